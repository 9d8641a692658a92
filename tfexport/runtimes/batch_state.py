"""The base class of batches in fixed buffers: it runs steps, one by one or several in one launch."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from tfexport.contract import BEST_TOKENS
from tfexport.runtimes.base import Ahead
from tfexport.runtimes.device import DeviceTensor, Mirror
from tfexport.runtimes.device_pool import Mirrored, Region
from tfexport.runtimes.launches import BeamLaunch, GreedyLaunch
from tfexport.runtimes.live_rows import LiveRows
from tfexport.runtimes.outputs import Best, Continuations, FloatArray, IntArray, best_from_logits
from tfexport.runtimes.sources import Sources
from tfexport.runtimes.workspace import locked


class BatchState:
    """A batch during decoding; `live` says which rows of the buffers its live sentences have.

    A subclass allocates the buffers of a step, `_io`, and the cache, and implements `_run` and `_begin`.
    """

    _input_names: ClassVar[tuple[str, ...]]
    """The tensors of `_io` that the host writes before each step. They lie one after the other."""
    _io: Region
    _cache: Region

    def __init__(self, sources: Sources, live: LiveRows, filled: int):
        self._sources = sources
        self._workspace = sources.workspace
        self._live = live
        self.lock = self._workspace.lock
        self._batch = sources.batch
        self._beam = live.beam
        self._filled = filled
        self._begun: GreedyLaunch | BeamLaunch | None = None
        """The launch of the next `search_ahead`, if it has begun."""

    @property
    def rows(self) -> int:
        return len(self._live.rows)

    @property
    @locked
    def cross(self) -> list[FloatArray]:
        return self._sources.read(self._live.places)

    @locked
    def step(self, tokens: IntArray) -> FloatArray:
        """Logits [rows, vocab] after `tokens` [rows]."""
        self._run(tokens, self._logits)
        logits: FloatArray = self._logits.array[self._live.rows]  # a copy: the next step overwrites the mirror
        return logits

    @locked
    def best(self, tokens: IntArray, count: int) -> Best:
        """The `count` best tokens of each row after `tokens` [rows]; only they leave the device, up to `BEST_TOKENS`."""
        if min(count, self._workspace.config.tgt_vocab_size) > BEST_TOKENS:
            return best_from_logits(self.step(tokens), count)
        self._run(tokens, self._best)
        return Best(*(self._best[name][self._live.rows][:, :count] for name in self._best.names))

    @locked
    def search_ahead(self, request: Ahead) -> Continuations:
        """The best continuations of each sentence in each of the next `AHEAD` steps; see `Runtime.search_ahead`."""
        launch = self._begun or self._begin(request)
        self._begun = None
        continuations = launch.continuations(self._live)
        self._filled += len(continuations.tokens)
        return continuations

    @locked
    def begin_ahead(self, request: Ahead, sentences: int) -> None:
        """Begin the next `search_ahead`, unless the batch may move to smaller buffers before it."""
        if self._workspace.graphs.buckets.batch_after(self._batch, sentences, self._beam) == self._batch:
            self._begun = self._begin(request)

    def _run(self, tokens: IntArray, results: Mirror | Mirrored) -> None:
        """Run a step after `tokens` [rows], copy `results` to the host, and wait."""
        raise NotImplementedError

    def _begin(self, request: Ahead) -> GreedyLaunch | BeamLaunch:
        """Enqueue the steps of `request`."""
        raise NotImplementedError

    def _inner_tensors(self) -> dict[str, DeviceTensor]:
        """The sources and the cache by the names of the step graph; past and present are the same buffer."""
        past, present = (self._workspace.named(kind, self._cache) for kind in ("past", "present"))
        return {**self._sources.tensors, **past, **present}

    @cached_property
    def _inputs(self) -> Mirrored:
        inputs = self._workspace.mirrored(self._io, *self._input_names)
        inputs["tokens"][:] = self._workspace.config.bos_id  # empty places read it
        return inputs

    @cached_property
    def _best(self) -> Mirrored:
        return self._workspace.mirrored(self._io, "best.log_probs", "best.ids")

    @cached_property
    def _logits(self) -> Mirror:
        """The logits of a step. The host array is allocated at the first `step`, because it may be large."""
        return self._workspace.mirror(self._io["logits"])
