"""The `ort-cpu` runtime: ONNX Runtime on the CPU, with the self-attention cache written in place.

Past and present of a layer are bound to one buffer, so a step writes one slot and copies nothing. The kernels read the
whole buffer, so it starts small and grows by blocks.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnxruntime

from tfexport.bundle import Bundle
from tfexport.config import ModelConfig
from tfexport.contract import cache_names
from tfexport.errors import BundleError
from tfexport.runtimes.base import FloatArray, IntArray

CACHE_BLOCK = 16
"""Slots of the smallest cache, and by which it grows."""


class OrtRuntime:
    """Decodes a bundle with ONNX Runtime's CPU provider."""

    name = "ort-cpu"

    def __init__(self, bundle: Bundle, *, threads: int | None = None):
        self._config = bundle.config
        self._step = _session(bundle.graph("decoder_step"), threads)
        self._encoder = _session(bundle.graph("encoder"), threads)

    @property
    def config(self) -> ModelConfig:
        return self._config

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1) -> OrtState:
        cross = self._encoder.run(cache_names(self._config, "cross"), {"src_ids": src_ids, "src_len": src_len})
        rows = len(src_len) * beam
        cache = min(CACHE_BLOCK, self._config.max_target_length)
        return OrtState(self._step, self._config, src_len, cross, _Cache(self._config, rows, cache), filled=0)

    def step(self, state: OrtState, tokens: IntArray) -> tuple[FloatArray, OrtState]:
        return state.step(tokens), state


class _Cache:
    """One set of self-attention buffers: for every layer a key and a value [rows, heads, cache, head_dim]."""

    def __init__(self, config: ModelConfig, rows: int, cache: int):
        shape = (rows, config.n_heads, cache, config.head_dim)
        # Zeros: a slot that was never written is masked, but a NaN in it would still poison the sum.
        self.buffers = [np.zeros(shape, dtype=np.float32) for _ in cache_names(config, "past")]
        self.rows, self.size = rows, cache

    def copy_from(self, other: _Cache, rows: IntArray | slice, filled: int) -> None:
        """Take over the `filled` first slots of some `rows` of another cache."""
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            mine[:, :, :filled] = theirs[rows, :, :filled]


class OrtState:
    """Buffers of a batch and their binding to the step graph; `step` writes into them."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        config: ModelConfig,
        src_len: IntArray,
        cross: list[FloatArray],
        cache: _Cache,
        filled: int,
    ):
        self._session, self._config = session, config
        self._src_len = np.ascontiguousarray(src_len)
        self._cross = [np.ascontiguousarray(tensor) for tensor in cross]
        self._cache = cache
        self._spare: _Cache | None = None  # where a reordered cache is written; the two take turns
        self._filled = filled
        self._tokens = np.zeros(cache.rows, dtype=np.int64)
        self._position = np.zeros(cache.rows, dtype=np.int64)
        self._logits = np.empty((cache.rows, config.tgt_vocab_size), dtype=np.float32)
        self._binding = session.io_binding()
        self._bind_input("tokens", self._tokens)
        self._bind_input("position", self._position)
        self._bind_input("src_len", self._src_len)
        for name, array in zip(cache_names(config, "cross"), self._cross, strict=True):
            self._bind_input(name, array)
        self._bind_output("logits", self._logits)
        self._bind_cache()

    @property
    def rows(self) -> int:
        return self._cache.rows

    @property
    def cross(self) -> list[FloatArray]:
        return self._cross

    def step(self, tokens: IntArray) -> FloatArray:
        """Logits [rows, vocab] after `tokens` [rows]; the array is overwritten by the next step."""
        if self._filled == self._cache.size:
            self._grow()
        self._tokens[:] = tokens
        self._position[:] = self._filled
        self._session.run_with_iobinding(self._binding)
        self._filled += 1
        return self._logits

    def select(self, rows: IntArray) -> OrtState:
        if len(rows) == self.rows:
            spare = self._spare or _Cache(self._config, self._cache.rows, self._cache.size)
            spare.copy_from(self._cache, rows, self._filled)
            self._cache, self._spare = spare, self._cache
            self._bind_cache()
            return self
        beam = self.rows // len(self._src_len)
        sentences = rows[::beam] // beam
        cache = _Cache(self._config, len(rows), self._cache.size)
        cache.copy_from(self._cache, rows, self._filled)
        cross = [tensor[sentences] for tensor in self._cross]
        return OrtState(self._session, self._config, self._src_len[sentences], cross, cache, self._filled)

    def _grow(self) -> None:
        size = min(self._cache.size + CACHE_BLOCK, self._config.max_target_length)
        cache = _Cache(self._config, self.rows, size)
        cache.copy_from(self._cache, slice(None), self._filled)
        self._cache, self._spare = cache, None
        self._bind_cache()

    def _bind_cache(self) -> None:
        for name, buffer in zip(cache_names(self._config, "past"), self._cache.buffers, strict=True):
            self._bind_input(name, buffer)
        for name, buffer in zip(cache_names(self._config, "present"), self._cache.buffers, strict=True):
            self._bind_output(name, buffer)

    def _bind_input(self, name: str, array: IntArray | FloatArray) -> None:
        self._binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def _bind_output(self, name: str, array: FloatArray) -> None:
        self._binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def usable_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _session(graph: Path, threads: int | None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    # Explicit: by itself ONNX Runtime takes every core of the machine, also those that this process may not use.
    options.intra_op_num_threads = threads or usable_cpus()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the library's errors have no common base
        first = str(error).splitlines()[0]
        raise BundleError(f"ONNX Runtime cannot load {graph}: {first} Export again, or upgrade onnxruntime.") from error
