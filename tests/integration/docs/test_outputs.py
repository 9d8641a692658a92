"""The outputs that pages show are those of the commands above them.

A block of the kind `console` has commands, in lines that begin with `$`, and what they print. The commands of a page run
in one folder, in the order of the page, beside the bundle of `tfexport demo -o de-en`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from makers.paths import ROOT
from tests.support.printed import assert_same
from tfexport.commands.demo import embedded_checkpoint
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint

pytestmark = pytest.mark.thorough

DEMO = "tfexport demo -o de-en"
SHELL = f"""set -e -o pipefail
tfexport() {{ {sys.executable} -m tfexport "$@"; }}
"""


def command_and_output(text: str) -> tuple[str, str]:
    """A command, which goes on after a backslash at the end of a line, and the lines behind it."""
    lines = text.splitlines(keepends=True)
    end = next(index for index, line in enumerate(lines, 1) if not line.endswith("\\\n"))
    return "".join(lines[:end]).strip(), "".join(lines[end:])


def sessions_of(page: Path) -> list[tuple[str, str]]:
    """The commands of a page, each with its output."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    texts = [text for block in blocks for text in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [command_and_output(text) for text in texts]


SESSIONS = {
    str(page.relative_to(ROOT)): sessions
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if (sessions := sessions_of(page))
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `tfexport demo -o de-en` writes."""
    folder = tmp_path_factory.mktemp("demo") / "de-en"
    export(load_checkpoint(embedded_checkpoint(), {}), folder, alignments=True, gate=None)
    return folder


def test_a_wrong_output_is_noticed() -> None:
    assert command_and_output("a \\\n  b\none\ntwo\n") == ("a \\\n  b", "one\ntwo\n")
    assert_same("x\ny -1.23456\n", "x\ny -1.23461\n")
    assert_same("x\ny\nz\n", "x\n...\n")
    for printed, shown in (("x -1.234\n", "x -1.244\n"), ("A man.\n", "A dog.\n"), ("x\ny\n", "...\nz\n")):
        with pytest.raises(AssertionError):
            assert_same(printed, shown)


@pytest.mark.parametrize("page", SESSIONS)
def test_outputs_of_a_page_are_those_of_its_commands(page: str, demo: Path, tmp_path: Path) -> None:
    if all(command != DEMO for command, _ in SESSIONS[page]):
        shutil.copytree(demo, tmp_path / "de-en")
    for command, shown in SESSIONS[page]:
        script = ["bash", "-c", SHELL + command]
        done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (command, done.stderr)
        assert_same(done.stdout, shown)
