"""`ServingOptions`: the options of a scheduler, each declared once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tfexport.option import MOST_AT_ONCE, Options, option

_BATCHES = "Batches"
_QUEUE = "Queue"
_WORKERS = "Workers"

WorkerKind = Literal["auto", "threads", "processes"]


@dataclass(frozen=True, kw_only=True)
class ServingOptions(Options):
    """The options of a scheduler.

    Raises:
        TfexportError: an option is out of range.
    """

    slots: int = option(
        64,
        minimum=1,
        maximum=MOST_AT_ONCE,
        help="Rows that a worker decodes at once: the hypotheses of all its sentences.",
        default_text="64; `tfexport serve` on a CPU: 32",
        panel=_BATCHES,
    )
    cache_tokens: int = option(
        65_536,
        minimum=1,
        help="Largest cache of a worker in tokens: its rows times their longest source and output.",
        panel=_BATCHES,
    )
    step_tokens: int = option(
        512,
        minimum=1,
        help="Largest number of source ids that a worker encodes between two steps; a longer sentence is encoded alone.",
        panel=_BATCHES,
    )
    max_queue: int = option(
        1024, minimum=1, help="Largest number of waiting requests; more are rejected at once.", panel=_QUEUE
    )
    max_queue_tokens: int = option(
        262_144,
        minimum=1,
        help="Largest number of source ids in the queue; an empty queue accepts a larger request.",
        panel=_QUEUE,
    )
    max_wait: float | None = option(
        None,
        above=0,
        help="Longest expected wait in seconds, at the speed of the last seconds; other requests are rejected at once.",
        default_text="none; `tfexport serve`: 1",
        panel=_QUEUE,
    )
    bulk_share: float = option(
        0.2,
        above=0,
        maximum=1,
        help="Share of bulk requests among the sentences that begin, while interactive requests wait too.",
        panel=_QUEUE,
    )
    timeout: float | None = option(
        None, above=0, help="Seconds after which a request without a deadline of its own expires.", panel=_QUEUE
    )
    workers: int = option(
        1,
        minimum=1,
        maximum=256,
        help="Workers, each with its own batches; they share one set of weights.",
        default_text="1; `tfexport serve`: one for each CPU",
        panel=_WORKERS,
    )
    worker_timeout: float = option(
        60.0,
        above=0,
        help="Seconds after which a worker that has sentences and does not report is replaced. It reports after every few "
        "steps.",
        panel=_WORKERS,
    )
    worker_kind: WorkerKind = option(
        "auto",
        help="Kind of workers: threads, or processes, which do not wait for each other; auto uses processes for several.",
        panel=_WORKERS,
    )
