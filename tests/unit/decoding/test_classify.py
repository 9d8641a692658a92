"""Results of a classifier, as columns and as records."""

from __future__ import annotations

from tfexport.decoding.classify import Classified, ClassProbability, ClassWriter


def test_a_result_is_written_as_columns_or_as_a_record() -> None:
    found = Classified(3, "ok", "", (ClassProbability(1, 0.75), ClassProbability(0, 0.25)))
    named = Classified(3, "ok", "", (ClassProbability(1, 0.75, "yes"), ClassProbability(0, 0.25, "no")))
    assert ClassWriter().line(found) == "1\t0.750000\t0\t0.250000"
    assert ClassWriter().line(named) == "yes\t0.750000\tno\t0.250000"
    classes = [{"class": 1, "label": "yes", "probability": 0.75}, {"class": 0, "label": "no", "probability": 0.25}]
    assert ClassWriter().record(named) == {"line": 3, "status": "ok", "classes": classes}
    unread = Classified(4, "too_long", "30 ids")
    assert ClassWriter().line(unread) == ""
    assert ClassWriter().record(unread) == {"line": 4, "status": "too_long", "message": "30 ids", "classes": []}
