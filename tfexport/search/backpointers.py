"""The history of the hypotheses of a beam search, as backpointers that are followed when tokens are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfexport.runtimes.outputs import Continuations, IntArray
from tfexport.search.token_rules import LogProbs

JOINED = 8
"""The number of one-step logs that are joined into one log: reading hypotheses has a cost per log."""


class Endings(NamedTuple):
    """Finished hypotheses without their tokens before the last one. Each field has the shape [hypotheses]."""

    sentences: IntArray
    scores: LogProbs
    log_probs: LogProbs
    lengths: IntArray
    parents: IntArray
    """The beam that the last token continues."""
    tokens: IntArray
    """The last tokens."""

    def at(self, index: IntArray) -> Endings:
        """The hypotheses at `index`."""
        return Endings(
            self.sentences.take(index),
            self.scores.take(index),
            self.log_probs.take(index),
            self.lengths.take(index),
            self.parents.take(index),
            self.tokens.take(index),
        )

    @classmethod
    def joined(cls, parts: Sequence[Endings]) -> Endings:
        """The concatenation of several parts."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    @classmethod
    def none(cls) -> Endings:
        """No hypotheses."""
        numbers, index = np.empty(0), np.empty(0, dtype=np.int64)
        return cls(index, numbers, numbers, index, index, index)


class Log(NamedTuple):
    """Consecutive steps of a search, and the places of hypotheses in them."""

    first: int
    """The number of steps before this log."""
    continuations: Continuations
    """[steps, sentences, candidates]. The first `beam` candidates continue."""
    first_rows: IntArray
    """For each sentence of the batch, the row of its first candidate in the arrays [sentences * candidates] of a step."""


class Paths:
    """The tokens of hypotheses: those at `beams` of `sentences` after `lengths` tokens, all [hypotheses]. In arrays
    [length, hypotheses], values after the end of a hypothesis are undefined.

    Args:
        parts: logs, with the rows of the hypotheses in each step, [steps, hypotheses].
    """

    def __init__(
        self, sentences: IntArray, beams: IntArray, lengths: IntArray, parts: Sequence[tuple[Continuations, IntArray]]
    ):
        self.sentences = sentences
        self.lengths = lengths
        self._last_beams = beams
        self._parts = parts

    @property
    def tokens(self) -> IntArray:
        """[length, hypotheses]"""
        return self._read([(continuations.tokens, rows) for continuations, rows in self._parts], np.int64)

    @property
    def log_probs(self) -> LogProbs:
        """The log-probability of each hypothesis up to each token, [length, hypotheses]."""
        return self._read([(continuations.log_probs, rows) for continuations, rows in self._parts], np.float64)

    def beams(self) -> list[list[int]]:
        """For each hypothesis, the beam that each token continues, and the beam that a next token would continue."""
        continued = self._read(
            [(continuations.parents, rows) for continuations, rows in self._parts], np.int64
        ).T.tolist()
        lasts = zip(continued, self.lengths.tolist(), self._last_beams.tolist(), strict=True)
        return [[*beams[:length], last] for beams, length, last in lasts]

    def token_log_probs(self, totals: LogProbs) -> list[tuple[float, ...]]:
        """For each hypothesis, the log-probability of each token, and of one further token whose addition gives `totals`."""
        hypotheses = zip(self.log_probs.T, self.lengths.tolist(), totals.tolist(), strict=True)
        return [tuple(np.diff(sums[:length], prepend=0.0, append=total).tolist()) for sums, length, total in hypotheses]

    def _read(self, parts: Sequence[tuple[NDArray[Any], IntArray]], dtype: Any) -> NDArray[Any]:
        read = np.empty((sum(len(rows) for _, rows in parts), len(self.sentences)), dtype=dtype)
        first = 0
        for field, rows in parts:
            width = field.shape[1] * field.shape[2]
            places = rows + np.arange(0, len(rows) * width, width)[:, None]
            field.take(places, out=read[first : first + len(rows)], mode="clip")
            first += len(rows)
        return read


class Backpointers:
    """The live hypotheses after each step: each is a token and a pointer to a hypothesis of the step before. No step copies
    the tokens of a hypothesis. The results of steps are stored as they are, and followed backwards when they are needed.
    """

    def __init__(self, batch: int, beam: int):
        self._batch, self._every_beam = batch, np.arange(beam)
        self._logs: list[Log] = []
        self._single = 0  # number of one-step logs at the end with the same sentences
        self._steps = 0
        self._sentences: IntArray | None = None
        self._width = 0

    def add(self, sentences: IntArray, continuations: Continuations) -> None:
        """Add the results of the next steps of `sentences`, [steps, sentences, candidates], live hypotheses first."""
        width = continuations.tokens.shape[2]
        if sentences is not self._sentences or width != self._width:
            self._sentences = sentences
            self._width = width
            self._single = 0
            self._first_rows = np.zeros(self._batch, dtype=np.int64)
            self._first_rows[sentences] = np.arange(0, len(sentences) * width, width)
        self._logs.append(Log(self._steps, continuations, self._first_rows))
        self._steps += len(continuations.tokens)
        self._single = self._single + 1 if len(continuations.tokens) == 1 else 0
        if self._single == JOINED:
            self._join()

    def _join(self) -> None:
        """Join the last `JOINED` logs into one."""
        logs = self._logs[-JOINED:]
        log_probs, parents, tokens = (
            np.concatenate(fields) for fields in zip(*(log.continuations for log in logs), strict=True)
        )
        self._logs[-JOINED:] = [Log(logs[0].first, Continuations(log_probs, parents, tokens), self._first_rows)]
        self._single = 0

    def read_live(self, sentences: IntArray) -> Paths:
        """All live hypotheses of these sentences, sentence by sentence."""
        beams = np.tile(self._every_beam, len(sentences))
        return self.read(sentences.repeat(len(self._every_beam)), beams, np.full(len(beams), self._steps))

    def read(self, sentences: IntArray, beams: IntArray, lengths: IntArray) -> Paths:
        """The hypotheses at `beams` of `sentences` after `lengths` tokens, all [hypotheses]."""
        longest = int(lengths.max(initial=0))
        last, parts = beams, list[tuple[Continuations, IntArray]]()
        for log in reversed(self._logs):
            if log.first >= longest:
                continue
            continuations, first_rows = log.continuations.at(slice(longest - log.first)), log.first_rows.take(sentences)
            steps = len(continuations.tokens)
            rows = np.empty((steps, len(sentences)), dtype=np.int64)
            rows[-1] = first_rows + last
            parents = continuations.parents.reshape(steps, -1)
            begins = lengths == np.arange(log.first, log.first + steps)[:, None]
            some_begin = begins.any(axis=1).tolist()
            for step in range(steps - 1, -1, -1):
                # Values after the end of a hypothesis are undefined, and may not be valid rows.
                last = parents[step].take(rows[step], mode="clip")
                if some_begin[step]:
                    np.copyto(last, beams, where=begins[step])
                if step:
                    np.add(first_rows, last, out=rows[step - 1])
            parts.append((continuations, rows))
        return Paths(sentences, beams, lengths, parts[::-1])
