"""Whether anything but the user's word confirms that a checkpoint was read as its owner's code computes it.

`parity` proves that graphs compute the model that tfexport read. This record says who vouches for the reading itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Source = Literal["", "module", "outputs", "file"]
"""What confirmed a reading: the user's own module, expected outputs, or a file that describes itself (a toolkit's, a Hugging
Face folder, tfexport's own); empty if nothing did."""

FEW = 3
"""The number of settings that a short line names."""


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """Who confirms the settings of a checkpoint."""

    by: Source = ""
    about: str = ""
    """What was compared, such as `my_code.py:build, 3,214 sequences in float64` or `60 of 60 expected outputs of out.tsv`;
    for a file, its kind."""
    unconfirmed: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the model that only the user or a default gave, and that `by` does not cover. JSON-ready."""

    @property
    def is_confirmed(self) -> bool:
        """Whether all settings are confirmed."""
        return bool(self.by) and not self.unconfirmed

    @property
    def text(self) -> str:
        """`confirmed by ...` or `unconfirmed: ...`, with all unconfirmed settings."""
        if self.is_confirmed:
            return f"confirmed by {self._witness}"
        if self.by:
            return f"confirmed by {self._witness}, except {self._settings()}"
        return f"unconfirmed: {self._settings()}"

    @property
    def doubt(self) -> str:
        """The first unconfirmed settings, for a line that says more: `unconfirmed: n_heads 8, ... and 5 more`. Empty if all
        settings are confirmed."""
        return "" if self.is_confirmed else f"unconfirmed: {self._settings(FEW)}"

    def claim(self, checkpoint: str) -> str:
        """What a bundle is known to compute if it equals the model that was read from `checkpoint`, the name of a file."""
        if self.by == "module":
            known = f"gives the outputs of {_printable(self.about.partition(', ')[0])}"
        elif self.by == "outputs":
            known = f"gives {_printable(self.about)}"
        elif self.by == "file":
            known = f"computes {_printable(checkpoint)} as its own settings describe it"
        else:
            known = f"equals our reading of {_printable(checkpoint)}"
        return f"{known} ({self.doubt})" if self.doubt else known

    @property
    def _witness(self) -> str:
        return f"the settings in the file ({_printable(self.about)})" if self.by == "file" else _printable(self.about)

    def _settings(self, most: int | None = None) -> str:
        """The unconfirmed settings with their values."""
        every = [f"{_printable(name)} {_value(value)}" for name, value in self.unconfirmed.items()]
        if not every:
            return "all settings, of which there is no record"
        if most is None or len(every) <= most + 1:
            return ", ".join(every)
        return f"{', '.join(every[:most])} and {len(every) - most} more"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, for the manifest."""
        return {"by": self.by, "about": self.about, "unconfirmed": dict(self.unconfirmed)}

    @classmethod
    def from_dict(cls, record: Any) -> Confirmation:
        """Read the record of `to_dict`. Anything else, as a manifest may contain, counts as not confirmed."""
        if not isinstance(record, Mapping) or record.get("by") not in get_args(Source):
            return cls()
        unconfirmed = record.get("unconfirmed")
        return cls(
            by=record["by"],
            about=str(record.get("about", "")),
            unconfirmed=dict(unconfirmed) if isinstance(unconfirmed, Mapping) else {"all settings": "unknown"},
        )


def _value(value: Any) -> str:
    """A setting as a message shows it: six digits of a float, and JSON's names for the rest."""
    if isinstance(value, float):
        return f"{value:g}"
    return _printable(value) if isinstance(value, str) else json.dumps(value)


def _printable(text: str) -> str:
    """A text of a manifest on one line: it may contain control characters, which a terminal would obey."""
    return text if text.isprintable() else ascii(text)
