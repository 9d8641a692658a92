"""The fuzzers of the server find what they are there for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import JSONResponse

from fuzz.server import failures, openapi, over_http
from makers.applications import application
from makers.serving_bundle import CONFIG
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.serving.v1 import results

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return openapi.bundles(tmp_path_factory.mktemp("http"))


@pytest.fixture
def app(bundles: dict[str, Path]) -> Iterator[Any]:
    with application(bundles) as found:
        yield found


def test_random_requests_are_answered_as_described(app: Any) -> None:
    counts, problems = openapi.check(app, 60, seed=1)
    assert problems == []
    assert counts.total() > 40


def test_an_answer_that_is_not_described_is_found(app: Any) -> None:
    @app.get("/other", response_model=list[int])
    async def other() -> JSONResponse:
        return JSONResponse({"not": "a list"}, 201)

    _, problems = openapi.check(app, 60, seed=1)
    assert {problem.partition(":")[0] for problem in problems} == {"GET /other"}


@pytest.fixture(scope="module")
def bundle(bundles: dict[str, Path]) -> Bundle:
    return open_bundle(bundles[openapi.NAMES[0]])


def test_a_server_answers_as_translate(bundle: Bundle) -> None:
    compared, problems = over_http.check(bundle, "int8", 40, seed=2)
    assert problems == []
    assert compared > 20


def test_another_bit_is_found(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    right = results.result_of

    def wrong(found: Any) -> Any:
        told = right(found)
        for one in told.hypotheses:
            one.score = one.score and one.score * (1 + 1e-15)
        return told

    monkeypatch.setattr(over_http, "result_of", wrong)
    _, problems = over_http.check(bundle, "float32", 10, seed=2)
    assert problems
    assert CONFIG.tgt_vocab_size == bundle.config.tgt_vocab_size


def test_a_server_survives_killed_workers_and_hostile_clients(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [
        "--kills",
        "5",
        "--disconnects",
        "40",
        "--stalls",
        "4",
        "--requests",
        "300",
        "--mixed",
        "600",
        "--clients",
        "5",
    ]
    assert failures.main(given) == 0, capsys.readouterr().out
