"""What `import tfexport` offers."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

import tfexport
from tfexport.search.search import SearchOptions


@pytest.mark.parametrize("method", ["translate", "iterate", "translate_ids", "stream"])
def test_every_search_option_is_a_keyword_with_its_default(method: str) -> None:
    parameters = inspect.signature(getattr(tfexport.Model, method)).parameters
    for field in fields(SearchOptions):
        assert parameters[field.name].default == field.default
