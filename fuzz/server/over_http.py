"""`scheduler --http`: random requests to a real server, against `translate` of each sentence alone, to the last bit.

Requests of all kinds of search and of all protocols come at random moments, stream, and go away before they are answered.
JSON tells floating-point numbers exactly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

import tfexport
from makers.scheduling import ATTENTION, OPTIONS
from makers.servers import serving
from tfexport.bundle.reader import Bundle
from tfexport.contract import short_name
from tfexport.search.options import SearchOptions
from tfexport.serving.v1.results import result_of

NAME = "de-en"
IN_FLIGHT = 24
"""Requests at once, at most."""
ANSWER_WITHIN = 300
"""Seconds."""
KINDS = (
    *OPTIONS,
    {"beam": 3, "nbest": 3, "token_scores": True},
    {"beam": 4, "length_penalty": 1.5, "max_length_ratio": 1.2},
)


@dataclass(frozen=True)
class Asked:
    """A request."""

    protocol: str
    """translate, stream or libre."""
    texts: tuple[str, ...]
    options: dict[str, Any]
    prefix: str | None
    leaves_after: float | None
    """Seconds after which the client goes away."""


@dataclass
class Found:
    """What came of all requests."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def check(bundle: Bundle, precision: str, requests: int, seed: int) -> tuple[int, list[str]]:
    """Answers that were compared, and what differs."""
    short = short_name(precision)  # type: ignore[arg-type]
    model = tfexport.load(bundle.directory, precision=short, threads=1)
    attention = bundle.has_graph("beam_step_attention", precision, "ort")  # type: ignore[arg-type]
    drawn = random.Random(seed)
    words = _words(bundle, "source"), _words(bundle, "target")
    asked = [_draw(drawn, *words, attention=attention) for _ in range(requests)]
    # A busy machine must not refuse what is to be compared.
    flags = ["--precision", short, "--slots", "24", "--step-tokens", "60", "--max-wait", "600"]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder) / "log", f"{NAME}={bundle.directory}", *flags) as running,
    ):
        found = asyncio.run(_send_all(running.url, asked, model, random.Random(seed + 1)))
    print(f"{precision}: " + ", ".join(f"{count} {name}" for name, count in sorted(found.counts.items())), flush=True)
    return found.counts.total() - found.counts["left"] - found.counts["refused"], found.problems


def _words(bundle: Bundle, side: Literal["source", "target"]) -> list[str]:
    tokenizer = bundle.tokenizer(side)
    assert tokenizer is not None
    ids = range(4, min(bundle.config.src_vocab_size, bundle.config.tgt_vocab_size, 400))
    texts = (tokenizer.decode([index]).strip() for index in ids)
    return [text for text in texts if text.isalnum() and text.isascii()]


def _draw(drawn: random.Random, words: list[str], outputs: list[str], *, attention: bool) -> Asked:
    count = 1 if drawn.random() < 0.7 else drawn.randint(2, 6)
    texts = tuple(" ".join(drawn.choices(words, k=drawn.randint(1, 14))) for _ in range(count))
    protocol = drawn.choices(["translate", "stream", "libre"], [6, 2, 1])[0]
    leaves = drawn.random() * 0.1 if drawn.random() < 0.1 else None
    if protocol == "libre":
        nbest = drawn.choice([1, 1, 2, 4])
        return Asked(protocol, texts, {"beam": nbest, "nbest": nbest} if nbest > 1 else {}, None, leaves)
    options = {"max_length": drawn.randint(6, 30), **drawn.choice(KINDS + ATTENTION * attention)}
    search = SearchOptions.of(options)
    if protocol == "stream" and (search.samples > 1 or search.alternatives > 0):
        protocol = "translate"
    if drawn.random() < 0.1:
        texts = (*texts, "")[-1:] if protocol == "stream" else (*texts, "")
    prefix = " ".join(drawn.choices(outputs, k=drawn.randint(1, 2))) if drawn.random() < 0.15 else None
    return Asked(protocol, texts[:1] if protocol == "stream" else texts, options, prefix, leaves)


async def _send_all(address: str, asked: list[Asked], model: tfexport.Model, drawn: random.Random) -> Found:
    found, room = Found(), asyncio.Semaphore(IN_FLIGHT)
    # The server closes connections that are idle for 5 s, and a request that crosses that on its way is lost.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=1)
    async with httpx.AsyncClient(base_url=address, timeout=ANSWER_WITHIN, limits=limits) as client:

        async def one(request: Asked) -> None:
            async with room:
                try:
                    async with asyncio.timeout(request.leaves_after):
                        status, answer = await _send(client, request)
                except TimeoutError:
                    found.counts["left"] += 1
                    return
                except httpx.HTTPError as error:
                    found.problems.append(f"{request}: {error!r}")
                    return
            if problem := await asyncio.to_thread(_difference, model, request, status, answer):
                found.problems.append(f"{request}: {problem}"[:2000])
            found.counts["refused" if status == 400 else request.protocol] += 1

        async with asyncio.TaskGroup() as tasks:
            for request in asked:
                while room.locked():
                    await asyncio.sleep(0.005)
                tasks.create_task(one(request))
                if drawn.random() < 0.3:
                    await asyncio.sleep(drawn.random() * 0.02)
        with contextlib.suppress(httpx.HTTPError):
            if (await client.get("/ready")).status_code != 200:
                found.problems.append("the server is not ready any more")
    return found


async def _send(client: httpx.AsyncClient, asked: Asked) -> tuple[int, Any]:
    several: Any = list(asked.texts) if len(asked.texts) > 1 else asked.texts[0]
    if asked.protocol == "libre":
        fields = {"q": "\n".join(asked.texts), "source": "de", "target": "en"}
        answer = await client.post("/translate", json={**fields, "alternatives": asked.options.get("nbest", 1) - 1})
    elif asked.protocol == "stream":
        body = {"text": several, "prefix": asked.prefix, "stream": True, **asked.options}
        async with client.stream("POST", "/v1/translate", json=body) as stream:
            lines = [line async for line in stream.aiter_lines()]
            return stream.status_code, lines
    else:
        answer = await client.post("/v1/translate", json={"text": several, "prefix": asked.prefix, **asked.options})
    return answer.status_code, answer.json()


def _difference(model: tfexport.Model, asked: Asked, status: int, answer: Any) -> str | None:
    """What differs from each sentence alone; None where nothing does."""
    if status != 200:
        return f"{status}: {answer}"
    alone = model.translate(list(asked.texts), prefix=asked.prefix, batch_size=1, **asked.options)
    wanted = [json.loads(result_of(one).model_dump_json(exclude_defaults=True)) for one in alone]
    if asked.protocol == "translate":
        return _unlike(answer["results"], wanted)
    if asked.protocol == "stream":
        return _stream_difference(answer, wanted[0])
    ranks = asked.options.get("nbest", 1)
    texts = ["\n".join(one.hypotheses[rank].text for one in alone) for rank in range(ranks)]
    first, *others = dict.fromkeys(texts)
    return _unlike([answer["translatedText"], answer.get("alternatives", [])], [first, others])


def _stream_difference(lines: list[str], wanted: Any) -> str | None:
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    if not names or names[-1] != "result" or set(names[:-1]) - {"step"}:
        return f"the events are {names}"
    if problem := _unlike(data[-1], wanted):
        return problem
    if not wanted["hypotheses"]:
        return None if names == ["result"] else "steps of a sentence that cannot be decoded"
    best = wanted["hypotheses"][0]
    return _unlike(
        [[one["id"] for one in data[:-1]], "".join(one["text"] for one in data[:-1])], [best["ids"], best["text"]]
    )


def _unlike(found: Any, wanted: Any) -> str | None:
    return None if found == wanted else f"{found} instead of {wanted}"
