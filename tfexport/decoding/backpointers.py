"""How the hypotheses of a beam search grew, read backwards when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfexport.decoding.token_rules import LogProbs
from tfexport.runtimes.base import Continuations, IntArray

JOINED = 8
"""Logs of one step that become one log: each log takes time of its own when hypotheses are read."""


class Endings(NamedTuple):
    """Finished hypotheses, without the tokens before the last. Each field is [hypotheses]."""

    sentences: IntArray
    scores: LogProbs
    log_probs: LogProbs
    lengths: IntArray
    parents: IntArray
    """The beam that the last token continues."""
    tokens: IntArray
    """The last tokens."""

    def at(self, index: IntArray) -> Endings:
        """Those at an index of all fields."""
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
        """All of several."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    @classmethod
    def none(cls) -> Endings:
        """No hypotheses."""
        numbers, index = np.empty(0), np.empty(0, dtype=np.int64)
        return cls(index, numbers, numbers, index, index, index)


class Log(NamedTuple):
    """Steps of a search, one after the other, and where hypotheses lie in them."""

    first: int
    """The number of steps before them."""
    found: Continuations
    """[steps, sentences, candidates], of which the first `beam` live on."""
    first_rows: IntArray
    """Of each sentence of the batch, the row of its first candidate in the arrays [sentences * candidates] of a step."""


class Paths:
    """Hypotheses as they grew, token by token: those that were the `beams` of `sentences` after `lengths` tokens, all
    [hypotheses]. In arrays [length, hypotheses], what follows the end of one means nothing.

    Args:
        parts: logs, and the rows in each of their steps, [steps, hypotheses].
    """

    def __init__(
        self, sentences: IntArray, beams: IntArray, lengths: IntArray, parts: Sequence[tuple[Continuations, IntArray]]
    ):
        self.sentences, self.lengths, self._last_beams, self._parts = sentences, lengths, beams, parts

    @property
    def tokens(self) -> IntArray:
        """[length, hypotheses]"""
        return self._read([(found.tokens, rows) for found, rows in self._parts], np.int64)

    @property
    def log_probs(self) -> LogProbs:
        """Of the hypothesis up to each token, [length, hypotheses]."""
        return self._read([(found.log_probs, rows) for found, rows in self._parts], np.float64)

    def beams(self) -> list[list[int]]:
        """Of each hypothesis, the beam that each token continues, and that which a next token would."""
        continued = self._read([(found.parents, rows) for found, rows in self._parts], np.int64).T.tolist()
        lasts = zip(continued, self.lengths.tolist(), self._last_beams.tolist(), strict=True)
        return [[*beams[:length], last] for beams, length, last in lasts]

    def token_log_probs(self, totals: LogProbs) -> list[tuple[float, ...]]:
        """Of each hypothesis, the log-probability of each token, and of one more with which it has that of `totals`."""
        sums = zip(self.log_probs.T, self.lengths.tolist(), totals.tolist(), strict=True)
        return [tuple(np.diff(one[:length], prepend=0.0, append=total).tolist()) for one, length, total in sums]

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
    """The live hypotheses after each step, as a token and the hypothesis of the step before that it continues. No step
    copies the tokens of a hypothesis: what steps found is kept as it is, and read backwards when it is needed.
    """

    def __init__(self, batch: int, beam: int):
        self._batch, self._every_beam = batch, np.arange(beam)
        self._logs: list[Log] = []
        self._single = 0  # logs of one step at the end, of the same sentences
        self._steps = 0
        self._sentences: IntArray | None = None
        self._width = 0

    def add(self, sentences: IntArray, found: Continuations) -> None:
        """Add what the next steps of `sentences` found, [steps, sentences, candidates]: first what lives on."""
        width = found.tokens.shape[2]
        if sentences is not self._sentences or width != self._width:
            self._sentences, self._width, self._single = sentences, width, 0
            self._first_rows = np.zeros(self._batch, dtype=np.int64)
            self._first_rows[sentences] = np.arange(0, len(sentences) * width, width)
        self._logs.append(Log(self._steps, found, self._first_rows))
        self._steps += len(found.tokens)
        self._single = self._single + 1 if len(found.tokens) == 1 else 0
        if self._single == JOINED:
            self._join()

    def _join(self) -> None:
        """Make one log of the last `JOINED`."""
        logs = self._logs[-JOINED:]
        log_probs, parents, tokens = (
            np.concatenate(fields) for fields in zip(*(log.found for log in logs), strict=True)
        )
        self._logs[-JOINED:] = [Log(logs[0].first, Continuations(log_probs, parents, tokens), self._first_rows)]
        self._single = 0

    def read_live(self, sentences: IntArray) -> Paths:
        """All live hypotheses of some sentences, one sentence after the other."""
        beams = np.tile(self._every_beam, len(sentences))
        return self.read(sentences.repeat(len(self._every_beam)), beams, np.full(len(beams), self._steps))

    def read(self, sentences: IntArray, beams: IntArray, lengths: IntArray) -> Paths:
        """The hypotheses that were the `beams` of `sentences` after `lengths` tokens, all [hypotheses]."""
        longest = int(lengths.max(initial=0))
        last, parts = beams, list[tuple[Continuations, IntArray]]()
        for log in reversed(self._logs):
            if log.first >= longest:
                continue
            found, first_rows = log.found.at(slice(longest - log.first)), log.first_rows.take(sentences)
            steps = len(found.tokens)
            rows = np.empty((steps, len(sentences)), dtype=np.int64)
            rows[-1] = first_rows + last
            parents = found.parents.reshape(steps, -1)
            begins = lengths == np.arange(log.first, log.first + steps)[:, None]
            some_begin = begins.any(axis=1).tolist()
            for step in range(steps - 1, -1, -1):
                # What lies behind the end of a hypothesis means nothing, and may be no row.
                last = parents[step].take(rows[step], mode="clip")
                if some_begin[step]:
                    np.copyto(last, beams, where=begins[step])
                if step:
                    np.add(first_rows, last, out=rows[step - 1])
            parts.append((found, rows))
        return Paths(sentences, beams, lengths, parts[::-1])
