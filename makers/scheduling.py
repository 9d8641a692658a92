"""A scheduler and its workers, driven step by step over a clock that only moves when told to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tfexport.runtimes.base import Runtime
from tfexport.scheduling.decoder import Decoder
from tfexport.scheduling.options import ServingOptions
from tfexport.scheduling.scheduler import Scheduler
from tfexport.scheduling.sentences import Orders
from tfexport.search.hypothesis import Hypothesis, Phrase, Source
from tfexport.search.search import SearchOptions, search
from tfexport.search.source_batch import length_limits


@dataclass
class Answer:
    """What became of a request: a `Listener`."""

    sources: Sequence[Source]
    options: SearchOptions
    number: int = -1
    outputs: list[list[Hypothesis]] | None = None
    error: Exception | None = None
    is_cancelled: bool = False
    prefixes: list[tuple[int, tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.outputs is not None or self.error is not None or self.is_cancelled

    def decided(self, index: int, ids: tuple[int, ...], log_probs: tuple[float, ...]) -> None:
        assert not self.is_over
        self.prefixes.append((index, ids, log_probs))

    def finished(self, outputs: list[list[Hypothesis]]) -> None:
        assert not self.is_over, "answered twice, or after it was cancelled"
        self.outputs = outputs

    def failed(self, error: Exception) -> None:
        assert not self.is_over
        self.error = error


class Driver:
    """A scheduler with workers over one runtime, in one thread."""

    def __init__(self, runtime: Runtime, *, workers: int = 1, **options: Any):
        self.now, self.runtime = 0.0, runtime
        self.scheduler = Scheduler(
            ServingOptions(**options),
            lambda source, search_options: int(length_limits(runtime, [source], search_options)[0]),
            lambda: self.now,
        )
        self.decoders: list[Decoder] = []
        self.orders: list[Orders] = []
        """All that workers were told to do."""
        for number in range(workers):
            self.decoders.append(self._decoder())
            self.scheduler.join(number)

    def submit(self, sources: Sequence[Source | Sequence[int]], options: SearchOptions, **more: Any) -> Answer:
        answer = Answer([one if isinstance(one, Source) else Source(one) for one in sources], options)
        answer.number = self.scheduler.submit(answer.sources, options, answer, **more)
        return answer

    def cancel(self, answer: Answer) -> None:
        self.scheduler.cancel(answer.number)
        answer.is_cancelled = not answer.is_over or answer.is_cancelled

    def turn(self, worker: int = 0) -> None:
        """A step of a worker."""
        orders = self.scheduler.take(worker)
        self.orders.append(orders)
        self.scheduler.report(worker, self.decoders[worker].turn(orders))

    def lose(self, worker: int) -> None:
        """A worker ends, and another takes its place."""
        self.scheduler.lose(worker)
        self.decoders[worker] = self._decoder()
        self.scheduler.join(worker)

    def run(self, *, most: int = 10_000) -> None:
        """Until nothing is left to do."""
        for _ in range(most):
            for worker in range(len(self.decoders)):
                self.turn(worker)
            counters = self.scheduler.counters
            if not counters.queued and not counters.live_rows and all(one.is_idle for one in self.decoders):
                return
        raise AssertionError("requests are left that nobody answers")

    def _decoder(self) -> Decoder:
        return Decoder(self.runtime, lambda: self.now)


def problems(runtime: Runtime, answer: Answer) -> list[str]:
    """What differs between an answer and a search of each of its sentences alone, to the last bit."""
    if answer.is_cancelled:
        return []
    if answer.outputs is None:
        return [f"no answer: {answer.error}"]
    found = []
    for index, (source, outputs) in enumerate(zip(answer.sources, answer.outputs, strict=True)):
        [alone] = search(runtime, [source], answer.options)
        if outputs != alone and repr(outputs) != repr(alone):  # NaN is not equal to itself
            found.append(f"{answer.options}: {outputs} instead of {alone}")
        if not all(_same_attention(one, other) for one, other in zip(outputs, alone, strict=False)):
            found.append(f"{answer.options}: other attention")
        best = outputs[0]
        for _, ids, log_probs in (one for one in answer.prefixes if one[0] == index):
            if best.ids[: len(ids)] != ids or (best.token_log_probs and best.token_log_probs[: len(ids)] != log_probs):
                found.append(f"{answer.options}: {ids} was decided, and {best.ids} came")
    return found


def _same_attention(one: Hypothesis, other: Hypothesis) -> bool:
    if one.attention is None or other.attention is None:
        return one.attention is other.attention
    return bool(np.array_equal(one.attention, other.attention))


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"scores": False},
    {"token_scores": True},
    {"beam": 4, "nbest": 3},
    {"beam": 2, "token_scores": True},
    {"samples": 1, "seed": 3},
    {"samples": 3, "top_k": 5, "temperature": 0.7},
    {"no_repeat_ngram": 2},
    {"beam": 4, "repetition_penalty": 1.3},
    {"scores": False, "min_length": 4},
    {"scores": False, "suppress_first": (5,)},
    {"suppress": (5, 6)},
    {"beam": 3, "end_tokens": (7,)},
    {"beam": 2, "alternatives": 3},
    {"profile": "hf", "beam": 4},
    {"profile": "fairseq", "beam": 3},
)
"""Searches of all kinds."""

ATTENTION: tuple[dict[str, Any], ...] = ({"attention": True}, {"beam": 3, "coverage_penalty": 0.2})
"""For runtimes that tell attention."""


def drive(
    runtime: Runtime,
    seed: int,
    requests: int,
    *,
    vocab: int,
    longest: int = 12,
    max_length: int = 20,
    attention: bool = False,
    workers: int = 1,
) -> tuple[Driver, list[Answer]]:
    """Random requests that come, stream, are cancelled and lose their workers at random moments; all are over in the end."""
    random = np.random.default_rng(seed)
    driver = Driver(
        runtime,
        workers=workers,
        slots=int(random.integers(4, 40)),
        step_tokens=int(random.integers(1, 120)),
        cache_tokens=int(random.integers(200, 3000)),
        max_queue=requests,
    )
    kinds = OPTIONS + ATTENTION * attention
    answers: list[Answer] = []
    while len(answers) < requests:
        driver.now += 0.01
        for _ in range(int(random.integers(0, 5)) if random.random() < 0.4 else 0):
            given = kinds[int(random.integers(len(kinds)))]
            beams = not given.keys() & {"samples", "alternatives"}
            count = 1 if random.random() < 0.8 else 3
            sources = [_source(random, vocab, longest, requires=beams) for _ in range(count)]
            most = int(random.integers(6, max_length + 1))
            options = SearchOptions.of({"max_length": most, **given})
            several = options.nbest > 1 or options.samples > 1 or options.alternatives > 0
            streams, bulk = bool(random.random() < 0.3) and not several, bool(random.random() < 0.3)
            answers.append(driver.submit(sources, options, streams=streams, bulk=bulk))
        if answers and random.random() < 0.05:
            driver.cancel(answers[int(random.integers(len(answers)))])
        if random.random() < 0.01 and not driver.scheduler.counters.restarts:  # twice would end requests, as it should
            driver.lose(int(random.integers(workers)))
        driver.turn(int(random.integers(workers)))
    driver.run()
    return driver, answers


def _source(random: np.random.Generator, vocab: int, longest: int, *, requires: bool) -> Source:
    ids = random.integers(4, vocab, int(random.integers(1, longest + 1))).tolist()
    prefix = tuple(random.integers(8, vocab, int(random.integers(1, 4))).tolist()) if random.random() < 0.15 else ()
    source = Source(ids, prefix=prefix, line=int(random.integers(1, 100)), least=int(random.random() < 0.1) * 3)
    required = _phrases(random, vocab) if requires and random.random() < 0.2 else ()
    return replace(source, required=required, forbidden=_phrases(random, vocab) if random.random() < 0.1 else ())


def _phrases(random: np.random.Generator, vocab: int) -> tuple[Phrase, ...]:
    lengths = random.integers(1, 3, int(random.integers(1, 4))).tolist()
    return tuple(Phrase(tuple(random.integers(4, vocab, length).tolist())) for length in lengths)
