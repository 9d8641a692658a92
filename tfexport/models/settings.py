"""The settings of a toolkit's model, each used, refused by name, or known to be without effect."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from tfexport.errors import ConfigError

_Meaning = TypeVar("_Meaning")


class Settings:
    """Named values, and which of them were read.

    Args:
        where: what holds them, for messages.
        settings: a value of None is as none.
    """

    harmless: Collection[str] = ()
    """Names of settings that change nothing in what a trained model computes."""

    def __init__(self, where: str, settings: Mapping[str, Any]):
        self.where = where
        self._settings = settings
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        found = self._settings.get(name)
        return default if found is None else found

    def number(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if type(value) is not int:
            raise ConfigError(f"{self.where} has {name} {_short(value)}, not a whole number. Correct it.")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if type(value) is not bool:
            raise ConfigError(f"{self.where} has {name} {_short(value)}, not true or false. Correct it.")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            raise ConfigError(f"{self.where} has {name} {_short(value)}, not a text. Correct it.")
        return value

    def inner(self, name: str) -> Mapping[str, Any]:
        """Settings within the setting `name`, none where there is none."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where} has {name} {_short(value)}, not settings by name. Correct it.")
        return value

    def known(self, name: str, value: Any, meanings: Mapping[str, _Meaning]) -> _Meaning:
        """What the `value` of the setting `name` means to us."""
        if not isinstance(value, str) or value not in meanings:
            raise ConfigError(
                f"{self.where} has {name} {_short(value)}, which is not supported. There are {', '.join(meanings)}."
            )
        return meanings[value]

    def require(self, wanted: Mapping[str, Any]) -> None:
        """Settings that are supported with one value only, wherever they are told."""
        for name, value in wanted.items():
            if (found := self.get(name, value)) != value:
                raise ConfigError(f"{self.where} has {name} {_short(found)}, and only {value!r} is supported.")

    def unread(self) -> list[str]:
        """Settings that say something, that nothing asked for and that are not known to be harmless."""
        return sorted(
            str(name)
            for name, value in self._settings.items()
            if name not in self._read and name not in self.harmless and value not in (None, False, {}, [], "", 0)
        )


def _short(value: Any) -> str:
    """A value as Python writes it, of a length that a message can hold."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
