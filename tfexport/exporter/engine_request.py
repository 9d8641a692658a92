"""A request for TensorRT engines: it chooses defaults, estimates costs and rejects impossible builds before the build."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tfexport import contract
from tfexport.bundle.reader import PORTABLE, Engine, Library
from tfexport.config import ModelConfig
from tfexport.contract import Precision
from tfexport.errors import EngineError, RuntimeUnavailable, TfexportError
from tfexport.exporter.engine_plan import LengthPlan, PlanCost, cost
from tfexport.exporter.engines import HERE, Builder, build_engines, refuse_elsewhere
from tfexport.exporter.options import EngineOptions
from tfexport.system.gpu import find_gpu

MAX_SOURCE, CACHE = 128, (32, 64, 128)
"""Default sizes."""
ASSUMED_MEMORY = 8 << 30
"""Assumed GPU memory in bytes, if it is not given and this machine has no GPU."""


@dataclass(frozen=True)
class EngineRequest:
    """The engines that a user requests."""

    plan: LengthPlan
    precisions: tuple[Precision, ...]
    gpus: tuple[str, ...]
    """GPU generations. Empty for the GPU of this machine, or for portable engines if it has none."""
    library: Literal["auto", "tensorrt", "tensorrt_rtx"] = "auto"
    gpu_memory: int | None = None
    """Bytes."""

    @classmethod
    def of(
        cls, options: EngineOptions, precisions: tuple[Precision, ...], plan: LengthPlan | None = None
    ) -> EngineRequest:
        """The request that the options describe.

        Args:
            plan: lengths that replace those of the options.

        Raises:
            TfexportError: a precision is for the CPU alone.
        """
        quantized = [contract.short_name(wanted) for wanted in precisions if wanted in contract.QUANTIZED]
        if quantized:
            raise TfexportError(
                f"engines do not support {', '.join(quantized)}, which is for the CPU. Build them in fp32, fp16 or bf16."
            )
        own = LengthPlan(
            max_batch=options.max_batch,
            max_beam=options.max_beam,
            max_source=options.max_source or MAX_SOURCE,
            cache=options.cache or CACHE,
        )
        memory = None if options.gpu_memory is None else int(options.gpu_memory * 2**30)
        return cls(plan or own, precisions, options.gpu, options.library, memory)

    def resolved(self, say: Callable[[str], None]) -> tuple[tuple[str, ...], Library, int]:
        """GPUs, library and memory. Missing values are chosen, and notes report the choice.

        Raises:
            EngineError: a GPU generation is unknown, or full TensorRT is requested for another machine's GPU.
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
        """The estimated cost of the engines, for each precision.

        Raises:
            EngineError: the plan does not fit the model or the GPU's memory.
        """
        gpus, library, memory = self.resolved(say)
        return [
            cost(self.plan, config, precision, n_gpus=len(gpus), limit=memory, library=library)
            for precision in self.precisions
        ]

    def check(self, config: ModelConfig) -> None:
        """Raise the errors that `build` would raise at its start.

        Raises:
            EngineError: the model is a classifier.
            EngineError: the library does not build for one of the GPUs.
            RuntimeUnavailable: the library is not installed, or a requested GPU is missing.
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
        """Build the engines into the bundle at `directory`; `built` is called with each engine and its size in bytes.

        Raises:
            BundleError, EngineError, RuntimeUnavailable: see `build_engines`.
        """
        gpus, library, _ = self.resolved(lambda _: None)
        return build_engines(directory, self.plan, precisions=self.precisions, gpus=gpus, library=library, built=built)
