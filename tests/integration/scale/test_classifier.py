"""`Classifier` on batches: the classes of `tfexport.load_classifier`. Ray itself is not needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfexport
from tfexport.errors import TfexportError
from tfexport.scale import Classifier

LINES = [" ".join(f"de{4 + (n * 7 + place * 3) % 27}" for place in range(1 + n % 9)) for n in range(40)]


def test_classes_are_those_of_the_model(worded_classifier: Path) -> None:
    wanted = [one.classes for one in tfexport.load_classifier(worded_classifier, threads=1).classify(LINES, top=3)]
    found = Classifier(worded_classifier, text_column="de", top=3)({"de": np.array(LINES), "class": np.arange(40)})
    assert list(found) == ["de", "input_class", "status", "message", "class", "probability", "classes"]
    assert found["class"].tolist() == [one[0].class_ for one in wanted]
    assert found["probability"].tolist() == pytest.approx([one[0].probability for one in wanted], abs=1e-6)
    assert [[one["class"] for one in row] for row in found["classes"]] == [[c.class_ for c in one] for one in wanted]
    assert len({tuple(one["class"] for one in row) for row in found["classes"]}) > 1


def test_labels_and_tables(worded_classifier: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    classifier = Classifier(worded_classifier, labels=worded_classifier.parent / "labels.txt", top=2)
    found = classifier(pa.table({"text": [*LINES, None]}))
    assert found.column_names == ["text", "status", "message", "class", "label", "probability", "classes"]
    assert [row["label"] for row in found.to_pylist()[:-1]] == ["abcde"[n] for n in found["class"].to_pylist()[:-1]]
    last = found.to_pylist()[-1]
    assert (last["status"], last["class"], last["label"], last["classes"]) == ("null", None, None, [])
    (row,) = classifier.rows(LINES[:1])
    assert [part.isalpha() for part in classifier.line(row).split("\t")] == [True, False] * 2


@pytest.mark.parametrize(
    ("given", "kind"), [(LINES[:2], "int64"), ([], "int64"), ([LINES[0], None], "float64"), ([None], "float64")]
)
def test_classes_in_data_frames_are_numbers(worded_classifier: Path, given: list[Any], kind: str) -> None:
    pandas = pytest.importorskip("pandas")
    found = Classifier(worded_classifier, top=2)(pandas.DataFrame({"text": given}))
    assert [str(found[name].dtype) for name in ("class", "probability", "classes")] == [kind, "float64", "object"]
    assert str(found["status"].dtype) in ("object", "str")


def test_bad_rows_are_marked(worded_classifier: Path) -> None:
    bad: list[Any] = [None, 3, b"\xff", "", "de4 " * 100_000]
    classifier = Classifier(worded_classifier)
    rows = list(classifier.rows([*LINES[:20], *bad, *LINES[20:]]))
    assert [row.status for row in rows[20:25]] == ["null", "not_text", "invalid_utf8", "empty", "too_long"]
    alone = [classifier.line(row) for row in classifier.rows(LINES, singly=True)]
    assert [classifier.line(row) for row in (*rows[:20], *rows[25:])] == alone


def test_what_cannot_be_used_is_an_error(worded_classifier: Path, tiny_bundle: Path) -> None:
    for wrong in ({"beam": 4}, {"max_batch_tokens": 9}, {"top": 0}, {"labels": "nowhere"}):
        with pytest.raises(TfexportError):
            Classifier(worded_classifier, **wrong)
    with pytest.raises(TfexportError, match=r"^text_column is 3\. Give the name of a column"):
        Classifier(worded_classifier, text_column=3)  # type: ignore[arg-type]
    with pytest.raises(TfexportError):
        Classifier(tiny_bundle)
    with pytest.raises(TfexportError, match="is a translation model"):  # before Ray starts and a folder is made
        Classifier.described(tiny_bundle, {})
