"""Every example trains, exports and decodes the tokens of its model, here after a few steps; `make examples` trains them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
SYSTEMS = (
    *("per_head_conv1d", "tutorial_spacy", "annotated_transformer"),
    *("base_model_tied", "attention_and_positions"),
)
OTHERS = ("make_checkpoint", "my_classifier_family", "my_family", "my_model")
"""Held by the tests of family files."""


def test_every_example_is_run_and_described() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SYSTEMS, *OTHERS}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    listed = re.search(r"^EXAMPLES = (.*)$", makefile, re.MULTILINE)
    assert listed is not None
    assert tuple(listed[1].split()) == SYSTEMS
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{name}.py`" in readme for name in SYSTEMS)


def test_the_text_is_parallel() -> None:
    german, english = ((EXAMPLES / f"data/captions.{side}").read_text(encoding="utf-8") for side in ("de", "en"))
    assert len(german.splitlines()) == len(english.splitlines()) == len(set(german.splitlines())) == 384


@pytest.mark.thorough
@pytest.mark.parametrize("name", SYSTEMS)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / f"{name}.py", "--steps", "8", "--out", tmp_path / "out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "24 sentences; " in done.stdout
    assert done.stdout.count("\nsame: ") == 24
    if name == "attention_and_positions":
        assert (tmp_path / "out/attention.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_an_example_fails_where_a_token_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = imported("per_head_conv1d")
    search, calls = example.greedy, []

    def wrong_once(*arguments: object) -> list[int]:
        calls.append(arguments)
        tokens = search(*arguments)
        return [*tokens[:-1], tokens[-1] + 1] if len(calls) == 3 else tokens

    monkeypatch.setattr(example, "greedy", wrong_once)
    monkeypatch.setattr(sys, "argv", ["example", "--steps", "8", "--out", str(tmp_path)])
    assert example.main() == 1
    assert capsys.readouterr().out.count("\nDIFFERENT: ") == 1


def imported(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
