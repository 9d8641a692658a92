"""The Open Inference Protocol, version 2, over HTTP, of KServe and Triton clients.

Source: https://github.com/kserve/open-inference-protocol
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from tfexport.errors import TfexportError
from tfexport.serving.catalog import Catalog, UnknownModelError
from tfexport.serving.http.openapi import body_schema
from tfexport.serving.open_inference.schemas import (
    InferRequest,
    InferResponse,
    ModelMetadata,
    ModelReady,
    ServerLive,
    ServerMetadata,
    ServerReady,
)
from tfexport.serving.open_inference.translation import HEADER_LENGTH, VERSION, infer, metadata_of
from tfexport.serving.problems import PROBLEMS
from tfexport.serving.state import State
from tfexport.system.version import version

_BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def inference_router(catalog: Catalog, state: State) -> APIRouter:
    """The routes below `/v2`."""
    router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"], responses=PROBLEMS)

    @router.get("", response_model=ServerMetadata)
    async def server_metadata() -> ServerMetadata:
        """The name of this server, and its extensions of the protocol."""
        return ServerMetadata(name="tfexport", version=version(), extensions=["binary_tensor_data"])

    @router.get("/health/live", response_model=ServerLive)
    async def server_live() -> ServerLive:
        """The process answers."""
        return ServerLive(live=True)

    @router.get("/health/ready", response_model=ServerReady, responses={503: {"model": ServerReady}})
    async def server_ready() -> Response:
        """200 if requests are accepted, 503 while the server drains."""
        return JSONResponse({"ready": not state.is_draining}, 503 if state.is_draining else 200)

    versioned = f"/versions/{VERSION}"

    @router.get("/models/{name}", response_model=ModelMetadata)
    @router.get(f"/models/{{name}}{versioned}", name="model_version_metadata", response_model=ModelMetadata)
    async def model_metadata(name: str) -> ModelMetadata:
        """The inputs and outputs of a bundle."""
        return metadata_of(catalog.find(name))

    @router.get("/models/{name}/ready", response_model=ModelReady)
    @router.get(f"/models/{{name}}{versioned}/ready", name="model_version_ready", response_model=ModelReady)
    async def model_ready(name: str) -> ModelReady:
        """A bundle is loaded."""
        return ModelReady(name=catalog.find(name).name, ready=True)

    answers: dict[int | str, dict[str, Any]] = {200: {"model": InferResponse, "content": _BINARY}}
    asks = body_schema(InferRequest.__name__)

    @router.post("/models/{name}/infer", responses=answers, openapi_extra=asks)
    @router.post(
        f"/models/{{name}}{versioned}/infer", name="model_version_infer", responses=answers, openapi_extra=asks
    )
    async def model_infer(name: str, request: Request) -> Response:
        """Translate sentences: the input TEXT gives TRANSLATION, STATUS, SCORE and TOKENS.

        With the header Inference-Header-Content-Length, tensors follow the JSON as binary data.
        """
        if request.headers.get("content-encoding", "identity") != "identity":
            raise TfexportError("compressed requests are not supported. Send it uncompressed.")
        with catalog.use(name) as served:
            found = await infer(served, await request.body(), request.headers.get(HEADER_LENGTH))
        if found.header_length is None:
            return Response(found.body, media_type="application/json")
        headers = {HEADER_LENGTH: str(found.header_length)}
        return Response(found.body, media_type="application/octet-stream", headers=headers)

    @router.get("/models/{name}/versions/{number}", include_in_schema=False)
    @router.get("/models/{name}/versions/{number}/ready", include_in_schema=False)
    @router.post("/models/{name}/versions/{number}/infer", include_in_schema=False)
    async def other_version(name: str, number: str) -> Response:
        """Bundles have one version."""
        raise UnknownModelError(f"{name} has no version {number}. Use {VERSION}, or leave it out.")

    return router
