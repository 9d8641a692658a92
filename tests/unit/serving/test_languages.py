"""What languages are called."""

from __future__ import annotations

import pytest

from tfexport.serving.libretranslate.languages import client_code, languages, name_of


@pytest.mark.parametrize(
    ("code", "name"),
    [("de", "German"), ("pt-BR", "Portuguese (Brazil)"), ("zh-Hans", "Chinese (Simplified)"), ("qqq", "qqq"), ("", "")],
)
def test_languages_have_english_names(code: str, name: str) -> None:
    assert name_of(code) == name


def test_codes_have_dashes() -> None:
    assert client_code("pt_BR") == "pt-BR"


def test_targets_are_told_of_each_language() -> None:
    assert languages([("de", "en"), ("de", "fr"), ("en", "de")]) == {"de": ["en", "fr"], "en": ["de"], "fr": []}
