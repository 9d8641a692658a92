"""Sampling: random tokens that depend on the seed and the line, not on the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tfexport.runtimes.outputs import IntArray
from tfexport.search.options import SearchOptions


class RandomStreams:
    """A stream of random numbers for each sample of each source, from a Philox generator (Salmon et al. 2011). The seed and
    the source's line are its key, the sample and the step its counter.
    """

    def __init__(self, seed: int, lines: Sequence[int], samples: int):
        self._seed = seed
        self._lines = lines
        self._samples = samples

    def uniform(self, sentences: IntArray, step: int) -> NDArray[np.float64]:
        """A number in [0, 1) for each sample of the sources `sentences`, for token `step`: [sentences * samples]."""
        numbers = np.empty((len(sentences), self._samples))
        for place, index in enumerate(sentences.tolist()):
            for sample in range(self._samples):
                bits = np.random.Philox(key=[self._seed, self._lines[index]], counter=[0, 0, sample, step])
                numbers[place, sample] = np.random.Generator(bits).random()
        return numbers.ravel()


def draw(log_probs: NDArray[np.float64], uniform: NDArray[np.float64], options: SearchOptions) -> IntArray:
    """Draw one token for each row, [rows], with the temperature, from the tokens that top-k and top-p keep.

    Args:
        log_probs: [rows, vocab]; -inf for banned tokens.
        uniform: numbers in [0, 1), [rows]: the place in the cumulative distribution, best token first.
    """
    order = np.argsort(-log_probs, axis=1, kind="stable")
    ranked = np.take_along_axis(log_probs, order, axis=1)
    # If all tokens are banned, all weights are 0.
    best = np.maximum(ranked[:, :1], np.finfo(np.float64).min)
    weights = np.exp((ranked - best) / options.temperature)
    if options.top_k:
        weights[:, options.top_k :] = 0.0
    sums = np.cumsum(weights, axis=1)
    if options.top_p < 1:
        # The token with which the sum reaches top_p is kept; those after it are not.
        weights[(sums - weights) >= options.top_p * sums[:, -1:]] = 0.0
        sums = np.cumsum(weights, axis=1)
    # The weights after the place are not all 0, so the token that is drawn has a weight above 0.
    places = (sums <= uniform[:, None] * sums[:, -1:]).sum(axis=1)
    return np.take_along_axis(order, np.minimum(places, log_probs.shape[1] - 1)[:, None], axis=1)[:, 0]
