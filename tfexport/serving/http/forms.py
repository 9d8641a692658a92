"""Bodies of requests as JSON or forms."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from tfexport.errors import TfexportError


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
    async with request.form() as form:
        return {**request.query_params, **form}
