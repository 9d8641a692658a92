"""The error for modules that the canonical model cannot compute."""

from __future__ import annotations


class NotCanonical(Exception):
    """A module computes something that `ModelConfig` cannot express. The message names it, in the user's lines."""

    def __init__(self, about: str, place: str = ""):
        super().__init__(f"{about} ({place})" if place else about)
