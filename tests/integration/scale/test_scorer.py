"""`Scorer` on batches: the scores of `Model.score`, and what is computed of two of them. Ray itself is not needed."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfexport
from makers.tiny import SRC_VOCAB, TGT_VOCAB
from tfexport.errors import TfexportError
from tfexport.scale import Scorer
from tfexport.scale.scorer import dual_cross_entropy

PAIRS = [
    (
        " ".join(f"de{4 + (n * 7 + place) % (SRC_VOCAB - 4)}" for place in range(1 + n % 7)),
        " ".join(f"wört{4 + (n * 5 + place) % (TGT_VOCAB - 4)}" for place in range(1 + n % 5)),
    )
    for n in range(30)
]
SOURCES, TARGETS = ([pair[side] for pair in PAIRS] for side in (0, 1))


def expected(bundle: Path, texts: list[str], targets: list[str]) -> list[tuple[float, float]]:
    found = [one.hypotheses[0] for one in tfexport.load(bundle, threads=1).score(texts, targets)]
    return [(one.log_prob, -one.log_prob / len(one.token_log_probs)) for one in found]


def test_scores_are_those_of_the_model(tiny_bundle: Path) -> None:
    scorer = Scorer(tiny_bundle, source_column="de", target_column="en")
    batch = {"de": np.array(SOURCES), "en": np.array(TARGETS), "status": np.arange(30)}
    found = scorer(batch)
    assert list(found) == ["de", "en", "input_status", "status", "message", "log_prob", "cross_entropy"]
    wanted = expected(tiny_bundle, SOURCES, TARGETS)
    assert found["log_prob"] == pytest.approx([one[0] for one in wanted], abs=1e-5)
    assert found["cross_entropy"] == pytest.approx([one[1] for one in wanted], abs=1e-5)
    assert set(found["status"]) == {"ok"}


def test_both_directions(tiny_bundle: Path, reverse_bundle: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    scorer = Scorer(tiny_bundle, reverse=reverse_bundle, channel_weight=0.5)
    found = scorer(pa.table({"source": SOURCES, "target": TARGETS})).to_pylist()
    forward, reverse = expected(tiny_bundle, SOURCES, TARGETS), expected(reverse_bundle, TARGETS, SOURCES)
    for row, (log_prob, there), (back_log_prob, back) in zip(found, forward, reverse, strict=True):
        assert row["log_prob"] == pytest.approx(log_prob, abs=1e-5)
        assert row["reverse_log_prob"] == pytest.approx(back_log_prob, abs=1e-5)
        wanted = math.exp(-(abs(there - back) + (there + back) / 2))
        assert row["dual_cross_entropy"] == pytest.approx(wanted, rel=1e-4)
        assert row["noisy_channel"] == pytest.approx(-there - 0.5 * back, abs=1e-5)


def test_dual_cross_entropy() -> None:
    assert dual_cross_entropy(0, 0) == 1
    assert dual_cross_entropy(1, 3) == dual_cross_entropy(3, 1) == pytest.approx(math.exp(-4))
    assert dual_cross_entropy(math.inf, 1) == dual_cross_entropy(math.inf, math.inf) == 0


def test_bad_rows_are_marked_and_the_others_scored(tiny_bundle: Path, reverse_bundle: Path) -> None:
    scorer = Scorer(tiny_bundle, reverse=reverse_bundle)
    bad: list[Any] = [
        *((None, "wört5"), ("de5", 3), (b"\xff", "wört5"), ("de5", b"\xff"), ("", "wört5")),
        *(("de5", "wört5 " * 30), (float("nan"), "wört5"), ("de5", "")),
    ]
    found = list(scorer.rows([*PAIRS[:9], *bad, *PAIRS[9:]]))
    marked = ["null", "not_text", "invalid_utf8", "invalid_utf8", "empty", "too_long", "null", "empty"]
    assert [row.status for row in found[9:17]] == marked
    messages = [row.message for row in found[9:17]]
    assert [message.startswith("reverse model: ") for message in messages] == [False] * 7 + [True]
    assert messages[7] == "reverse model: empty"
    alone = list(scorer.rows(PAIRS))
    assert [scorer.line(row) for row in (*found[:9], *found[17:])] == [scorer.line(row) for row in alone]
    singly = [scorer.columns([row])["log_prob"][0] for row in scorer.rows(PAIRS, singly=True)]
    assert singly == pytest.approx(scorer.columns(alone)["log_prob"], abs=1e-5)
    assert [len(scorer.line(row).split("\t")) for row in alone] == [6] * 30
    assert scorer.line(found[9]) == ""


def test_a_copy_computes_the_same(tiny_bundle: Path) -> None:
    scorer = Scorer(tiny_bundle)
    again = pickle.loads(pickle.dumps(scorer))
    assert [again.line(row) for row in again.rows(PAIRS)] == [scorer.line(row) for row in scorer.rows(PAIRS)]


def test_what_cannot_be_used_is_an_error(tiny_bundle: Path) -> None:
    for wrong in ({"beam": 4}, {"reverse": "nowhere"}, {"channel_weight": -1}, {"threads": 0}, {"precision": "fp8"}):
        with pytest.raises(TfexportError):
            Scorer(tiny_bundle, **wrong)
    with pytest.raises(TfexportError, match="no column 'target'"):
        Scorer(tiny_bundle)({"source": np.array(["a"])})
    with pytest.raises(TfexportError, match=r"^target_column is 3\. Give the name of a column"):
        Scorer(tiny_bundle, target_column=3)  # type: ignore[arg-type]
    same = {"source_column": "de", "target_column": "de"}
    for make in (lambda: Scorer(tiny_bundle, **same), lambda: Scorer.described(tiny_bundle, same)):
        with pytest.raises(TfexportError, match=r"^source_column and target_column are both 'de'\. Name two columns"):
            make()
