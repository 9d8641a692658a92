"""JSON with very many values is refused before it is parsed; text of any content is not."""

from __future__ import annotations

import asyncio
import json

import pytest
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from tfexport.serving.http.bodies import MOST_VALUES, check_values
from tfexport.serving.libretranslate.schemas import LibreRequest
from tfexport.serving.v1.schemas import TranslateRequest


def check(body: bytes) -> None:
    asyncio.run(check_values(body))


@pytest.mark.parametrize("value", ['""', "1", "{}", "[]", '{"a":1}', '"\\""', "[[[]]]"])
def test_more_values_are_refused(value: str) -> None:
    few = f"[{','.join([value] * (MOST_VALUES // 8))}]".encode()
    check(few)
    many = f"[{','.join([value] * (2 * MOST_VALUES + 1))}]".encode()
    with pytest.raises(HTTPException, match="more than 262,144 values"):
        check(many)


@pytest.mark.parametrize("text", [",", '"', "\\", '\\",', "[{", "a,"])
def test_text_is_no_value(text: str) -> None:
    check(json.dumps({"text": text * (3 * MOST_VALUES)}).encode())


def test_strings_without_an_end_and_bodies_that_are_no_json_are_left_to_the_parser() -> None:
    check(b'"' + b'\\"' * 10**6)
    check(b'"' + b"," * 10**6)
    check(b"")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_json_is_utf_8(encoding: str) -> None:
    with pytest.raises(HTTPException, match="not UTF-8"):
        check('{"x":"∀","text":[[],[]]}'.encode(encoding))
    check("\ufeff{}".encode())


@pytest.mark.parametrize(
    ("model", "field", "wrong"),
    [
        (LibreRequest, "q", 1),
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
