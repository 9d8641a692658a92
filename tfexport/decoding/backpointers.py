"""How the hypotheses of a beam search grew, read backwards when they are needed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tfexport.decoding.steps import ALL_SENTENCES
from tfexport.decoding.token_rules import LogProbs
from tfexport.runtimes.base import Continuations, IntArray


class Paths(NamedTuple):
    """Hypotheses as they grew, in arrays of one length. What follows the end of one means nothing."""

    ids: IntArray
    """[hypotheses, length + 1]; the last one is empty."""
    log_probs: LogProbs
    """After each token, [hypotheses, length + 1]; the last one is empty."""
    beams: IntArray
    """The beam before the first token and after each, [hypotheses, length + 1]."""


class Backpointers:
    """The live hypotheses after each step, as a token and the beam of the step before that it continues. No step copies the
    tokens of a hypothesis; they are read backwards when they are needed.
    """

    def __init__(self, steps: int, batch: int, beam: int):
        self._tokens = np.empty((steps, batch, beam), dtype=np.int64)
        self._parents = np.empty((steps, batch, beam), dtype=np.int64)
        self._log_probs = np.empty((steps, batch, beam))

    def add(self, step: int, sentences: IntArray, live: Continuations) -> None:
        """Add the hypotheses of `sentences` that are `live` [steps, sentences, beam] after this step and the next ones."""
        every = sentences if len(sentences) < self._tokens.shape[1] else ALL_SENTENCES
        at = slice(step, step + len(live.tokens)), every
        self._log_probs[at], self._parents[at], self._tokens[at] = live

    def read(self, sentences: IntArray, beams: IntArray, lengths: IntArray) -> Paths:
        """Hypotheses: of each of `sentences` [n] the one in `beams` after `lengths` tokens, each [n]."""
        longest = int(lengths.max(initial=0))
        shape = len(beams), longest + 1
        found = Paths(np.empty(shape, dtype=np.int64), np.empty(shape), np.empty(shape, dtype=np.int64))
        for step in range(longest - 1, -1, -1):
            at = step, sentences, beams
            found.ids[:, step], found.log_probs[:, step] = self._tokens[at], self._log_probs[at]
            found.beams[:, step + 1] = beams
            beams = np.where(step < lengths, self._parents[at], beams)
        found.beams[:, 0] = beams
        return found

    def read_all(self, sentences: IntArray, length: int) -> tuple[IntArray, LogProbs]:
        """All hypotheses of some sentences after `length` tokens: their tokens, and their log-probabilities after each; both
        [sentences, beam, length]."""
        beam = self._tokens.shape[2]
        ids = np.empty((len(sentences), beam, length), dtype=np.int64)
        log_probs, beams = np.empty(ids.shape), np.tile(np.arange(beam), (len(sentences), 1))
        for step in range(length - 1, -1, -1):
            at = step, sentences[:, None], beams
            ids[..., step], log_probs[..., step], beams = self._tokens[at], self._log_probs[at], self._parents[at]
        return ids, log_probs
