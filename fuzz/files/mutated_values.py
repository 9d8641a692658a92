"""Content such as that of JSON, with one value in it changed."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, -1, 0, 1, 7, 10**9, 2**63, 1e308, 1.5, True),
    *("", "../../etc/passwd", "/dev/zero", "x" * 100_000),
    *([], {}, [[]] * 5),
)


def other_value(chosen: random.Random, content: Any) -> Any:
    """`content`, of which one value, wherever it stands, is now another one, is missing, or has another name."""
    places = list(_places(content))
    if not places:
        return content
    holder, key = chosen.choice(places)
    match chosen.randrange(4):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[chosen.choice(("x", "", "../y"))] = holder.pop(key)
        case _:
            holder[key] = copy.deepcopy(chosen.choice(VALUES))
    return content


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(items):
        yield content, key
        yield from _places(value)
