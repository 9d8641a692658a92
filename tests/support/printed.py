"""Outputs that pages show, and what commands print."""

from __future__ import annotations

import re

import pytest

NUMBER = re.compile(r"-?\d+\.\d{3,}|-?\d\.\d+e[+-]\d+")
"""Results of computations, whose last digits depend on the machine."""
ANY_LINES = "...\n"


def assert_same(printed: str, shown: str) -> None:
    """Equal text, where `...` in a line of its own stands for any lines; numbers agree in three digits."""
    pattern = re.escape(NUMBER.sub("#", shown)).replace(re.escape(ANY_LINES), "(?:.*\n)*")
    assert re.fullmatch(pattern, NUMBER.sub("#", printed)), printed
    if ANY_LINES not in shown:
        numbers = [float(number) for number in NUMBER.findall(printed)]
        assert numbers == pytest.approx([float(number) for number in NUMBER.findall(shown)], rel=1e-3, abs=1e-4)
