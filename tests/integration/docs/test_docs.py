"""The examples of the documentation run, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tfexport.commands.demo import embedded_checkpoint
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint

PAGES = sorted([ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")])
EXAMPLES = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that examples name: the embedded German-English model, and text for it."""
    folder = tmp_path_factory.mktemp("docs")
    export(load_checkpoint(embedded_checkpoint(), {}), folder / "bundle")
    (folder / "input.txt").write_text("Ein Hund läuft.\nZwei Kinder spielen.\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run(code: str, folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings]
            assert heading in anchors, target
