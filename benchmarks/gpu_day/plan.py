"""The stages of a day, the most valuable first, and the time that each may take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MINUTES = 25.0
"""The whole day."""
GRACE = 5.0
"""Seconds that a stage has to end after it was asked to; then it is killed."""
LEAST = 0.6
"""The share of its limit for which a stage is still worth starting."""


@dataclass(frozen=True)
class Stage:
    """A process of a day: `python -m benchmarks.gpu_day.stages.NAME`, with `_` for `-`."""

    name: str
    about: str
    limit: int
    """Seconds."""
    hangs: bool = False
    """It is there to be stopped: a rehearsal shows with it that the others do not suffer."""

    @property
    def module(self) -> str:
        return f"benchmarks.gpu_day.stages.{self.name.replace('-', '_')}"

    @property
    def least(self) -> int:
        """Seconds below which it is not started."""
        return math.ceil(LEAST * self.limit)


STAGES = (
    Stage("environment", "the machine: GPU, driver, clocks, versions, commit", 40),
    Stage(
        "smoke",
        "8 sentences beside PyTorch on the CPU: fp32, fp16 and bf16, greedy and beam 4; which kernels ran",
        120,
    ),
    Stage("tests", "tests/gpu without those that compile", 200),
    Stage("export", "the base model of the paper: `tfexport export`, and CTranslate2's converter", 120),
    Stage("speed", "ort-cuda beside eager PyTorch, Hugging Face and CTranslate2", 300),
    Stage("profile", "microseconds a node of a step, and the gaps between nodes", 60),
    Stage("compiled", "speed of compiled PyTorch beside ort-cuda", 180),
    Stage("compiled-tests", "tests/gpu that compile", 440),
)

HANG = Stage("hang", "a stage that never ends, to see that it is stopped", 6, hangs=True)


def stages(*, rehearsal: bool) -> tuple[Stage, ...]:
    """All stages in their order; a rehearsal has one more, which hangs."""
    if not rehearsal:
        return STAGES
    return (*STAGES[:2], HANG, *STAGES[2:])


class UnknownStage(Exception):
    """There is no stage of this name."""


def chosen(all_stages: Sequence[Stage], *, first: str | None = None, only: str | None = None) -> tuple[Stage, ...]:
    """The stages from `first` on, or `only` one; all where neither is given.

    Raises:
        UnknownStage: there is none of this name; the message lists those that there are.
    """
    names = [stage.name for stage in all_stages]
    asked = only or first
    if asked is None:
        return tuple(all_stages)
    if asked not in names:
        raise UnknownStage(f"there is no stage {asked!r}. Give one of: {', '.join(names)}.")
    start = names.index(asked)
    return tuple(all_stages[start : start + 1] if only else all_stages[start:])
