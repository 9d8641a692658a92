"""`/health`, `/ready` and `/v1/models`: the state and the bundles of the server."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from tfexport.serving.catalog import Catalog, Served
from tfexport.serving.http.responses import json_of
from tfexport.serving.problems import PROBLEMS
from tfexport.serving.state import ServerStatus, State
from tfexport.serving.v1.schemas import ModelInfo, Models


def health_router(catalog: Catalog, state: State) -> APIRouter:
    """The routes for load balancers and for people."""
    router = APIRouter(tags=["health"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses={503: PROBLEMS[503]})
    async def health() -> JSONResponse:
        """200 if the process answers and each bundle has workers; otherwise 503, and a new process must replace this one."""
        catalog.require_health()
        return JSONResponse({"status": "ok"})

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", response_model=Models, responses={503: {"model": Models}})
    async def ready() -> Response:
        """200 if requests are accepted, 503 while the server drains. Lists the bundles without a valid certificate."""
        response = json_of(_models(catalog, state.status))
        response.status_code = 503 if state.is_draining else 200
        return response

    @router.get("/v1/models", response_model=Models)
    async def models() -> Response:
        """The bundles."""
        return json_of(_models(catalog, state.status))

    return router


def _models(catalog: Catalog, status: ServerStatus) -> Models:
    return Models(status=status, models=[_about(served) for served in catalog.served])


def _about(served: Served) -> ModelInfo:
    source, target = served.entry.pair or (None, None)
    return ModelInfo(
        name=served.name,
        source=source,
        target=target,
        task="classify" if served.bundle.config.is_classifier else "translate",
        runtime=served.runtime,
        precision=served.precision,
        attention=served.tells_attention,
        certified=served.uncertified is None,
        problem=served.uncertified,
        reading=served.bundle.origin.confirmation.text,
        confirmed=served.bundle.origin.confirmation.is_confirmed,
    )
