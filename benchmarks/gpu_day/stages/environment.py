"""What the machine is: GPU, driver, clocks, libraries, and the commit that is measured."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from typing import Any

from benchmarks.gpu_day.stage import Task, main, say
from benchmarks.gpu_day.state import commit, now, read_json
from benchmarks.gpu_day.unpack import SITE, UNPACKED
from tfexport.system.processes import cpu_name, usable_cpus

ASKED = (
    *("name", "driver_version", "memory.total", "memory.used", "compute_cap", "persistence_mode", "mig.mode.current"),
    *("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.draw", "power.limit", "temperature.gpu"),
    *("clocks_event_reasons.active", "ecc.mode.current"),
)
TELLING = (
    "torch",
    "triton",
    "onnx",
    "transformers",
    "tokenizers",
    "numpy",
    "ctranslate2",
    "cuda",
    "nvidia",
    "tensorrt",
)
"""Packages whose versions matter have names that begin so."""
TOOLS = ("nsys", "ncu", "nvcc", "g++", "nvidia-smi")


def gpu_now() -> dict[str, str]:
    """What `nvidia-smi` says of the first GPU; empty where it says nothing.

    A field that this version does not know would make it refuse them all, so then each is asked for alone.
    """
    found = _ask(ASKED)
    if found is None:
        one_by_one = {name: _ask((name,)) for name in ASKED}
        found = {name: answer[name] for name, answer in one_by_one.items() if answer}
    return found


def _ask(names: tuple[str, ...]) -> dict[str, str] | None:
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")] if done.stdout.strip() else []
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else None


def run(task: Task) -> bool:
    """Record what the machine is."""
    versions = {d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"]}
    unpacked = read_json(SITE / UNPACKED)
    task.found |= {
        "date": now(),
        "commit": commit() or unpacked.get("commit"),
        "cpu": cpu_name(),
        "cpus": usable_cpus(),
        "python": platform.python_version(),
        "versions": {name: versions[name] for name in sorted(versions) if name.lower().startswith(TELLING)},
        "pack": {name: unpacked.get(name) for name in ("commit", "used", "there")},
        "tools": [tool for tool in TOOLS if shutil.which(tool)],
    }
    task.save()
    task.found["gpu"] = gpu_now() if shutil.which("nvidia-smi") else {}
    task.save()
    task.found["torch"] = _torch()
    say(str(task.found))
    return task.rehearsal or bool(task.found["torch"].get("gpu"))


def _torch() -> dict[str, Any]:
    """What PyTorch sees of the GPU."""
    import torch

    facts: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda, "gpu": None}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = {
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_mib": properties.total_memory / 2**20,
            "multiprocessors": properties.multi_processor_count,
            "cudnn": torch.backends.cudnn.version(),
        }
    return facts


if __name__ == "__main__":
    sys.exit(main(run))
