"""The graphs, memory, bound calls and lock that all batches of a runtime over fixed buffers share."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from tfexport.config import ModelConfig
from tfexport.contract import ITEM_SIZES, Precision, cache_names
from tfexport.runtimes.buckets import Buckets
from tfexport.runtimes.device import Call, Device, DeviceTensor, Mirror
from tfexport.runtimes.device_pool import BatchNumber, MemoryPool, Mirrored, Region

CACHED = 128
"""The number of bound graphs, and of mirrors, that are kept for the next batch with the same addresses and shapes."""

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")


class Executable(Protocol):
    """A graph of the contract, loaded by a library."""

    def bind(self, tensors: Mapping[str, DeviceTensor], *, record: bool = True) -> Call:
        """A call that enqueues one run of the graph.

        Args:
            tensors: all inputs and outputs of the graph, by name.
            record: the run may be recorded by itself. False if it becomes a part of a recording.
        """
        ...


class SearchGraphs(Protocol):
    """Graphs that choose tokens on the device; see `graphs/search.py`."""

    @property
    def greedy_search(self) -> Executable: ...

    @property
    def beam_search(self) -> Executable: ...

    @property
    def best_tokens(self) -> Executable: ...

    def record(self, work: Call, *, is_last: bool) -> Call | None:
        """A recording of `work`, which takes less host time; None if it cannot be recorded. The work must have run before.

        Args:
            is_last: this is the last attempt to record this work.
        """
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

    @property
    def search(self) -> SearchGraphs | None:
        """The graphs that choose tokens on the device; None if the host chooses them."""
        ...

    @property
    def has_beam_step(self) -> bool:
        """Whether `beam_step` is implemented."""
        ...

    def beam_step(self) -> Executable:
        """The step for hypotheses that share a cache of any number of slots. Only if `has_beam_step`."""
        ...

    @property
    def position_dtype(self) -> str:
        """The type of the input `position` of the steps."""
        ...

    @property
    def flat(self) -> bool:
        """Whether cross keys, values and shared caches are [.., length, d_attention]; else [.., heads, length, head_dim]."""
        ...

    def step(self, cache: int, *, attention: bool = False) -> Executable:
        """The decoder step for caches of `cache` slots, one of the buckets.

        Args:
            attention: the variant of the step that has the cross-attention as an output.

        Raises:
            RuntimeUnavailable, BundleError: there is no such variant.
        """
        ...


class HostSearch:
    """The members of `Graphs` without search graphs and without a shared cache."""

    search: SearchGraphs | None = None
    has_beam_step = False
    flat = False
    position_dtype = "int64"

    def beam_step(self) -> Executable:
        raise NotImplementedError(f"{type(self).__name__} has no step for a shared cache; use step")


class Locked(Protocol):
    """An object with the lock of its runtime."""

    @property
    def lock(self) -> threading.RLock: ...


State = TypeVar("State", bound=Locked)


def locked(
    method: Callable[Concatenate[State, Arguments], Value],
) -> Callable[Concatenate[State, Arguments], Value]:
    """Let a method of a state hold the lock of its runtime."""

    @wraps(method)
    def with_lock(state: State, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Value:
        with state.lock:
            return method(state, *arguments, **named)

    return with_lock


def _cached(values: OrderedDict[Any, Value], key: Any, make: Callable[[], Value]) -> Value:
    """`values[key]`, made by `make` if it is new. Above `CACHED` values the least recently used one is dropped."""
    if key in values:
        values.move_to_end(key)
    else:
        values[key] = make()
        if len(values) > CACHED:
            values.popitem(last=False)
    return values[key]


class Workspace:
    """Graphs and memory for batches, in buffers of a few sizes."""

    def __init__(self, config: ModelConfig, graphs: Graphs):
        self.config, self.graphs = config, graphs
        # With buckets the same sizes occur again, and should get the same memory. Without buckets they seldom do.
        bucketed = graphs.buckets.batch is not None
        self._pool = MemoryPool(graphs.device, kept=256 if bucketed else 8, by_use=bucketed)
        self._batch_numbers: set[int] = set()
        self._calls: OrderedDict[Any, Any] = OrderedDict()
        self._mirrors: OrderedDict[DeviceTensor, Mirror] = OrderedDict()
        self._mirrored: OrderedDict[Any, Mirrored] = OrderedDict()
        self._tables: Any = None
        self.lock = threading.RLock()
        """Only one thread decodes at a time, because all share memory, bound tensors and a stream."""

    def batch_number(self) -> BatchNumber:
        """The number of a new batch."""
        return BatchNumber(self._batch_numbers)

    def region(self, batch_number: BatchNumber | None, use: str, **tensors: tuple[tuple[int, ...], str]) -> Region:
        """Memory for some tensors of a batch; if `batch_number` is None, of all batches."""
        return Region(self._pool, use if batch_number is None else f"{use} {batch_number.value}", **tensors)

    def tables(self, make: Callable[[Workspace], Value]) -> Value:
        """The result of `make` at the first call."""
        if self._tables is None:
            self._tables = make(self)
        tables: Value = self._tables
        return tables

    def inputs(self, batch_number: BatchNumber, batch: int, src: int) -> Region:
        """The inputs of the encoder. A smaller batch has them too, so that `src_len` has the same offset in all batches."""
        return self.region(batch_number, "inputs", src_len=((batch,), "int64"), src_ids=((batch, src), "int64"))

    def mirror(self, tensor: DeviceTensor) -> Mirror:
        return _cached(self._mirrors, tensor, lambda: self.graphs.device.mirror(tensor))

    def mirrored(self, region: Region, *names: str) -> Mirrored:
        """Host arrays for consecutive tensors of `region`. They are kept for the next region at the same address."""
        key = (*region.key, names)
        return _cached(self._mirrored, key, lambda: Mirrored(self.mirror(region.span(*names)), region, *names))

    def blocks(self, batch_number: BatchNumber, use: str, rows: int, length: int, *, flat: bool = False) -> Region:
        """Keys and values of all layers in one tensor `all`, [blocks, rows, heads, length, head_dim].

        Args:
            flat: [blocks, rows, length, d_attention]; see `Graphs.flat`.
        """
        config = self.config
        of_row = (length, config.d_attention) if flat else (config.n_heads, length, config.head_dim)
        shape = (2 * config.n_decoder_layers, rows, *of_row)
        return self.region(batch_number, use, all=(shape, self.graphs.precision))

    def named(self, kind: Any, blocks: Region) -> dict[str, DeviceTensor]:
        """The tensors of `blocks`, by their names in the contract: those of `cache_names` for a `kind`."""
        address, (n_blocks, *shape), dtype = blocks["all"]
        nbytes = blocks["all"].nbytes // n_blocks
        names = cache_names(self.config, kind)
        return {name: DeviceTensor(address + i * nbytes, tuple(shape), dtype) for i, name in enumerate(names)}

    def call(self, executable: Executable, tensors: Mapping[str, DeviceTensor]) -> Call:
        """`executable` bound to `tensors`. The call is kept for the next tensors with the same addresses and shapes."""
        return self.made((id(executable), *tensors.values()), lambda: executable.bind(tensors))

    def made(self, key: Any, make: Callable[[], Value]) -> Value:
        """The value of `key`, made by `make` if it is new, and kept."""
        return _cached(self._calls, key, make)

    def gather(self, batch_number: BatchNumber, use: str, blocks: Region, index: DeviceTensor) -> Region:
        """A copy of the rows `index` of `blocks`, in their order."""
        n_blocks, rows, *of_row = blocks["all"].shape
        target = self.region(batch_number, use, all=((n_blocks, index.shape[0], *of_row), blocks["all"].dtype))
        width = math.prod(of_row)
        tensors = {
            "tensors": blocks["all"]._replace(shape=(n_blocks, rows, width)),
            "index": index,
            "selected": target["all"]._replace(shape=(n_blocks, index.shape[0], width)),
        }
        self.call(self.graphs.select_rows, tensors)()
        return target

    def copy_slots(self, target: Region, source: Region, filled: int) -> None:
        """Enqueue the copy of the first `filled` slots of a cache to a larger one."""
        *runs, length, numbers = source["all"].shape
        slot = numbers * ITEM_SIZES[source["all"].dtype]
        self.graphs.device.copy_prefixes(
            target["all"].address,
            source["all"].address,
            count=math.prod(runs),
            width=filled * slot,
            steps=(target["all"].shape[-2] * slot, length * slot),
        )

    def empty_cache(self, batch_number: BatchNumber, rows: int, size: int, *, flat: bool = False) -> Region:
        """A cache of `size` slots for each of `rows` rows, filled with zeros."""
        cache = self.blocks(batch_number, "cache", rows, size, flat=flat)
        # Slots that were never written are masked, but 0 * NaN is NaN.
        self.graphs.device.zero(cache["all"])
        return cache
