"""The runtimes that there are, and what each of them needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """What a runtime needs.

    Attributes:
        extra: the extra of the package that installs its library.
        packages: the packages on whose version its numbers depend; the first installed one counts.
        gpu: whether it runs on a GPU.
    """

    extra: str
    packages: tuple[str, ...]
    gpu: bool = False


RUNTIMES = {
    "ort-cpu": Needs("cpu", ("onnxruntime", "onnxruntime-gpu")),
    "ort-cuda": Needs("cuda", ("onnxruntime-gpu",), gpu=True),
    "tensorrt": Needs("tensorrt-rtx", ("tensorrt", "tensorrt-rtx"), gpu=True),
    "torch": Needs("export", ("torch",)),
    "torch-cuda": Needs("export", ("torch",), gpu=True),
}
"""By the names for `--runtime`."""
