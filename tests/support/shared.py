"""Folders that are made once for all processes of a test run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` of this run; the first process that asks for it calls `make` with its path. Not to be changed.

    pytest-xdist gives each of its processes a folder of its own in that of the run.
    """
    base = factory.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = run / "made-once" / name
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        done = folder.with_name(f"{name}.done")
        if not done.exists():
            make(folder)
            done.touch()
    return folder
