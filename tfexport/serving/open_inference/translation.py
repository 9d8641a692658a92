"""Translation with tensors instead of fields, under the names of the repository that `tfexport triton` writes.

TEXT, PREFIX (optional)      BYTES, any shape: sentences
TRANSLATION, TOKENS, STATUS  BYTES, SCORE FP32: of the same shape; with another axis where a sentence has several outputs
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfexport.api.results import Output, Translation
from tfexport.errors import TfexportError
from tfexport.search.options import SearchOptions
from tfexport.serving.catalog import Served
from tfexport.serving.fitting import require_one_line, require_rows
from tfexport.serving.open_inference.schemas import (
    InferOutput,
    InferRequest,
    ModelMetadata,
    TensorMetadata,
    read_request,
)
from tfexport.serving.open_inference.tensors import Tensor, binary_strings, json_strings, size_of, split_body
from tfexport.serving.v1.schemas import MOST_TEXTS

VERSION = "1"
TEXT, PREFIX = "TEXT", "PREFIX"
OUTPUTS = {"TRANSLATION": "BYTES", "STATUS": "BYTES", "SCORE": "FP32", "TOKENS": "BYTES"}

HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class Answer:
    """The body of a response, and the length of its JSON if binary data follows it."""

    body: bytes
    header_length: int | None


def metadata_of(served: Served) -> ModelMetadata:
    """The inputs and outputs of a bundle. Raises TfexportError if it does not translate."""
    _ = served.translator
    inputs = [TensorMetadata(name=TEXT, datatype="BYTES", shape=[-1])]
    outputs = [TensorMetadata(name=name, datatype=datatype, shape=[-1]) for name, datatype in OUTPUTS.items()]
    return ModelMetadata(name=served.name, versions=[VERSION], platform="tfexport", inputs=inputs, outputs=outputs)


async def infer(served: Served, body: bytes, header_length: str | None) -> Answer:
    """Answer a request.

    Args:
        header_length: the value of the header `HEADER_LENGTH`.

    Raises:
        TfexportError: the request cannot be used.
    """
    text, rest = split_body(body, header_length)
    request, parameters = read_request(text)
    asked = _asked(request.outputs, binary=parameters.binary_data_output)
    tensors, shape = _inputs(request, rest)
    options, model = parameters.options, served.translator
    require_rows(served, options)
    require_one_line(**tensors)
    texts, prefix = tensors[TEXT], tensors.get(PREFIX)
    found = await model.translate_async(texts, prefix=prefix, **options, **parameters.order) if texts else []
    outputs = _outputs(found, shape, model.search_options(**options))
    return _answer(served.name, request.id, asked, outputs)


def _inputs(request: InferRequest, rest: memoryview) -> tuple[dict[str, list[str]], tuple[int, ...]]:
    """The strings of each input, and their common shape."""
    found: dict[str, list[str]] = {}
    shape = tuple(request.inputs[0].shape)
    count = size_of(shape)
    if count > MOST_TEXTS:
        raise TfexportError(f"the shape {list(shape)} has {count} sentences. Send at most {MOST_TEXTS} at once.")
    for one in request.inputs:
        if one.name not in (TEXT, PREFIX) or one.name in found:
            raise TfexportError(
                f"{one.name} is not an input, or occurs twice. Give {TEXT}, and {PREFIX} if you need it."
            )
        if one.datatype != "BYTES" or tuple(one.shape) != shape:
            raise TfexportError(f"{one.name} is {one.datatype} {one.shape}. Give BYTES, and all inputs in one shape.")
        size = (one.parameters or {}).get("binary_data_size")
        if size is None:
            found[one.name] = json_strings(one.name, one.data, count)
            continue
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(rest) or one.data is not None:
            raise TfexportError(
                f"binary_data_size of {one.name} is {str(size)[:20]}, and {len(rest)} bytes follow. Give the size of its "
                "data, and no data in JSON."
            )
        found[one.name], rest = binary_strings(one.name, rest[:size], count), rest[size:]
    if TEXT not in found:
        raise TfexportError(f"there is no input {TEXT}. Give the sentences.")
    if len(rest):
        raise TfexportError(f"{len(rest)} bytes follow the inputs. Give the sizes of all as binary_data_size.")
    return found, shape


def _asked(outputs: Sequence[InferOutput] | None, *, binary: bool) -> dict[str, bool]:
    """The requested outputs, and whether each is binary."""
    if not outputs:
        return dict.fromkeys(OUTPUTS, binary)
    found: dict[str, bool] = {}
    for one in outputs:
        if one.name not in OUTPUTS:
            raise TfexportError(f"there is no output {one.name!r}. There are {', '.join(OUTPUTS)}.")
        parameters: Mapping[str, Any] = one.parameters or {}
        if unknown := parameters.keys() - {"binary_data"}:
            raise TfexportError(f"outputs have no parameter {min(unknown)!r}. Leave it out.")
        wanted = parameters.get("binary_data", binary)
        if not isinstance(wanted, bool):
            raise TfexportError(f"binary_data of {one.name} is neither true nor false. Correct it.")
        found[one.name] = wanted
    return found


def _outputs(found: Sequence[Translation], shape: tuple[int, ...], search: SearchOptions) -> dict[str, Tensor]:
    """All outputs. Missing hypotheses of a sentence are empty."""
    several = search.alternatives or search.samples or search.nbest
    rows: list[tuple[Translation, Output | None]] = [
        (one, one.hypotheses[place] if place < len(one.hypotheses) else None)
        for one in found
        for place in range(several)
    ]
    values: dict[str, list[Any]] = {
        "TRANSLATION": [output.text if output else "" for _, output in rows],
        "STATUS": [one.status for one, _ in rows],
        "SCORE": [_score(output) for _, output in rows],
        "TOKENS": [" ".join(output.tokens) if output else "" for _, output in rows],
    }
    full = (*shape, several) if several > 1 else shape
    return {name: Tensor(name, OUTPUTS[name], full, of) for name, of in values.items()}


def _score(output: Output | None) -> float:
    """The score; 0 if missing, because JSON has no NaN."""
    return 0.0 if output is None or math.isnan(output.score) else output.score


def _answer(name: str, request_id: str | None, asked: Mapping[str, bool], outputs: Mapping[str, Tensor]) -> Answer:
    described, parts = [], []
    for output, is_binary in asked.items():
        tensor = outputs[output]
        about: dict[str, Any] = {"name": output, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if is_binary:
            parts.append(tensor.binary())
            about["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            about["data"] = tensor.data()
        described.append(about)
    identity = {} if request_id is None else {"id": request_id}
    response = {"model_name": name, "model_version": VERSION, **identity, "outputs": described}
    header = json.dumps(response, ensure_ascii=False, separators=(",", ":")).encode()
    return Answer(b"".join([header, *parts]), len(header) if parts else None)
