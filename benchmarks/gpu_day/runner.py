"""Runs the stages of a day: one after the other, each under its limit, with the state saved before and after each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_day.plan import GRACE, Stage
from benchmarks.gpu_day.state import DONE, FAILED, INTERRUPTED, NOT_RUN, RAN, REHEARSED, RUNNING, TIMED_OUT, State, now


@dataclass(frozen=True)
class Outcome:
    """How the process of a stage ended."""

    code: int | None
    """Its exit code, negative for a signal; None if it was stopped at its limit."""
    seconds: float
    last_line: str = ""


Launch = Callable[[Stage, float], Outcome]
"""Runs the process of a stage for at most so many seconds."""


def run(
    stages: Sequence[Stage],
    state: State,
    launch: Launch,
    *,
    seconds: float,
    again: bool = False,
    saved: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Run those of `stages` that are not done, in their order, within `seconds` in all.

    A stage for which too little of its limit is left is not run, and waits for the next time. A failure or a stop of one
    changes nothing for the others.

    Args:
        again: run also what is done.
        saved: called after each change of the state, to write what follows from it.
        say: gets a line for each stage.

    Returns:
        Whether all of them ended as they should.
    """
    end = clock() + seconds
    for stage in stages:
        if state.status(stage.name) in DONE and not again:
            say(f"{stage.name}: {state.status(stage.name)} before")
            continue
        left = end - clock() - GRACE
        if left < stage.least:
            reason = f"{max(0, left):.0f} s were left, it needs {stage.least}"
            if state.status(stage.name) == NOT_RUN:
                state.note(stage.name, NOT_RUN, reason=reason)
            say(f"{stage.name}: not run now: {reason}")
            continue
        limit = min(stage.limit, left)
        _run_one(stage, state, launch, limit, say)
        saved()
    saved()
    return all(_as_it_should(stage, state) for stage in stages)


def _run_one(stage: Stage, state: State, launch: Launch, limit: float, say: Callable[[str], None]) -> None:
    facts = {"began": now(), "limit": round(limit)}
    say(f"{stage.name}: at most {limit:.0f} s: {stage.about}")
    state.note(stage.name, RUNNING, **facts)
    try:
        outcome = launch(stage, limit)
    except BaseException as error:  # the day is ended from outside, or a stage cannot be started
        ended = not isinstance(error, Exception)
        reason = "the day ended while it ran" if ended else f"it could not be started: {error}"
        state.note(stage.name, INTERRUPTED if ended else FAILED, **facts, reason=reason)
        if ended:
            raise
        say(f"{stage.name}: failed: {reason}")
        return
    status, reason = _judged(outcome, limit, rehearsal=state.rehearsal)
    state.note(stage.name, status, **facts, seconds=round(outcome.seconds, 1), reason=reason)
    say(f"{stage.name}: {status} after {outcome.seconds:.0f} s" + (f": {reason}" if reason else ""))


def _judged(outcome: Outcome, limit: float, *, rehearsal: bool) -> tuple[str, str]:
    if outcome.code is None:
        return TIMED_OUT, f"stopped after {limit:.0f} s; what it had written is kept"
    if outcome.code:
        how = f"signal {-outcome.code}" if outcome.code < 0 else f"exit code {outcome.code}"
        return FAILED, f"{how}: {outcome.last_line}" if outcome.last_line else how
    return (REHEARSED if rehearsal else RAN), ""


def _as_it_should(stage: Stage, state: State) -> bool:
    return state.status(stage.name) in ({TIMED_OUT} if stage.hangs else {RAN, REHEARSED})


def last_line(log: Path) -> str:
    """The last line that says something, of at most 300 characters."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
