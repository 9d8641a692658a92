"""Measures the speed of a bundle and of alternative engines, interleaved, each in its best configuration.

A cell is a precision, a number of threads, a batch size and a beam. Each cell tries every configuration of every contestant
once. The best one of each contestant, or two that are close, go into rounds. In a round the contestants decode the same
sentences one after another, and each round begins with another contestant. So other load on the machine affects all of them
equally.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tfexport.bench.contestants import OWN, PROFILED, Contestant, Failed, Handle, Process, ProcessLayout, hire, setups
from tfexport.bench.machine import ONE_THREAD, Peaks, busy_cpus, facts
from tfexport.bench.plan import Cell, Plan, Sources
from tfexport.bench.rows import Attempt, cell_record
from tfexport.bundle.reader import Bundle
from tfexport.config import ModelConfig
from tfexport.contract import WEIGHTS_FILE
from tfexport.errors import TfexportError

SLOW = 20.0
"""A contestant that is slower than the fastest one by this factor runs only in `SLOW_ROUNDS` rounds."""
SLOW_ROUNDS = 2
CLOSE = 1.1
"""A contestant's second configuration also goes into the rounds if it is slower than the first by at most this factor."""
SHORT = 0.2
"""Seconds below which a trial is repeated."""
BUSY = 0.2
"""The largest number of busy CPUs before a run without a warning."""
ROUND_SECONDS, MOST_REPEATS = 0.25, 20
"""A contestant repeats its decode for about this number of seconds in a round, up to this number of repeats. The mean
counts."""
CALLS, CALL_SECONDS, FEWEST_CALLS = 20, 2.0, 3
"""The number of single calls whose latency is measured: at most `CALLS`, until they have taken `CALL_SECONDS` together, and
at least `FEWEST_CALLS`."""


@dataclass
class Team:
    """The processes of the cells that share a precision and threads. Each process starts when it is first needed."""

    hire: Callable[[ProcessLayout], Handle]
    first: list[int]
    """The sentence that each process decodes after loading."""
    loaded: dict[ProcessLayout, dict[str, Any]] = field(default_factory=dict)
    """The answers of the processes to `load`."""
    _handles: dict[ProcessLayout, Handle] = field(default_factory=dict)
    _lost: dict[ProcessLayout, str] = field(default_factory=dict)

    def ask(self, setup: ProcessLayout, request: Mapping[str, Any]) -> dict[str, Any]:
        """Raises Failed if the process cannot be loaded or the request fails. A failed process gets no further requests."""
        if setup in self._lost:
            raise Failed(self._lost[setup])
        if setup not in self._handles:
            try:
                self._handles[setup] = self.hire(setup)
                self.loaded[setup] = self._handles[setup].ask(setup.load_request(self.first))
            except Failed as error:
                self._lost[setup] = str(error)
                self._let_go(setup)
                raise
        try:
            return self._handles[setup].ask(request)
        except Failed:
            self._let_go(setup)
            raise

    def close(self) -> None:
        for setup in list(self._handles):
            self._let_go(setup)

    def _let_go(self, setup: ProcessLayout) -> None:
        handle = self._handles.pop(setup, None)
        if handle is not None:
            handle.close()


class Bench:
    """Measures the cells of a plan.

    Args:
        sources: encoder ids.
        peaks: the peaks for each number of threads, for the lower bound.
        hire: starts the process of a setup.
        say: gets progress messages.
    """

    def __init__(
        self,
        config: ModelConfig,
        sources: Sources,
        contestants: Sequence[Contestant],
        plan: Plan,
        peaks: Mapping[int, Peaks],
        hire: Callable[[ProcessLayout], Handle],
        say: Callable[[str], None],
    ):
        _require_tokens(config, plan)
        self._config, self._sources, self._plan, self._peaks = config, sources, plan, peaks
        # tfexport first: most slow contestants are then recognised as slow in their first trial.
        self._contestants = sorted(contestants, key=lambda contestant: contestant.name != OWN)
        self._hire, self._say = hire, say

    def run(self, done: Callable[[dict[str, Any]], None], cells: Sequence[Cell] | None = None) -> None:
        """Measure the plan's cells, or the given `cells`. `done` gets the record of each."""
        cells = self._plan.cells if cells is None else cells
        groups = itertools.groupby(enumerate(cells, start=1), key=lambda item: (item[1].precision, item[1].threads))
        for _, group in groups:
            with closing(Team(self._hire, self._sources[0])) as team:
                for number, cell in group:
                    self._say(f"{cell.about} ({number} of {len(cells)})")
                    done(self._measure(team, cell))

    def _measure(self, team: Team, cell: Cell) -> dict[str, Any]:
        stream = self._plan.stream(self._sources, cell)
        attempts: dict[str, list[Attempt]] = {}
        for contestant in self._contestants:
            known = [attempt.trial for tried in attempts.values() for attempt in tried if attempt.trial is not None]
            fastest = min(known, default=None)
            attempts[contestant.name] = [
                attempt
                for setup in setups(contestant, cell.precision, cell.threads)
                for attempt in self._tried(team, setup, cell, stream, fastest)
            ]
        chosen = finalists(attempts)
        self._rounds(team, cell, stream, chosen)
        best = {}
        for name, tried in attempts.items():
            finished = [attempt for attempt in tried if attempt.ran]
            failed = [attempt for attempt in tried if attempt.reason]
            best[name] = min(finished, key=lambda attempt: attempt.median) if finished else (failed or tried)[0]
        self._calls(team, cell, stream, [attempt for attempt in best.values() if attempt.ran])
        for name in PROFILED:
            if name in best and best[name].ran:
                self._profile(team, cell, stream, best[name])
        for attempt in best.values():
            attempt.loaded = team.loaded.get(attempt.setup)
        return {
            "about": cell.about,
            **asdict(cell),
            **cell_record(self._config, self._peaks[cell.threads], stream, cell.beam, attempts, best),
        }

    def _tried(
        self, team: Team, setup: ProcessLayout, cell: Cell, stream: Sources, fastest: float | None
    ) -> list[Attempt]:
        """The trials of one setup. With a free batch size, these are the sizes on the way to its best one."""
        if cell.batch is not None:
            return [self._trial(team, setup, cell.batch, cell, stream, fastest)]
        tried: dict[int, Attempt] = {}

        def seconds(batch: int) -> float:
            if batch not in tried:
                tried[batch] = self._trial(team, setup, batch, cell, stream, fastest)
            trial = tried[batch].trial
            return float("inf") if trial is None else trial

        climb(cell.batches, seconds)
        return list(tried.values())

    def _trial(
        self, team: Team, setup: ProcessLayout, batch: int, cell: Cell, stream: Sources, fastest: float | None
    ) -> Attempt:
        """Decode once for warm-up and once or twice for time. A contestant that is known as slow decodes only once."""
        attempt = Attempt(setup, batch)
        request = {**self._plan.request("decode", stream, batch, cell.beam), "outputs": True}
        try:
            first = self._decode(team, attempt, {**request, "forget_peak": True})
            if fastest is not None and first > SLOW * fastest:
                attempt.trial = first
                return attempt
            attempt.trial = self._decode(team, attempt, request)
            if attempt.trial < SHORT:
                attempt.trial = min(attempt.trial, self._decode(team, attempt, request))
        except Failed as error:
            attempt.reason, attempt.trial = str(error), None
        return attempt

    def _decode(self, team: Team, attempt: Attempt, request: Mapping[str, Any]) -> float:
        """The seconds of one decode. Its outputs are checked and recorded in `attempt`."""
        answer = team.ask(attempt.setup, request)
        wrong = sorted({*answer["lengths"]} - {self._plan.tokens}) if self._plan.tokens is not None else []
        if wrong:
            raise Failed(f"it returned outputs of {wrong} tokens instead of {self._plan.tokens}.")
        attempt.lengths = answer["lengths"]
        attempt.outputs = answer.get("outputs", attempt.outputs)
        if answer["memory"] is not None:
            attempt.memory = max(answer["memory"], attempt.memory or 0)
        return float(answer["seconds"])

    def _rounds(self, team: Team, cell: Cell, stream: Sources, chosen: Sequence[Attempt]) -> None:
        for number in range(self._plan.rounds):
            shift = number % max(1, len(chosen))
            for attempt in (*chosen[shift:], *chosen[:shift]):
                seconds = None
                if attempt.reason is None and number in attempt.takes_part(self._plan.rounds, SLOW_ROUNDS):
                    request = self._plan.request("decode", stream, attempt.batch, cell.beam)
                    repeats = min(MOST_REPEATS, math.ceil(ROUND_SECONDS / attempt.trial_seconds()))
                    try:
                        seconds = self._decode(team, attempt, {**request, "repeats": repeats})
                    except Failed as error:
                        attempt.reason = str(error)
                attempt.seconds.append(seconds)

    def _calls(self, team: Team, cell: Cell, stream: Sources, best: Sequence[Attempt]) -> None:
        """Measure the latency of single calls, each with another batch, round robin over the contestants."""
        for number in range(CALLS):
            for attempt in best:
                enough = sum(attempt.calls) > CALL_SECONDS and len(attempt.calls) >= FEWEST_CALLS
                if enough or attempt.reason is not None or (attempt.slow and number >= SLOW_ROUNDS):
                    continue
                start = number * attempt.batch % len(stream)
                part = [*stream[start:], *stream[:start]][: attempt.batch]
                request = self._plan.request("decode", part, attempt.batch, cell.beam)
                try:
                    attempt.calls.append(float(team.ask(attempt.setup, request)["seconds"]))
                except Failed as error:
                    attempt.reason = str(error)

    def _profile(self, team: Team, cell: Cell, stream: Sources, attempt: Attempt) -> None:
        try:
            attempt.profile = team.ask(attempt.setup, self._plan.request("profile", stream, attempt.batch, cell.beam))
        except Failed as error:
            self._say(f"note: {attempt.setup.contestant.name} was not profiled: {error}")


def climb(sizes: Sequence[int], seconds: Callable[[int], float]) -> int:
    """The best of `sizes` (ascending) by hill climbing from the middle one."""
    place = len(sizes) // 2
    for step in (1, -1):
        moved = False
        while 0 <= place + step < len(sizes) and seconds(sizes[place + step]) < seconds(sizes[place]):
            place, moved = place + step, True
        if moved:
            break
    return sizes[place]


def finalists(attempts: Mapping[str, Sequence[Attempt]]) -> list[Attempt]:
    """The attempt of each contestant with the fastest trial, and the next one if it is close. Marks slow attempts."""
    chosen: list[Attempt] = []
    for tried in attempts.values():
        ranked = sorted((attempt for attempt in tried if attempt.trial is not None), key=Attempt.trial_seconds)
        chosen += [attempt for attempt in ranked[:2] if attempt.trial_seconds() <= CLOSE * ranked[0].trial_seconds()]
    fastest = min((attempt.trial_seconds() for attempt in chosen), default=0.0)
    for attempt in chosen:
        attempt.slow = attempt.trial_seconds() > SLOW * fastest
    return chosen


def _require_tokens(config: ModelConfig, plan: Plan) -> None:
    longest = config.max_target_length
    if plan.tokens is not None and plan.tokens > longest:
        raise TfexportError(f"the model generates at most {longest} tokens. Give --tokens {longest} or fewer.")


def run(
    bundle: Bundle,
    sources: Sources,
    contestants: Sequence[Contestant],
    plan: Plan,
    *,
    begun: Callable[[dict[str, Any]], None],
    done: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
    cells: Sequence[Cell] | None = None,
    peaks: Mapping[int, Peaks] | None = None,
) -> dict[str, Any]:
    """Measure the machine and then the cells of `plan`. Returns the full record, ready for JSON.

    Args:
        begun: gets the record before there are cells.
        done: gets the record of each cell.
        cells: the cells of the plan to measure; by default all.
        peaks: the peaks of the machine, if known.

    Raises:
        TfexportError: the plan does not fit the model, or nothing could be measured.
    """
    bundle.graph("decoder_step")  # a classifier has nothing to decode
    _require_tokens(bundle.config, plan)  # before anything is measured
    busy = busy_cpus()
    if busy is not None and busy > BUSY:
        say(f"warning: {busy:.1f} CPUs are busy already, which affects the numbers. Stop other programs.")
    if peaks is None:
        say("measuring the machine")
        peaks = peaks_of(plan.threads)
    config = bundle.config
    measured: list[dict[str, Any]] = []
    record = {
        "machine": {**facts(), "busy_cpus": busy},
        "peaks": [peak.to_dict() for peak in peaks.values()],
        "options": asdict(plan),
        "contestants": [
            {"name": contestant.name, "path": contestant.path.name, "python": Path(contestant.python).name}
            for contestant in contestants
        ],
        "bundle": str(bundle.directory),
        "config": config.to_dict(),
        "weights_sha256": bundle.files[WEIGHTS_FILE],
        "cells": measured,
    }
    begun(record)

    def keep(cell: dict[str, Any]) -> None:
        measured.append(cell)
        done(cell)

    Bench(config, sources, contestants, plan, peaks, hire, say).run(keep, cells)
    rows = [row for cell in measured for row in cell["rows"]]
    if rows and all(row["tokens_per_second"] is None for row in rows):
        raise TfexportError(f"nothing could be measured: {rows[0]['reason']}")
    return record


def peaks_of(threads: Sequence[int]) -> dict[int, Peaks]:
    """The peaks of this machine for each number of `threads`, and for one thread."""
    wanted = sorted({1, *threads})
    with Process(ONE_THREAD) as process:
        answer = process.ask({"command": "peaks", "threads": wanted})
    by_threads: dict[int, Peaks] = {}
    for fields in answer["peaks"]:
        peaks = Peaks.from_dict(fields)
        by_threads[peaks.threads] = peaks.or_better(by_threads[max(by_threads)]) if by_threads else peaks
    return by_threads
