"""PyTorch decoding in buffers with fixed addresses, eager or compiled: PyTorch as fast as a careful user makes it.

The self-attention cache is written in place and has few sizes. Compiled, all buffers have few sizes, so that `torch.compile`
compiles few shapes, and its CUDA graphs find the addresses that they were recorded with.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tfexport.bundle.reader import Bundle
from tfexport.config import ModelConfig
from tfexport.contract import BEST_TOKENS, Precision
from tfexport.models.layers import KeyValue, best_tokens, write_in_place
from tfexport.models.transformer import Transformer
from tfexport.runtimes.base import BaseRuntime, Capacity
from tfexport.runtimes.buckets import Buckets
from tfexport.runtimes.live_rows import LiveRows, fill_sources
from tfexport.runtimes.outputs import Best, FloatArray, IntArray, best_from_logits
from tfexport.runtimes.pytorch import TorchRuntime, full_memory_is_an_error

CACHE = tuple(32 * 2**power for power in range(10))
BATCH = tuple(2**power for power in range(15))
SRC_BLOCK = 32

SHRINK = 4
"""Compiled code moves to a smaller batch when it is this many times smaller: each batch size takes seconds to compile."""

MOST_FREE = 256
"""The most free sets of buffers of compiled code. Of more, the least recently used set is freed."""

TensorSize = tuple[tuple[int, ...], torch.dtype]


def static_buckets(config: ModelConfig, *, few_shapes: bool) -> Buckets:
    """Caches that double; with `few_shapes`, batches that double and sources in blocks as well."""
    cache = tuple(size for size in CACHE if size < 2 * config.max_target_length) or CACHE[:1]
    if not few_shapes:
        return Buckets(cache, remedy="The model has no more positions.")
    src = (*range(SRC_BLOCK, config.max_source_length, SRC_BLOCK), config.max_source_length)
    return Buckets(cache, BATCH, src, remedy="Use a smaller --batch-size, or shorter lines.")


class Lease:
    """Tensors of a pool. They are given back when nothing refers to the lease."""

    def __init__(self, pool: BufferPool, specs: tuple[TensorSize, ...], tensors: list[Tensor]):
        self.tensors = tensors
        weakref.finalize(self, pool.give_back, specs, tensors).atexit = False

    def pairs(self, start: int = 0) -> list[KeyValue]:
        """The tensors from `start` on, key and value of each layer."""
        rest = self.tensors[start:]
        return [KeyValue(key, value) for key, value in zip(rest[::2], rest[1::2], strict=True)]


class BufferPool:
    """Buffers on one device. Those of compiled code are kept, because a CUDA graph needs the addresses that it recorded."""

    def __init__(self, device: torch.device, *, compiled: bool):
        self._device, self._compiled = device, compiled
        self._free: list[tuple[tuple[TensorSize, ...], list[Tensor]]] = []

    def take(self, *specs: TensorSize) -> Lease:
        """Tensors of these shapes and types, not initialized."""
        for index in reversed(range(len(self._free))):
            if self._free[index][0] == specs:
                return Lease(self, *self._free.pop(index))
        try:
            tensors = self._new(specs)
        except torch.OutOfMemoryError:
            self._free.clear()
            tensors = self._new(specs)
        return Lease(self, specs, tensors)

    def _new(self, specs: tuple[TensorSize, ...]) -> list[Tensor]:
        tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in specs]
        if self._compiled:
            for tensor in tensors:
                # CUDA graphs copy inputs without this mark, and cannot write to them.
                torch._dynamo.mark_static_address(tensor)
        return tensors

    def give_back(self, specs: tuple[TensorSize, ...], tensors: list[Tensor]) -> None:
        if self._compiled:
            self._free.append((specs, tensors))
            del self._free[:-MOST_FREE]


def encode_into(model: Transformer, src_ids: Tensor, src_len: Tensor, cross: list[KeyValue]) -> None:
    """`Transformer.encode` into given buffers."""
    for target, source in zip(cross, model.encode(src_ids, src_len), strict=True):
        target.key.copy_(source.key)
        target.value.copy_(source.value)


def advance(
    model: Transformer,
    tokens: Tensor,
    position: Tensor,
    src_len: Tensor,
    cache: list[KeyValue],
    cross: list[KeyValue],
    count: int,
) -> tuple[Tensor, ...]:
    """`Transformer.step` with its cache and `position` written in place: logits, and `count` best tokens if not 0."""
    logits, _ = model.step(tokens, position, src_len, cache, cross, write_in_place)
    position.add_(1)
    return (logits, *best_tokens(logits, count)) if count else (logits,)


def gather(targets: Sequence[Tensor], sources: Sequence[Tensor], index: Tensor) -> None:
    """The rows `index` of each source into its target."""
    for target, source in zip(targets, sources, strict=True):
        torch.index_select(source, 0, index, out=target)


def compile_for_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled for each shape, on a GPU with a CUDA graph for each shape and set of addresses."""
    # The default limit of 8 shapes is for code that should be dynamic. Here each bucket is compiled on purpose.
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, limits.accumulated_recompile_limit)
    compiled = torch.compile(function, mode="reduce-overhead", dynamic=False, fullgraph=True)

    def call(*arguments: Any) -> Any:
        # The results of the last call were copied to the host, so CUDA graphs may reuse their memory.
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return compiled(*arguments)

    return call


class StaticDecoder:
    """Encodes and steps with a `Transformer` on its own device.

    Args:
        compiled: with `torch.compile`, on a GPU with CUDA graphs.
        best_on_device: find the best tokens on the device, in float32, equal ones in any order, and not on the host with
            `best_from_logits`. None: on GPUs.
        buckets: in the place of `static_buckets`.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        compiled: bool = False,
        best_on_device: bool | None = None,
        buckets: Buckets | None = None,
    ):
        self.model, self.config = model, model.config
        self.device, self.dtype = model.encoder.tokens.weight.device, model.encoder.tokens.weight.dtype
        self.buckets = buckets or static_buckets(model.config, few_shapes=compiled)
        self.shrink = SHRINK if compiled else 1
        self.pool = BufferPool(self.device, compiled=compiled)
        on_device = self.device.type == "cuda" if best_on_device is None else best_on_device
        self.best_count = min(BEST_TOKENS, model.config.tgt_vocab_size) if on_device else 0
        wrap = compile_for_graphs if compiled else lambda function: function
        self.encode_into, self.advance, self.gather = wrap(encode_into), wrap(advance), wrap(gather)

    @full_memory_is_an_error()
    @torch.no_grad()
    def encode(self, src_ids: IntArray, src_len: IntArray, beam: int) -> StaticState:
        sentences, length = src_ids.shape
        batch, src = self.buckets.batch_for(sentences, beam), self.buckets.src_for(length)
        sources = self.take_sources(batch, src)
        ids, lengths = np.empty((batch, src), dtype=np.int64), np.empty(batch, dtype=np.int64)
        fill_sources(ids, lengths, src_ids, src_len, pad_id=self.config.pad_id)
        for buffer, array in zip(sources.tensors, (ids, lengths), strict=False):
            buffer.copy_(torch.from_numpy(array))
        self.encode_into(self.model, *sources.tensors[:2], sources.pairs(2))
        cache = self.take_cache(batch * beam, self.buckets.cache_for(1))
        return StaticState(self, LiveRows.first(sentences, beam), length, sources, cache)

    def take_sources(self, batch: int, src: int) -> Lease:
        """Source ids, their lengths, then cross keys and values."""
        shape = (batch, self.config.n_heads, src, self.config.head_dim)
        cross = [(shape, self.dtype)] * (2 * self.config.n_decoder_layers)
        return self.pool.take(((batch, src), torch.int64), ((batch,), torch.int64), *cross)

    def take_cache(self, rows: int, slots: int) -> Lease:
        """Keys and values, zeroed: slots that were never written are masked, but 0 * NaN is NaN."""
        shape = (rows, self.config.n_heads, slots, self.config.head_dim)
        cache = self.pool.take(*[(shape, self.dtype)] * (2 * self.config.n_decoder_layers))
        for tensor in cache.tensors:
            tensor.zero_()
        return cache

    def to_host(self, *tensors: Tensor) -> list[Any]:
        """NumPy arrays of `tensors`, waiting for the GPU once."""
        if self.device.type != "cuda":
            return [tensor.numpy() for tensor in tensors]
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        return [copy.numpy() for copy in copies]


class InPlaceRuntime(BaseRuntime):
    """A runtime that decodes in fixed buffers. It has no cross-attention weights."""

    def __init__(self, model: Transformer, decoder: StaticDecoder, *, name: str = "torch"):
        self.name, self.decoder, self.config = name, decoder, model.config
        plain = TorchRuntime(model)
        self.precision, self.capacity = plain.precision, Capacity.of_model(model.config)

    @classmethod
    def from_bundle(
        cls, bundle: Bundle, *, device: str, precision: Precision, threads: int | None = None, compiled: bool = False
    ) -> InPlaceRuntime:
        """The weights of a bundle; see `TorchRuntime.from_bundle`.

        Args:
            compiled: with `torch.compile`, for each of a few sizes, which takes seconds each.
        """
        plain = TorchRuntime.from_bundle(bundle, device=device, precision=precision, threads=threads)
        name = plain.name + ("-compiled" if compiled else "")
        return cls(plain.model, StaticDecoder(plain.model, compiled=compiled), name=name)

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> StaticState:
        if attention:
            raise NotImplementedError("there are no buffers for cross-attention weights")
        return self.decoder.encode(src_ids, src_len, beam)

    def step(self, state: StaticState, tokens: IntArray) -> tuple[FloatArray, StaticState]:
        return state.step(tokens), state

    def best(self, state: StaticState, tokens: IntArray, count: int) -> tuple[Best, StaticState]:
        return state.best(tokens, count), state


class StaticState:
    """A batch during decoding; `slots` are the places of its live sentences in the buffers."""

    def __init__(
        self,
        decoder: StaticDecoder,
        slots: LiveRows,
        src: int,
        sources: Lease,
        cache: Lease,
        filled: int = 0,
    ):
        self._decoder, self._slots, self._src, self._filled = decoder, slots, src, filled
        self._sources, self._cache = sources, cache
        self._spare: Lease | None = None  # the second set of the cache, once rows were reordered
        self._batch = len(sources.tensors[1])
        places = self._batch * slots.beam
        self._rows = decoder.pool.take(*[((places,), torch.int64)] * 3)
        self._tokens, self._position, self._index = self._rows.tensors
        self._position.fill_(filled)
        # Empty places read bos. Pinned, so that the copy to the GPU is asynchronous.
        pinned = decoder.device.type == "cuda"
        self._host_tokens = torch.full((places,), decoder.config.bos_id, dtype=torch.int64, pin_memory=pinned)

    @property
    def rows(self) -> int:
        return len(self._slots.rows)

    @property
    def cross(self) -> list[FloatArray]:
        arrays = self._decoder.to_host(*(tensor.float() for tensor in self._sources.tensors[2:]))
        return [array[self._slots.places][:, :, : self._src] for array in arrays]

    @property
    def attention(self) -> FloatArray:
        raise NotImplementedError("searches with attention decode without these buffers")

    def step(self, tokens: IntArray) -> FloatArray:
        """Logits [rows, vocab] after `tokens` [rows]."""
        logits: FloatArray = self._decoder.to_host(self._run(tokens)[0])[0]
        return logits[self._slots.rows]

    def best(self, tokens: IntArray, count: int) -> Best:
        """The `count` best tokens of each row after `tokens` [rows]."""
        ranked = self._decoder.best_count
        if not ranked:
            return best_from_logits(self.step(tokens), count)
        logits, *best = self._run(tokens)
        count = min(count, logits.shape[1])
        if count > ranked:
            best = list(best_tokens(logits, count))
        log_probs, ids = self._decoder.to_host(*best)
        return Best(log_probs[self._slots.rows, :count], ids[self._slots.rows, :count])

    @full_memory_is_an_error()
    @torch.no_grad()
    def _run(self, tokens: IntArray) -> tuple[Tensor, ...]:
        if self._filled == self._cache.tensors[0].shape[2]:
            self._grow()
        self._host_tokens.numpy()[self._slots.rows] = tokens
        self._tokens.copy_(self._host_tokens, non_blocking=True)
        self._filled += 1
        decoder, src_len = self._decoder, self._sources.tensors[1]
        return decoder.advance(
            *(decoder.model, self._tokens, self._position, src_len, self._cache.pairs(), self._sources.pairs(2)),
            decoder.best_count,
        )

    @full_memory_is_an_error()
    @torch.no_grad()
    def select(self, rows: IntArray) -> StaticState:
        slots, parents = self._slots.select(rows)
        batch = self._decoder.buckets.batch_for(len(slots), slots.beam)
        if batch < self._batch and batch * self._decoder.shrink <= self._batch:
            return self._smaller(batch, slots, parents)
        self._slots = slots
        index = slots.reorder(parents, self._batch)
        if index is not None:
            self._reorder(index)
        return self

    def _reorder(self, index: IntArray) -> None:
        """Gather the cache into its second set of buffers; the two sets alternate."""
        self._index.copy_(torch.from_numpy(index))
        spare = self._spare or self._decoder.take_cache(len(index), self._cache.tensors[0].shape[2])
        self._decoder.gather(spare.tensors, self._cache.tensors, self._index)
        self._cache, self._spare = spare, self._cache

    def _smaller(self, batch: int, slots: LiveRows, parents: IntArray) -> StaticState:
        """This state in buffers for `batch` sentences."""
        decoder = self._decoder
        sentences, rows = slots.compact(parents, batch)
        sources = decoder.take_sources(batch, self._sources.tensors[0].shape[1])
        cache = decoder.take_cache(len(rows), self._cache.tensors[0].shape[2])
        gather(sources.tensors, self._sources.tensors, torch.from_numpy(sentences).to(decoder.device))
        gather(cache.tensors, self._cache.tensors, torch.from_numpy(rows).to(decoder.device))
        live = LiveRows.first(len(slots), slots.beam)
        return StaticState(decoder, live, self._src, sources, cache, self._filled)

    def _grow(self) -> None:
        cache = self._decoder.take_cache(len(self._tokens), self._decoder.buckets.cache_for(self._filled + 1))
        for target, source in zip(cache.tensors, self._cache.tensors, strict=True):
            target[:, :, : self._filled] = source[:, :, : self._filled]
        self._cache, self._spare = cache, None
