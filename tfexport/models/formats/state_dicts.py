"""Search for the state_dict in the file of a training script, and for the model's own names in it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor

from tfexport.errors import CheckpointError
from tfexport.models.formats.pickles import InertObject

WRAPPERS = ("model_state_dict", "state_dict", "model_state", "model")
"""Keys under which training scripts save the weights."""
_PART_SUFFIXES = ("_state_dict", "_state")
"""Endings of the keys of parts, such as `encoder_state_dict`."""
_MOST_LEVELS = 5
"""Maximum nesting depth of a checkpoint. A file may contain itself."""
_MOST_FLAGS = 12
"""Maximum number of flags that a message gives."""
_MOST_ENTRIES = 100_000
_MOST_MODULES = 10_000
"""Maximum number of the parts of a saved module, which may contain itself."""


@dataclass(frozen=True)
class Picked:
    """The user's selection of the model's tensors in a file."""

    key: str | None = None
    """Entry that contains the state_dict: its keys from the outside in, separated by dots."""
    ignore: tuple[str, ...] = ()
    """Names of tensors that belong to no layer, as patterns such as `crit.*`; `*` stands for any characters."""

    def without_ignored(self, weights: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The weights that are not ignored, and the names of the others."""
        ignored = tuple(name for name in weights if any(fnmatchcase(name, pattern) for pattern in self.ignore))
        return {name: value for name, value in weights.items() if name not in set(ignored)}, ignored

    def require_used(self, path: Path, ignored: Sequence[str]) -> None:
        """Raise CheckpointError if a pattern matches no tensor: it may be misspelt."""
        for pattern in self.ignore:
            if not any(fnmatchcase(name, pattern) for name in ignored):
                raise CheckpointError(
                    f"{path} has no weight of a name like {pattern!r}. Correct or leave out --ignore."
                )


def find_state_dict(path: Path, content: Any, key: str | None = None) -> dict[str, Any]:
    """Find the state_dict in the content of a file: tensors by name, perhaps with other values among them.

    Raises:
        CheckpointError: there is none, or there are several and `key` does not select one.
    """
    if key is not None:
        content = _at(path, content, key)
    for _ in range(_MOST_LEVELS):
        usual = [name for name in WRAPPERS if _holds_weights(content, name)]
        if len(usual) != 1:
            break
        content = content[usual[0]]
    candidates = {"": parts} if (parts := _joined_parts(content)) else dict(_state_dicts(content))
    if len(candidates) > 1:
        raise CheckpointError(
            f"{path} contains weights in {len(candidates)} places: {_listed(candidates)}. Choose one with --key NAME; or, "
            "if they are parts of one model, save it as a whole with torch.save(model.state_dict(), 'ckpt.pt')."
        )
    content = next(iter(candidates.values()), content)
    if not _has_tensors(content):
        raise CheckpointError(
            f"{path} contains no weights by name, but {what_is(content)}. Nothing in it was run. Save them with "
            f"torch.save(model.state_dict(), 'ckpt.pt'), bare or under one of {', '.join(WRAPPERS)}."
        )
    return {str(name): value for name, value in content.items()}


def _joined_parts(content: Any) -> dict[str, Any]:
    """The tensors of an encoder and a decoder that were saved one by one, with other parts beside them, under joint names.

    `{"encoder": {"a.weight": ...}, "decoder": ...}` becomes `{"encoder.a.weight": ...}`. Empty for other content.
    """
    parts: dict[str, Mapping[Any, Any]] = {}
    for key, value in _entries(content).items():
        name = str(key)
        for suffix in _PART_SUFFIXES:
            name = name.removesuffix(suffix)
        weights = _module_weights(value) if _is_module(value) else value
        if isinstance(weights, Mapping) and weights and all(isinstance(each, Tensor) for each in weights.values()):
            parts[name] = weights
    if not parts.keys() >= {"encoder", "decoder"}:
        return {}
    return {f"{part}.{name}": tensor for part, weights in parts.items() for name, tensor in weights.items()}


def tensors_of(path: Path, entries: Mapping[str, Any]) -> dict[str, Tensor]:
    """The entries of a state_dict, which must all be tensors.

    Raises:
        CheckpointError: some entries are not tensors.
    """
    others = [name for name, value in entries.items() if not isinstance(value, Tensor)]
    if others:
        raise CheckpointError(
            f"{path} has entries other than weights, which are not tensors: {some(others)}. Save model.state_dict() alone, "
            f"or leave them out with {ignore_flags(others)}."
        )
    return dict(entries)


def without_prefix(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights without the module names that prefix all names.

    DataParallel, torch.compile, Lightning and a user's own class add such prefixes. torch.compile also adds its name inside,
    if it compiled a part of the model.
    """
    plain = {".".join(part for part in name.split(".") if part != "_orig_mod"): name for name in weights}
    weights = {name: weights[old] for name, old in plain.items()} if len(plain) == len(weights) else dict(weights)
    while len(tops := {name.partition(".")[0] for name in weights}) == 1 and not tops & {"encoder", "decoder"}:
        if not all("." in name for name in weights):
            break
        weights = {name.partition(".")[2]: tensor for name, tensor in weights.items()}
    return weights


def some(names: Sequence[str], most: int = 12) -> str:
    """The first names of a list, for a message."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def ignore_flags(names: Sequence[str]) -> str:
    """The flags that leave these names out, for a message."""
    return " ".join(f"--ignore {shlex.quote(name)}" for name in names[:_MOST_FLAGS])


def what_is(content: Any) -> str:
    """A description of a file's content, for a message."""
    if isinstance(content, InertObject):
        return f"an object of {content.of[:100]}"
    return f"the keys {some([str(key) for key in content])}" if isinstance(content, Mapping) else type(content).__name__


def _is_module(content: Any) -> TypeGuard[InertObject]:
    """Whether an object was an `nn.Module`, as `torch.save(model, path)` writes it."""
    parts = content.attributes if isinstance(content, InertObject) else {}
    return all(isinstance(parts.get(name), Mapping) for name in ("_parameters", "_buffers", "_modules"))


def _module_weights(module: InertObject) -> dict[str, Any]:
    """The names and tensors that `state_dict()` of this module would return. None of its code is run."""
    weights: dict[str, Any] = {}
    waiting: list[tuple[str, InertObject]] = [("", module)]
    n_modules = 0
    while waiting and n_modules < _MOST_MODULES:
        prefix, at = waiting.pop()
        parts, n_modules = at.attributes, n_modules + 1
        passing = parts.get("_non_persistent_buffers_set") or ()
        own = {**parts["_parameters"], **parts["_buffers"]}
        weights |= {f"{prefix}{name}": own[name] for name in own if own[name] is not None and name not in passing}
        waiting += [(f"{prefix}{name}.", child) for name, child in parts["_modules"].items() if _is_module(child)]
    return weights


def _entries(content: Any) -> Mapping[Any, Any]:
    """The entries of a dict, or the attributes and entries of an object of any class."""
    if isinstance(content, InertObject):
        return {**content.attributes, **content.entries}
    return content if isinstance(content, Mapping) else {}


def _at(path: Path, content: Any, key: str) -> Any:
    """The entry at a dotted path of keys, which may contain dots themselves."""
    waiting = [(content, key)]
    while waiting:
        at, rest = waiting.pop()
        entries = {str(name): value for name, value in _entries(at).items()}
        if rest in entries and isinstance(entries[rest], Mapping | InertObject):
            return entries[rest]
        parts = rest.split(".")[:_MOST_LEVELS]
        heads = (".".join(parts[:count]) for count in range(1, len(parts)))
        waiting += [(entries[head], rest.removeprefix(f"{head}.")) for head in heads if head in entries]
    candidates = dict(_state_dicts(content))
    places = f"it has weights in {_listed(candidates)}" if candidates else f"it contains {what_is(content)}"
    raise CheckpointError(f"{path} has no entry {key!r}: {places}. Correct or leave out --key.")


def _listed(candidates: Mapping[str, Mapping[Any, Any]]) -> str:
    return some([f"{name} ({len(weights)} tensors)" for name, weights in candidates.items()])


def _has_tensors(content: Any) -> bool:
    return isinstance(content, Mapping) and any(isinstance(value, Tensor) for value in content.values())


def _holds_weights(content: Any, name: str) -> bool:
    inner = content.get(name) if isinstance(content, Mapping) else None
    return isinstance(inner, Mapping) and (_has_tensors(inner) or next(_state_dicts(inner), None) is not None)


def _state_dicts(content: Any) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """The dicts of tensors by names of layers, each with its path.

    Names of layers contain dots. The names in an optimizer's state do not, so it is not among them.
    """
    waiting: list[tuple[str, Any, int]] = [("", content, 0)]
    seen, n_entries = set[int](), 0
    while waiting:
        place, at, level = waiting.pop(0)
        if id(at) in seen or level > _MOST_LEVELS or n_entries > _MOST_ENTRIES:
            continue
        seen.add(id(at))
        if _is_module(at):
            if weights := _module_weights(at):
                yield place, weights
            continue
        entries = _entries(at)
        n_entries += len(entries)
        if any(isinstance(value, Tensor) and "." in str(name) for name, value in entries.items()):
            yield place, entries
            continue
        waiting += [
            (f"{place}.{name}".removeprefix("."), value, level + 1)
            for name, value in entries.items()
            if isinstance(value, Mapping | InertObject)
        ]
