"""Standard JSON for other programs. NaN and infinity, which other parsers refuse, are never written."""

from __future__ import annotations

import json
from typing import Any


def json_text(value: Any, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """`value` (dicts, lists, tuples, texts, numbers) as JSON (RFC 8259); a number that is not finite is null."""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)
    except ValueError:  # a number that is not finite, which is rare
        # In C: deep values need no Python frames.
        finite = json.loads(json.dumps(value), parse_constant=lambda name: None)
        return json.dumps(finite, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)
