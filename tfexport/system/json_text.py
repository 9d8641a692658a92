"""JSON for other programs: none of what it lacks, NaN and infinity, is ever written as a word that their readers refuse."""

from __future__ import annotations

import json
import math
from typing import Any


def json_text(value: Any, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """`value` (dicts, lists, tuples, texts, numbers) as JSON (RFC 8259); a number that is not finite is null."""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)
    except ValueError:  # such a number, which few values have
        return json.dumps(_finite(value), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
