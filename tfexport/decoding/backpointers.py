"""How the hypotheses of a beam search grew, read backwards when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfexport.decoding.steps import ALL_SENTENCES
from tfexport.decoding.token_rules import LogProbs
from tfexport.runtimes.base import Continuations, IntArray


class Endings(NamedTuple):
    """Finished hypotheses, without the tokens before the last. Each field is [hypotheses]."""

    log_probs: LogProbs
    lengths: IntArray
    parents: IntArray
    """The beam that the last token continues."""
    tokens: IntArray
    """The last tokens."""

    def at(self, index: IntArray) -> Endings:
        """Those at an index of all fields."""
        return Endings(self.log_probs[index], self.lengths[index], self.parents[index], self.tokens[index])

    @classmethod
    def joined(cls, parts: Sequence[Endings]) -> Endings:
        """All of several."""
        return cls(
            np.concatenate([part.log_probs for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.parents for part in parts]),
            np.concatenate([part.tokens for part in parts]),
        )


class Paths(NamedTuple):
    """Hypotheses as they grew, in arrays of one length. What follows the end of one means nothing."""

    ids: IntArray
    """[hypotheses, length]"""
    ended: Endings
    past: Backpointers
    rows: IntArray
    """Of each hypothesis before the first token and after each but the last, [length, hypotheses]."""

    def token_log_probs(self, number: int) -> LogProbs:
        """The log-probability of each token of hypothesis `number`."""
        steps = np.arange(self.ended.lengths[number] - 1)
        sums = self.past.log_probs[steps, self.rows[steps + 1, number]]
        return np.diff(sums, prepend=0.0, append=self.ended.log_probs[number])

    def beams(self, number: int) -> list[int]:
        """The beam that each token of hypothesis `number` continues."""
        found: list[int] = (self.rows[: self.ended.lengths[number], number] % self.past.beam).tolist()
        return found


class Backpointers:
    """The live hypotheses after each step, as a token and the hypothesis of the step before that it continues. No step
    copies the tokens of a hypothesis; they are read backwards when they are needed.

    Hypothesis k of sentence b has row b * beam + k.
    """

    def __init__(self, steps: int, batch: int, beam: int):
        self.beam = beam
        self._first_rows: IntArray = np.arange(batch)[:, None] * beam
        self._grid = Continuations(
            np.empty((steps, batch, beam)),
            np.empty((steps, batch, beam), dtype=np.int64),
            np.empty((steps, batch, beam), dtype=np.int64),
        )
        # The same arrays by row: [steps, batch * beam].
        self.log_probs, self._parents, self._tokens = (field.reshape(steps, -1) for field in self._grid)

    def add(self, step: int, sentences: IntArray, live: Continuations) -> None:
        """Add the hypotheses of `sentences` that are `live` [steps, sentences, beam] after this step and the next ones."""
        every = sentences if len(sentences) < len(self._first_rows) else ALL_SENTENCES
        at = slice(step, step + len(live.tokens)), every
        self._grid.log_probs[at], self._grid.tokens[at] = live.log_probs, live.tokens
        self._grid.parents[at] = live.parents + self._first_rows[every]

    def read(self, sentences: IntArray, ended: Endings) -> Paths:
        """The hypotheses `ended`, one of each of `sentences` [n]."""
        lengths = ended.lengths
        longest = int(lengths.max(initial=1))
        rows = np.empty((longest, len(lengths)), dtype=np.int64)
        rows[-1] = last = sentences * self.beam + ended.parents
        begins = lengths == np.arange(1, longest)[:, None]
        some_begin = begins.any(axis=1).tolist()
        for step in range(longest - 2, -1, -1):
            # What lies behind the end of a hypothesis means nothing, and may be no row.
            self._parents[step].take(rows[step + 1], out=rows[step], mode="clip")
            if some_begin[step]:
                np.copyto(rows[step], last, where=begins[step])
        ids = np.empty((len(lengths), longest), dtype=np.int64)
        places = rows[1:] + np.arange(longest - 1)[:, None] * self._tokens.shape[1]
        ids[:, :-1] = self._tokens.take(places, mode="clip").T
        ids[np.arange(len(lengths)), lengths - 1] = ended.tokens
        return Paths(ids, ended, self, rows)

    def read_all(self, sentences: IntArray, length: int) -> tuple[IntArray, LogProbs]:
        """All hypotheses of some sentences after `length` tokens: their tokens, and their log-probabilities after each; both
        [sentences, beam, length]."""
        ids = np.empty((length, len(sentences), self.beam), dtype=np.int64)
        log_probs, rows = np.empty(ids.shape), self._first_rows[sentences] + np.arange(self.beam)
        for step in range(length - 1, -1, -1):
            ids[step], log_probs[step] = self._tokens[step, rows], self.log_probs[step, rows]
            rows = self._parents[step, rows]
        return np.moveaxis(ids, 0, -1), np.moveaxis(log_probs, 0, -1)
