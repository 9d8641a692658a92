"""The targets of `export --target` and `build` beyond the graphs: TensorRT engines, and a Triton model repository."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tfexport import contract
from tfexport.bundle.reader import MANIFEST, open_bundle
from tfexport.commands.console import print_engine, print_plan, print_repository, say
from tfexport.config import ModelConfig
from tfexport.contract import Precision
from tfexport.errors import TfexportError
from tfexport.exporter.engine_request import EngineRequest
from tfexport.exporter.options import EngineOptions
from tfexport.serving import triton
from tfexport.system.regular_files import read_text


@dataclass(frozen=True)
class GraphsTarget:
    """`--target onnx`: only the graphs."""

    precisions: tuple[Precision, ...]

    def check(self, config: ModelConfig) -> None:
        """Before the long export, raise the errors that it or `write` would raise for any such model.

        Raises:
            TfexportError: one of the precisions does not support this kind of model.
        """
        quantized = [contract.short_name(precision) for precision in self.precisions if precision in contract.QUANTIZED]
        if config.is_classifier and quantized:
            raise TfexportError(
                f"encoder classifiers are not exported in {', '.join(quantized)}. Give --precision fp32, fp16 or bf16."
            )

    def write(self, directory: Path) -> None:
        """After the export, add files to the bundle at `directory` or beside it, and print their names."""


@dataclass(frozen=True)
class EnginesTarget(GraphsTarget):
    """`--target tensorrt`: engines in the bundle."""

    request: EngineRequest

    def check(self, config: ModelConfig) -> None:
        self.request.check(config)
        for cost in self.request.costs(config, say):
            print_plan(cost)

    def write(self, directory: Path) -> None:
        self.request.build(directory, print_engine)


def engines_target(precisions: tuple[Precision, ...], engines: EngineOptions) -> EnginesTarget:
    """The target of engines with these options."""
    return EnginesTarget(precisions, EngineRequest.of(engines, precisions))


@dataclass(frozen=True)
class TritonTarget(GraphsTarget):
    """`--target triton`: a model repository next to the bundle, in the first precision."""

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
    """When the block ends, print how many engines of the bundle at `directory` it has removed."""
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
    """The names of the engines of a bundle; empty if there is no readable bundle."""
    try:
        manifest = json.loads(read_text(directory / MANIFEST))
        return {str(engine["file"]) for engine in manifest["engines"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()
