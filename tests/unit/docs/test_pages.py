"""Links of the pages lead somewhere, and the contract's table is the contract."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.contract_table import markdown_table
from tests.support.paths import ROOT
from tfexport.models.checkpoints.load import FAMILIES

PAGES = sorted([ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")])

README, CHECKPOINTS, DECODING, ATTENTION, SPEED, CONTRACT = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in (
        "README.md",
        *(f"docs/{page}.md" for page in ("checkpoints", "decoding", "attention", "speed", "contract")),
    )
)


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


def test_contract_table_is_generated() -> None:
    shown = re.search(r"<!-- contract: .*? -->\n(.*?)\n<!-- end of contract -->", CONTRACT, flags=re.DOTALL)
    assert shown is not None
    assert shown[1] == markdown_table()


def test_every_family_is_listed() -> None:
    for family in FAMILIES:
        assert f"| `{family.name}` |" in CHECKPOINTS


def test_every_status_is_listed() -> None:
    from typing import get_args

    from tfexport.decoding.line_reader import Status

    for status in get_args(Status):
        assert f"| `{status}` |" in README
