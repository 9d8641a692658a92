"""What the hypotheses of a search attended to, and what follows from it for their scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.errors import TfexportError
from tfexport.runtimes.base import FloatArray, IntArray


class Attended:
    """The cross-attention of one decoder layer, the mean of its heads, at each step of a search.

    A search moves its hypotheses from row to row; here nothing moves. Who wants the attention of a hypothesis says in which
    place of its sentence it was at each step.

    Args:
        layer: from 0; negative ones count from the last.
        n_layers: that the decoder has.
        src_len: source ids of each sentence, [batch].
        width: hypotheses of a sentence.

    Raises:
        TfexportError: the decoder has no such layer.
    """

    def __init__(self, layer: int, n_layers: int, src_len: IntArray, width: int):
        self._layer, self._src_len, self._width = layer_of(layer, n_layers), src_len, width
        self._steps: list[tuple[FloatArray, IntArray]] = []

    def add(self, attention: FloatArray, sentence: IntArray) -> None:
        """The `attention` [layers, rows, heads, src] of a step, whose groups of rows decode the sentences `sentence`."""
        mean = attention[self._layer].mean(axis=1)
        place = np.full(len(self._src_len), -1)
        place[sentence] = np.arange(len(sentence))
        self._steps.append((mean.reshape(len(sentence), self._width, -1), place))

    def by(self, index: int, places: Sequence[int]) -> FloatArray:
        """What the tokens of a hypothesis of sentence `index` attended to, [tokens, source ids].

        Args:
            places: where among its sentence's hypotheses it was in the step that found each of its tokens.
        """
        steps = zip(self._steps, places, strict=False)
        return np.stack([mean[place[index], k, : self._src_len[index]] for (mean, place), k in steps])


def layer_of(layer: int, n_layers: int) -> int:
    """A layer from 0, of one that may be counted from the last.

    Raises:
        TfexportError: the decoder has no such layer.
    """
    if not -n_layers <= layer < n_layers:
        raise TfexportError(
            f"there is no decoder layer {layer}: this model has {n_layers}. Give 0 to {n_layers - 1}, or -1 for the last."
        )
    return layer % n_layers


def coverage(attention: NDArray[Any]) -> float:
    """The sum over source ids of log(min(what all tokens together attended to it, 1)), of `attention` [tokens, source ids].

    So it is 0 where each source id had its part of attention, and less for each that was passed over (Wu et al. 2016,
    section 7, without its factor beta). A source id whose attention is too small for a float, which would be infinitely bad,
    counts for nothing, as in CTranslate2.
    """
    sums = attention.sum(axis=0, dtype=np.float64)
    return float(np.log(np.minimum(sums[sums > 0], 1.0)).sum())
