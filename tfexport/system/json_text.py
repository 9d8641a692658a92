"""Standard JSON for other programs. NaN and infinity, which other parsers refuse, are never written."""

from __future__ import annotations

import json
import math
from typing import Any


def json_text(value: Any, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """`value` (dicts, lists, tuples, texts, numbers) as JSON (RFC 8259); a number that is not finite is null."""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)
    except ValueError:  # a number that is not finite, which is rare
        return json.dumps(_finite(value), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
