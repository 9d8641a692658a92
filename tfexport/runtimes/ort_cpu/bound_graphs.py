"""Graphs of the dialect `ort` bound to NumPy arrays, so that a step is one call."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from tfexport.contract import ATTENTION_ROLES, SHORTLIST_ROLES, Role, cache_names
from tfexport.errors import BundleError
from tfexport.runtimes.base import Ahead
from tfexport.runtimes.ort_cpu.context import Context
from tfexport.runtimes.outputs import (
    Argmax,
    Best,
    BestRequest,
    FloatArray,
    IntArray,
    LogitsRequest,
    StepOutput,
    StepRequest,
)


@dataclass(frozen=True)
class BatchShortlist:
    """The candidates of a batch with a shortlist, and the output projection for them alone."""

    ids: IntArray
    """The candidates of all sentences of the batch, [candidates]."""
    weights: Mapping[str, NDArray[Any]]
    """The output projection for the candidates, by the names of the step graphs' inputs."""
    left_out: FloatArray
    """Numbers that are added to logits, [sentences, candidates]: -inf for candidates of other sentences, else 0."""

    def select(self, sentences: IntArray) -> BatchShortlist:
        return replace(self, left_out=self.left_out[sentences])


class Binding:
    """A session bound to NumPy arrays, which a run reads and writes in place."""

    def __init__(self, session: onnxruntime.InferenceSession):
        self._session, self._binding = session, session.io_binding()
        self._values: dict[str, Any] = {}  # keeps the values alive, and with them their arrays

    def input(self, name: str, array: NDArray[Any]) -> None:
        self._binding.bind_cpu_input(name, array)

    def output(self, name: str, array: NDArray[Any]) -> None:
        self._values[name] = value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        self._binding.bind_ortvalue_output(name, value)

    def in_place(self, past: str, present: str, array: NDArray[Any]) -> None:
        """Bind an input and an output to one array."""
        self._values[past] = value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        self._binding.bind_ortvalue_input(past, value)
        self._binding.bind_ortvalue_output(present, value)

    def run(self) -> None:
        """Raises BundleError where ONNX Runtime cannot compute the graph."""
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # the library's errors have no common base
            raise BundleError(
                f"ONNX Runtime cannot run this graph: {str(error).splitlines()[0]} If memory is short, use a smaller "
                "--batch-size or --beam; if not, export again."
            ) from error


class _BoundGraph:
    """A step graph bound to the arrays of a batch.

    Args:
        shape: of `tokens` and `position`: [rows], or [batch, beam].
    """

    def __init__(
        self, context: Context, role: Role, cross: Sequence[FloatArray], src_len: NDArray[np.int32], shape: Any
    ):
        self.config = context.config
        self._past, self._present = cache_names(self.config, "past"), cache_names(self.config, "present")
        self.binding = Binding(context.session(role))
        self.tokens = np.empty(shape, dtype=np.int64)
        self.position = np.empty(shape, dtype=np.int32)
        for name, array in (("tokens", self.tokens), ("position", self.position), ("src_len", src_len)):
            self.binding.input(name, array)
        for name, array in zip(cache_names(self.config, "cross"), cross, strict=True):
            self.binding.input(name, array)

    def bind_cache(self, cache: Sequence[FloatArray]) -> None:
        """Bind past and present to the tensors of `cache`, which are written in place."""
        for index, tensor in enumerate(cache):
            self.bind_cache_tensor(index, tensor)

    def bind_cache_tensor(self, index: int, tensor: FloatArray) -> None:
        """Bind one past and its present to another tensor."""
        self.binding.in_place(self._past[index], self._present[index], tensor)

    def begin(self, tokens: IntArray, position: NDArray[Any]) -> None:
        """Set the inputs of the next run; `position` is [rows], or [batch, 1] for all hypotheses of a sentence."""
        np.copyto(self.tokens, tokens.reshape(self.tokens.shape))
        np.copyto(self.position, position, casting="same_kind")


class StepGraph(_BoundGraph):
    """A step graph that computes logits, and the best tokens with their log-probabilities.

    Args:
        role: of the plain step.
        attention: run the variant of this step that has the cross-attention as an output.
        shortlist: run the variant for shortlists.
    """

    def __init__(
        self,
        context: Context,
        role: Role,
        cross: Sequence[FloatArray],
        src_len: NDArray[np.int32],
        shape: Any,
        *,
        attention: bool,
        shortlist: BatchShortlist | None,
    ):
        role = ATTENTION_ROLES[role] if attention else role if shortlist is None else SHORTLIST_ROLES[role]
        super().__init__(context, role, cross, src_len, shape)
        self._shortlist = shortlist
        self._count = np.zeros(1, dtype=np.int64)
        self.binding.input("count", self._count)
        self._log_probs, self._ids = np.empty((0, 0), dtype=np.float32), np.empty((0, 0), dtype=np.int64)
        self._logits: FloatArray | None = None
        self.attention: FloatArray | None = None
        """[layers, rows, heads, src], written by each run."""
        if attention:
            layers, (_, heads, src, _) = self.config.n_decoder_layers, cross[0].shape
            self.attention = np.empty((layers, self.tokens.size, heads, src), dtype=np.float32)
            self.binding.output("attention", self.attention)
        if shortlist is not None:
            for name, array in shortlist.weights.items():
                self.binding.input(name, array)
            beam = self.tokens.size // len(src_len)
            self.binding.input("left_out", np.repeat(shortlist.left_out, beam, axis=0))

    def run(self, count: int = 1) -> None:
        """Run the graph with the inputs of `begin`; it writes the `count` best tokens of each row."""
        self.bind_best(count)
        self.binding.run()

    def bind_best(self, count: int) -> tuple[FloatArray, IntArray]:
        """The arrays to which the next runs write the log-probabilities and ids of the best tokens, [rows, count]."""
        if self._count[0] != count:
            self._count[0] = count
            self._log_probs = np.empty((self.tokens.size, count), dtype=np.float32)
            self._ids = np.empty((self.tokens.size, count), dtype=np.int64)
            self.binding.output("best.log_probs", self._log_probs)
            self.binding.output("best.ids", self._ids)
        return self._log_probs, self._ids

    def best(self) -> Best:
        """The best tokens of the last run, [rows, count], copied: the next run overwrites them."""
        ids = self._ids.copy() if self._shortlist is None else self._shortlist.ids[self._ids]
        return Best(self._log_probs.copy(), ids)

    def enable_logits(self) -> None:
        """Let the next runs write logits."""
        if self._logits is None:
            words = self.config.tgt_vocab_size if self._shortlist is None else len(self._shortlist.ids)
            self._logits = np.empty((self.tokens.size, words), dtype=np.float32)
            self.binding.output("logits", self._logits)

    def logits(self) -> FloatArray:
        """The logits of the last run, [rows, vocab], copied."""
        assert self._logits is not None
        if self._shortlist is None:
            return self._logits.copy()
        every = np.full((len(self._logits), self.config.tgt_vocab_size), -np.inf, dtype=np.float32)
        every[:, self._shortlist.ids] = self._logits
        return every


class GreedyStepGraph(_BoundGraph):
    """The step graph that computes only the best token and its logit."""

    def __init__(self, context: Context, cross: Sequence[FloatArray], src_len: NDArray[np.int32]):
        super().__init__(context, "greedy_step", cross, src_len, len(src_len))
        self._logits, self._ids = np.empty((len(src_len), 1), np.float32), np.empty((len(src_len), 1), np.int64)
        self.binding.output("best.logits", self._logits)
        self.binding.output("best.ids", self._ids)
        self._banned: tuple[int, ...] | None = None

    def argmax(self, tokens: IntArray, position: NDArray[Any], banned: Sequence[int]) -> Argmax:
        """The best token of each row that is not `banned`, with its logit, each [rows, 1]."""
        if self._banned != tuple(banned):
            self._banned = tuple(banned)
            self.binding.input("banned", np.array(self._banned, dtype=np.int64))
        self.begin(tokens, position)
        self.binding.run()
        return Argmax(self._logits.copy(), self._ids.copy())


def same_bans(request: Ahead) -> int:
    """The number of the first steps of a request with the same banned ids."""
    return sum(1 for _ in itertools.takewhile(lambda banned: banned == request.banned[0], request.banned))


def widest(requests: Sequence[StepRequest]) -> tuple[int, bool]:
    """The number of best tokens that all requests need, and whether one of them needs logits."""
    counts = [request.count for request in requests if isinstance(request, BestRequest)]
    return max([1, *counts]), any(isinstance(request, LogitsRequest) for request in requests)


def outputs_of(step: StepGraph, requests: Sequence[StepRequest], rows: IntArray | None) -> list[StepOutput]:
    """The outputs of the last run of `step` for each request but `ArgmaxRequest`s.

    Args:
        rows: the rows of the graph's output that are returned; None for all.
    """
    best, logits = step.best(), step.logits() if widest(requests)[1] else None
    if rows is not None:
        best = Best(best.log_probs[rows], best.ids[rows])
        logits = None if logits is None else logits[rows]
    outputs: list[StepOutput] = []
    for request in requests:
        if isinstance(request, BestRequest):
            outputs.append(Best(best.log_probs[:, : request.count], best.ids[:, : request.count]))
        else:
            assert logits is not None
            outputs.append(logits)
    return outputs


def requested(attention: FloatArray | None) -> FloatArray:
    """The attention of a step graph; asserts that it was requested."""
    assert attention is not None, "encode was called without attention=True"
    return attention
