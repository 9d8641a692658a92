"""Bodies of requests as JSON or forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Request

from tfexport.errors import TfexportError

MOST_FIELDS = 100
"""The largest number of fields of a form."""
TEXT = "q"
"""The field that may be there several times."""


async def fields_of(request: Request) -> dict[str, Any]:
    """The fields of a request: from a JSON object, or from a form and the query string.

    Raises:
        TfexportError: the body is not JSON, or not an object.
        HTTPException: the form is damaged.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        try:
            given = await request.json()
        except (ValueError, RecursionError) as error:  # ValueError: also for invalid UTF-8 and numbers
            raise TfexportError(f"Invalid request: the body is not JSON ({error}). Correct it.") from None
        if not isinstance(given, dict):
            raise TfexportError("Invalid request: the JSON is not an object. Send fields with names.")
        return given
    if kind == "application/x-www-form-urlencoded":
        return {**_fields(request.query_params.multi_items()), **_fields(form_pairs(await request.body()))}
    async with request.form(max_fields=MOST_FIELDS) as form:
        return {**_fields(request.query_params.multi_items()), **_fields(form.multi_items())}


def form_pairs(body: bytes) -> list[tuple[str, str]]:
    """The names and values of a form `application/x-www-form-urlencoded`, in UTF-8 whether or not the client escapes it.

    Raises:
        TfexportError: it is not UTF-8, or has too many fields.
    """
    try:
        return parse_qsl(body.decode("utf-8"), keep_blank_values=True, errors="strict", max_num_fields=MOST_FIELDS)
    except ValueError as error:
        raise TfexportError(f"Invalid request: the form cannot be read ({error}). Send it in UTF-8.") from None


def _fields(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Fields by name. Several texts are a list, as in JSON.

    Raises:
        TfexportError: another field is there twice.
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
