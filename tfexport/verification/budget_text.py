"""The text of a budget: the outputs of float32, and the loss of another runtime against them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from tfexport.decoding.line_reader import Reader, read_pairs
from tfexport.decoding.translate import Writer
from tfexport.errors import TfexportError
from tfexport.models.transformer import Transformer
from tfexport.runtimes.base import Runtime
from tfexport.runtimes.outputs import FloatArray, IntArray
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions, pad, search
from tfexport.verification.bleu_chrf import Quality
from tfexport.verification.reference_outputs import as_inputs
from tfexport.verification.report import kl_divergence

Metric = Literal["bleu", "chrf", "top1", "identical"]


BATCH = 32


class _Forced(NamedTuple):
    """A batch to decode along float32's outputs."""

    src_ids: IntArray
    src_len: IntArray
    tgt_ids: IntArray
    """[batch, tgt], beginning with bos."""
    tgt_len: IntArray
    wanted: IntArray
    """[batch, tgt], the tokens that follow."""


class Text:
    """The text of a budget, with the outputs of float32.

    Args:
        sources: encoder ids.
        targets: a translation of each source, for BLEU and chrF.
        writer: converts output ids to text, for BLEU and chrF.
    """

    def __init__(
        self,
        model: Transformer,
        sources: Sequence[list[int]],
        targets: Sequence[str] = (),
        writer: Writer | None = None,
    ):
        self._reference = TorchRuntime(model)
        self._writer, self._options = writer, SearchOptions()
        # Sort by length, so that batches have little padding.
        order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
        self._targets = [targets[i] for i in order] if targets else []
        ordered = [sources[i] for i in order]
        self._batches = [ordered[start : start + BATCH] for start in range(0, len(ordered), BATCH)]
        self._outputs = self._decoded(self._reference)
        self._quality = self._quality_of(self._outputs)
        self.sentences = len(ordered)

    @classmethod
    def read(
        cls,
        model: Transformer,
        reader: Reader,
        writer: Writer | None,
        lines: Iterable[bytes],
        targets: Iterable[bytes] | None,
        say: Callable[[str], None],
    ) -> Text:
        """Read lines of text and their translations.

        Raises:
            TfexportError: no line can be decoded, or the numbers of lines and targets differ.
        """
        sources, wanted = read_pairs(lines, targets, reader, say)
        return cls(model, sources, wanted if targets is not None else (), writer)

    def loss(self, runtime: Runtime, metric: Metric) -> float:
        """The loss of `runtime` against float32; infinite if it returns no numbers."""
        try:
            if metric == "top1":
                return self._other_best(runtime)
            outputs = self._decoded(runtime)
        except TfexportError:
            return math.inf
        if metric == "identical":
            return float(np.mean([ids != other for ids, other in zip(self._outputs, outputs, strict=True)]))
        quality = self._quality_of(outputs)
        assert self._quality is not None
        assert quality is not None
        return float(getattr(self._quality, metric) - getattr(quality, metric))

    def harm(self, runtime: Runtime) -> float:
        """The mean KL(float32 || runtime) of the next token's distribution, in the batch of middle length. Infinite if the
        runtime returns no numbers."""
        forced, expected = self._probe
        state, total = runtime.encode(forced.src_ids, forced.src_len), 0.0
        for position in range(forced.tgt_ids.shape[1]):
            logits, state = runtime.step(state, forced.tgt_ids[:, position])
            live = position < forced.tgt_len
            total += float(kl_divergence(expected[live, position], logits[live]).sum())
        return total / float(forced.tgt_len.sum()) if math.isfinite(total) else math.inf

    @cached_property
    def _probe(self) -> tuple[_Forced, FloatArray]:
        """A batch with float32's logits [batch, tgt, vocab] along its outputs."""
        forced = self._forced(len(self._batches) // 2)
        return forced, self._reference.teacher_forced(forced.src_ids, forced.src_len, forced.tgt_ids)

    def _forced(self, index: int) -> _Forced:
        config, outputs = self._reference.config, self._outputs[index * BATCH : (index + 1) * BATCH]
        return _Forced(
            *pad(self._batches[index], config.pad_id),
            *as_inputs(config, outputs),
            pad(outputs, -1)[0],
        )

    def _other_best(self, runtime: Runtime) -> float:
        """The share of steps with another best token than float32, whose best tokens are the outputs."""
        other, steps = 0, 0
        for index in range(len(self._batches)):
            forced = self._forced(index)
            state = runtime.encode(forced.src_ids, forced.src_len)
            for position in range(forced.tgt_ids.shape[1]):
                best, state = runtime.best(state, forced.tgt_ids[:, position], 1)
                live = position < forced.tgt_len
                # A row of NaN has no best token, whatever id it returns.
                same = (best.ids[:, 0] == forced.wanted[:, position]) & np.isfinite(best.log_probs[:, 0])
                other += int((live & ~same).sum())
                steps += int(live.sum())
        return other / steps

    def _decoded(self, runtime: Runtime) -> list[tuple[int, ...]]:
        return [best.ids for batch in self._batches for best, *_ in search(runtime, batch, self._options)]

    def _quality_of(self, outputs: Sequence[tuple[int, ...]]) -> Quality | None:
        if not self._targets:
            return None
        assert self._writer is not None
        return Quality.of([self._writer.text(ids) for ids in outputs], self._targets)
