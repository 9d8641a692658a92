"""Converts options that are declared with `tfexport.option` to flags in a command's signature, which Typer reads."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from tfexport.option import Declared, Given, declared


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with a flag for each option of its parameters that are groups of options.

    A parameter of type `Given[Group]` gets the given options by name, and one of type `Group` gets an instance of the group.
    Flags keep the order of the parameters.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, tuple[type, bool, list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        origin = get_origin(parameter.annotation)
        group = get_args(parameter.annotation)[0] if origin is Given else parameter.annotation
        if not (isinstance(group, type) and is_dataclass(group)):
            parameters.append(parameter)
            continue
        flags = list(_flags(group))
        groups[name] = (group, origin is Given, [flag.name for flag in flags])
        parameters += flags

    @functools.wraps(command)
    def expanded(**values: Any) -> Any:
        for name, (group, as_given, fields) in groups.items():
            flags = {field: value for field in fields if (value := values.pop(field)) not in (None, [])}
            given: Given[Any] = Given.parse(group, flags, as_flags=True)  # here, so that an error names the flag
            values[name] = given if as_given else group(**given)
        return command(**values)

    named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    expanded.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in named}
    return expanded


def _flags(group: type) -> Iterator[inspect.Parameter]:
    """The parameters for Typer, one for each option with a flag; None means that an option is not given."""
    for name, option in declared(group).items():
        if option.about.flag == "":
            continue
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[_type(option) | None, _flag(option)],
        )


def _type(option: Declared) -> Any:
    if option.about.repeated:
        return list[str]
    return str if option.about.tokens or option.about.parse else option.hint


def _flag(option: Declared) -> Any:
    about = option.about
    default = about.default_text or (None if option.default in (None, False, "", ()) else str(option.default))
    bounds: dict[str, Any] = {}
    if {int, float} & {option.hint, *get_args(option.hint)} and not option.about.parse and about.above is None:
        bounds = {"min": about.minimum, "max": about.maximum}
    return typer.Option(
        option.flag,
        metavar=_metavar(option),
        help=about.help,
        show_default=default if default is not None else False,
        rich_help_panel=about.panel,
        **bounds,
    )


def _metavar(option: Declared) -> str | None:
    """The name of the value in the help; None for the choices of a `Literal`."""
    types = {int: "N", float: "N", Path: "FILE", str: "TEXT", bool: ""}
    hints = {option.hint, *get_args(option.hint)}
    return option.about.metavar or next((name for hint, name in types.items() if hint in hints), None)
