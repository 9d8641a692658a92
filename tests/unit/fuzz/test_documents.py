"""Random documents keep all their parts. `python -m fuzz.files.documents` tries many more."""

from __future__ import annotations

import pytest

from fuzz.files.documents import check


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_random_documents(first: int) -> None:
    for number in range(first, first + 100):
        check(number)


@pytest.mark.thorough
def test_many_random_documents() -> None:
    for number in range(10_000):
        check(number)
