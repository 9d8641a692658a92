"""What `export --target` and `build` do beyond the graphs: TensorRT engines, with their cost told before, and a Triton
model repository.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tfexport import contract
from tfexport.bundle.reader import MANIFEST, PORTABLE, Engine, Library, open_bundle
from tfexport.commands.console import print_engine, print_plan, print_repository, say
from tfexport.config import ModelConfig
from tfexport.contract import Precision
from tfexport.errors import EngineError, RuntimeUnavailable, TfexportError
from tfexport.exporter.engine_plan import LengthPlan, PlanCost, cost
from tfexport.exporter.engines import HERE, Builder, build_engines, refuse_elsewhere
from tfexport.serving import triton
from tfexport.system.gpu import find_gpu

ASSUMED_MEMORY = 8 << 30
"""Bytes of GPU memory where it is not said and no GPU is here to ask."""


@dataclass(frozen=True)
class EngineRequest:
    """Engines that someone asks for."""

    plan: LengthPlan
    precisions: tuple[Precision, ...]
    gpus: tuple[str, ...]
    """Empty: the GPU here, or else portable engines."""
    library: Literal["auto", "tensorrt", "tensorrt_rtx"] = "auto"
    gpu_memory: int | None = None
    """Bytes."""

    def resolved(self, say: Callable[[str], None]) -> tuple[tuple[str, ...], Library, int]:
        """GPUs, library and memory, with what was left open chosen and said.

        Raises:
            EngineError: something is no name of a GPU generation, or full TensorRT is to build for a GPU elsewhere.
        """
        try:
            here = find_gpu()
        except RuntimeUnavailable:
            here = None
        unknown = [gpu for gpu in self.gpus if not re.fullmatch(rf"sm\d+|{PORTABLE}|{HERE}", gpu)]
        if unknown:
            raise EngineError(f"there is no GPU generation {unknown[0]!r}. Give such as sm89, {PORTABLE} or {HERE}.")
        gpus = self.gpus or (HERE if here else PORTABLE,)
        if not self.gpus:
            say(
                f"note: building for {here.name if here else 'portable engines: there is no GPU here'}; --gpu names others"
            )
        library = self.library
        if library == "auto":
            full = HERE in gpus and importlib.util.find_spec("tensorrt") is not None
            library = "tensorrt" if full else "tensorrt_rtx"
        for gpu in gpus:
            refuse_elsewhere(library, gpu)
        memory = self.gpu_memory or (here.memory if here and HERE in gpus else None)
        if memory is None:
            say(f"note: {ASSUMED_MEMORY >> 30} GiB of GPU memory are assumed; --gpu-memory says how much there is")
        return gpus, library, memory or ASSUMED_MEMORY

    def costs(self, config: ModelConfig, say: Callable[[str], None]) -> list[PlanCost]:
        """What the engines will cost, for each precision.

        Raises:
            EngineError: the plan does not fit the model or the GPU's memory.
        """
        gpus, library, memory = self.resolved(say)
        return [
            cost(self.plan, config, precision, n_gpus=len(gpus), limit=memory, library=library)
            for precision in self.precisions
        ]

    def check(self, config: ModelConfig) -> None:
        """Raise now what `build` would raise at once.

        Raises:
            EngineError: the model is a classifier.
            EngineError: the library does not build for one of the GPUs.
            RuntimeUnavailable: the library, or a GPU that is asked for, is not here.
        """
        if config.is_classifier:
            raise EngineError(
                "this is an encoder classifier, which has nothing to decode. Export it without --target tensorrt, and "
                "run it with `tfexport classify`."
            )
        gpus, library, _ = self.resolved(lambda _: None)
        builder = Builder(library)
        for gpu in gpus:
            builder.generation(gpu)

    def build(self, directory: Path, built: Callable[[Engine, int], None]) -> Sequence[Engine]:
        """Build the engines into the bundle at `directory`; `built` hears of each and of its bytes.

        Raises:
            BundleError, EngineError, RuntimeUnavailable: see `build_engines`.
        """
        gpus, library, _ = self.resolved(lambda _: None)
        return build_engines(directory, self.plan, precisions=self.precisions, gpus=gpus, library=library, built=built)


@dataclass(frozen=True)
class GraphsTarget:
    """`--target onnx`: the graphs alone."""

    precisions: tuple[Precision, ...]

    def check(self, config: ModelConfig) -> None:
        """Before the export, which takes longer: raise what it or `write` would raise of any such model.

        Raises:
            TfexportError: there are no graphs of such a model in one of the precisions.
        """
        quantized = [contract.short_name(precision) for precision in self.precisions if precision in contract.QUANTIZED]
        if config.is_classifier and quantized:
            raise TfexportError(
                f"encoder classifiers are not exported in {', '.join(quantized)}. Give --precision fp32, fp16 or bf16."
            )

    def write(self, directory: Path) -> None:
        """After the export: add to the bundle at `directory`, or beside it, and print what."""


@dataclass(frozen=True)
class EnginesTarget(GraphsTarget):
    """`--target tensorrt`: engines in the bundle."""

    request: EngineRequest

    def check(self, config: ModelConfig) -> None:
        self.request.check(config)
        for told in self.request.costs(config, say):
            print_plan(told)

    def write(self, directory: Path) -> None:
        self.request.build(directory, print_engine)


@dataclass(frozen=True)
class TritonTarget(GraphsTarget):
    """`--target triton`: beside the bundle a model repository, in the first precision."""

    bundle: Path
    runtime: str
    beam: int
    force: bool

    def check(self, config: ModelConfig) -> None:
        super().check(config)
        if self.runtime == "tensorrt":
            raise TfexportError(
                "a bundle has no TensorRT engines when it is exported. Export it with --precision fp16 alone, then "
                f"`tfexport build {self.bundle}`, then `tfexport triton {self.bundle} --runtime tensorrt`."
            )
        repository = triton.beside(self.bundle)
        triton.check_request(repository, runtime=self.runtime, precision=self.precisions[0], force=self.force)

    def write(self, directory: Path) -> None:
        written = triton.write_repository(
            open_bundle(directory),
            triton.beside(directory),
            runtime=self.runtime,
            precision=self.precisions[0],
            beam=self.beam,
            force=self.force,
        )
        print_repository(written, self.precisions[0])


@contextmanager
def telling_of_lost_engines(directory: Path) -> Iterator[None]:
    """Say, when the block ends, how many of the engines of the bundle at `directory` it has removed."""
    before = _engine_files(directory)
    try:
        yield
    finally:
        lost = before - _engine_files(directory)
        if lost:
            say(
                f"note: the bundle's {len(lost)} TensorRT engines are gone with it: build them again with tfexport build"
            )


def _engine_files(directory: Path) -> set[str]:
    """The names of the engines of a bundle; none where there is no bundle that can be read."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        return {str(engine["file"]) for engine in manifest["engines"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()
