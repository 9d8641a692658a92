"""Requests that come one by one: continuous batching beside static batching, and beside `translate` of a list.

    python -m benchmarks.serve.batching BUNDLE [--text benchmarks/sentences.de] [--precision int8] [--beam 1] [--clients 64]

A closed loop: each client sends its next sentence when it has its answer. All ways decode the same sentences, in the same
shuffled order, and each answer is compared with that of `translate`.

    offline      `translate` of all sentences in batches of 32, sorted by length: no request waits for anything
    static       32 requests that wait begin together and end together, in the order in which they came
    continuous   `translate_async`: requests join and leave between steps; with one or two threads, or one or two processes

The ways take turns, several times. Sentences per second are medians of wall time; of the ways with one worker there is CPU
time too, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import tfexport
from benchmarks.paths import SENTENCES
from tfexport.bench.machine import facts

BATCH = 32


@dataclass
class Timed:
    """Of one way, in each of its turns."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    """Seconds of each request."""

    def record(self, sentences: int, *, has_cpu: bool) -> dict[str, float]:
        """Sentences per second, and what requests waited for their answers."""
        found = {"per second": sentences / median(self.wall)}
        if has_cpu:  # that of worker processes is not known
            found["per CPU second"] = sentences / median(self.cpu)
        if self.latencies:
            ordered = sorted(self.latencies)
            found |= {"median latency": median(ordered), "p99 latency": ordered[int(0.99 * (len(ordered) - 1))]}
        return {name: round(value, 4) for name, value in found.items()}


class Load:
    """The sentences, their answers, and clients that ask for them."""

    def __init__(self, model: tfexport.Model, lines: Sequence[str], clients: int, search: dict[str, Any]):
        self.model, self.lines, self.clients, self.search = model, lines, clients, search
        known = sorted(set(lines))
        self.wanted = {
            found: wanted.text for found, wanted in zip(known, model.translate(known, **search), strict=True)
        }

    def offline(self, timed: Timed, workers: int = 1) -> None:
        found = self.model.translate(self.lines, batch_size=BATCH, workers=workers, **self.search)
        self._check(found)

    def static(self, timed: Timed) -> None:
        """Groups of `BATCH` of the requests that wait; who is answered sends the next one, which goes to the end."""
        coming = deque(self.lines)
        waiting = deque((coming.popleft(), time.perf_counter()) for _ in range(min(self.clients, len(coming))))
        while waiting:
            group = [waiting.popleft() for _ in range(min(BATCH, len(waiting)))]
            found = self.model.translate([line for line, _ in group], batch_size=BATCH, **self.search)
            now = time.perf_counter()
            timed.latencies += [now - since for _, since in group]
            self._check(found, [line for line, _ in group])
            waiting.extend((coming.popleft(), now) for _ in range(min(len(group), len(coming))))

    async def continuous(self, timed: Timed, model: tfexport.Model) -> None:
        coming = deque(self.lines)

        async def client() -> None:
            while coming:
                line, since = coming.popleft(), time.perf_counter()
                found = await model.translate_async(line, **self.search)
                timed.latencies.append(time.perf_counter() - since)
                self._check([found], [line])

        await asyncio.gather(*(client() for _ in range(self.clients)))

    def _check(self, found: Sequence[tfexport.Translation], lines: Sequence[str] | None = None) -> None:
        for line, one in zip(lines or self.lines, found, strict=True):
            if one.text != self.wanted[line]:
                raise AssertionError(f"{line!r} gave {one.text!r} and not {self.wanted[line]!r}")


def measured(timed: Timed, run: Callable[[], None]) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    timed.wall.append(time.perf_counter() - wall)
    timed.cpu.append(time.process_time() - cpu)


def compare(bundle: Path, precision: str, load: dict[str, Any], slots: int, turns: int) -> dict[str, Any]:
    """What each way achieved."""

    def loaded() -> tfexport.Model:
        return tfexport.load(bundle, precision=precision, threads=1)

    plain = Load(loaded(), **load)
    kinds: dict[str, dict[str, Any]] = {
        "continuous": {},
        "continuous, 1 process": {"worker_kind": "processes"},
        "continuous, 2 threads": {"workers": 2, "worker_kind": "threads", "slots": slots // 2},
        "continuous, 2 processes": {"workers": 2, "worker_kind": "processes", "slots": slots // 2},
    }
    # Each way has a model of its own; processes are made first, while there are no threads.
    serving = {
        name: Load(loaded().serve(**{"slots": slots, **options}), **load) for name, options in reversed(kinds.items())
    }
    ways: dict[str, Callable[[Timed], None]] = {
        "offline": plain.offline,
        "offline, 2 workers": lambda timed: plain.offline(timed, 2),
        "static": plain.static,
        **{
            name: lambda timed, of=serving[name]: asyncio.run(of.continuous(timed, of.model))  # type: ignore[misc]
            for name in kinds
        },
    }
    times = {name: Timed() for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            measured(timed := times[name] if turn else Timed(), lambda way=way, timed=timed: way(timed))  # type: ignore[misc]
    for one in serving.values():
        one.model.close()
    sentences = len(plain.lines)
    records = {name: timed.record(sentences, has_cpu="," not in name) for name, timed in times.items()}
    for name, record in records.items():
        base = records["offline, 2 workers" if "2 " in name else "offline"]
        record["of offline"] = round(record["per second"] / base["per second"], 3)
        if "per CPU second" in record:
            record["of offline, by CPU time"] = round(record["per CPU second"] / base["per CPU second"], 3)
    return records


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Continuous batching beside static batching and offline decoding.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--text", type=Path, default=SENTENCES)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--sentences", type=int, default=800)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    lines = options.text.read_text(encoding="utf-8").splitlines()
    lines = (lines * (-(-options.sentences // len(lines))))[: options.sentences]
    random.Random(0).shuffle(lines)
    load = {"lines": lines, "clients": options.clients, "search": {"beam": options.beam}}
    found = compare(options.bundle, options.precision, load, options.slots * options.beam, options.turns)
    for name, record in found.items():
        print(f"{name:26}" + "  ".join(f"{key} {value:g}" for key, value in record.items()))
    if options.out:
        about = {"precision": options.precision, "beam": options.beam, "clients": options.clients, "machine": facts()}
        options.out.write_text(json.dumps({**about, "ways": found}, indent=1, default=str) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
