"""What help costs: it imports nothing heavy. And the version."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from makers.processes import ENVIRONMENT, TFEXPORT
from makers.tiny import (
    TinyCheckpoint,
)
from tests.support.commands import HEAVY, NOT_FOR_DECODING, TEXT, Run, modules_after, wanted_text
from tfexport import __version__
from tfexport.cli import app, app_of

COMMANDS = (
    "inspect",
    "export",
    "build",
    "triton",
    "decode",
    "corpus",
    "corpus-score",
    "corpus-classify",
    "score",
    "attend",
    "classify",
    "parity",
    "bench",
    "train",
    "demo",
    "version",
)


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_works(command: str | None) -> None:
    result = CliRunner().invoke(app_of(command or ""), [command, "--help"] if command else ["--help"])
    assert result.exit_code == 0
    assert "--help" in result.output
    for name in COMMANDS if command is None else [command]:
        assert name in result.output


@pytest.mark.parametrize("arguments", [["-h"], ["decode", "-h"]])
def test_short_help_is_the_help(arguments: list[str]) -> None:
    long = [*arguments[:-1], "--help"]
    assert (
        CliRunner().invoke(app_of(arguments[0]), arguments).output == CliRunner().invoke(app_of(long[0]), long).output
    )


def test_the_version_is_an_option_too() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"tfexport {__version__}\n"


def test_help_says_the_exit_codes() -> None:
    output = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output.split())
    assert "0 done, 1 parity failed, 2 wrong use or input, 3 a fault of tfexport itself, 130 interrupted" in output


@pytest.mark.thorough
def test_help_imports_nothing_heavy() -> None:
    modules, _ = modules_after(["--help"], *([command, "--help"] for command in COMMANDS), ["version"])
    assert "typer" in modules
    assert not modules & HEAVY


def test_help_is_quick() -> None:
    """A generous bound of CPU seconds, whatever else the machine does: PyTorch alone would take most of it."""
    before = os.times()
    subprocess.run([TFEXPORT, "--help"], check=True, capture_output=True, env=ENVIRONMENT)
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2


def test_decoding_with_onnxruntime_needs_no_torch(tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    commands = [["decode", tiny_bundle, "--threads", "1", *beam] for beam in ([], ["--beam", "2"])]
    modules, output = modules_after(*commands, stdin=TEXT)
    assert "onnxruntime" in modules
    assert not modules & NOT_FOR_DECODING
    assert output.decode() == wanted_text(tiny_checkpoint)  # the second command finds stdin at its end


@pytest.mark.thorough
def test_version(run: Run) -> None:
    found = run("version")
    assert (found.code, found.stderr) == (0, "")
    first, *more = found.lines
    assert first == f"tfexport {__version__}"
    assert [line.split(" ")[0] for line in more if not line.startswith(" ")] == [
        "python",
        "cpu:",
        "runtimes:",
        "kernels:",
    ]
