"""The page of a comparison says what was found, is well formed, and needs nothing from elsewhere."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.html import Checked
from tfexport.bundle.reader import open_bundle
from tfexport.errors import RuntimeUnavailable, TfexportError
from tfexport.graph_checks.check import Compared, GraphCheck
from tfexport.search.search import SearchOptions
from tfexport.verification.files import Mismatch
from tfexport.verification.invariance import Arrangement, Invariance, invariance
from tfexport.verification.page import page, write_page
from tfexport.verification.parity import Comparison, check

LINES = [b"de4 de5 de6", b"de7", b"de9 de10 de11 de12 de13"]


def compared(bundle: Path, **options: Any) -> Comparison:
    return check(bundle, LINES, ["ort-cpu"], beams=(1, 2), say=lambda _: None, **options)


@pytest.fixture(scope="module")
def clean(tiny_bundle: Path) -> Comparison:
    """Of the tiny bundle, with the checks of one graph: each is a plot, which takes half a second. Not to be changed."""
    comparison = compared(tiny_bundle)
    return replace(comparison, graphs={precision: checks[:1] for precision, checks in comparison.graphs.items()})


@pytest.mark.thorough
def test_a_page_of_all_that_was_compared(half_bundle: Path, tmp_path: Path) -> None:
    comparison = compared(half_bundle, precisions=("float32", "float16"))
    graphs = {
        precision: [checks[0], next((check for check in checks if check.with_kernels), checks[-1])]
        for precision, checks in comparison.graphs.items()
    }
    comparison = replace(comparison, graphs=graphs)
    checked = [one for of_precision in graphs.values() for one in of_precision]
    options = SearchOptions(beam=2)
    arranged = [invariance(comparison.bundle, r, p, comparison.sources, options) for r, p in comparison.variants]
    write_page(tmp_path / "out.html", comparison, arranged)
    text = (tmp_path / "out.html").read_text(encoding="utf-8")
    parser = Checked()
    parser.feed(text)
    assert parser.open == []
    assert "half: PASSED" in text
    plots = [
        one for one in checked if not one.with_kernels or one.first is not None
    ]  # the kernels' values are in a table
    assert 1 < len(plots) < len(checked)
    assert text.count("<svg") == 2 + len(plots)
    for part in (
        "ort-cpu fp32",
        "ort-cpu fp16",
        *(one.file for one in checked),
        "onnxruntime 1.",
        "poisoned cache",
    ):
        assert part in text
    assert not re.findall(r'(?:src|href)="(?!#)', text)  # marks within a plot are all it refers to


@pytest.mark.thorough
def test_what_differs_is_marked(quantized_bundle: Path) -> None:
    comparison = compared(quantized_bundle, tolerance=1e-6, precisions=("int4",))
    assert any(report.divergences for report in comparison.reports)
    failed = [one for one in comparison.graphs["int4"] if one.first][:1]
    text = page(replace(comparison, graphs={"int4": failed}))
    assert "quantized: FAILED" in text
    assert "<mark>" in text
    assert "wört" in text  # outputs are shown in words


def test_names_cannot_bring_tags_into_it(clean: Comparison, tiny_bundle: Path, tmp_path: Path) -> None:
    other = open_bundle(tiny_bundle)
    object.__setattr__(other, "directory", tmp_path / "<script>alert(1)")
    text = page(replace(clean, bundle=other))
    assert "&lt;script&gt;alert(1)" in text
    assert "<script" not in text


def test_a_page_that_cannot_be_written_is_told(clean: Comparison, tmp_path: Path) -> None:
    with pytest.raises(TfexportError, match=r"cannot write .* --report"):
        write_page(tmp_path / "missing" / "out.html", clean, [])


def test_without_matplotlib_it_says_what_to_install(clean: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeUnavailable, match=r"tfexport\[report\]"):
        page(clean)


def test_arrangements_that_differ_are_marked(clean: Comparison) -> None:
    ways = (Arrangement("shuffled", 2, 2, 0), Arrangement("padded", 3, 1, 0), Arrangement("2 threads", 0, 0, 0, "no <"))
    text = page(clean, arranged=[Invariance("ort-cpu", "float32", 1, 3, ways)])
    assert "tiny: FAILED" in text
    assert "<mark>2, 2</mark>" in text
    assert "<td>3, 1</td>" in text
    assert "<mark>no &lt;</mark>" in text


@pytest.mark.thorough
def test_quality_stands_in_the_matrix(clean: Comparison, tiny_bundle: Path) -> None:
    text = page(replace(compared(tiny_bundle, targets=[b"a", b"b", b"c"]), graphs={}))
    assert "BLEU / PyTorch" in text
    assert "0.00 / 0.00" in text
    assert "BLEU" not in page(clean)


@pytest.mark.thorough
def test_what_is_wrong_stands_first(clean: Comparison) -> None:
    assert 'ul class="failed"' not in page(clean)
    comparison = replace(clean, reports=deepcopy(clean.reports))
    comparison.reports[1].positions[0].error = 0.5
    first = Compared("encoder.layers.1.norms.0/Add_1", "output of a + b + c", 0.25, 1e-7, 1e-6)
    comparison = replace(
        comparison,
        graphs={"float32": [GraphCheck("encoder.ort.onnx", (first,), with_kernels=True)]},
        mismatches=[Mismatch("weights.safetensors", "a <b> is missing")],
    )
    ways = (Arrangement("padded", 1, 1, 1),)
    text = page(comparison, [Invariance("ort-cpu", "int8", 4, 3, ways)])
    assert "tiny: FAILED" in text
    wrong = text[text.index('<ul class="failed">') : text.index("</ul>")]
    assert (
        "encoder.ort.onnx with kernels departs from PyTorch at <b>encoder.layers.1.norms.0/Add_1</b>: its output of a and 2 "
        "more is off by 2.5e-01, 1.0e-06 is allowed" in wrong
    )
    assert "<li>weights.safetensors: a &lt;b&gt; is missing</li>" in wrong
    assert "ort-cpu fp32, beam 2: logits of step 1 are off by 5.0e-01, " in wrong
    assert "ort-cpu int8, beam 4, padded: 1 of 3 sentences are decoded differently from alone" in wrong
