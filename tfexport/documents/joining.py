"""The text between two translations whose sources touch, as sentences do in Japanese."""

from __future__ import annotations

import unicodedata

_WITHOUT_SPACES = ("THAI ", "LAO ", "KHMER ", "MYANMAR ", "TIBETAN ")
"""Scripts of narrow letters without spaces between sentences."""


def glue(left: str, right: str) -> str:
    """A space, if the script of the two translations has spaces between sentences; else an empty string."""
    if not left or not right or left[-1].isspace() or right[0].isspace():
        return ""
    return "" if _is_close(left[-1]) or _is_close(right[0]) else " "


def _is_close(letter: str) -> bool:
    wide = unicodedata.east_asian_width(letter) in "WF"
    return wide or unicodedata.name(letter, "").startswith(_WITHOUT_SPACES)
