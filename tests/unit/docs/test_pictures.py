"""Pictures show what is there, and say it in words too."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from makers.paths import ROOT
from tests.support.fakes import tiny_config
from tfexport.contract import PRECISIONS, QUANTIZED
from tfexport.dialects import DIALECTS, runtime_dialects
from tfexport.graph_contract import graphs_of
from tfexport.runtimes import RUNTIMES

DOCS = ROOT / "docs"
PICTURES = sorted(DOCS.rglob("*.svg"))


def texts_of(picture: Path, kind: str = "") -> list[str]:
    """The texts, or those of a class, in the order of the file."""
    root = ElementTree.parse(picture).getroot()
    texts = root.iter("{http://www.w3.org/2000/svg}text")
    return [text.text or "" for text in texts if not kind or kind in text.get("class", "").split()]


@pytest.mark.parametrize("picture", PICTURES, ids=[picture.stem for picture in PICTURES])
def test_each_picture_stands_on_one_page_with_a_description(picture: Path) -> None:
    shown = [
        description
        for page in picture.parent.glob("*.md")
        for description in re.findall(rf"!\[(.*)\]\({picture.name}\)", page.read_text(encoding="utf-8"))
    ]
    assert len(shown) == 1
    assert len(shown[0]) > 30
    assert picture.stat().st_size < 10_000


def test_layers_are_those_that_are_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    own = next(contract["layers"] for contract in contracts if "tfexport.cli" in contract.get("layers", []))
    layers = [name.removeprefix("tfexport.") for line in own for name in line.split(" | ")]
    packages = [name for name in layers if (ROOT / "tfexport" / name / "__init__.py").exists()]
    shown = [name.removesuffix("/") for name in texts_of(DOCS / "how-it-works/layers.svg", "path")]
    position = {name: line for line, row in enumerate(own) for name in re.findall(r"\.(\w+)", row)}
    assert sorted(name for name in shown if not name.endswith(".py")) == sorted(packages)
    rows = [position[name.removesuffix(".py")] for name in shown]
    assert rows == sorted(rows)


def test_dialects_are_those_that_runtimes_use() -> None:
    config = tiny_config(d_model=64, n_heads=8)
    graphs = [
        graph
        for precision in PRECISIONS.values()
        for dialect in DIALECTS
        for graph in graphs_of(config, precision, dialect)
    ]
    used = runtime_dialects(graphs)
    shown = texts_of(DOCS / "how-it-works/dialects.svg")
    for runtime in RUNTIMES:
        cells = []
        for precision in PRECISIONS.values():
            own_model = "weights" if runtime.startswith("torch") and precision not in QUANTIZED else "\N{EN DASH}"
            cells.append(used.get(runtime, {}).get(precision, own_model))
        row = shown.index(runtime) + 1
        assert shown[row : row + len(cells)] == cells
