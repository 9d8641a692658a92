"""Whether anything but the user's word confirms that a checkpoint was read as its owner's code computes it.

`parity` proves that graphs compute the model that tfexport read. This record says who vouches for the reading itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Source = Literal["", "module", "outputs", "file"]
"""What confirmed a reading: the user's own module, expected outputs, or a file that describes itself (a toolkit's
checkpoint, a Hugging Face folder, tfexport's own); empty if nothing did."""


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """Who confirms the settings of a checkpoint."""

    by: Source = ""
    about: str = ""
    """What was compared, such as `my_code.py:build, 3,214 sequences in float64`."""
    unconfirmed: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the model that only the user or a default gave, and that `by` does not cover. JSON-ready."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, for the manifest."""
        return {"by": self.by, "about": self.about, "unconfirmed": dict(self.unconfirmed)}
