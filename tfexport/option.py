"""Options, each declared once: type, default, bounds, help text and scope.

A group of options is a frozen dataclass derived from `Options`, with fields made by `option`. This declaration defines the
flags of the command line (`commands/signature.py`), the checks of keyword arguments in Python (`checked`) and the tables of
the docs (`rows`).

    @dataclass(frozen=True, kw_only=True)
    class Sampling(Options):
        top_k: int = option(0, minimum=0, help="Draw among the K most likely tokens; 0 for all.")
"""

from __future__ import annotations

import difflib
import inspect
import math
import shlex
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from tfexport.errors import TfexportError

Result = TypeVar("Result")
Group = TypeVar("Group")
_KEY = "tfexport.option"


@dataclass(frozen=True, kw_only=True)
class Option:
    """The properties of an option, other than its name, type and default."""

    help: str
    """Help text for the command line and the docs, one sentence."""
    flag: str | None = None
    """Flag of the command line, such as `--no-repeat-ngram`; by default made from the name; empty for Python only."""
    metavar: str | None = None
    """Name of the value in the help of the command line."""
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """Exclusive lower bound."""
    finite: bool = True
    """Whether infinity is out of range."""
    tokens: bool = False
    """Whether the value is ids of target tokens. They may also be text: tokens of the target vocabulary, with spaces between
    them."""
    repeated: bool = False
    """Whether the flag may be repeated. In Python one value stands for a list of one."""
    parse: Callable[[str, str], Any] | None = None
    """Function that parses text into the value, such as `1,4` into two numbers; for a repeated option, into one of its
    values. Its arguments are the name or flag of the option, for errors, and the text."""
    also: tuple[str, ...] = ()
    """Names of the option in other libraries, for the hint at a wrong name."""
    gives: tuple[str, ...] = ()
    """Fields of `ModelConfig`, or names of layers, that the option sets."""
    usage: str | None = None
    """The flag with a value, for error messages."""
    default_text: str | None = None
    """Description of the default in the help, if the default depends on other values."""
    panel: str | None = None
    """Heading of the option in the command's help."""

    def problem(self, name: str, value: Any) -> str | None:
        """The problem with a value of the right type, in words; None if it is within bounds."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        low, above, high = self.minimum, self.above, self.maximum
        within = (low is None or value >= low) and (above is None or value > above) and (high is None or value <= high)
        if within and (value < math.inf or not self.finite):
            return None
        if low is not None and high is not None:
            return f"{name} is {value}, not between {low} and {high}"
        if low is not None:
            return f"{name} is {value}, below {low}" if value < low else f"{name} is {value}, not a number"
        return f"{name} is {value}, not above {above}" + ("" if high is None else f" and at most {high}")


@dataclass(frozen=True)
class Declared:
    """An option with its name, type and default."""

    name: str
    """Name of the field."""
    hint: Any
    """Type annotation of the field."""
    default: Any
    about: Option

    @property
    def flag(self) -> str:
        """The flag of the command line; for an option of Python alone, the flag that its name would give."""
        return self.about.flag or f"--{self.name.replace('_', '-')}"


def option(default: Any, **about: Any) -> Any:
    """A field of a group of options. `about` holds fields of `Option`."""
    return field(default=default, metadata={_KEY: Option(**about)})


MOST_AT_ONCE = 2**16
"""Maximum number of sentences in a batch, or of hypotheses of a sentence. Larger numbers are mistakes, and array sizes are
limited."""

_known: dict[type, Mapping[str, Declared]] = {}


def declared(group: type) -> Mapping[str, Declared]:
    """The options of a group, by name."""
    if group not in _known:
        _known[group] = _read(group)
    return _known[group]


def _read(group: type) -> Mapping[str, Declared]:
    hints = get_type_hints(group)
    return {
        option.name: Declared(option.name, hints[option.name], option.default, option.metadata[_KEY])
        for option in fields(group)
        if _KEY in option.metadata
    }


def with_keywords(*groups: type) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Show the options of groups in the signature of a function with `**options`, for `help` and completion."""

    def show(function: Callable[..., Result]) -> Callable[..., Result]:
        signature = inspect.signature(function)
        parameters = signature.parameters.values()
        own = [item for item in parameters if item.kind is not inspect.Parameter.VAR_KEYWORD]
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=option.hint)
            for group in groups
            for name, option in declared(group).items()
        ]
        function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return function

    return show


def out_of_bounds(options: Any) -> list[str]:
    """The options of a group that are out of bounds, in words."""
    problems = (option.about.problem(name, getattr(options, name)) for name, option in declared(type(options)).items())
    return [problem for problem in problems if problem is not None]


def flags(options: Any, *groups: type) -> list[str]:
    """The options of `groups` as they were given on the command line, without those that have their defaults."""
    words = []
    for name, of in ((name, of) for group in groups for name, of in declared(group).items()):
        value, (yes, _, no) = getattr(options, name), of.flag.partition("/")
        if value == of.default:
            continue
        if isinstance(value, bool):
            words.append(yes if value else no)
        else:
            words.append(f"{yes} {shlex.quote(str(value))}")
    return words


@dataclass(frozen=True, kw_only=True)
class Options:
    """A group of options.

    Raises:
        TfexportError: an option is out of range, or two of them exclude each other.
    """

    def __post_init__(self) -> None:
        if problems := [*out_of_bounds(self), *self.conflicts()]:
            raise TfexportError(f"these options cannot be used: {'; '.join(problems)}. Change them.")

    def conflicts(self) -> list[str]:
        """Options that exclude each other, in words."""
        return []


def checked(
    group: type, values: Mapping[str, Any], *, others: Sequence[str] = (), as_flags: bool = False
) -> dict[str, Any]:
    """Check keyword values and convert them to the types of their options.

    Whole numbers become floating-point numbers, strings become paths, and lists become tuples. `tokens` may be strings.

    Args:
        others: other names that the caller accepts, for the hint at a misspelt name.
        as_flags: values come from the command line, so errors name the flag of an option.

    Raises:
        TfexportError: an option does not exist, or its value has the wrong type.
    """
    known = declared(group)
    for name in values:
        if name not in known:
            near = [own for own, option in known.items() if name in option.about.also]
            if name in others:
                raise TfexportError(f"{name!r} is not an option of this function. Leave it out.")
            near = near or difflib.get_close_matches(name, [*known, *others], n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(known)}."
            raise TfexportError(f"there is no option {name!r}. {hint}")
    return {name: _converted(known[name], value, as_flags=as_flags) for name, value in values.items()}


class Given(Mapping[str, Any], Generic[Group]):
    """The options of a group that a caller gave, by name, as `checked` returns them. It can be hashed.

    Options that were left out, or are None, are missing: their defaults depend on others, such as the profile of a search.
    """

    def __init__(self, options: Mapping[str, Any] = types.MappingProxyType({})):
        self._options = {name: value for name, value in options.items() if value is not None}

    @classmethod
    def parse(
        cls, group: type[Group], options: Mapping[str, Any], *, others: Sequence[str] = (), as_flags: bool = False
    ) -> Given[Group]:
        """The options of a group, checked. The arguments, and errors, are those of `checked`."""
        return Given(checked(group, options, others=others, as_flags=as_flags))

    def __getitem__(self, name: str) -> Any:
        return self._options[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __hash__(self) -> int:
        return hash(frozenset(self._options.items()))

    def __or__(self, options: Mapping[str, Any]) -> Given[Group]:
        """These options and others, which take precedence."""
        return Given({**self._options, **options})


def _converted(option: Declared, value: Any, *, as_flags: bool) -> Any:
    if value is None:
        return value  # the same as an option that is not given
    called, parse = option.flag if as_flags else option.name, option.about.parse
    if option.about.repeated and isinstance(value, str):
        value = [value]
    if parse is not None:
        if option.about.repeated and isinstance(value, Sequence):
            value = [parse(called, item) if isinstance(item, str) else item for item in value]
        elif isinstance(value, str):
            return parse(called, value)
    for hint in _alternatives(option.hint):
        converted = _as(hint, value, tokens=option.about.tokens)
        if converted is not None:
            return converted
    is_list = isinstance(value, Sequence) and value and all(isinstance(item, str) for item in value)
    if parse is not None and is_list and not option.about.repeated:
        return parse(called, ",".join(value))  # a list of the items that the text separates by commas
    raise TfexportError(f"{called} is {value!r}. Give {_said(option)}.")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a union, without None; the type itself if it is no union."""
    if get_origin(hint) in (types.UnionType, typing.Union):
        return tuple(part for part in get_args(hint) if part is not type(None))
    return (hint,)


def _as(hint: Any, value: Any, *, tokens: bool = False) -> Any:
    """`value` converted to the type `hint`; None if that is impossible.

    Args:
        tokens: the value may be text in place of ids; text stays text.
    """
    if get_origin(hint) is Literal:
        if isinstance(value, bool) and str(value).lower() in get_args(hint):
            return str(value).lower()  # Transformers writes True where others write "true"
        return value if isinstance(value, str) and value in get_args(hint) else None
    if get_origin(hint) is tuple:
        return _as_tuple(get_args(hint), value, tokens=tokens)
    if hint is bool:
        return value if isinstance(value, bool) else None
    if hint is int:
        return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if hint is float:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None
    if hint is Path:
        return Path(value) if isinstance(value, str | Path) else None
    return value if isinstance(value, hint) else None


def _as_tuple(parts: tuple[Any, ...], value: Any, *, tokens: bool) -> Any:
    """`value` converted to a tuple of these types by `_as`. A single value becomes a tuple of one."""
    is_list = parts[1:] == (Ellipsis,)
    if isinstance(value, str) and tokens and is_list:
        return value if parts[0] is int else _as_tuple(parts, [value], tokens=tokens)
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, Integral | Real):
        value = (value,)
    if isinstance(value, str) or not isinstance(value, Sequence) or not (is_list or len(value) == len(parts)):
        return None
    hints = [parts[0]] * len(value) if is_list else parts
    items = [_as(hint, item, tokens=tokens) for hint, item in zip(hints, value, strict=True)]
    return None if any(item is None for item in items) else tuple(items)


def _said(option: Declared) -> str:
    """The values that an option accepts, in words."""
    words = {bool: "True or False", int: "a whole number", float: "a number", str: "a string", Path: "a path"}
    said = []
    for hint in _alternatives(option.hint):
        if get_origin(hint) is Literal:
            said.append("one of " + ", ".join(get_args(hint)))
        elif get_origin(hint) is tuple:
            said.append(_said_of_list(hint))
        else:
            said.append(words[hint])
    if option.about.tokens and not said[-1].startswith(_PAIRS):
        said.append("tokens separated by spaces" + " for each list" * option.about.repeated)
    return " or ".join(said)


_PAIRS = "a list of pairs"


def _said_of_list(hint: Any) -> str:
    """The values that a tuple option accepts, in words."""
    parts = get_args(hint)
    inner = parts[0]
    if get_origin(inner) is tuple:
        if get_args(inner)[1:] == (float,):
            return f"{_PAIRS} of tokens and a number: the tokens are ids, as in [4, 5], or text, as in 'w1 w2'"
        return "a list of lists of whole numbers"
    return "a list of " + {int: "whole numbers"}.get(inner, "strings")


def numbers(called: str, text: str) -> tuple[int, ...]:
    """Parse text such as `1,8` into numbers above 0.

    Args:
        called: the argument or flag with the text, for errors.

    Raises:
        TfexportError: the text is no such list.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) < 10 and int(word) > 0 for word in words):
        raise TfexportError(f"{called} is {text!r}, not numbers above 0. Give them as in 1,8.")
    return tuple(dict.fromkeys(int(word) for word in words))


def rows(group: type) -> list[tuple[str, str, str, str, str]]:
    """The options of a group for a table: name, flag, type, default and help."""
    return [
        (
            name,
            "" if option.about.flag == "" else option.flag,
            _said(option),
            option.about.default_text or ("" if option.default in (None, "", ()) else str(option.default)),
            option.about.help,
        )
        for name, option in declared(group).items()
    ]
