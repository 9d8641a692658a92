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


def body_schema(name: str) -> dict[str, Any]:
    """For OpenAPI: a body of this schema, which the application reads itself.

    JSON alone is described: generators of clients take a body of several types for one that may be left out.
    """
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {"requestBody": {"required": True, "content": content}}
