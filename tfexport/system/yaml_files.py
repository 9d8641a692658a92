"""Reading of the YAML files of toolkits: settings and vocabularies. Only plain values; no code from a file is executed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from tfexport.errors import CheckpointError, TfexportError, TokenizerError
from tfexport.system.imports import import_failure
from tfexport.system.regular_files import read_text

_KEPT: dict[str, str] = {"\u2028": "\ue000", "\u2029": "\ue001"}
"""Characters that are line breaks in YAML 1.1, which PyYAML reads, and normal characters in YAML 1.2, which Marian writes.
Private characters replace them while PyYAML reads."""


LARGEST_SETTINGS = 2**18
"""Maximum number of characters of settings, many times those of any toolkit. PyYAML takes some seconds for so many."""
LONGEST_NUMBER = 100
"""Maximum number of characters of a number. For YAML's numbers in base 60, PyYAML's time grows with the square of it."""


def read_settings(text: str, where: str) -> dict[str, Any]:
    """Parse `text` into a mapping with values of YAML's core types.

    Raises:
        CheckpointError: the text is not such a mapping, is far larger than settings, or has aliases, with which a small file
            can contain a huge value.
        RuntimeUnavailable: PyYAML is not installed.
    """
    yaml = _library(where)
    if len(text) > LARGEST_SETTINGS:
        raise CheckpointError(
            f"{where} has {len(text):,} characters, more than settings have. Check that it is the right file."
        )

    class WithoutAliases(yaml.SafeLoader):  # type: ignore[name-defined,misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("it has aliases (*), which are not read")
            node = super().compose_node(parent, index)
            is_number = isinstance(node, yaml.ScalarNode) and node.tag.endswith((":int", ":float"))
            if is_number and len(node.value) > LONGEST_NUMBER:
                raise yaml.YAMLError(f"it has a number of {len(node.value)} characters")
            return node

    try:
        settings = yaml.load(text, Loader=WithoutAliases)
    except Exception as error:  # for values that contradict their tags, PyYAML's constructors may raise any error
        raise CheckpointError(f"cannot read {where}: {_first_line(error)}. Correct it.") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{where} is not a mapping of settings. Check that it was copied completely.")
    return settings


def read_words(text: str, where: str) -> dict[str, int]:
    """The words and ids of a vocabulary in YAML, with `word: id` on each line.

    Words are always text, even if YAML would convert them (`no`, `1`, `~`). Only the events of the parser are used, so no
    value is constructed that the file does not spell out.

    Raises:
        TokenizerError: the text is not such a vocabulary, or has a word or an id twice.
        RuntimeUnavailable: PyYAML is not installed.
    """
    yaml = _library(where)
    taken = [private for private in _KEPT.values() if private in text]
    if taken:
        raise TokenizerError(f"{where} has the private character {taken[0]!r}, which cannot be read. Remove its word.")
    words: dict[str, int] = {}
    key: str | None = None
    depth = 0
    kept = text.translate({ord(own): private for own, private in _KEPT.items()})
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # the fast loader, if PyYAML was built with it
    try:
        for event in yaml.parse(kept, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.SequenceStartEvent | yaml.AliasEvent) or depth > 1:
                raise ValueError("it contains more than words and ids")
            if not isinstance(event, yaml.ScalarEvent):
                continue
            if depth == 0:
                raise ValueError("it is not a mapping")
            if key is None:
                key = event.value.translate({ord(private): own for own, private in _KEPT.items()})
            elif key in words:
                raise ValueError(f"it has the word {key!r} twice")
            else:
                words[key], key = _id(event.value), None
    except (yaml.YAMLError, ValueError) as error:
        raise TokenizerError(
            f"{where} is not a vocabulary of words and ids: {_first_line(error)}. Correct it, or give it as JSON."
        ) from error
    if not words or len(set(words.values())) < len(words):
        raise TokenizerError(f"{where} has {'an id twice' if words else 'no words'}. Correct it.")
    return words


def _id(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise ValueError(f"{text[:30]!r} is not an id")
    return int(text)


def _library(where: str) -> ModuleType:
    try:
        import yaml
    except ImportError as error:
        absent = f"{where} is YAML, and PyYAML is not installed: pip install 'tfexport[yaml]'."
        raise import_failure(error, "yaml", absent) from error
    return yaml


def _first_line(error: Exception) -> str:
    """The problem and its line, without the lines of the file that PyYAML quotes."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{problem} in line {mark.line + 1}" if mark else str(problem)


def read_yaml_file(path: Path, error: type[TfexportError] = CheckpointError) -> str:
    """The text of a YAML file; raises an `error` if it has none."""
    try:
        return read_text(path, "utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"cannot read {path}: {problem}. Check that it was copied completely.") from problem
