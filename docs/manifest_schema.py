"""The JSON schema of `manifest.json`. `make pages` writes it to docs/reference/manifest.schema.json.

It requires what `tfexport/bundle/reader.py` requires. Values that only the writer knows, such as `versions`, are optional.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tfexport import confirmation, contract
from tfexport.bundle.reader import TOKENIZER_FILES, Library
from tfexport.config import ModelConfig
from tfexport.dialects import RUNTIME_DIALECTS

Schema = dict[str, Any]

FILE_NAME = {
    "type": "string",
    "pattern": r"^[^/\u0000]+$",
    "not": {"enum": [".", ".."]},
    "description": "The name of a file in the folder of the bundle, without a path.",
}
TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
TEXTS = {"type": "array", "items": TEXT}


def text() -> str:
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def schema() -> Schema:
    parts = {
        "format": {"const": contract.FORMAT, "description": "The format of the bundle. A reader knows one."},
        "files": _map(
            "Every file but manifest.json and certificates.json, by name.",
            _object("", {"sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"}, "bytes": COUNT}, ["sha256"]),
            names=FILE_NAME,
        ),
        "config": _config(),
        "graphs": _list("The ONNX graphs.", _graph()),
        "engines": _list("The TensorRT engines that `tfexport build` wrote.", _engine()),
        "runtimes": _map(
            "The dialect that each runtime uses, by precision.",
            _map("", _one_of(contract.Dialect), names=_one_of(contract.Precision)),
            names={"enum": list(RUNTIME_DIALECTS)},
        ),
        "tokenizers": _object(
            "The tokenizer file of each side. A side without one has ids in place of text.",
            dict.fromkeys(TOKENIZER_FILES, FILE_NAME),
            [],
        ),
        "source": _source(),
        "budgets": _map(
            "For `auto-` precisions: the modules that stay in float32.",
            _object("", {"float32": {"type": "object", "description": "The modules, by path."}}, ["float32"]),
            names={"enum": list(contract.PRECISIONS)},
        ),
        "versions": _map("The versions of the libraries that wrote the bundle.", TEXT),
    }
    optional = {"budgets", "versions"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "manifest.json of a tfexport bundle",
        **_object("", parts, [name for name in parts if name not in optional]),
    }


def _source() -> Schema:
    unconfirmed = {"type": "object", "description": "Settings that nothing confirms, with their values."}
    confirmed = {"by": _one_of(confirmation.Source), "about": TEXT, "unconfirmed": unconfirmed}
    parts = {
        "file": TEXT,
        "sha256": TEXT,
        "family": TEXT,
        "given": {"type": "object", "description": "Settings that the user gave, because no file has them."},
        "text": {"type": "object", "description": "Options of vocabularies and languages, by flag."},
        "notes": TEXTS,
        "ignored": TEXTS,
        "confirmation": _object("Who confirms that the settings are right.", confirmed, []),
    }
    return _object("The checkpoint.", parts, ["sha256", "family", "given"])


def _graph() -> Schema:
    tensor = {
        "name": TEXT,
        "dtype": _one_of(contract.DType),
        "shape": {"type": "array", "items": {"type": ["string", "integer"]}},
    }
    tensors = {"type": "array", "items": _object("", tensor, list(tensor))}
    parts = {
        "file": FILE_NAME,
        "role": _one_of(contract.Role),
        "precision": _one_of(contract.Precision),
        "dialect": _one_of(contract.Dialect),
        "float32_islands": _map("Parts of a half-precision graph in float32, with the reason.", TEXT),
        "inputs": tensors,
        "outputs": tensors,
    }
    return _object("", parts, ["file", "role", "precision", "dialect"])


def _engine() -> Schema:
    shapes = {"type": "array", "items": {"type": "array", "items": COUNT}}
    parts = {
        "file": FILE_NAME,
        "role": _one_of(contract.Role),
        "precision": _one_of(contract.Precision),
        "library": _one_of(Library),
        "version": TEXT,
        "gpu": {"type": "string", "description": "`portable`, or a generation such as `sm89`."},
        "cache": COUNT,
        "profile": _map("The smallest, usual and largest shape of each input.", shapes),
        "seconds": {"type": "number", "description": "The time of the build."},
    }
    return _object("", parts, list(parts))


def _config() -> Schema:
    hints = get_type_hints(ModelConfig)
    fields = dataclasses.fields(ModelConfig)
    parts = {field.name: _type(hints[field.name]) for field in fields}
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    config = _object("The model: docs/reference/config.md describes the fields.", parts, required)
    return {**config, "additionalProperties": False}


def _type(hint: Any) -> Schema:
    if get_origin(hint) is Literal:
        return _one_of(hint)
    if get_origin(hint) is tuple:
        return {"type": "array", "items": {"type": "integer"}}
    return {"type": {int: "integer", float: "number", bool: "boolean"}[hint]}


def _one_of(literal: Any) -> Schema:
    """The values of a `Literal`, which may contain other ones."""
    return {"enum": list(get_args(literal))}


def _object(about: str, parts: Schema, required: Collection[str]) -> Schema:
    return {**_described("object", about), "properties": parts, "required": [*required]}


def _map(about: str, values: Schema, *, names: Schema | None = None) -> Schema:
    named = {"propertyNames": names} if names else {}
    return {**_described("object", about), **named, "additionalProperties": values}


def _list(about: str, items: Schema) -> Schema:
    return {**_described("array", about), "items": items}


def _described(kind: str, about: str) -> Schema:
    return {"type": kind, **({"description": about} if about else {})}
