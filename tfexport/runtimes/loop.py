"""Exported graphs over fixed buffers: ONNX Runtime on a GPU, TensorRT, and the portable graphs on a CPU.

A library brings `Graphs`: how to run each graph of the contract on tensors at given addresses. Everything else is here:

    encode   source ids ──encoder──> cross keys/values, once for a batch
    step     tokens ──decoder_step──> logits and best tokens; writes one slot of the cache, in place
    select   before the next step, a beam reorder gathers the cache into a second buffer, and the two take turns (an identity
             moves nothing);
             sentences that are done leave their places empty until a smaller batch is to be had for one gather
    growth   a full cache is copied into the next larger bucket

On a GPU, batch, source and cache sizes are rounded up to buckets, so that recorded graphs can be replayed. On a CPU
only the cache is. A step allocates only if the cache grows, or if a reorder of beams needs a buffer that the pool does
not have. Several threads may decode over one runtime: they take turns, call by call, because memory, bound tensors and
a GPU's stream are shared.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from tfexport.config import ModelConfig
from tfexport.contract import BEST, ITEM_SIZES, Precision, cache_names
from tfexport.runtimes.base import BaseRuntime, Best, Capacity, FloatArray, IntArray, best_from_logits
from tfexport.runtimes.buckets import Buckets
from tfexport.runtimes.device import Call, Device, DeviceTensor, Mirror, to_float32
from tfexport.runtimes.device_pool import Lane, MemoryPool, Mirrored, Region
from tfexport.runtimes.slots import Slots, fill_sources

CACHED = 128
"""Bound graphs, and mirrors of tensors, that are kept for the next batch with the same addresses and shapes."""


Value = TypeVar("Value")


class Executable(Protocol):
    """A graph of the contract, loaded by a library."""

    def bind(self, tensors: Mapping[str, DeviceTensor]) -> Call:
        """A call that enqueues one run on `tensors`, which are all inputs and outputs of the graph by their names."""
        ...


class Graphs(Protocol):
    """A bundle's graphs in one precision, loaded by a library."""

    @property
    def device(self) -> Device: ...

    @property
    def precision(self) -> Precision: ...

    @property
    def buckets(self) -> Buckets: ...

    @property
    def encoder(self) -> Executable: ...

    @property
    def select_rows(self) -> Executable: ...

    def step(self, cache: int, *, attention: bool = False) -> Executable:
        """The decoder step for caches of `cache` slots, one of the buckets.

        Args:
            attention: the variant of the step that has the cross-attention as an output.

        Raises:
            RuntimeUnavailable, BundleError: there is no such variant.
        """
        ...


def _locked(method: Callable[..., Value]) -> Callable[..., Value]:
    """A method of a state that holds the lock of its runtime."""

    @wraps(method)
    def with_lock(state: LoopState, *arguments: Any) -> Value:
        with state.lock:
            return method(state, *arguments)

    return with_lock


def _cached(values: OrderedDict[Any, Value], key: Any, make: Callable[[], Value]) -> Value:
    """`values[key]`, which `make` makes if it is new. The least recently used value is dropped."""
    if key in values:
        values.move_to_end(key)
    else:
        values[key] = make()
        if len(values) > CACHED:
            values.popitem(last=False)
    return values[key]


class LoopRuntime(BaseRuntime):
    """A runtime over `Graphs`, in buffers of a few sizes."""

    def __init__(self, name: str, config: ModelConfig, graphs: Graphs):
        self._name, self._config, self._graphs = name, config, graphs
        # With buckets the same sizes come again, and each should find its memory. Without, they seldom do.
        bucketed = graphs.buckets.batch is not None
        self._pool = MemoryPool(graphs.device, kept=256 if bucketed else 8, by_use=bucketed)
        self._lanes: set[int] = set()
        self._calls: OrderedDict[Any, Call] = OrderedDict()
        self._mirrors: OrderedDict[DeviceTensor, Mirror] = OrderedDict()
        self.lock = threading.RLock()
        """Threads decode one call after the other: they share memory, bound tensors and a stream."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def precision(self) -> Precision:
        return self._graphs.precision

    @property
    def capacity(self) -> Capacity:
        return self._graphs.buckets.capacity(self._config)

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> LoopState:
        with self.lock:
            if attention:
                self._graphs.step(self._graphs.buckets.cache_for(1), attention=True)  # raises if there is none
            return self._encode(src_ids, src_len, beam, attention)

    def _encode(self, src_ids: IntArray, src_len: IntArray, beam: int, attention: bool) -> LoopState:
        buckets, sentences = self._graphs.buckets, len(src_len)
        batch, src = buckets.batch_for(sentences, beam), buckets.src_for(src_ids.shape[1])
        lane = Lane(self._lanes)
        inputs, cross = self.inputs(lane, batch, src), self.blocks(lane, "cross", batch, src)
        source = self.mirrored(inputs, "src_len", "src_ids")
        fill_sources(source["src_ids"], source["src_len"], src_ids, src_len, pad_id=self._config.pad_id)
        source.push()
        self.call(self._graphs.encoder, {**inputs.tensors, **self.named("cross", cross)})()
        slots = Slots.first(sentences, beam)
        return LoopState(self, lane, slots, src_ids.shape[1], inputs, source, cross, attention=attention)

    def step(self, state: LoopState, tokens: IntArray) -> tuple[FloatArray, LoopState]:
        return state.step(tokens), state

    def best(self, state: LoopState, tokens: IntArray, count: int) -> tuple[Best, LoopState]:
        return state.best(tokens, count), state

    # For the states.

    @property
    def graphs(self) -> Graphs:
        return self._graphs

    def region(self, lane: Lane, use: str, **tensors: tuple[tuple[int, ...], str]) -> Region:
        return Region(self._pool, f"{use} {lane.number}", **tensors)

    def inputs(self, lane: Lane, batch: int, src: int) -> Region:
        """The source of a batch; a batch that became smaller has it too, so that `src_len` lies where it always does."""
        return self.region(lane, "inputs", src_len=((batch,), "int64"), src_ids=((batch, src), "int64"))

    def mirror(self, tensor: DeviceTensor) -> Mirror:
        return _cached(self._mirrors, tensor, lambda: self._graphs.device.mirror(tensor))

    def mirrored(self, region: Region, *names: str) -> Mirrored:
        """Host arrays beside tensors of `region` that lie one after the other."""
        return Mirrored(self.mirror(region.span(*names)), region, *names)

    def blocks(self, lane: Lane, use: str, rows: int, length: int) -> Region:
        """Keys and values of all layers in one tensor `all`, [blocks, rows, heads, length, head_dim]."""
        config = self._config
        shape = (2 * config.n_decoder_layers, rows, config.n_heads, length, config.head_dim)
        return self.region(lane, use, all=(shape, self._graphs.precision))

    def named(self, kind: Any, blocks: Region) -> dict[str, DeviceTensor]:
        """The tensors of `blocks` by their names in the contract."""
        address, (n_blocks, *shape), dtype = blocks["all"]
        nbytes = blocks["all"].nbytes // n_blocks
        names = cache_names(self._config, kind)
        return {name: DeviceTensor(address + i * nbytes, tuple(shape), dtype) for i, name in enumerate(names)}

    def call(self, executable: Executable, tensors: Mapping[str, DeviceTensor]) -> Call:
        """`executable` bound to `tensors`. The call is kept for the next time that they have these addresses and shapes."""
        return _cached(self._calls, (id(executable), *tensors.values()), lambda: executable.bind(tensors))

    def gather(self, lane: Lane, use: str, blocks: Region, index: DeviceTensor) -> Region:
        """The rows `index` of `blocks`, gathered into other memory."""
        n_blocks, rows, heads, length, head_dim = blocks["all"].shape
        target = self.blocks(lane, use, index.shape[0], length)
        width = heads * length * head_dim
        tensors = {
            "tensors": blocks["all"]._replace(shape=(n_blocks, rows, width)),
            "index": index,
            "selected": target["all"]._replace(shape=(n_blocks, index.shape[0], width)),
        }
        self.call(self._graphs.select_rows, tensors)()
        return target


class LoopState:
    """A batch during decoding; `slots` are the places of its live sentences in the buffers."""

    def __init__(
        self,
        runtime: LoopRuntime,
        lane: Lane,
        slots: Slots,
        src: int,
        inputs: Region,
        source: Mirrored,
        cross: Region,
        cache: Region | None = None,
        filled: int = 0,
        *,
        attention: bool = False,
    ):
        self._runtime, self._lane, self._slots, self._src = runtime, lane, slots, src
        self.lock = runtime.lock
        self._inputs, self._source, self._cross = inputs, source, cross
        self._filled = filled
        self._reorder: IntArray | None = None
        """The rows that the rows of the next step continue, where the cache has them in another order."""
        config = runtime.config
        self._batch = cross["all"].shape[1]
        places = self._batch * slots.beam
        self._cache = cache or self._empty_cache(runtime.graphs.buckets.first_cache(cross["all"].shape[3]))
        self._steps: dict[DeviceTensor, Call] = {}  # the bound step graph for each buffer of the cache
        best = min(BEST, config.tgt_vocab_size)
        self._io = runtime.region(
            lane,
            "io",
            tokens=((places,), "int64"),
            position=((places,), "int64"),
            index=((places,), "int64"),
            **{"best.log_probs": ((places, best), "float32"), "best.ids": ((places, best), "int64")},
            logits=((places, config.tgt_vocab_size), "float32"),
            **self._attention_spec(places) if attention else {},
        )
        self._attention = runtime.mirror(self._io["attention"]) if attention else None
        self._given = runtime.mirrored(self._io, "tokens", "position", "index")
        self._best = runtime.mirrored(self._io, "best.log_probs", "best.ids")
        self._logits: Mirror | None = None  # allocated at the first `step`: it may be large
        self._given["tokens"][:] = config.bos_id  # read by empty places

    @property
    def rows(self) -> int:
        return len(self._slots.rows)

    @property
    @_locked
    def cross(self) -> list[FloatArray]:
        mirror = self._runtime.mirror(self._cross["all"])
        mirror.pull()
        self._runtime.graphs.device.synchronize()
        return [to_float32(block[self._slots.places][:, :, : self._src]) for block in mirror.array]

    def _attention_spec(self, places: int) -> dict[str, tuple[tuple[int, ...], str]]:
        _, _, heads, src, _ = self._cross["all"].shape
        return {"attention": ((self._runtime.config.n_decoder_layers, places, heads, src), "float32")}

    @property
    @_locked
    def attention(self) -> FloatArray:
        assert self._attention is not None, "encode was called without attention=True"
        return self._attention.array[:, self._slots.rows, :, : self._src]

    @_locked
    def step(self, tokens: IntArray) -> FloatArray:
        """Logits [rows, vocab] after `tokens` [rows]."""
        if self._logits is None:
            self._logits = self._runtime.mirror(self._io["logits"])
        self._run(tokens, self._logits)
        return self._live_rows(self._logits.array)

    @_locked
    def best(self, tokens: IntArray, count: int) -> Best:
        """The `count` best tokens of each row after `tokens` [rows]; only they leave the device, up to `BEST`."""
        if min(count, self._runtime.config.tgt_vocab_size) > BEST:
            return best_from_logits(self.step(tokens), count)
        self._run(tokens, self._best)
        return Best(*(self._live_rows(self._best[name])[:, :count] for name in ("best.log_probs", "best.ids")))

    def _run(self, tokens: IntArray, results: Mirror | Mirrored) -> None:
        self._given["tokens"][self._slots.rows] = tokens
        self._given["position"][:] = self._filled
        if self._reorder is not None:
            self._given["index"][:] = self._reorder
        self._given.push()
        if self._reorder is not None:
            self._cache, self._reorder = self._reordered(), None
        if self._filled == self._cache["all"].shape[3]:
            self._grow()
        if self._cache["all"] not in self._steps:
            self._steps[self._cache["all"]] = self._bound_step()
        self._steps[self._cache["all"]]()
        results.pull()
        if self._attention:
            self._attention.pull()
        self._runtime.graphs.device.synchronize()
        self._filled += 1

    def _reordered(self) -> Region:
        """The cache in the order of `index`."""
        return self._runtime.gather(self._lane, "cache", self._cache, self._io["index"])

    def _bound_step(self) -> Call:
        """The step graph bound to the buffers of this state; past and present are the same buffer."""
        runtime = self._runtime
        tensors = {name: tensor for name, tensor in self._io.tensors.items() if name != "index"}
        tensors |= {"src_len": self._inputs["src_len"], **runtime.named("cross", self._cross)}
        tensors |= {**runtime.named("past", self._cache), **runtime.named("present", self._cache)}
        step = runtime.graphs.step(self._cache["all"].shape[3], attention=self._attention is not None)
        return runtime.call(step, tensors)

    def _live_rows(self, array: NDArray[Any]) -> NDArray[Any]:
        """The rows of the search, copied, because the next step overwrites the array of a mirror."""
        return array[self._slots.rows]

    @_locked
    def select(self, rows: IntArray) -> LoopState:
        slots, parents = self._slots.select(rows)
        batch = self._runtime.graphs.buckets.batch_after(self._batch, len(slots), slots.beam)
        if batch < self._batch:
            return self._smaller(batch, slots, parents)
        self._slots = slots
        index = slots.reorder(parents, self._batch)
        if index is not None:
            self._reorder = index if self._reorder is None else self._reorder[index]
        return self

    def _smaller(self, batch: int, slots: Slots, parents: IntArray) -> LoopState:
        """This state in buffers for `batch` sentences."""
        runtime = self._runtime
        sentences, rows = slots.compact(parents, batch)
        index = runtime.region(self._lane, "smaller", sentences=((batch,), "int64"), rows=((len(rows),), "int64"))
        inputs = runtime.inputs(self._lane, batch, self._cross["all"].shape[3])
        source, given = runtime.mirrored(inputs, "src_len"), runtime.mirrored(index, "sentences", "rows")
        source["src_len"][:] = self._source["src_len"][sentences]
        given["sentences"][:] = sentences
        given["rows"][:] = rows if self._reorder is None else self._reorder[rows]
        source.push()
        given.push()
        cross = runtime.gather(self._lane, "cross", self._cross, index["sentences"])
        cache = runtime.gather(self._lane, "cache", self._cache, index["rows"])
        runtime.graphs.device.synchronize()
        buffers = (inputs, source, cross, cache, self._filled)
        live = Slots.first(len(slots), slots.beam)
        return LoopState(runtime, self._lane, live, self._src, *buffers, attention=self._attention is not None)

    def _empty_cache(self, size: int) -> Region:
        cache = self._runtime.blocks(self._lane, "cache", self._batch * self._slots.beam, size)
        # Slots that were never written are masked, but 0 * NaN is NaN.
        self._runtime.graphs.device.zero(cache["all"])
        return cache

    def _grow(self) -> None:
        old = self._cache["all"]
        size = self._runtime.graphs.buckets.cache_for(self._filled + 1)
        cache = self._empty_cache(size)
        n_blocks, rows, heads, length, head_dim = old.shape
        slot = head_dim * ITEM_SIZES[old.dtype]
        self._runtime.graphs.device.copy_prefixes(
            cache["all"].address,
            old.address,
            count=n_blocks * rows * heads,
            width=self._filled * slot,
            steps=(size * slot, length * slot),
        )
        self._cache = cache
