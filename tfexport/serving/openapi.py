"""The OpenAPI description of an application: also of bodies that its routes read themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema


def describe_bodies(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Let the description of an app have the schemas of these bodies: its routes refer to the names of the classes."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        is_new = app.openapi_schema is None
        found = original()
        if is_new:
            _, definitions = models_json_schema(
                [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
            )
            found["components"]["schemas"].update(definitions["$defs"])
        return found

    app.openapi = openapi  # type: ignore[method-assign]
