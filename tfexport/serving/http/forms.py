"""Bodies of requests as JSON or forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from fastapi import Request

from tfexport.errors import TfexportError

MOST_FIELDS = 100
"""The largest number of fields of a form."""
BLOCK = 64 * 1024
"""The number of bytes of a form that are decoded at once."""
TEXT = "q"
"""The field that a form may repeat."""


async def fields_of(request: Request) -> dict[str, Any]:
    """The fields of a request: from a JSON object, or from a form and the query string.

    Raises:
        TfexportError: the body is not JSON, or not an object.
        HTTPException: the form is damaged.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        try:
            document = await request.json()
        except (ValueError, RecursionError) as error:  # ValueError: also for invalid UTF-8 and numbers
            raise TfexportError(f"Invalid request: the body is not JSON ({error}). Correct it.") from None
        if not isinstance(document, dict):
            raise TfexportError("Invalid request: the JSON is not an object. Send fields with names.")
        return document
    if kind == "application/x-www-form-urlencoded":
        return _fields([*request.query_params.multi_items(), *form_pairs(await request.body())])
    async with request.form(max_fields=MOST_FIELDS) as form:
        return _fields([*request.query_params.multi_items(), *form.multi_items()])


def form_pairs(body: bytes) -> list[tuple[str, str]]:
    """The names and values of a form `application/x-www-form-urlencoded`, in UTF-8 whether or not the client escapes it.

    Raises:
        TfexportError: it is not UTF-8, or has too many fields.
    """
    if body.count(b"&") >= MOST_FIELDS:
        raise TfexportError(f"Invalid request: the form has more than {MOST_FIELDS} fields. Send it as JSON.")
    fields = [field for field in body.split(b"&") if field]
    try:
        return [(_text(name), _text(value)) for name, _, value in (field.partition(b"=") for field in fields)]
    except ValueError as error:
        raise TfexportError(f"Invalid request: the form cannot be read ({error}). Send it in UTF-8.") from None


def _text(escaped: bytes) -> str:
    """Undo percent encoding block by block: `unquote_to_bytes` needs many times the memory of what it is given."""
    blocks, start = list[bytes](), 0
    while start < len(escaped):
        end = start + BLOCK
        if end < len(escaped) and (cut := escaped.rfind(b"%", end - 2, end)) >= 0:
            end = cut  # an escape stays in one piece
        blocks.append(unquote_to_bytes(escaped[start:end].replace(b"+", b" ")))
        start = end
    return b"".join(blocks).decode("utf-8")


def _fields(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Fields by name. Several texts are a list, as in JSON.

    Raises:
        TfexportError: another field is repeated.
    """
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name not in fields:
            fields[name] = value
        elif name == TEXT:
            fields[name] = [*(fields[name] if isinstance(fields[name], list) else [fields[name]]), value]
        else:
            raise TfexportError(f"Invalid request: the form has several {name}. Send one.")
    return fields
