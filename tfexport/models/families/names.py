"""Templates of parameter names: `encoder.{i}.attn.{h}.{p}` stands for the names of every layer, head and parameter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

_PLACEHOLDER = re.compile(r"{(?P<step>\d*)(?P<kind>[ihp])(?:\+(?P<offset>\d+))?}")
_NUMBER = "0|[1-9][0-9]{0,8}"
_VALUES = {"i": _NUMBER, "h": _NUMBER, "p": "weight|bias"}
_ZEROS = re.compile(r"(?:^|\.)0[0-9]+(?:\.|$)")


def has_leading_zero(name: str) -> bool:
    """Whether a part of a name is a number such as `01`. It stands for no layer, so that layer names stay unique."""
    return _ZEROS.search(name) is not None


@dataclass(frozen=True)
class NameTemplate:
    """A name with placeholders, each at most once.

    `{i}` is the number of a layer, `{h}` that of a head, `{p}` is `weight` or `bias`. `{3i+1}` is 3 times the number of the
    layer plus 1, for lists in which several modules of a layer follow each other.
    """

    text: str
    wildcards: bool = False
    """Whether `*` stands for any text."""

    @cached_property
    def placeholders(self) -> dict[str, tuple[int, int]]:
        """Step and offset of each placeholder, in order.

        Raises:
            ValueError: the text has an unknown placeholder, or the same one twice.
        """
        bounds: dict[str, tuple[int, int]] = {}
        for match in _PLACEHOLDER.finditer(self.text):
            if match["kind"] in bounds:
                raise ValueError(f"{{{match['kind']}}} comes twice in {self.text!r}")
            bounds[match["kind"]] = int(match["step"] or 1), int(match["offset"] or 0)
            if bounds[match["kind"]][0] == 0 or (match["kind"] == "p" and bounds["p"] != (1, 0)):
                raise ValueError(f"{match[0]} in {self.text!r} is not a placeholder")
        if left := re.search(r"[{}][^{}]*}?", _PLACEHOLDER.sub("", self.text)):
            raise ValueError(f"{left[0]} in {self.text!r} is not a placeholder")
        return bounds

    def match(self, name: str) -> dict[str, str] | None:
        """The values of the placeholders in a name; None if the name does not match."""
        match = self._regex.fullmatch(name)
        if match is None:
            return None
        values = match.groupdict()
        for kind, (step, offset) in self.placeholders.items():
            if kind == "p":
                continue
            number, rest = divmod(int(values[kind]) - offset, step)
            if rest or number < 0:
                return None
            values[kind] = str(number)
        return values

    def fill(self, values: Mapping[str, str]) -> str:
        """The name with these values. Placeholders without a value stay."""

        def value(match: re.Match[str]) -> str:
            kind = match["kind"]
            if kind not in values:
                return match[0]
            step, offset = self.placeholders[kind]
            return values[kind] if kind == "p" else str(int(values[kind]) * step + offset)

        return _PLACEHOLDER.sub(value, self.text)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        pieces, end = [], 0
        for match in _PLACEHOLDER.finditer(self.text):
            pieces += [self._literal(self.text[end : match.start()]), f"(?P<{match['kind']}>{_VALUES[match['kind']]})"]
            end = match.end()
        return re.compile("".join([*pieces, self._literal(self.text[end:])]), re.DOTALL)

    def _literal(self, text: str) -> str:
        return ".*".join(map(re.escape, text.split("*"))) if self.wildcards else re.escape(text)
