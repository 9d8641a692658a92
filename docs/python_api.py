"""The text of the Python API: signatures and docstrings of the public names, as Markdown."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
import types
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from docs.reference_tables import table

ELSEWHERE = {
    "ModelConfig": "[Model configuration](config.md) lists the fields.",
    "SearchOptions": "[Options of a search](options.md#options-of-a-search) lists the fields.",
}
"""Classes whose fields another page describes."""

_SECTION = re.compile(r"^(Args|Raises):\n((?:    .*\n|\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^    (\S[^:]*): ", re.MULTILINE)


def public_names() -> str:
    """Every public name of `tfexport`: functions first, then classes."""
    import tfexport

    names = [name for name in tfexport.__all__ if name != "__version__"]
    functions = sorted(name for name in names if name[0].islower())
    return _of_module(tfexport, [*functions, *sorted(set(names) - set(functions))])


def corpus_names() -> str:
    """Every public name of `tfexport.scale`."""
    from tfexport import scale

    return _of_module(scale, ["Translator", "Scorer", "Classifier"])


def _of_module(module: Any, names: list[str]) -> str:
    parts: list[str] = []
    for name in names:
        parts += _entry(f"{module.__name__}.{name}", getattr(module, name))
    return "\n\n".join(parts)


def _entry(name: str, item: Any) -> Iterator[str]:
    yield f"## {name}"
    if not inspect.isclass(item):
        yield _signature(name, item)
        yield _prose(item)
        return
    if issubclass(item, Exception):
        bases = ", ".join(f"`{base.__name__}`" for base in item.__bases__)
        yield f"An error, a subclass of {bases}."
    elif not dataclasses.is_dataclass(item):
        yield _signature(name, item.__init__)
    yield _prose(item)
    if dataclasses.is_dataclass(item):
        yield ELSEWHERE.get(item.__name__) or _fields(item)
    yield from _members(item)


def _members(cls: type) -> Iterator[str]:
    """Public properties and methods, in the order of the source, those of its own class first."""
    members: dict[str, Any] = {}
    for base in cls.__mro__:
        if base.__module__.startswith("tfexport."):
            members = {**vars(base), **members} if base is cls else {**members, **{**vars(base), **members}}
    public = {name: member for name, member in members.items() if not name.startswith("_")}
    properties = [
        (f"`{name}`", " ".join((inspect.getdoc(member) or "").split()))
        for name, member in public.items()
        if isinstance(member, property)
    ]
    if properties:
        yield table(("property", "description"), properties)
    for name, member in public.items():
        function = getattr(member, "__func__", member)
        if inspect.isfunction(function) and function.__name__ == name:  # a default of a field is none
            yield f"### {cls.__name__}.{name}"
            yield _signature(name, function)
            yield _prose(function)


def _fields(cls: type) -> str:
    about = _field_docs(cls)
    rows = [
        (f"`{field.name}`", f"`{field.type}`", _default(field), about.get(field.name, ""))
        for field in dataclasses.fields(cls)
        if not field.name.startswith("_")
    ]
    return table(("field", "type", "default", "description"), rows)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    return "" if field.default is dataclasses.MISSING else f"`{_value(field.default)}`"


def _field_docs(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass, of its bases too."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                docs[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return docs


def _signature(name: str, function: Any) -> str:
    """The signature as the source has it. Options that a decorator adds stay `**options`."""
    as_written = function
    if "__signature__" in vars(function):
        as_written = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        as_written.__kwdefaults__, as_written.__annotations__ = function.__kwdefaults__, function.__annotations__
    signature = inspect.signature(as_written)
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    arguments: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not any(text.startswith("*") for text in arguments):
            arguments.append("*")
        hint = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
        default = "" if parameter.default is parameter.empty else f" = {_value(parameter.default)}"
        arguments.append(f"{marks.get(parameter.kind, '')}{parameter.name}{hint}{default}")
    returns = (
        "" if signature.return_annotation in (signature.empty, None, "None") else f" -> {signature.return_annotation}"
    )
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) > 88:
        line = "\n".join([f"{name}(", *(f"    {argument}," for argument in arguments), f"){returns}"])
    return f"```py\n{line}\n```"


def _value(value: Any) -> str:
    if callable(value):
        return "..."
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value).replace("'", '"')


def _prose(item: Any) -> str:
    """A docstring, with its arguments and errors as lists."""
    text = (inspect.getdoc(item) or "") + "\n"
    return _SECTION.sub(lambda part: _list(part[1], part[2]), text).strip()


def _list(title: str, body: str) -> str:
    kind = {"Args": "Arguments", "Raises": "Errors"}[title]
    pieces = _ENTRY.split(f"{body}\n")[1:]
    entries = zip(pieces[::2], pieces[1::2], strict=True)
    lines = [f"- `{name.replace(', ', '`, `')}`: {' '.join(about.split())}" for name, about in entries]
    return "\n".join([f"**{kind}**", "", *lines, "", ""])
