"""The Open Inference Protocol, as tritonclient speaks it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from fastapi.testclient import TestClient
from tritonclient.utils import InferenceServerException

import tfexport
from makers import applications
from makers.servers import serving

LINES = ["de5 de9 de7", "", "de20 de8 de6 de13"]


@pytest.fixture(scope="module")
def address(quantized_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("server") / "log", f"de-en={quantized_bundle}") as running:
        yield running.url


@pytest.fixture(scope="module")
def client(quantized_bundle: Path, classifier_bundle: Path) -> Iterator[TestClient]:
    with applications.client({"de-en": quantized_bundle, "classes": classifier_bundle}) as found:
        yield found


@pytest.fixture(scope="module")
def model(quantized_bundle: Path) -> tfexport.Model:
    return tfexport.load(quantized_bundle, threads=1)


@pytest.fixture
def theirs(address: str) -> Iterator[Any]:
    with triton.InferenceServerClient(address.removeprefix("http://")) as found:
        yield found


def sentences(name: str, lines: list[str], shape: tuple[int, ...], *, binary: bool = True) -> Any:
    found = triton.InferInput(name, list(shape), "BYTES")
    found.set_data_from_numpy(np.array(lines, dtype=object).reshape(shape), binary_data=binary)
    return found


def test_the_server_and_its_models_are_described(theirs: Any) -> None:
    assert theirs.is_server_live()
    assert theirs.is_server_ready()
    assert theirs.is_model_ready("de-en")
    assert theirs.is_model_ready("de-en", "1")
    assert not theirs.is_model_ready("de-en", "2")
    assert not theirs.is_model_ready("fr-en")
    assert theirs.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    found = theirs.get_model_metadata("de-en")
    assert found["inputs"] == [{"name": "TEXT", "datatype": "BYTES", "shape": [-1]}]
    assert [one["name"] for one in found["outputs"]] == ["TRANSLATION", "STATUS", "SCORE", "TOKENS"]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_text_in_and_text_out(theirs: Any, model: tfexport.Model, binary: bool, named: bool) -> None:
    wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("SCORE", "TRANSLATION", "STATUS")]
    asked = [sentences("TEXT", LINES, (1, 3), binary=binary)]
    options = {"beam": 3, "max_length": 12}
    found = theirs.infer("de-en", asked, outputs=wanted if named else None, parameters=options, request_id="r7")
    alone = model.translate(LINES, **options)
    assert found.get_response()["id"] == "r7"
    texts = found.as_numpy("TRANSLATION")
    assert texts.shape == (1, 3)
    as_text = [one.decode() if isinstance(one, bytes) else one for one in texts.ravel()]
    assert as_text == [one.text for one in alone]
    assert [str(one, "utf-8") if isinstance(one, bytes) else one for one in found.as_numpy("STATUS").ravel()] == [
        one.status for one in alone
    ]
    scores = [one.hypotheses[0].score if one.hypotheses else 0.0 for one in alone]
    assert found.as_numpy("SCORE").tolist() == np.array([scores], dtype=np.float32).tolist()


def test_several_outputs_are_another_axis(theirs: Any, model: tfexport.Model) -> None:
    found = theirs.infer(
        "de-en", [sentences("TEXT", LINES, (3,))], parameters={"beam": 3, "nbest": 2}, model_version="1"
    )
    assert found.as_numpy("TRANSLATION").shape == found.as_numpy("SCORE").shape == (3, 2)
    alone = model.translate(LINES[0], beam=3, nbest=2).hypotheses
    assert [one.decode() for one in found.as_numpy("TRANSLATION")[0]] == [one.text for one in alone]
    assert [one.decode().split() for one in found.as_numpy("TOKENS")[0]] == [list(one.tokens) for one in alone]
    assert found.as_numpy("TRANSLATION")[1].tolist() == [b"", b""]


def test_outputs_begin_with_prefixes(theirs: Any, model: tfexport.Model) -> None:
    inputs = [sentences("TEXT", LINES[:1], (1,)), sentences("PREFIX", ["wört5"], (1,))]
    found = theirs.infer("de-en", inputs, priority=2, timeout=60_000_000)
    assert found.as_numpy("TRANSLATION")[0].decode() == model.translate(LINES[0], prefix="wört5").text


def test_errors_are_told_as_the_protocol_says(theirs: Any) -> None:
    for name, inputs, options, message in (
        ("fr-en", [sentences("TEXT", LINES, (3,))], {}, "called fr-en"),
        ("de-en", [sentences("TXT", LINES, (3,))], {}, "TXT is not an input"),
        ("de-en", [sentences("PREFIX", LINES, (3,))], {}, "no input TEXT"),
        ("de-en", [sentences("TEXT", ["a\nb"], (1,))], {}, "line break"),
        ("de-en", [sentences("TEXT", LINES, (3,))], {"num_beams": 4}, "Did you mean 'beam'"),
        ("de-en", [sentences("TEXT", LINES, (3,))], {"beam": 65}, "65 rows"),
        ("de-en", [sentences("TEXT", LINES, (3,))], {"unk_dictionary": "/etc/passwd"}, "no option"),
    ):
        with pytest.raises(InferenceServerException, match=message):
            theirs.infer(name, inputs, parameters=options or None)


def body(**changes: Any) -> dict[str, Any]:
    text = {"name": "TEXT", "shape": [1], "datatype": "BYTES", "data": ["de5"], **changes.pop("text", {})}
    return {"inputs": [text], **changes}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"text": {"shape": [2]}}, "1 elements"),
        ({"text": {"shape": [-1]}}, "shape"),
        ({"text": {"shape": [1024, 1024]}}, "at most 1024"),
        ({"text": {"shape": []}}, "shape"),
        ({"text": {"datatype": "FP32"}}, "FP32"),
        ({"text": {"data": [5]}}, "is not a string"),
        ({"text": {"data": None}}, "no data"),
        ({"text": {"data": ["\ud800"]}}, "."),
        ({"text": {"parameters": {"binary_data_size": 4}}}, "binary_data_size"),
        ({"text": {"parameters": {"binary_data_size": 4}, "data": None}}, "0 bytes follow"),
        ({"outputs": [{"name": "TEXT"}]}, "no output 'TEXT'"),
        ({"outputs": [{"name": "SCORE", "parameters": {"classification": 2}}]}, "classification"),
        ({"parameters": {"sequence_id": 3}}, "sequence_id"),
        ({"inputs": []}, "inputs"),
    ],
)
def test_requests_that_contradict_themselves(client: TestClient, changes: dict[str, Any], error: str) -> None:
    found = client.post("/v2/models/de-en/infer", content=json.dumps(body(**changes)).encode())
    assert found.status_code == 400, found.text
    assert re.search(error, found.json()["error"]), found.text


def test_other_bodies(client: TestClient) -> None:
    for content, headers in (
        (b"{", {}),
        (b"{}", {"Inference-Header-Content-Length": "3"}),
        (b"{}", {"Inference-Header-Content-Length": "-1"}),
        (b"{}", {"Content-Encoding": "gzip"}),
    ):
        assert client.post("/v2/models/de-en/infer", content=content, headers=headers).status_code == 400
    assert client.post("/v2/models/de-en/versions/2/infer", json=body()).status_code == 404
    assert client.post("/v2/models/classes/infer", json=body()).status_code == 400
    assert client.get("/v2/models/classes").status_code == 400
    empty = body(text={"shape": [0], "data": []})
    assert client.post("/v2/models/de-en/infer", json=empty).json()["outputs"][0]["data"] == []
