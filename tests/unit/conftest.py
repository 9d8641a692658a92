"""Unit tests read no model files and start no processes: a test that does is stopped, and belongs to tests/integration."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

STARTS = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen"}
MODEL_FILES = (".onnx", ".pt", ".ckpt", ".safetensors", ".npz", "manifest.json", "model.bin")
_running = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _running:
        return
    if event in STARTS:
        raise AssertionError(f"a unit test starts a process ({event}): it belongs to tests/integration")
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        name = os.fsdecode(arguments[0])
        if name.endswith(MODEL_FILES):
            raise AssertionError(f"a unit test opens the model file {Path(name).name}: it belongs to tests/integration")


sys.addaudithook(_audit)  # for good: Python does not take one back


@pytest.fixture(scope="session", autouse=True)
def _fonts() -> None:
    """matplotlib builds its cache of fonts at its first import on a machine, and starts `fc-list` for that."""
    with contextlib.suppress(ImportError):
        importlib.import_module("matplotlib.font_manager")


@pytest.fixture(autouse=True)
def _only_units() -> Iterator[None]:
    global _running
    _running = True
    yield
    _running = False
