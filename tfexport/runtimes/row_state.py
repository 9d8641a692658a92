"""A batch in which each row has a cache of its own."""

from __future__ import annotations

from tfexport.contract import BEST_TOKENS
from tfexport.runtimes.base import Ahead
from tfexport.runtimes.batch_state import BatchState
from tfexport.runtimes.device import Call, DeviceTensor, Mirror
from tfexport.runtimes.device_pool import Mirrored, Region
from tfexport.runtimes.launches import GreedyLaunch, slots_needed, tokens_needed
from tfexport.runtimes.live_rows import LiveRows
from tfexport.runtimes.outputs import FloatArray, IntArray
from tfexport.runtimes.sources import Sources
from tfexport.runtimes.workspace import locked


class RowState(BatchState):
    """A batch during decoding, with a cache for each row."""

    _input_names = ("tokens", "position", "index")

    def __init__(
        self, sources: Sources, live: LiveRows, cache: Region | None = None, filled: int = 0, *, attention: bool = False
    ):
        super().__init__(sources, live, filled)
        self._reorder: IntArray | None = None
        """The row of the cache that each row of the next step continues, [rows]; None if the cache is in order."""
        config, graphs = self._workspace.config, self._workspace.graphs
        places = self._batch * self._beam
        self._cache = cache or self._empty_cache(graphs.buckets.first_cache(sources.padded))
        self._steps: dict[DeviceTensor, Call] = {}  # the bound step graph for each buffer of the cache
        best = min(BEST_TOKENS, config.tgt_vocab_size)
        self._io = self._workspace.region(
            sources.batch_number,
            "io",
            tokens=((places,), "int64"),
            position=((places,), graphs.position_dtype),
            index=((places,), "int64"),
            **{"best.log_probs": ((places, best), "float32"), "best.ids": ((places, best), "int64")},
            logits=((places, config.tgt_vocab_size), "float32"),
            **self._attention_spec(places) if attention else {},
        )
        self._attention = self._workspace.mirror(self._io["attention"]) if attention else None

    def _attention_spec(self, places: int) -> dict[str, tuple[tuple[int, ...], str]]:
        config = self._workspace.config
        shape = (config.n_decoder_layers, places, config.n_heads, self._sources.padded)
        return {"attention": (shape, "float32")}

    @property
    @locked
    def attention(self) -> FloatArray:
        assert self._attention is not None, "encode was called without attention=True"
        return self._attention.array[:, self._live.rows, :, : self._sources.length]

    def _begin(self, request: Ahead) -> GreedyLaunch:
        assert self._beam == 1, "the rows of a beam would have to be gathered"
        workspace = self._workspace
        if (slots := slots_needed(self._filled, workspace)) > self._cache["all"].shape[-2]:
            self._grow(slots)
        top_k, step = tokens_needed(request, workspace), workspace.graphs.step(self._cache["all"].shape[-2])

        def made() -> GreedyLaunch:
            return GreedyLaunch(workspace, self._sources.batch_number, step, self._step_tensors(), top_k)

        buffers = *self._sources.key, self._cache.key, self._io.key
        launch = workspace.made((GreedyLaunch, id(step), top_k, buffers), made)
        launch.begin(request, self._filled, self._live)
        return launch

    def _run(self, tokens: IntArray, results: Mirror | Mirrored) -> None:
        assert self._begun is None, "several steps are under way"
        self._inputs["tokens"][self._live.rows] = tokens
        self._inputs["position"][:] = self._filled
        if self._reorder is not None:
            self._inputs["index"][:] = self._reorder
        self._inputs.push()
        if self._reorder is not None:
            self._cache, self._reorder = self._reordered(), None
        if self._filled == self._cache["all"].shape[-2]:
            self._grow(self._filled + 1)
        if self._cache["all"] not in self._steps:
            self._steps[self._cache["all"]] = self._bound_step()
        self._steps[self._cache["all"]]()
        results.pull()
        if self._attention:
            self._attention.pull()
        self._workspace.graphs.device.synchronize()
        self._filled += 1

    def _reordered(self) -> Region:
        """The cache in the order of `index`."""
        return self._workspace.gather(self._sources.batch_number, "cache", self._cache, self._io["index"])

    def _step_tensors(self) -> dict[str, DeviceTensor]:
        """The buffers of this state by the names of the step graph."""
        tensors = {name: tensor for name, tensor in self._io.tensors.items() if name != "index"}
        return {**tensors, **self._inner_tensors()}

    def _bound_step(self) -> Call:
        size = self._cache["all"].shape[-2]
        step = self._workspace.graphs.step(size, attention=self._attention is not None)
        return self._workspace.call(step, self._step_tensors())

    @locked
    def select(self, rows: IntArray) -> RowState:
        live, parents = self._live.select(rows)
        batch = self._workspace.graphs.buckets.batch_after(self._batch, len(live), self._beam)
        if batch < self._batch:
            return self._smaller(batch, live, parents)
        self._live = live
        index = live.reorder(parents, self._batch)
        if index is not None:
            self._reorder = index if self._reorder is None else self._reorder[index]
        return self

    def _smaller(self, batch: int, live: LiveRows, parents: IntArray) -> RowState:
        """This state in buffers for `batch` sentences."""
        assert self._begun is None, "several steps are under way"
        workspace, batch_number = self._workspace, self._sources.batch_number
        sentences, rows = live.compact(parents, batch)
        index = workspace.region(batch_number, "smaller", sentences=((batch,), "int64"), rows=((len(rows),), "int64"))
        host_index = workspace.mirrored(index, "sentences", "rows")
        host_index["sentences"][:] = sentences
        host_index["rows"][:] = rows if self._reorder is None else self._reorder[rows]
        host_index.push()
        sources = self._sources.gathered(sentences, index["sentences"])
        cache = workspace.gather(batch_number, "cache", self._cache, index["rows"])
        workspace.graphs.device.synchronize()
        first = LiveRows.first(len(live), self._beam)
        return RowState(sources, first, cache, self._filled, attention=self._attention is not None)

    def _empty_cache(self, size: int) -> Region:
        return self._workspace.empty_cache(self._sources.batch_number, self._batch * self._beam, size)

    def _grow(self, slots: int) -> None:
        """Continue in a cache with at least this number of `slots`."""
        cache = self._empty_cache(self._workspace.graphs.buckets.cache_for(slots))
        self._workspace.copy_slots(cache, self._cache, self._filled)
        self._cache = cache
