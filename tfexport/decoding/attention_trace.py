"""The cross-attention of a search's hypotheses, and their coverage of the source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.errors import TfexportError
from tfexport.runtimes.base import FloatArray, IntArray


class AttentionTrace:
    """The cross-attention of one decoder layer, the mean of its heads, at each step of a search.

    A search moves its hypotheses from row to row; the trace moves nothing. To read the attention of a hypothesis, give the
    beam that it was in at each step.

    Args:
        layer: from 0; negative ones count from the last.
        n_layers: of the decoder.
        src_len: source ids of each sentence, [batch].
        width: hypotheses of a sentence.

    Raises:
        TfexportError: the decoder has no such layer.
    """

    def __init__(self, layer: int, n_layers: int, src_len: IntArray, width: int):
        self._layer, self._src_len, self._width = resolve_layer(layer, n_layers), src_len, width
        self._steps: list[tuple[FloatArray, IntArray]] = []

    def add(self, attention: FloatArray, sentences: IntArray) -> None:
        """Add the `attention` [layers, rows, heads, src] of a step, whose groups of rows decode `sentences`."""
        mean = attention[self._layer].mean(axis=1)
        place = np.full(len(self._src_len), -1)
        place[sentences] = np.arange(len(sentences))
        self._steps.append((mean.reshape(len(sentences), self._width, -1), place))

    def hypothesis(self, index: int, beams: Sequence[int]) -> FloatArray:
        """The attention of each token of a hypothesis of sentence `index`, [tokens, source ids].

        Args:
            beams: the beam of the hypothesis, or the number of the sample, in the step that found each of its tokens.
        """
        steps = zip(self._steps, beams, strict=False)
        return np.stack([mean[place[index], beam, : self._src_len[index]] for (mean, place), beam in steps])


def resolve_layer(layer: int, n_layers: int) -> int:
    """The number from 0 of a layer, which may be counted from the last: -1 is `n_layers` - 1.

    Raises:
        TfexportError: the decoder has no such layer.
    """
    if not -n_layers <= layer < n_layers:
        raise TfexportError(
            f"there is no decoder layer {layer}: this model has {n_layers}. Give 0 to {n_layers - 1}, or -1 for the last."
        )
    return layer % n_layers


def coverage(attention: NDArray[Any]) -> float:
    """The sum over source ids of log(min(a, 1)), where a is the sum over tokens of `attention` [tokens, source ids].

    It is 0 where every source id is attended to, and below 0 where some are passed over (Wu et al. 2016, section 7, without
    the factor beta). A source id whose attention underflows to 0 would make it infinite; as in CTranslate2 it is left out.
    """
    sums = attention.sum(axis=0, dtype=np.float64)
    return float(np.log(np.minimum(sums[sums > 0], 1.0)).sum())
