"""The results of the reference for some sentences: memories, outputs, and logits along the outputs in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.config import ModelConfig
from tfexport.graph_checks.rounding import logit_errors
from tfexport.runtimes.outputs import IntArray
from tfexport.runtimes.pytorch import TorchRuntime, TorchState
from tfexport.search.search import Hypothesis, SearchOptions, pad
from tfexport.search.token_rules import log_softmax


@dataclass(frozen=True)
class Memory:
    """Sources, and the results of the reference's encoder."""

    sources: Sequence[Sequence[int]]
    src_ids: IntArray
    src_len: IntArray
    exact: TorchState
    """The state in float64."""
    own: TorchState
    """The state in float32."""

    @classmethod
    def of(cls, reference: TorchRuntime, sources: Sequence[Sequence[int]]) -> Memory:
        src_ids, src_len = pad(sources, reference.config.pad_id)
        exact, own = (runtime.encode(src_ids, src_len) for runtime in (reference.in_float64(), reference.in_float32()))
        return cls(sources, src_ids, src_len, exact, own)


class Memories:
    """Caches the results of a reference's encoder for several comparisons of the same sentences."""

    def __init__(self, reference: TorchRuntime):
        self._reference = reference
        self._known: dict[tuple[tuple[int, ...], ...], Memory] = {}

    def of(self, sources: Sequence[Sequence[int]]) -> Memory:
        key = tuple(map(tuple, sources))
        if key not in self._known:
            self._known[key] = Memory.of(self._reference, sources)
        return self._known[key]


@dataclass(frozen=True)
class Along:
    """Logits along outputs in float64, and the distance of PyTorch's own logits in float32 from them."""

    tgt_ids: IntArray
    """[batch, tgt]: bos and the outputs without their last tokens."""
    tgt_len: IntArray
    words: IntArray
    """[batch, tgt]: the next tokens."""
    logits: NDArray[np.float64]
    """[batch, tgt, vocab] along `tgt_ids`."""
    own: NDArray[np.float64]
    """[batch, tgt]: the largest distance of a float32 logit."""

    @classmethod
    def of(cls, reference: TorchRuntime, memory: Memory, outputs: Sequence[Sequence[int]]) -> Along:
        tgt_ids, tgt_len = as_inputs(reference.config, outputs)
        logits: Any = reference.in_float64().forced(memory.exact, tgt_ids)
        own = logit_errors(logits, reference.in_float32().forced(memory.own, tgt_ids))
        words, _ = pad(outputs, reference.config.pad_id)
        return cls(tgt_ids, tgt_len, words, logits, own)

    def log_probs(self, sentence: int) -> NDArray[np.float64]:
        """The log-probabilities of the tokens of an output."""
        length = self.tgt_len[sentence]
        return log_softmax(self.logits[sentence, :length])[np.arange(length), self.words[sentence, :length]]


@dataclass(frozen=True)
class Expected:
    """The results of the reference for some sentences."""

    memory: Memory
    options: SearchOptions
    best: list[Hypothesis]
    along: Along
    """The logits along its best outputs."""

    @classmethod
    def of(cls, reference: TorchRuntime, memory: Memory, best: list[Hypothesis], options: SearchOptions) -> Expected:
        along = Along.of(reference, memory, [hypothesis.ids for hypothesis in best])
        return cls(memory, options, best, along)


def as_inputs(config: ModelConfig, outputs: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """The decoder's input for `outputs`: padded ids [batch, tgt] that begin with bos, and their lengths."""
    return pad([[config.bos_id, *output[:-1]] for output in outputs], config.pad_id)
