"""`ServingOptions`: what a scheduler may use, each option declared once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tfexport.option import MOST_AT_ONCE, Options, option

_BATCHES, _QUEUE, _WORKERS = "Batches", "Queue", "Workers"

WorkerKind = Literal["auto", "threads", "processes"]


@dataclass(frozen=True, kw_only=True)
class ServingOptions(Options):
    """How requests are scheduled.

    Raises:
        TfexportError: an option is out of range.
    """

    slots: int = option(
        64,
        minimum=1,
        maximum=MOST_AT_ONCE,
        help="Rows that a worker decodes at once: hypotheses of all its sentences.",
        default_text="64; `tfexport serve` on a CPU: 32",
        panel=_BATCHES,
    )
    cache_tokens: int = option(
        65_536,
        minimum=1,
        help="Largest cache of a worker in tokens: rows times the longest source and output of them.",
        panel=_BATCHES,
    )
    step_tokens: int = option(
        512,
        minimum=1,
        help="Source ids that a worker encodes between two steps, at most; a longer sentence is encoded alone.",
        panel=_BATCHES,
    )
    max_queue: int = option(
        1024, minimum=1, help="Requests that wait, at most; more are rejected at once.", panel=_QUEUE
    )
    max_queue_tokens: int = option(
        262_144,
        minimum=1,
        help="Source ids of the requests that wait, at most; a larger request is taken by an empty queue.",
        panel=_QUEUE,
    )
    max_wait: float | None = option(
        None,
        above=0,
        help="Seconds that a request may be expected to wait, by the speed of late; others are rejected at once.",
        default_text="none; `tfexport serve`: 1",
        panel=_QUEUE,
    )
    bulk_share: float = option(
        0.2,
        above=0,
        maximum=1,
        help="Part of the sentences that begin which are of bulk requests, while interactive ones wait too.",
        panel=_QUEUE,
    )
    timeout: float | None = option(
        None, above=0, help="Seconds after which a request without a deadline of its own expires.", panel=_QUEUE
    )
    workers: int = option(
        1,
        minimum=1,
        maximum=256,
        help="Workers, each with batches of its own, over one set of weights.",
        default_text="1; `tfexport serve`: one for each CPU",
        panel=_WORKERS,
    )
    worker_kind: WorkerKind = option(
        "auto",
        help="What workers are: threads, or processes, which do not wait for each other; auto takes processes for several.",
        panel=_WORKERS,
    )
