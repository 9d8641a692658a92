"""The runtimes by name, and the requirements of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Requirements:
    """The requirements of a runtime.

    Attributes:
        extra: the extra of the package that installs its library.
        packages: the packages on whose version its numbers depend; the first installed one counts.
        gpu: whether it runs on a GPU.
    """

    extra: str
    packages: tuple[str, ...]
    gpu: bool = False


RUNTIMES = {
    "ort-cpu": Requirements("cpu", ("onnxruntime", "onnxruntime-gpu")),
    "ort-cuda": Requirements("cuda", ("onnxruntime-gpu",), gpu=True),
    "tensorrt": Requirements("tensorrt-rtx", ("tensorrt", "tensorrt-rtx"), gpu=True),
    "torch": Requirements("export", ("torch",)),
    "torch-cuda": Requirements("export", ("torch",), gpu=True),
}
"""The requirements of each runtime, by its name for `--runtime`."""
