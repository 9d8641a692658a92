"""What the tests share: an export takes seconds, so one bundle serves all that only read it.

These exports go unchecked, since checks take most of the time: `exporter/test_pipeline.py` checks the same graphs.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from makers.tiny import HINTS, TinyCheckpoint, tiny_classifier, write_tiny_checkpoint
from tests.support.commands import Outcome, Run
from tests.support.shared import made_once
from tfexport.__main__ import main
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import Checkpoint, load_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """A tiny random model of the tutorial family, as a state_dict file and vocabularies. Not to be changed."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def exported(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Export `tiny_checkpoint` to a bundle of this name, once for all processes of the run."""

    def export_once(name: str, **options: Any) -> Path:
        return made_once(
            tmp_path_factory, name, lambda folder: export(tiny_checkpoint.load(), folder, gate=None, **options)
        )

    return export_once


@pytest.fixture(scope="session")
def tiny_bundle(exported: Callable[..., Path]) -> Path:
    """The bundle of `tiny_checkpoint`. Not to be changed."""
    return exported("tiny")


@pytest.fixture(scope="session")
def half_bundle(exported: Callable[..., Path]) -> Path:
    """The bundle of `tiny_checkpoint` in float32, float16 and bfloat16. Not to be changed."""
    return exported("half", precisions=("float16", "bfloat16"))


@pytest.fixture(scope="session")
def quantized_bundle(exported: Callable[..., Path]) -> Path:
    """The bundle of `tiny_checkpoint` in float32, int8 and int4. Not to be changed."""
    return exported("quantized", precisions=("int8", "int4"))


@pytest.fixture(scope="session")
def aligned_bundle(exported: Callable[..., Path]) -> Path:
    """The bundle of `tiny_checkpoint` in float32 and int8, with graphs that tell attention. Not to be changed."""
    return exported("aligned", precisions=("int8",), alignments=True)


@pytest.fixture(scope="session")
def classifier_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of `tiny_classifier()`, without words. Not to be changed."""

    def make(folder: Path) -> None:
        file = tmp_path_factory.mktemp("classifier") / "classifier.pt"
        torch.save(tiny_classifier().state_dict(), file)
        export(load_checkpoint(file, HINTS), folder, gate=None)

    return made_once(tmp_path_factory, "classifier", make)


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


@pytest.fixture
def run() -> Run:
    """`tfexport ARGUMENTS` in this process, which has PyTorch loaded already."""

    def run_main(*arguments: object, stdin: bytes | None = b"") -> Outcome:
        # As in a poor locale: what is written must not depend on it.
        out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        err = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(sys, "argv", ["tfexport", *map(str, arguments)])
            patches.setattr(sys, "stdin", None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin)))
            patches.setattr(sys, "stdout", out)
            patches.setattr(sys, "stderr", err)
            with pytest.raises(SystemExit) as caught:
                main()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for stream in (out, err):
            stream.flush()
        return Outcome(int(caught.value.code or 0), out.buffer.getvalue(), err.buffer.getvalue().decode("ascii"))

    return run_main
