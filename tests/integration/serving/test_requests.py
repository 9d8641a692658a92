"""`/v1`: scores, classes, and requests that cannot be answered."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

import tfexport
from makers import applications
from makers.serving_bundle import words
from makers.tiny import HINTS, SRC_VOCAB, tiny_classifier
from tfexport.api import scheduled
from tfexport.decoding.classify import Classified
from tfexport.errors import DeadlineError, QueueFullError
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.formats.native import Tokenizers
from tfexport.serving.v1.classifying import Classifying

LINES = ["de5 de9 de7", "de11 de4", "de20 de8 de6 de13"]
TARGETS = ["wört5 wört9", "wört7", ""]


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier that reads words such as w4."""
    folder = tmp_path_factory.mktemp("worded")
    torch.save(tiny_classifier().state_dict(), folder / "c.pt")
    tokenizers = Tokenizers(words("w", SRC_VOCAB), None)
    return export(load_checkpoint(folder / "c.pt", HINTS, tokenizers=tokenizers), folder / "b", gate=None).directory


@pytest.fixture(scope="module")
def client(quantized_bundle: Path, worded: Path) -> Iterator[TestClient]:
    with applications.client({"de-en": quantized_bundle, "classes": worded}, slots=12) as found:
        yield found


def test_scores_are_those_of_the_api(client: TestClient, quantized_bundle: Path) -> None:
    alone = tfexport.load(quantized_bundle, threads=1).score(LINES, TARGETS, batch_size=1)
    answer = client.post("/v1/score", json={"model": "de-en", "texts": LINES, "targets": TARGETS}).json()
    assert answer["model"] == "de-en"
    for found, wanted in zip(answer["results"], alone, strict=True):
        assert found["status"] == wanted.status
        [output] = wanted.hypotheses
        assert found["log_prob"] == output.log_prob
        assert found["token_log_probs"] == list(output.token_log_probs)
        assert found["tokens"] == list(output.tokens)
    one = client.post("/v1/score", json={"model": "de-en", "texts": LINES[0], "targets": TARGETS[0]}).json()
    assert one["results"] == answer["results"][:1]


def test_outputs_have_their_phrases(client: TestClient, quantized_bundle: Path) -> None:
    phrases, options = [["wört7 wört8"], [], ["wört9", "wört9"]], {"beam": 4, "nbest": 2, "constraint_order": "ordered"}
    alone = tfexport.load(quantized_bundle, threads=1).translate(LINES, constraints=phrases, batch_size=1, **options)
    fields = {"model": "de-en", "text": LINES, "constraints": phrases, **options}
    found = client.post("/v1/translate", json=fields).json()["results"]
    for one, wanted, required in zip(found, alone, phrases, strict=True):
        assert [output["ids"] for output in one["hypotheses"]] == [list(output.ids) for output in wanted.hypotheses]
        assert all(phrase in output["text"] for output in one["hypotheses"] for phrase in required)
    fields = {"model": "de-en", "text": LINES[0], "constraints": phrases[0], "beam": 4, "stream": True}
    assert "wört7 wört8" in client.post("/v1/translate", json=fields).text
    fields = {"model": "de-en", "text": "de5", "constraints": ["wört7 wört8"], "max_length": 1}
    [result] = client.post("/v1/translate", json=fields).json()["results"]
    assert (result["status"], result["hypotheses"][0]["missing"]) == ("phrases_missing", ["wört7 wört8"])
    fields = {"model": "de-en", "text": ["de5 de6", "de5 de7"], "glossary": {"de6": "wört7 wört8"}}
    found = client.post("/v1/translate", json=fields).json()["results"]
    assert ["wört7 wört8" in one["hypotheses"][0]["text"] for one in found] == [True, False]
    [result] = client.post("/v1/translate", json={"model": "de-en", "text": "de5 [x]", "keep_between": "[ ]"}).json()[
        "results"
    ]
    assert result["status"] == "unknown_token"


def test_what_cannot_be_scored_has_its_status(client: TestClient) -> None:
    fields = {"model": "de-en", "texts": ["", LINES[0]], "targets": ["wört5", "wört5 " * 80]}
    found = client.post("/v1/score", json=fields).json()["results"]
    assert [one["status"] for one in found] == ["empty", "too_long"]
    assert "log_prob" not in found[0]


def test_classes_are_those_of_the_api(client: TestClient, worded: Path) -> None:
    texts = ["w4 w5 w6", "", "w9"]
    alone = tfexport.load_classifier(worded, threads=1).classify(texts, top=2)
    found = client.post("/v1/classify", json={"model": "classes", "texts": texts, "top": 2}).json()["results"]
    assert [one["status"] for one in found] == ["ok", "empty", "ok"]
    assert [[(of["class"], of["probability"]) for of in one["classes"]] for one in found] == [
        [(of.class_, of.probability) for of in one.classes] for one in alone
    ]
    assert client.post("/v1/classify", json={"model": "classes", "texts": "w9"}).json()["results"][0]["status"] == "ok"


@pytest.mark.parametrize(
    ("path", "fields", "status", "error"),
    [
        ("translate", {"text": LINES[0], "beam_size": 4}, 422, "there is no option 'beam_size'. Did you mean 'beam'?"),
        ("translate", {"text": LINES[0], "unk_dictionary": "/x"}, 422, "there is no option 'unk_dictionary'."),
        ("translate", {"text": LINES[0], "models": "x"}, 422, "there is no option 'models'. Did you mean 'model'?"),
        ("translate", {"text": LINES[0], "\ud800": 1}, 422, "there is no option '\\ud800'."),
        ("score", {"texts": "a", "target_": "b"}, 422, "there is no field 'target_'. Did you mean 'target'?"),
        ("score", {"texts": ["a"], "targets": []}, 422, "targets."),
        ("score", {"texts": ["a"], "targets": ["a", "b"]}, 422, "there are 1 texts and 2 targets: give one for each"),
        ("score", {"texts": "a", "targets": ["a"]}, 422, "texts and targets are two strings, or two lists of strings"),
        ("translate", {"text": LINES[0], "beam": 13}, 400, "each sentence would take 13 rows"),
        ("translate", {"text": LINES[0], "beam": 4, "alternatives": 4}, 400, "each sentence would take 16 rows"),
        ("translate", {"text": LINES[0], "samples": 13, "stream": True}, 400, "each sentence would take 13 rows"),
        ("translate", {"ids": [[5, 3]], "samples": 13}, 400, "each sentence would take 13 rows"),
        ("translate", {"text": "de5\nde6"}, 400, "text has a line break, and a sentence is one line."),
        ("translate", {"text": "de5\r\nde6", "stream": True}, 400, "text has a line break"),
        ("translate", {"text": ["de5", "de5\nde6"]}, 400, "text.1 has a line break"),
        ("translate", {"text": "de5", "prefix": "wört5\nwört6"}, 400, "prefix has a line break"),
        ("score", {"texts": "de5", "targets": "wört5\nwört6"}, 400, "targets has a line break"),
        ("translate", {"text": "de5", "constraints": ["wört5\nwört6"]}, 400, "constraints.0 has a line break"),
        ("translate", {"text": "de5", "constraints": [["wört5"]]}, 422, "constraints are a list of phrases for one"),
        (
            "translate",
            {"text": ["de5"], "constraints": ["wört5"]},
            422,
            "constraints are a list of phrases for one sentence, and",
        ),
        (
            "translate",
            {"text": ["de5"], "constraints": [[], []]},
            422,
            "there are 1 sentences and 2 lists of constraints",
        ),
        ("translate", {"ids": [[5, 3]], "constraints": [["wört5"]]}, 422, "constraints go with text"),
        (
            "translate",
            {"text": "de5", "constraints": ["wört5"], "samples": 2},
            400,
            "required phrases need beam search",
        ),
        ("translate", {"text": "de5", "keep_between": "x"}, 400, "keep_between is 'x'. Give two marks"),
        (
            "translate",
            {"text": "de5", "keep_between": "\ud800 x"},
            400,
            "these options cannot be used: keep_between is",
        ),
        ("translate", {"text": "de5", "glossary": {"de5": "\ud800"}}, 400, "glossary has"),
        ("classify", {"texts": "de5"}, 400, "de-en is not a classifier. Use /v1/translate."),
        (
            "score",
            {"model": "classes", "texts": "w5", "targets": "x"},
            400,
            "classes is a classifier. Use /v1/classify.",
        ),
    ],
)
def test_errors_say_what_to_do(client: TestClient, path: str, fields: dict[str, Any], status: int, error: str) -> None:
    content = json.dumps({"model": "de-en", **fields})
    found = client.post(f"/v1/{path}", content=content, headers={"Content-Type": "application/json"})
    assert found.status_code == status, found.text
    assert found.json()["error"].startswith(error)


def test_white_space_around_a_sentence_is_no_line_break(client: TestClient) -> None:
    found = client.post("/v1/translate", json={"model": "de-en", "text": ["\n de5 \r\n", "de5"]}).json()["results"]
    assert found[0] == found[1]


def test_long_texts_leave_the_event_loop(quantized_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    read = scheduled.read_window

    def reads(*given: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return read(*given)

    monkeypatch.setattr(scheduled, "read_window", reads)
    with tfexport.load(quantized_bundle, threads=1) as model:
        few = asyncio.run(model.translate_async(LINES))
        many = asyncio.run(model.translate_async([*LINES, *["de5 " * 500] * 3]))
        asyncio.run(model.score_async(LINES[:1], ["wört5 " * 1000]))
        asyncio.run(model.translate_async(LINES[:1], constraints=[["wört5 " * 1000]]))
        asyncio.run(model.translate_async(LINES[:1], glossary={"de99": "wört5 " * 1000}))
    assert threads == [True, False, False, False, False]
    assert [one.text for one in many[:3]] == [one.text for one in few]
    assert [one.status for one in many[3:]] == ["too_long"] * 3


def test_a_stream_without_scores_ends_as_translate(quantized_bundle: Path) -> None:
    with tfexport.load(quantized_bundle, threads=1) as model:

        async def last() -> Any:
            return [one async for one in model.follow_async(LINES[0], scores=False)][-1]

        assert repr(asyncio.run(last())) == repr(model.translate(LINES[0], scores=False))


class Slow:
    """A classifier that answers when it is let."""

    def __init__(self) -> None:
        self.may_go, self.calls = threading.Event(), 0

    def classify(self, texts: list[str], *, top: int) -> list[Classified]:
        self.calls += 1
        self.may_go.wait(60)
        return [Classified(1, "ok", "")]


def test_few_classifications_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def several() -> tuple[int, int]:
        slow: Any = Slow()
        classifying = Classifying(most_waiting=2)
        first = [asyncio.create_task(classifying.classify(slow, ["x"], top=1, timeout=None)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="2 requests wait already"):
            await classifying.classify(slow, ["x"], top=1, timeout=None)
        first[2].cancel()
        await asyncio.sleep(0)
        with pytest.raises(DeadlineError):
            await classifying.classify(slow, ["x"], top=1, timeout=0.001)
        slow.may_go.set()
        return len(await asyncio.gather(*first[:2])), slow.calls

    assert asyncio.run(several()) == (2, 2)
