"""What is fuzzed: valid content, and what reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """One way in which bytes from outside come in."""

    name: str
    seeds: tuple[bytes, ...]
    """Valid content, which mutations begin with."""
    read: Callable[[Path], object]
    """Reads a file as the commands do."""
    suffix: str = ".bin"
