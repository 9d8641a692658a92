"""A server under more requests than it can answer: what those that it takes wait, what it uses, and how soon it recovers.

    python -m benchmarks.serve.overload BUNDLE [--text benchmarks/sentences.de] [--times 5] [--seconds 60] [--max-wait 1]

`tfexport serve` runs in a process of its own, with its defaults, and the clients in this one. Requests come at random
moments at a fixed rate, whatever becomes of those before (an open loop).

    capacity    64 clients ask one request after the other: answers per second
    90 %        at 0.9 of that: the latency of a server that is well used
    overload    at `--times` the capacity for `--seconds`: accepted and rejected requests, latency of the accepted, memory
    recovery    at half of the capacity, from the moment the overload ends: seconds until nothing is rejected any more

Clients and server share the machine, so that the overload takes time from the server. Figures are printed, as JSON too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.paths import SENTENCES
from makers.servers import Running, Size, serving


@dataclass
class Phase:
    """Requests at one rate."""

    accepted: list[tuple[float, float]] = field(default_factory=list)
    """When each came, since the phase began, and its latency."""
    rejected: list[float] = field(default_factory=list)
    """When each came."""
    reject_seconds: list[float] = field(default_factory=list)
    others: int = 0
    seconds: float = 0.0
    most_memory: int = 0

    def record(self) -> dict[str, Any]:
        latencies = sorted(latency for _, latency in self.accepted)
        return {
            "requests per second": round((len(self.accepted) + len(self.rejected) + self.others) / self.seconds, 1),
            "accepted per second": round(len(self.accepted) / self.seconds, 1),
            "rejected": len(self.rejected),
            "other": self.others,
            "p50": _part(latencies, 0.5),
            "p99": _part(latencies, 0.99),
            "p99 of rejections": _part(sorted(self.reject_seconds), 0.99),
            "most memory, MiB": round(self.most_memory / 2**20, 1),
        }


def _part(ordered: Sequence[float], part: float) -> float | None:
    return round(ordered[int(part * (len(ordered) - 1))], 3) if ordered else None


class Client:
    """Sends requests and notes what became of them."""

    def __init__(self, running: Running, lines: Sequence[str], beam: int, seed: int):
        self.running, self.lines, self.beam, self.random = running, lines, beam, random.Random(seed)
        self.http = aiohttp.ClientSession(running.url, connector=aiohttp.TCPConnector(limit=0))

    def body(self) -> dict[str, Any]:
        return {"text": self.random.choice(self.lines), "beam": self.beam}

    async def ask(self, phase: Phase, began: float) -> None:
        since = time.perf_counter()
        try:
            async with self.http.post("/v1/translate", json=self.body()) as answer:
                await answer.read()
        except (aiohttp.ClientError, TimeoutError):
            phase.others += 1
            return
        seconds = time.perf_counter() - since
        if answer.status == 200:
            phase.accepted.append((since - began, seconds))
        elif answer.status == 429:
            phase.rejected.append(since - began)
            phase.reject_seconds.append(seconds)
        else:
            phase.others += 1

    async def closed(self, clients: int, seconds: float) -> Phase:
        phase, began = Phase(), time.perf_counter()

        async def one() -> None:
            while time.perf_counter() - began < seconds:
                await self.ask(phase, began)

        await asyncio.gather(*(one() for _ in range(clients)))
        phase.seconds = time.perf_counter() - began
        return phase

    async def open(self, rate: float, seconds: float) -> Phase:
        phase, began = Phase(), time.perf_counter()
        tasks: set[asyncio.Task[None]] = set()
        due, looked = began, began
        while (now := time.perf_counter()) < began + seconds:  # where clients are late, the rate is lower, and told
            await asyncio.sleep(max(0.0, due - now))
            task = asyncio.create_task(self.ask(phase, began))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due += self.random.expovariate(rate)
            if time.perf_counter() - looked > 1:
                looked = time.perf_counter()
                phase.most_memory = max(phase.most_memory, Size.of(self.running).resident)
        phase.seconds = time.perf_counter() - began
        if tasks:
            await asyncio.wait(tasks)
        return phase


async def measure(running: Running, lines: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    client = Client(running, lines, options.beam, options.seed)
    await client.closed(64, options.seconds / 12)  # the first second is that of a server that knows nothing
    capacity = len((known := await client.closed(64, options.seconds / 6)).accepted) / known.seconds
    found: dict[str, Any] = {"capacity per second": round(capacity, 1)}

    def tell(name: str, phase: Phase) -> None:
        found[name] = phase.record()
        print(f"{name}: {json.dumps(found[name])}", flush=True)

    print(f"capacity: {capacity:.1f} answers per second", flush=True)
    tell("90 %", await client.open(0.9 * capacity, options.seconds / 2))
    await asyncio.sleep(2)
    tell(f"{options.times:g} times", await client.open(options.times * capacity, options.seconds))
    after = await client.open(0.5 * capacity, 10)
    tell("afterwards", after)
    found["recovery, seconds"] = round(max(after.rejected, default=0.0), 2)
    await client.http.close()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A server under more requests than it can answer.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--text", type=Path, default=SENTENCES)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--times", type=float, default=5)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--max-wait", type=float)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    lines = [line for line in options.text.read_text(encoding="utf-8").splitlines() if line]
    more = ["--max-wait", options.max_wait] if options.max_wait else []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with serving(log, f"model={options.bundle}", "--precision", options.precision, *more) as running:
            found = asyncio.run(measure(running, lines, options))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
