"""The cross-attention of the hypotheses of a search, and their coverage of the source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.errors import TfexportError
from tfexport.runtimes.outputs import FloatArray, IntArray


class AttentionTrace:
    """Records the cross-attention of one decoder layer, averaged over its heads, at each step of a search.

    A search moves its hypotheses from row to row, but the trace does not. To read the attention of a hypothesis, give its
    beam at each step.

    Args:
        layer: the layer number from 0; negative numbers count from the last.
        n_layers: the number of decoder layers.
        src_len: the number of source ids of each sentence, [batch].
        width: the number of hypotheses of a sentence.

    Raises:
        TfexportError: the decoder has no such layer.
    """

    def __init__(self, layer: int, n_layers: int, src_len: IntArray, width: int):
        self._layer = resolve_layer(layer, n_layers)
        self._src_len = src_len
        self._width = width
        self._steps: list[tuple[FloatArray, IntArray]] = []

    def add(self, attention: FloatArray, sentences: IntArray) -> None:
        """Add the `attention` [layers, rows, heads, src] of a step. Its groups of rows decode `sentences`."""
        mean = attention[self._layer].mean(axis=1)
        place = np.full(len(self._src_len), -1)
        place[sentences] = np.arange(len(sentences))
        self._steps.append((mean.reshape(len(sentences), self._width, -1), place))

    def hypothesis(self, index: int, beams: Sequence[int]) -> FloatArray:
        """The attention of each token of a hypothesis of sentence `index`, [tokens, source ids].

        Args:
            beams: for each token, the beam of the hypothesis, or the number of the sample, in the step that chose the token.
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

    The coverage is 0 if the output attends to every source id, and below 0 if it skips some (Wu et al. 2016, section 7,
    without the factor beta). A source id whose attention underflows to 0 would make the sum infinite. It is left out, as in
    CTranslate2.
    """
    sums = attention.sum(axis=0, dtype=np.float64)
    return float(np.log(np.minimum(sums[sums > 0], 1.0)).sum())
