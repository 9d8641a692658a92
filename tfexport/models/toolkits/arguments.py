"""The options that a toolkit saved with a model. Each is used, refused by name, or known to have no effect."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tfexport.errors import ConfigError

_MOST_SHOWN = 60
"""Maximum number of characters of a value in a message."""


class Arguments:
    """Options by name. The object records which of them were read."""

    def __init__(self, where: str, values: Mapping[str, Any]):
        self.where = where
        """The place of the options, for messages."""
        self._given = values
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an option. None counts as missing."""
        self._read.add(name)
        value = self._given.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if type(value) is not int:
            raise ConfigError(f"{self.where} has {name} {_shown(value)}, not a whole number. Correct it.")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if type(value) is not bool:
            raise ConfigError(f"{self.where} has {name} {_shown(value)}, not true or false. Correct it.")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            raise ConfigError(f"{self.where} has {name} {_shown(value)}, not a text. Correct it.")
        return value

    def texts(self, name: str) -> list[str]:
        """An option that is a list of texts; empty if it is missing."""
        value = self.get(name, [])
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise ConfigError(f"{self.where} has {name} {_shown(value)}, not a list of texts. Correct it.")
        return value

    def inner(self, name: str) -> Arguments:
        """The options within the option `name`; empty if it is missing."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where} has {name} {_shown(value)}, not options by name. Correct it.")
        return Arguments(f"{self.where}, {name}", value)

    def names(self) -> list[str]:
        """The names of all options."""
        return [str(name) for name in self._given]

    def size(self, name: str, default: int | None = None) -> int:
        """An option that is a number above 0."""
        if (value := self.number(name, default)) < 1:
            raise ConfigError(f"{self.where} has {name} {value}, not above 0. Correct it.")
        return value

    def same(self, left: str, right: str) -> int:
        """A size that both stacks must share."""
        values = self.size(left), self.size(right)
        if values[0] != values[1]:
            raise ConfigError(
                f"{self.where} has {left} {values[0]} and {right} {values[1]}: models whose stacks differ in it are "
                "not supported."
            )
        return values[0]

    def known(self, name: str, value: Any, ours: Mapping[str, str]) -> str:
        """tfexport's name for the `value` of an option."""
        if not isinstance(value, str) or value not in ours:
            raise ConfigError(
                f"{self.where} has {name} {_shown(value)}, which is not supported. There are {', '.join(ours)}."
            )
        return ours[value]

    def require(self, wanted: Mapping[str, Any]) -> None:
        """Refuse options with unsupported values. Each has one supported value, which is also its default."""
        for name, value in wanted.items():
            if (actual := self.get(name, value)) != value:
                raise ConfigError(f"{self.where} has {name} {_shown(actual)}, and only {_shown(value)} is supported.")

    def refuse(self, *names: str) -> None:
        """Refuse options that are on. They are only supported if they are false, 0 or empty."""
        for name in names:
            if actual := self.get(name):
                raise ConfigError(f"{self.where} has {name} {_shown(actual)}, which is not supported.")

    def others(self, harmless: Collection[str]) -> list[str]:
        """Options with a value that were not read and are not known to be harmless."""
        return sorted(
            str(name)
            for name, value in self._given.items()
            if name not in self._read and name not in harmless and value not in (None, False, {}, [], "")
        )


def _shown(value: Any) -> str:
    """A value for a message; long values are cut."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
