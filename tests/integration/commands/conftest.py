"""Commands as fixtures: run in this process, which has PyTorch loaded already."""

from __future__ import annotations

from pathlib import Path

import pytest

from makers.tiny import (
    TinyCheckpoint,
)
from tests.support.commands import (
    Outcome,
    Run,
)


@pytest.fixture
def decode(run: Run, tiny_bundle: Path) -> Run:
    """`tfexport decode` of the tiny bundle."""

    def run_decode(*arguments: object, stdin: bytes | None = b"") -> Outcome:
        return run("decode", tiny_bundle, *arguments, "--threads", "1", stdin=stdin)

    return run_decode


@pytest.fixture
def here(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Path:
    """A copy of the checkpoint that other files may lie beside."""
    (tmp_path / "here").mkdir()
    path = tmp_path / "here" / "tiny.pt"
    path.write_bytes(tiny_checkpoint.path.read_bytes())
    return path


@pytest.fixture
def export_engines(run: Run, here: Path, tiny_checkpoint: TinyCheckpoint) -> Run:
    """`tfexport export --target tensorrt` for a GPU that is not here."""

    def run_export(*arguments: object) -> Outcome:
        flags = ("--target", "tensorrt", "--gpu", "sm89", "--gpu-memory", "0.1")
        return run("export", here, *tiny_checkpoint.flags, *flags, *arguments)

    return run_export


@pytest.fixture
def build(run: Run, own_bundle: Path) -> Run:
    """`tfexport build` of a bundle for a GPU that is not here, where the arguments name no other."""

    def run_build(*arguments: object, stdin: bytes | None = b"") -> Outcome:
        defaults = ("--precision", "fp32", "--gpu", "sm89", "--gpu-memory", "1")
        return run("build", own_bundle, *defaults, *arguments, stdin=stdin)  # of two equal flags the last one counts

    return run_build
