"""The Python examples of the documentation run, and print the text that follows them, in a block of the kind `text`."""

from __future__ import annotations

import re
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

PAGES = [*(ROOT / name for name in ("README.md", "examples/README.md")), *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLE = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
"""Code, and what it prints if the page shows that."""
PYTHON = [
    pytest.param(*example.groups(), id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, example in enumerate(EXAMPLE.finditer(page.read_text(encoding="utf-8")))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What examples name: the embedded German-English model as two bundles, and text for it."""
    folder = tmp_path_factory.mktemp("docs")
    export(load_checkpoint(embedded_checkpoint(), {}), folder / "bundle", gate=None)
    for name in ("ckpt", "de-en"):
        (folder / name).symlink_to("bundle")
    (folder / "model.safetensors").symlink_to(embedded_checkpoint())
    (folder / "input.txt").write_text("Ein Hund läuft.\nZwei Kinder spielen.\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize(("code", "shown"), PYTHON)
def test_python_examples_run(code: str, shown: str | None, folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if shown is not None:
        assert_same(done.stdout, shown)
