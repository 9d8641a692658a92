"""The PyTorch runtimes: the canonical model itself. On the CPU, eager, it is the reference for all other runtimes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tfexport.bundle.reader import MANIFEST, Bundle
from tfexport.config import ModelConfig
from tfexport.contract import Precision
from tfexport.errors import BundleError, RuntimeUnavailable, TfexportError
from tfexport.models.float64 import InFloat64, WithRandomRounding
from tfexport.models.layers import KeyValue
from tfexport.models.model import EncoderClassifier, build_model
from tfexport.models.precision import in_precision
from tfexport.models.transformer import Transformer
from tfexport.runtimes.base import BaseRuntime, Capacity
from tfexport.runtimes.outputs import Best, FloatArray, IntArray, best_from_logits

CACHE_BLOCK = 32
"""The number of slots by which the cache grows. Its size does not change the result."""


@dataclass(frozen=True)
class TorchState:
    """The state of the reference: an immutable value."""

    src_len: Tensor  # [batch]
    memory: list[KeyValue]  # a layer: [batch, heads, src, head_dim]
    past: list[KeyValue]  # a layer: [rows, heads, cache, head_dim]
    position: Tensor  # [rows]
    last_attention: Tensor | None = None
    """The cross-attention weights [layers, rows, heads, src] of the last step; empty before it, None if not requested."""

    @property
    def attention(self) -> FloatArray:
        assert self.last_attention is not None, "encode was called without attention=True"
        return _array(self.last_attention)

    @property
    def rows(self) -> int:
        return len(self.position)

    @property
    def cross(self) -> list[FloatArray]:
        return [_array(tensor) for memory in self.memory for tensor in memory]

    def select(self, rows: IntArray) -> TorchState:
        index = torch.from_numpy(rows).to(self.position.device)
        beam = self.rows // len(self.src_len)
        sentences = index[::beam] // beam
        return TorchState(
            self.src_len[sentences],
            [KeyValue(memory.key[sentences], memory.value[sentences]) for memory in self.memory],
            [KeyValue(cache.key[index], cache.value[index]) for cache in self.past],
            self.position[index],
            self.last_attention,
        )

    def grown(self) -> TorchState:
        """The same state with `CACHE_BLOCK` more slots."""
        pad = (0, 0, 0, CACHE_BLOCK)
        return replace(self, past=[KeyValue(*(torch.nn.functional.pad(t, pad) for t in kv)) for kv in self.past])


@contextmanager
def full_memory_is_an_error() -> Iterator[None]:
    """Raises TfexportError where the GPU has no memory left."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TfexportError(
            "the GPU's memory is full. Decode with a smaller --batch-size or --beam, or end other programs on it."
        ) from error


class TorchRuntime(BaseRuntime):
    """Runs a `Transformer` on its own device; the model is put into evaluation mode.

    Args:
        arithmetic: the context to compute in, such as float64; see `models/float64.py`.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        name: str = "torch",
        arithmetic: Callable[[], AbstractContextManager[object]] = nullcontext,
    ):
        self.name = name
        self._model, self._arithmetic = model.eval(), arithmetic

    @classmethod
    def from_bundle(
        cls,
        bundle: Bundle,
        *,
        device: str = "cpu",
        precision: Precision = "float32",
        threads: int | None = None,
    ) -> TorchRuntime:
        """The canonical weights of a bundle in PyTorch: the parity reference by default.

        Args:
            device: `cpu` or `cuda`.

        Raises:
            RuntimeUnavailable: there is no GPU that PyTorch can use.
            BundleError: the bundle is a classifier's.
            TfexportError: a weight is too large for the precision, or the GPU's memory is full.
        """
        bundle.graph("decoder_step")
        if device == "cuda":
            require_gpu()
            if precision == "float32":
                torch.set_float32_matmul_precision("highest")  # no TF32, which rounds factors to 10 bits
        if threads is not None:
            torch.set_num_threads(threads)
        model = in_precision(_built(bundle), precision)
        assert isinstance(model, Transformer)
        with full_memory_is_an_error():
            model = model.to(device).eval()
        return cls(model, name="torch-cuda" if device == "cuda" else "torch")

    @property
    def model(self) -> Transformer:
        """The model of this runtime."""
        return self._model

    def in_float64(self) -> TorchRuntime:
        """The same model, computed in float64."""
        return TorchRuntime(self._model, arithmetic=InFloat64)

    def in_float32(self) -> TorchRuntime:
        """The same model in its own arithmetic."""
        return TorchRuntime(self._model)

    def with_random_rounding(self, seed: int) -> TorchRuntime:
        """The same model with another rounding of every result."""
        return TorchRuntime(self._model, arithmetic=partial(WithRandomRounding, seed))

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def precision(self) -> Precision:
        dtypes: dict[torch.dtype, Precision] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
        return dtypes.get(self._model.encoder.tokens.weight.dtype, "float32")

    @property
    def capacity(self) -> Capacity:
        return Capacity.of_model(self.config)

    def _tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._model.encoder.tokens.weight.device)

    @full_memory_is_an_error()
    @torch.inference_mode()
    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> TorchState:
        length = self._tensor(src_len)
        with self._arithmetic():
            cross = self._model.encode(self._tensor(src_ids), length)
        rows = len(src_len) * beam
        cache, last_attention = self._model.empty_cache(rows, CACHE_BLOCK), torch.empty(0) if attention else None
        return TorchState(length, cross, cache, length.new_zeros(rows), last_attention)

    @full_memory_is_an_error()
    @torch.inference_mode()
    def step(self, state: TorchState, tokens: IntArray) -> tuple[FloatArray, TorchState]:
        if state.position.max() >= state.past[0].key.shape[2]:
            state = state.grown()
        inputs = (self._tensor(tokens), state.position, state.src_len, state.past, state.memory)
        with self._arithmetic():
            if state.last_attention is None:
                (logits, past), last_attention = self._model.step(*inputs), None
            else:
                logits, past, last_attention = self._model.step_with_attention(*inputs)
        return _array(logits), replace(state, past=past, position=state.position + 1, last_attention=last_attention)

    def best(self, state: TorchState, tokens: IntArray, count: int) -> tuple[Best, TorchState]:
        logits, state = self.step(state, tokens)
        return best_from_logits(logits, count), state

    @torch.inference_mode()
    def teacher_forced(self, src_ids: IntArray, src_len: IntArray, tgt_ids: IntArray) -> FloatArray:
        """Logits [batch, tgt, vocab] along `tgt_ids` [batch, tgt], beginning with bos, without any cache."""
        with self._arithmetic():
            logits = self._model(self._tensor(src_ids), self._tensor(src_len), self._tensor(tgt_ids))
        return _array(logits)

    @torch.inference_mode()
    def forced(self, state: TorchState, tgt_ids: IntArray) -> FloatArray:
        """`teacher_forced` over the sources of `state`, of one hypothesis each, which `encode` gave."""
        with self._arithmetic():
            return _array(self._model.forced(state.memory, state.src_len, self._tensor(tgt_ids)))


def _array(tensor: Tensor) -> FloatArray:
    """A NumPy array in float32, or in float64 if it was computed so."""
    return (tensor if tensor.dtype == torch.float64 else tensor.float()).cpu().numpy()


def _built(bundle: Bundle) -> Transformer | EncoderClassifier:
    """The model of a bundle's config and weights."""
    try:
        with bundle.loading():
            weights = load_file(bundle.weights)
        return build_model(bundle.config, weights)
    except SafetensorError as error:
        raise BundleError(f"{bundle.weights} cannot be read: {error}. Export the checkpoint again.") from error
    except RuntimeError as error:  # PyTorch's, of names and shapes
        raise BundleError(
            f"{bundle.weights} does not have the tensors of the config in {bundle.directory / MANIFEST}: "
            f"{str(error).splitlines()[-1].strip()} Export the checkpoint again."
        ) from error


def require_gpu() -> None:
    """Does nothing where PyTorch has a GPU to use.

    Raises:
        RuntimeUnavailable: it has none.
    """
    if torch.version.cuda is None:
        raise RuntimeUnavailable(
            f"the PyTorch installed here, {torch.__version__}, is built without CUDA. Install one with CUDA as "
            "pytorch.org says, or decode with --runtime torch."
        )
    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:  # no GPU, no driver, an old driver, or an unsupported GPU
        reason = str(error).splitlines()[0].rstrip(".")
        raise RuntimeUnavailable(
            f"PyTorch cannot use an NVIDIA GPU here ({reason}). Run on a machine with a GPU and a driver for CUDA "
            f"{torch.version.cuda}, or decode with --runtime torch."
        ) from error


class TorchClassifier:
    """The canonical weights of an encoder classifier's bundle in PyTorch, on the CPU.

    Raises:
        BundleError: the bundle is of another kind.
        TfexportError: a weight is too large for the precision.
    """

    name = "torch"

    def __init__(self, bundle: Bundle, *, precision: Precision = "float32", threads: int | None = None):
        self.precision = precision
        bundle.graph("encoder_classifier")
        if threads is not None:
            torch.set_num_threads(threads)
        self.config, self.capacity = bundle.config, Capacity.of_model(bundle.config)
        model = in_precision(_built(bundle), precision)
        assert isinstance(model, EncoderClassifier)
        self._model = model.eval()

    @torch.inference_mode()
    def logits(self, src_ids: IntArray, src_len: IntArray) -> FloatArray:
        return _array(self._model(torch.from_numpy(src_ids), torch.from_numpy(src_len)))
