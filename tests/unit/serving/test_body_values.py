"""JSON with very many values is refused before it is parsed; text of any content is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from tfexport.serving.http.bodies import MOST_VALUES, check_values
from tfexport.serving.libretranslate.schemas import LibreRequest
from tfexport.serving.open_inference.schemas import InferRequest
from tfexport.serving.v1.schemas import TranslateRequest


def scope(**headers: str) -> dict[str, Any]:
    given = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return {"type": "http", "headers": [(name.encode(), value.encode()) for name, value in given.items()]}


@pytest.mark.parametrize("value", ['""', "1", "{}", "[]", '{"a":1}', '"\\""', "[[[]]]"])
def test_more_values_are_refused(value: str) -> None:
    few = f"[{','.join([value] * (MOST_VALUES // 8))}]".encode()
    check_values(scope(), few)
    many = f"[{','.join([value] * (2 * MOST_VALUES + 1))}]".encode()
    with pytest.raises(HTTPException, match="more than 262,144 values"):
        check_values(scope(), many)


@pytest.mark.parametrize("text", [",", '"', "\\", '\\",', "[{", "a,"])
def test_text_is_no_value(text: str) -> None:
    check_values(scope(), json.dumps({"text": text * (3 * MOST_VALUES)}).encode())


def test_strings_without_an_end_and_bodies_that_are_no_json_are_left_to_the_parser() -> None:
    check_values(scope(), b'"' + b'\\"' * 10**6)
    check_values(scope(), b'"' + b"," * 10**6)
    check_values(scope(content_type="application/x-www-form-urlencoded"), b"q=" + b"," * 10**6)
    check_values(scope(inference_header_content_length="2"), b"{}" + b"," * 10**6)
    check_values(scope(inference_header_content_length="9" * 5000), b"{}")


@pytest.mark.parametrize(
    ("model", "field", "wrong"),
    [
        (LibreRequest, "q", 1),
        (InferRequest, "inputs", {}),
        (InferRequest, "outputs", {}),
        (TranslateRequest, "text", 1),
        (TranslateRequest, "ids", ["x"]),
        (TranslateRequest, "tokens", [1]),
        (TranslateRequest, "constraints", 1),
        (TranslateRequest, "suppress", {}),
    ],
)
def test_a_list_of_errors_is_short(model: type[BaseModel], field: str, wrong: object) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate({field: [wrong] * 1000})
    assert len(caught.value.errors()) < 10
