"""Forms of requests, beside the parser of Python's library."""

from __future__ import annotations

import random
from urllib.parse import parse_qsl

import pytest

from tfexport.errors import TfexportError
from tfexport.serving.http import forms


def test_fields_are_those_of_the_library_wherever_blocks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "BLOCK", 7)
    chooser = random.Random(0)
    for _ in range(5000):
        body = "".join(chooser.choice("q=&%+4aF1ä x;") for _ in range(chooser.randint(0, 40))).encode()
        try:
            wanted = parse_qsl(body.decode(), keep_blank_values=True, errors="strict")
        except ValueError:
            continue
        assert forms.form_pairs(body) == wanted


@pytest.mark.parametrize(
    ("body", "about"), [(b"q=\xe4", "Send it in UTF-8"), (b"q=%E4", "UTF-8"), (b"&" * 100, "100 fields")]
)
def test_damaged_forms_are_refused(body: bytes, about: str) -> None:
    with pytest.raises(TfexportError, match=about):
        forms.form_pairs(body)
