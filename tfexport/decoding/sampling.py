"""Tokens drawn at random: the same ones whenever seed and line are the same, whatever the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tfexport.decoding.options import SearchOptions
    from tfexport.runtimes.base import IntArray


class Streams:
    """A stream of random numbers for each sample of each source: its line and the seed are the key of a Philox generator
    (Salmon et al. 2011), whose counter begins at the sample and the step."""

    def __init__(self, seed: int, lines: Sequence[int], samples: int):
        self._seed, self._lines, self._samples = seed, lines, samples

    def uniform(self, sentence: IntArray, step: int) -> NDArray[np.float64]:
        """A number from 0 to 1, without 1, for each sample of each of these sources: [sentences * samples]."""
        found = np.empty((len(sentence), self._samples))
        for place, index in enumerate(sentence.tolist()):
            for sample in range(self._samples):
                bits = np.random.Philox(key=[self._seed, self._lines[index]], counter=[0, 0, sample, step])
                found[place, sample] = np.random.Generator(bits).random()
        return found.ravel()


def draw(scores: NDArray[np.float64], uniform: NDArray[np.float64], options: SearchOptions) -> IntArray:
    """One token of each row, drawn from the temperature's distribution over those that top-k and top-p leave.

    Args:
        scores: log-probabilities, [rows, vocab]; -inf for what may not come.
        uniform: a number from 0 to 1, without 1, [rows]: the place in the cumulative distribution, best token first.
    """
    order = np.argsort(-scores, axis=1, kind="stable")
    ranked = np.take_along_axis(scores, order, axis=1)
    # Where no token may come all weights are 0.
    best = np.maximum(ranked[:, :1], np.finfo(np.float64).min)
    weights = np.exp((ranked - best) / options.temperature)
    if options.top_k:
        weights[:, options.top_k :] = 0.0
    sums = np.cumsum(weights, axis=1)
    if options.top_p < 1:
        # The token with which the sum reaches top_p is the last one that is kept.
        weights[(sums - weights) >= options.top_p * sums[:, -1:]] = 0.0
        sums = np.cumsum(weights, axis=1)
    # Some weight lies beyond the place, so the token that is found has some.
    places = (sums <= uniform[:, None] * sums[:, -1:]).sum(axis=1)
    return np.take_along_axis(order, np.minimum(places, scores.shape[1] - 1)[:, None], axis=1)[:, 0]
