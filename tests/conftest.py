"""What the tests share: an export takes seconds, so one bundle serves all that only read it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import TinyCheckpoint, write_tiny_checkpoint

from tfexport.export import export


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from a second thread, and threads that wait for a busy core cost minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """A tiny random model of the tutorial family, as a state_dict file and vocabularies. Not to be changed."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of `tiny_checkpoint`. Not to be changed."""
    return export(tiny_checkpoint.load(), tmp_path_factory.mktemp("bundle") / "tiny").directory


@pytest.fixture
def own_bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of `tiny_bundle` that a test may change."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "own"))
