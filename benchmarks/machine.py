"""The hardware and the software that a benchmark ran on."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tfexport.bench.machine import facts as cpu_facts

PACKAGES = (
    *("tfexport", "torch", "triton", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt_rtx", "transformers"),
    *("numpy", "onnx", "cuda-bindings", "nvidia-cudnn-cu13", "sacrebleu"),
)


def _command(words: Sequence[str]) -> str:
    """A command without the folders of this machine."""
    return shlex.join(["python", *(Path(word).name if Path(word).is_absolute() else word for word in words[1:])])


def machine(device: str) -> dict[str, Any]:
    """Hardware and software of this run; None for what is not there or does not tell."""
    versions = {package: _version(package) for package in PACKAGES}
    facts: dict[str, Any] = {**cpu_facts(), "command": _command(sys.orig_argv), "versions": versions, "gpu": None}
    if device == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = {
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_mib": properties.total_memory / 2**20,
            "driver": _driver(),
            "torch_cuda": torch.version.cuda,
        }
    return facts


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
