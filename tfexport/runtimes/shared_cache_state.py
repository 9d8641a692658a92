"""A batch in which the hypotheses of a sentence share a cache (see `shared_cache_mask.py`), in fixed buffers.

No slot is dropped: the cache is never larger than the caches of all rows would be.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tfexport.contract import BEST_TOKENS
from tfexport.runtimes.base import Ahead
from tfexport.runtimes.batch_state import BatchState
from tfexport.runtimes.device import DeviceTensor, Mirror
from tfexport.runtimes.device_pool import Mirrored, Region
from tfexport.runtimes.launches import BeamLaunch, slots_needed, tokens_needed
from tfexport.runtimes.live_rows import LiveRows
from tfexport.runtimes.outputs import FloatArray, IntArray
from tfexport.runtimes.shared_cache_mask import see_new_slots
from tfexport.runtimes.sources import Sources
from tfexport.runtimes.workspace import locked


class SharedCacheState(BatchState):
    """A batch during decoding, with a cache for each sentence.

    Args:
        mask: the slots that are the past of each row, [batch, 1, beam, cache]; None before the first step.
    """

    _input_names = ("tokens", "position", "slot")

    def __init__(
        self,
        sources: Sources,
        live: LiveRows,
        cache: Region | None = None,
        mask: NDArray[np.bool_] | None = None,
        filled: int = 0,
    ):
        super().__init__(sources, live, filled)
        config, graphs = self._workspace.config, self._workspace.graphs
        rows, grid = self._batch * self._beam, (self._batch, self._beam)
        steps = graphs.buckets.first_cache(sources.padded)
        self._cache = cache or self._empty_cache(steps)
        best = min(BEST_TOKENS, config.tgt_vocab_size)
        self._io = self._workspace.region(
            sources.batch_number,
            "io",
            tokens=(grid, "int64"),
            position=(grid, graphs.position_dtype),
            slot=((self._batch,), "int64"),
            **{"best.log_probs": ((rows, best), "float32"), "best.ids": ((rows, best), "int64")},
            logits=((rows, config.tgt_vocab_size), "float32"),
        )
        self._use_masks(mask)

    def _use_masks(self, mask: NDArray[np.bool_] | None) -> None:
        """Allocate two masks that take turns, for the present size of the cache. The first begins with `mask`."""
        shape = (self._batch, 1, self._beam, self._cache["all"].shape[-2])
        masks = {"mask": (shape, "bool"), "other": (shape, "bool")}
        self._masks = self._workspace.region(self._sources.batch_number, "masks", **masks)
        self._mask = self._workspace.mirror(self._masks["mask"])
        self._is_on_host = True
        """Whether the newest mask is on the host; else it is on the device."""
        self._mask.array[:] = False
        if mask is not None:
            self._mask.array[..., : mask.shape[3]] = mask
        self._see_own()

    def _see_own(self) -> None:
        """Let each row see the slot of its next token."""
        slot = self._filled * self._beam
        if slot < self._mask.array.shape[3]:
            see_new_slots(self._mask.array, np.arange(self._batch), np.full(self._batch, slot))

    @property
    def attention(self) -> FloatArray:
        raise NotImplementedError("steps with a shared cache return no attention")

    def _run(self, tokens: IntArray, results: Mirror | Mirrored) -> None:
        if (self._filled + 1) * self._beam > self._cache["all"].shape[-2]:
            self._grow(self._filled + 1)
        self._read_mask()
        self._inputs["tokens"].reshape(-1)[self._live.rows] = tokens
        self._inputs["position"][:] = self._filled
        self._inputs["slot"][:] = self._filled * self._beam
        self._inputs.push()
        self._mask.push()
        self._workspace.call(self._workspace.graphs.beam_step(), self._step_tensors())()
        results.pull()
        self._workspace.graphs.device.synchronize()
        self._filled += 1
        self._see_own()

    def _step_tensors(self) -> dict[str, DeviceTensor]:
        """The buffers of this state by the names of the step graph."""
        return {**self._io.tensors, "mask": self._masks["mask"], **self._inner_tensors()}

    def _begin(self, request: Ahead) -> BeamLaunch:
        workspace = self._workspace
        if (steps := slots_needed(self._filled, workspace)) * self._beam > self._cache["all"].shape[-2]:
            self._grow(steps)
        top_k, candidates = tokens_needed(request, workspace), request.candidates
        step = workspace.graphs.beam_step()

        def made() -> BeamLaunch:
            batch_number = self._sources.batch_number
            tensors = self._step_tensors()
            other = self._masks["other"]
            return BeamLaunch(workspace, batch_number, step, tensors, top_k, other=other, candidates=candidates)

        buffers = *self._sources.key, self._cache.key, self._io.key, self._masks.key
        launch = workspace.made((BeamLaunch, id(step), top_k, candidates, buffers), made)
        if self._is_on_host:
            self._mask.push()
            self._is_on_host = False
        launch.begin(request, self._filled, self._live)
        return launch

    def _read_mask(self) -> NDArray[np.bool_]:
        """The newest mask, on the host."""
        assert self._begun is None, "several steps are under way"
        if not self._is_on_host:
            self._mask.pull()
            self._workspace.graphs.device.synchronize()
            self._is_on_host = True
        return np.asarray(self._mask.array)

    @locked
    def select(self, rows: IntArray) -> SharedCacheState:
        live, parents = self._live.select(rows)
        batch = self._workspace.graphs.buckets.batch_after(self._batch, len(live), self._beam)
        if batch < self._batch:
            return self._smaller(batch, live, parents)
        self._live = live
        if (parents.ravel() != live.rows).any():
            self._move_rows(live.rows, parents.ravel())
        return self

    def _move_rows(self, rows: IntArray, parents: IntArray) -> None:
        """Let `rows` of the mask continue their `parents`."""
        mask = self._read_mask().reshape(self._batch * self._beam, -1)
        own = self._filled * self._beam
        mask[rows] = mask[parents]
        mask[:, own : own + self._beam] = False
        self._see_own()

    def _smaller(self, batch: int, live: LiveRows, parents: IntArray) -> SharedCacheState:
        """This state in buffers for `batch` sentences."""
        if (parents.ravel() != live.rows).any():
            self._move_rows(live.rows, parents.ravel())
        workspace, batch_number = self._workspace, self._sources.batch_number
        sentences, _ = live.compact(parents, batch)
        mask = self._read_mask()[sentences]
        index = workspace.region(batch_number, "smaller", sentences=((batch,), "int64"))
        host_index = workspace.mirrored(index, "sentences")
        host_index["sentences"][:] = sentences
        host_index.push()
        sources = self._sources.gathered(sentences, index["sentences"])
        cache = workspace.gather(batch_number, "cache", self._cache, index["sentences"])
        workspace.graphs.device.synchronize()
        return SharedCacheState(sources, LiveRows.first(len(live), self._beam), cache, mask, self._filled)

    def _empty_cache(self, steps: int) -> Region:
        """A cache for `steps` steps. Each step takes a slot for each hypothesis."""
        flat = self._workspace.graphs.flat
        return self._workspace.empty_cache(self._sources.batch_number, self._batch, steps * self._beam, flat=flat)

    def _grow(self, steps: int) -> None:
        """Continue in a cache for at least this number of `steps`."""
        mask = self._read_mask().copy()
        cache = self._empty_cache(self._workspace.graphs.buckets.cache_for(steps))
        self._workspace.copy_slots(cache, self._cache, self._filled * self._beam)
        self._cache = cache
        self._use_masks(mask)
