"""A user's own family file: Python code that the user names on the command line. It is run, because the user wrote it.

    FAMILY = Family(name="my-model", about="...", renames={...}, signature=(...), read_config=...)

`read_config` says all arithmetic that the canonical names do not show, such as `norm_first`; tfexport asks for the rest.
`FAMILIES` may hold several families, which are tried in order. A function `reference(weights, config)` returns the module
that the weights were trained in, for `tfexport probe` (see `Family.reference`). examples/my_family.py is a complete file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn

from tfexport.config import ModelConfig
from tfexport.errors import ConfigError, TfexportError
from tfexport.models.checkpoints.recognise import FAMILIES, NATIVE
from tfexport.models.families.family import Family

Result = TypeVar("Result")
Weights = dict[str, Tensor]

_MOST_SHOWN = 300
"""Maximum number of characters of an error that are shown."""


def read_family_file(path: Path) -> tuple[Family, ...]:
    """Run the file and return its families, in the order in which they are tried.

    An error in one of their functions names the line of the file.

    Raises:
        ConfigError: the file is missing, fails, or has no family.
    """
    if not path.is_file():
        raise ConfigError(f"there is no family file {path}. Give the path of your own, such as my_family.py.")
    with running(path):
        module = run_file(path)
    families = getattr(module, "FAMILIES", None) or (getattr(module, "FAMILY", None),)
    if not isinstance(families, Sequence) or not all(isinstance(family, Family) for family in families):
        raise ConfigError(
            f"{path} has no FAMILY. Let it say FAMILY = Family(name=..., ...), with `from tfexport import Family`, as "
            "examples/my_family.py does."
        )
    reference = getattr(module, "reference", None)
    return tuple(_checked(path, family, reference) for family in families)


def run_file(path: Path) -> ModuleType:
    """Run the user's file as a module of its own.

    It is compiled each time. Python takes cached bytecode for current if the file has the same size and was changed in the
    same second.
    """
    where = str(path.resolve())
    loader = SourceFileLoader(f"tfexport_user_{path.stem}", where)
    spec = importlib.util.spec_from_file_location(loader.name, where, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(loader.source_to_code(loader.get_data(where), where), vars(module))
    return module


def _checked(path: Path, family: Family, reference: Callable[..., nn.Module] | None) -> Family:
    if problem := _wrong_field(family):
        raise ConfigError(f"{path} has a Family whose {problem}. Correct the family file.")
    if family.name in (NATIVE, *(known.name for known in FAMILIES)):
        raise ConfigError(f"{path} has a family {family.name!r}, which tfexport has itself. Give it another name.")
    try:
        family.check_names()
    except ValueError as error:
        raise ConfigError(
            f"the names of {path} cannot be read: {error}. Placeholders are {{i}}, {{h}} and {{p}}, each once in a name, "
            "and such as {3i+1} in flat lists of layers."
        ) from error
    changes: dict[str, Any] = {
        "is_own": True,
        "read_config": _giving(path, "read_config", _telling(path, family.read_config), _wrong_fields),
        "adjust": _giving(path, "adjust", _not_in_place(path, _telling(path, family.adjust)), _wrong_weights),
    }
    if (reference := reference or family.reference) is not None:
        changes["reference"] = _giving(path, "reference", _telling(path, reference), _no_module)
    return replace(family, **changes)


_FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig))


def _wrong_field(family: Family) -> str | None:
    """The problem with the types of a family's fields, in words."""

    def is_names(value: Any) -> bool:
        return isinstance(value, tuple | list) and all(isinstance(name, str) for name in value)

    def is_table(value: Any, of: Callable[[Any], bool]) -> bool:
        return isinstance(value, Mapping) and all(isinstance(name, str) and of(to) for name, to in value.items())

    def is_text(value: Any) -> bool:
        return isinstance(value, str)

    wanted = (
        *((name, is_text(getattr(family, name)), "a string") for name in ("name", "about")),
        ("renames", is_table(family.renames, lambda to: is_text(to) or is_names(to)), "a dict of names to names"),
        ("shared", is_table(family.shared, is_text), "a dict of names to names"),
        ("usual", is_table(family.usual, lambda value: True), "a dict of configuration fields"),
        *(
            (name, is_names(getattr(family, name)), "a tuple of names, as in ('a.weight',)")
            for name in ("signature", "ignored", "absent", "notes", "asked", "told_by_user")
        ),
        *((name, callable(getattr(family, name)), "a function") for name in ("read_config", "adjust")),
    )
    for name, is_right, kind in wanted:
        if not is_right:
            return f"{name} is not {kind}"
    for name in ("asked", "usual"):
        if others := [field for field in getattr(family, name) if field not in _FIELDS]:
            return f"{name} has {others[0]!r}, which is not a field of the configuration{_nearest(others[0])}"
    return None


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, _FIELDS, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _wrong_fields(fields: Any) -> str | None:
    if not isinstance(fields, dict):
        return f"returns {type(fields).__name__}, not a dict of configuration fields"
    for name, value in fields.items():
        if name not in _FIELDS:
            return f"returns {name!r}, which is not a field of the configuration{_nearest(str(name))}"
        if not isinstance(value, bool | int | float | str | tuple | list):
            return f"returns {name} as {type(value).__name__}, not as a plain value such as len(weight) or int(number)"
    return None


def _wrong_weights(weights: Any) -> str | None:
    if not isinstance(weights, dict):
        return f"returns {type(weights).__name__}, not a dict of names to tensors. Let it return the weights"
    for name, value in weights.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            return f"returns {type(value).__name__} as {name!r}, not a tensor"
    return None


def _no_module(module: Any) -> str | None:
    return (
        None
        if isinstance(module, nn.Module)
        else f"returns {type(module).__name__}, not an nn.Module. Let it return one"
    )


def _giving(
    path: Path, name: str, function: Callable[..., Result], wrong: Callable[[Any], str | None]
) -> Callable[..., Result]:
    """Wrap the function to check its result."""

    @wraps(function)
    def checked(*arguments: Any) -> Result:
        result = function(*arguments)
        if problem := wrong(result):
            raise ConfigError(f"`{name}` of {path} {problem}. Correct the family file.")
        return result

    return checked


def _not_in_place(path: Path, adjust: Callable[[Weights], Weights]) -> Callable[[Weights], Weights]:
    """Wrap `adjust` to reject writes into its input: the weights are read once and converted more than once."""

    def adjusted(weights: Weights) -> Weights:
        before = {name: tensor._version for name, tensor in weights.items()}
        passed = dict(weights)
        made = adjust(weights)
        changed = [name for name, tensor in passed.items() if tensor._version != before[name]]
        if changed:
            raise ConfigError(
                f"`adjust` of {path} writes into {changed[0]}. Let it make new tensors: weights[name] = weights[name] * 2, "
                "not weights[name] *= 2."
            )
        return made

    return adjusted


def _telling(path: Path, function: Callable[..., Result]) -> Callable[..., Result]:
    @wraps(function)
    def guarded(*arguments: Any) -> Result:
        with running(path):
            return function(*arguments)

    return guarded


@contextlib.contextmanager
def importing_beside(path: Path) -> Iterator[None]:
    """A context in which modules are also imported from the folder of the user's file, as in a script."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:  # the file may change the path
            sys.path.remove(folder)


@contextlib.contextmanager
def running(path: Path) -> Iterator[None]:
    """A context in which the user's file runs as a script without arguments. Errors become tfexport errors with the line."""
    arguments, sys.argv = sys.argv, [str(path)]
    try:
        with importing_beside(path):
            yield
    except TfexportError:
        raise
    except (Exception, SystemExit) as error:
        own = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path.resolve())
        ]
        line = error.lineno if isinstance(error, SyntaxError) else own[-1] if own else None
        where = f"{path}, line {line}" if line else str(path)
        reason = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split()).rstrip(".")
        reason = reason if len(reason) <= _MOST_SHOWN else f"{reason[:_MOST_SHOWN]} [...]"
        raise ConfigError(
            f"{where}: {type(error).__name__}: {reason}. Correct the file; --debug shows the traceback."
        ) from error
    finally:
        sys.argv = arguments
