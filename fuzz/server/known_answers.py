"""Random requests to a server, whose answers are known."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import tfexport
from makers.servers import Running
from makers.serving_bundle import CONFIG

SEARCHES: tuple[dict[str, Any], ...] = (
    {},
    {"beam": 3},
    {"scores": False},
    {"samples": 1, "seed": 7},
    {"no_repeat_ngram": 2},
    {"min_length": 12},
    {"min_length": 20, "beam": 2},
)
SENTENCES = 40
"""That requests are made of."""


@dataclass
class Asked:
    """A request and its answer."""

    body: dict[str, Any]
    wanted: list[list[int]]


@dataclass
class Figures:
    """What happened."""

    seen: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        self.problems.append(text)
        if len(self.problems) <= 10:
            print(f"PROBLEM: {text}", flush=True)


class Load:
    """Random requests with known answers, and a server that is to give them."""

    def __init__(self, bundle: Path, running: Running, seed: int):
        self.running, self.figures, self.random = running, Figures(), random.Random(seed)
        sources = [self._source() for _ in range(SENTENCES)]
        self._known: list[Asked] = []
        model = tfexport.load(bundle, threads=1)
        for search in SEARCHES:
            found = model.translate_ids(sources, max_length=30, **search)
            # What sampling draws depends on the number of the line, so that such a request has one.
            alone = [model.translate_ids([ids], max_length=30, **search)[0] for ids in sources]
            for count in (1, 1, 3):
                for start in range(0, SENTENCES - count, count):
                    chosen = [found[at] for at in range(start, start + count)] if count > 1 else [alone[start]]
                    if count > 1 and "samples" in search:
                        continue
                    body = {"ids": sources[start : start + count], "max_length": 30, **search}
                    self._known.append(Asked(body, [list(one.hypotheses[0].ids) for one in chosen]))

    def _source(self) -> list[int]:
        return [self.random.randrange(4, CONFIG.src_vocab_size) for _ in range(self.random.randint(2, 20))]

    def draw(self) -> Asked:
        return self.random.choice(self._known)

    async def ask(self, client: httpx.AsyncClient, padding: int = 0) -> None:
        """A request that is to be answered.

        Args:
            padding: the number of spaces behind its body.
        """
        asked = self.draw()
        content, headers = json.dumps(asked.body) + " " * padding, {"Content-Type": "application/json"}
        try:
            answer = await client.post("/v1/translate", content=content, headers=headers)
        except httpx.HTTPError as error:
            self.figures.problem(f"a request was lost: {error!r}")
            return
        self.figures.seen[f"{answer.status_code}"] += 1
        if answer.status_code == 200:
            ids = [one["hypotheses"][0]["ids"] for one in answer.json()["results"]]
            if ids != asked.wanted:
                self.figures.problem(f"{asked.body} gave {ids} and not {asked.wanted}")
        elif answer.status_code not in (429, 503):
            self.figures.problem(f"{answer.status_code}: {answer.text[:200]}")

    async def clients(self, count: int, is_over: Callable[[], bool]) -> None:
        """Clients that ask one request after the other until it is over."""

        async def one() -> None:
            async with httpx.AsyncClient(base_url=self.running.url, timeout=120) as client:
                while not is_over():
                    await self.ask(client)

        await asyncio.gather(*(one() for _ in range(count)))

    async def require_rest(self) -> None:
        """Nothing is left in the server that nobody waits for."""
        for _ in range(200):
            left = [
                self.running.metric(f"tfexport_{name}")
                for name in ("queue_requests", "live_rows", "http_requests_active")
            ]
            if not any(left):
                break
            await asyncio.sleep(0.05)
        else:
            self.figures.problem(f"requests, rows and answers are left that nobody waits for: {left}")
        accepted, ended = (
            sum(self.running.metric(f'tfexport_requests_total{{model="model",outcome="{one}"}}') for one in outcomes)
            for outcomes in (("accepted",), ("finished", "failed", "cancelled", "expired"))
        )
        if accepted != ended:
            self.figures.problem(f"{accepted:.0f} requests were taken, and {ended:.0f} came to an end")
