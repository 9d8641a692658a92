"""Requests and responses of the Open Inference Protocol, version 2, in JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from tfexport.errors import TfexportError
from tfexport.serving.v1.schemas import MOST_TEXTS, SEARCH_FIELDS, SearchRequest

_MICROSECONDS = 1e-6

MOST_AXES = 8
MOST_TENSORS = 64
"""The largest number of inputs or outputs of a request."""


class InferInput(BaseModel):
    """A tensor of a request."""

    name: str
    shape: Annotated[list[int], Field(fail_fast=True, min_length=1, max_length=MOST_AXES)]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = Field(default=None, description="Strings; if missing, binary data follows the JSON.")


class InferOutput(BaseModel):
    """A requested tensor."""

    name: str
    parameters: dict[str, Any] | None = None


class InferRequest(BaseModel):
    """Sentences to translate, as tensors. Parameters are the options of a search, as in `/v1/translate`."""

    id: str | None = None
    parameters: dict[str, Any] | None = None
    inputs: Annotated[list[InferInput], Field(fail_fast=True, min_length=1, max_length=MOST_TENSORS)]
    outputs: Annotated[list[InferOutput], Field(fail_fast=True, max_length=MOST_TENSORS)] | None = Field(
        default=None, description="Requested outputs; by default all."
    )


class InferTensor(BaseModel):
    """A tensor of a response."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int] | None = None
    data: list[str] | list[float] | None = None


class InferResponse(BaseModel):
    """Translations, as tensors."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[InferTensor]


class TensorMetadata(BaseModel):
    """An input or output of a model."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    """The metadata of a bundle."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(BaseModel):
    """This server."""

    name: str
    version: str
    extensions: list[str]


class ServerLive(BaseModel):
    """The process answers."""

    live: bool


class ServerReady(BaseModel):
    """Requests are accepted."""

    ready: bool


class ModelReady(BaseModel):
    """The bundle accepts requests."""

    name: str
    ready: bool


class InferParameters(SearchRequest):  # type: ignore[valid-type, misc]
    """Parameters of a request: those of the protocol, and options of a search."""

    binary_data_output: bool = False
    timeout: int | None = Field(default=None, description="Microseconds.", gt=0, le=2**62)
    priority: Literal["interactive", "bulk"] | int = "interactive"

    @property
    def options(self) -> dict[str, Any]:
        """The options of the search."""
        return {name: value for name in SEARCH_FIELDS if (value := getattr(self, name)) is not None}

    @property
    def order(self) -> dict[str, Any]:
        """The priority and the timeout. Of numeric priorities, 1 is the highest, and 0 means none."""
        is_bulk = self.priority > 1 if isinstance(self.priority, int) else self.priority == "bulk"
        return {"bulk": is_bulk, "timeout": self.timeout and self.timeout * _MICROSECONDS}


def read_request(json: bytes) -> tuple[InferRequest, InferParameters]:
    """A request and its parameters.

    Raises:
        TfexportError: the request does not match the schema.
    """
    try:
        request = InferRequest.model_validate_json(json)
    except ValidationError as error:
        raise TfexportError(f"the request does not match the protocol: {_said(error)}. Correct it.") from None
    try:
        parameters = InferParameters.model_validate(request.parameters or {})
    except ValidationError as error:
        raise TfexportError(f"a parameter cannot be used: {_said(error)}") from None
    for one in request.inputs:
        if min(one.shape) < 0 or max(one.shape) > MOST_TEXTS:
            raise TfexportError(f"the shape of {one.name} is {one.shape}. Send at most {MOST_TEXTS} sentences at once.")
    return request, parameters


def _said(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    own = first.get("ctx", {}).get("error") if first["type"] == "value_error" else None
    return f"{place}: {own or first['msg']}" if place else str(own or first["msg"])
