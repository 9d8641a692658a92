"""Commands as fixtures: run in this process, which has PyTorch loaded already."""

from __future__ import annotations

import io
import signal
import sys
from pathlib import Path

import pytest

from tests.support.commands import (
    Outcome,
    Run,
)
from tests.support.tiny import (
    TinyCheckpoint,
)
from tfexport.__main__ import main


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
