"""What the tests share: an export takes seconds, so one bundle serves all that only read it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny import HINTS, TinyCheckpoint, tiny_classifier, write_tiny_checkpoint
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import Checkpoint, load_checkpoint


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


@pytest.fixture(scope="session")
def half_bundle(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of `tiny_checkpoint` in float32, float16 and bfloat16. Not to be changed."""
    folder = tmp_path_factory.mktemp("half") / "half"
    return export(tiny_checkpoint.load(), folder, precisions=("float16", "bfloat16")).directory


@pytest.fixture(scope="session")
def quantized_bundle(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of `tiny_checkpoint` in float32, int8 and int4. Not to be changed."""
    folder = tmp_path_factory.mktemp("quantized") / "quantized"
    return export(tiny_checkpoint.load(), folder, precisions=("int8", "int4")).directory


@pytest.fixture(scope="session")
def aligned_bundle(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of `tiny_checkpoint` in float32 and int8, with graphs that tell attention. Not to be changed."""
    folder = tmp_path_factory.mktemp("aligned") / "aligned"
    return export(tiny_checkpoint.load(), folder, precisions=("int8",), alignments=True).directory


@pytest.fixture(scope="session")
def classifier_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of `tiny_classifier()`, without words. Not to be changed."""
    folder = tmp_path_factory.mktemp("classifier")
    torch.save(tiny_classifier().state_dict(), folder / "classifier.pt")
    return export(load_checkpoint(folder / "classifier.pt", HINTS), folder / "classifier").directory


@pytest.fixture(scope="session")
def command_export(
    tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """`tfexport export tiny.pt` in a process and a folder of its own: the folder and what the command said."""
    folder = tmp_path_factory.mktemp("command")
    shutil.copy(tiny_checkpoint.path, folder)
    command = [Path(sys.executable).with_name("tfexport"), "export", "tiny.pt", *tiny_checkpoint.flags]
    # Other hashes than in this process: an order that came from a set would show in the graphs.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "4711"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return folder, done


@pytest.fixture
def own_bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of `tiny_bundle` that a test may change."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "own"))


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Checkpoint]:
    """Save what is given as a `.pt` file and read it."""

    def save_and_load(content: Any, hints: Mapping[str, Any] = HINTS, **options: Any) -> Checkpoint:
        torch.save(content, tmp_path / "saved.pt")
        return load_checkpoint(tmp_path / "saved.pt", hints, **options)

    return save_and_load


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Checkpoint]:
    """Write bytes to a file and read it as a checkpoint."""

    def write_and_read(content: bytes, *, name: str = "given.pt") -> Checkpoint:
        (tmp_path / name).write_bytes(content)
        return load_checkpoint(tmp_path / name, HINTS)

    return write_and_read
