"""The OpenAPI description of an application, including bodies that its routes parse themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema


def describe_bodies(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Add the schemas of these bodies to the description of an app. Its routes refer to the names of the classes."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        is_new = app.openapi_schema is None
        description = original()
        if is_new:
            _, definitions = models_json_schema(
                [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
            )
            description["components"]["schemas"].update(definitions["$defs"])
        return description

    app.openapi = openapi  # type: ignore[method-assign]


def body_schema(name: str) -> dict[str, Any]:
    """The OpenAPI description of a body with this schema, which the application parses itself.

    Only JSON is described, because client generators treat a body with several types as optional.
    """
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {"requestBody": {"required": True, "content": content}}
