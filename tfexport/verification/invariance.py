"""Checks that the output of a sentence does not depend on its batch, cache and threads, by comparing a runtime with itself.

The tokens of each sentence decoded alone are compared with those of the same sentence

    shuffled          in batches of all lengths, in random order
    padded            in batches with a source twice as long as the longest, or as long as the model takes
    other cache       in caches that grow by other steps
    poisoned cache    in caches whose unused slots hold NaN (see `_with_poisoned_cache`)
    2 threads         where it was decoded with one
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfexport.bundle.reader import Bundle
from tfexport.contract import Precision
from tfexport.errors import TfexportError
from tfexport.runtimes import load_runtime
from tfexport.runtimes.base import Runtime
from tfexport.search.search import Hypothesis, SearchOptions, search

TIE = 1e-3
"""Two outputs whose scores differ by less are a tie, because rounding may decide it: float32 has an error of 1e-5."""

BLOCK, ROOM = 24, 5
"""Sizes of the other cache: they neither divide the usual sizes nor are divided by them."""

STALE = 1e4
"""A value for stale memory that a kernel reads with a weight of 0."""

Outputs = list[Hypothesis]


@dataclass(frozen=True)
class Arrangement:
    """One way to decode, compared with each sentence alone."""

    name: str
    identical: int
    """The number of sentences with the same tokens."""
    exact: int
    """The number of sentences whose scores are also the same to the last bit."""
    ties: int
    """The number of sentences with other tokens but an equally good score, within `TIE`."""
    error: str | None = None
    """The reason why nothing was decoded, such as scores that are NaN."""


@dataclass(frozen=True)
class Invariance:
    """The result for one runtime, precision and beam."""

    runtime: str
    precision: Precision
    beam: int
    sentences: int
    arrangements: tuple[Arrangement, ...]

    @property
    def passed(self) -> bool:
        """Whether all tokens are the same, except for ties."""
        return all(arrangement.identical + arrangement.ties == self.sentences for arrangement in self.arrangements)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        arrangements = [vars(arrangement) for arrangement in self.arrangements]
        return {**vars(self), "arrangements": arrangements, "passed": self.passed}


def invariance(
    bundle: Bundle,
    name: str,
    precision: Precision,
    sources: Sequence[Sequence[int]],
    options: SearchOptions,
    *,
    batch_size: int = 32,
) -> Invariance:
    """Decode `sources`, lists of encoder ids, in all arrangements that the runtime `name` supports.

    Raises:
        TfexportError: the runtime cannot be loaded, or it returns no numbers.
    """
    runtime = load_runtime(name, bundle, precision=precision, threads=1)
    batch_size = runtime.capacity.batch_size(batch_size, options.beam)
    order = np.random.default_rng(0).permutation(len(sources)).tolist()
    try:
        alone = [search(runtime, [source], options)[0][0] for source in sources]
    except TfexportError as error:
        return Invariance(name, precision, options.beam, len(sources), (Arrangement("alone", 0, 0, 0, str(error)),))

    def in_batches(runtime: Runtime) -> Outputs:
        return _in_order(order, (search(runtime, [sources[i] for i in c], options) for c in _cut(order, batch_size)))

    def padded() -> Outputs:
        # Only the length of the longest source matters, not its tokens.
        longest = max(sources, key=len)
        most = min(runtime.capacity.source, 2 * len(longest))
        filler = [longest[i % len(longest)] for i in range(most)]
        size = max(1, batch_size - 1)
        batches = (search(runtime, [*[sources[i] for i in c], filler], options)[:-1] for c in _cut(order, size))
        return _in_order(order, batches)

    ways: dict[str, Callable[[], Outputs]] = {"shuffled": lambda: in_batches(runtime)}
    if (runtime.capacity.batch or 2) > 1:
        ways["padded"] = padded
    if name == "ort-cpu":
        ways |= {
            "other cache": lambda: in_batches(_with_other_cache(bundle, precision)),
            "poisoned cache": lambda: in_batches(_with_poisoned_cache(bundle, precision, options.beam)),
            "2 threads": lambda: in_batches(load_runtime(name, bundle, precision=precision, threads=2)),
        }
    arrangements = tuple(_beside(way, alone, decode) for way, decode in ways.items())
    return Invariance(name, precision, options.beam, len(sources), arrangements)


def _cut(order: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _in_order(order: Sequence[int], batches: Iterator[list[list[Hypothesis]]]) -> Outputs:
    """The best hypotheses of sentences that were decoded in `order`, in the original order."""
    best = [hypotheses[0] for batch in batches for hypotheses in batch]
    return [hypothesis for _, hypothesis in sorted(zip(order, best, strict=True), key=lambda pair: pair[0])]


def _beside(name: str, alone: Outputs, decode: Callable[[], Outputs]) -> Arrangement:
    try:
        pairs = list(zip(alone, decode(), strict=True))
    except TfexportError as error:
        return Arrangement(name, 0, 0, 0, str(error))
    same = [(alone_best, two) for alone_best, two in pairs if alone_best.ids == two.ids]
    exact = sum(alone_best.score == two.score for alone_best, two in same)
    ties = sum(abs(alone_best.score - two.score) <= TIE for alone_best, two in pairs if alone_best.ids != two.ids)
    return Arrangement(name, len(same), exact, ties)


def _with_other_cache(bundle: Bundle, precision: Precision) -> Runtime:
    from tfexport.runtimes.ort_cpu.context import CacheLayout
    from tfexport.runtimes.ort_cpu.load import ort_cpu

    return ort_cpu(bundle, precision=precision, threads=1, layout=CacheLayout(block=BLOCK, room=ROOM))


def _with_poisoned_cache(bundle: Bundle, precision: Precision, beam: int) -> Runtime:
    """A runtime whose unused cache slots contain NaN if the kernel never reads them, as in the greedy caches of the dialect
    `ort`. Elsewhere they contain large numbers: a hidden slot is read with a weight of 0, and 0 * NaN is NaN. (The contract
    has zeros there.)"""
    from tfexport.runtimes.ort_cpu.context import CacheLayout
    from tfexport.runtimes.ort_cpu.load import ort_cpu

    unread = beam == 1 and bundle.has_graph("decoder_step", precision, "ort")
    return ort_cpu(bundle, precision=precision, threads=1, layout=CacheLayout(fill=math.nan if unread else STALE))
