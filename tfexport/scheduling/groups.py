"""Groups of sentences that join a batch together: one search, with the results of its steps and its errors."""

from __future__ import annotations

import traceback
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tfexport.errors import TfexportError, UnavailableError
from tfexport.runtimes.base import Runtime
from tfexport.runtimes.outputs import IntArray
from tfexport.scheduling.sentences import Decided, Event, Failed, Finished, Sentence
from tfexport.search.search_batch import SearchBatch
from tfexport.search.source_batch import length_limits
from tfexport.search.token_rules import ends_at_limit

LIKE_LENGTH = 0.75
"""The smallest length of a source in a run of the encoder, as a fraction of the longest, if there are enough sources."""

FEWEST_IDS = 48
"""The smallest number of source ids in a run of the encoder, if there are enough. A smaller run costs more than padding."""


@dataclass
class Group:
    """Sentences that began together, with the same options.

    Attributes:
        places: the place of each sentence in the batch, [sentences].
        rows: the row in the batch of each row of the search.
    """

    search: SearchBatch
    sentences: Sequence[Sentence]
    places: IntArray
    rows: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    _n_reported: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._streams = any(sentence.streams for sentence in self.sentences)

    def live(self) -> list[Sentence]:
        return [self.sentences[index] for index in self.search.sentences.tolist()]

    def find_rows(self, width: int) -> IntArray:
        """`rows` for the current sentences of the search."""
        self.rows = (self.places[self.search.sentences][:, None] * width + np.arange(width)).ravel()
        return self.rows

    def drop(self, keys: frozenset[Hashable]) -> IntArray:
        """Remove sentences; returns their indices."""
        live = self.search.sentences.tolist()
        leaving = np.array([index for index in live if self.sentences[index].key in keys], dtype=np.int64)
        if len(leaving):
            self.search.drop(leaving)
        return leaving

    def events(self) -> Iterator[Event]:
        """The events of the last step of the search."""
        ended = self.search.ended
        if len(ended):
            for index, outputs in zip(ended.tolist(), self.search.outputs(ended), strict=True):
                yield Finished(self.sentences[index].key, outputs)
        if self.search.is_done or not self._streams:
            return
        for index in self.search.sentences.tolist():
            if self.sentences[index].streams:
                ids, log_probs = self.search.stable_prefix(index)
                if len(ids) > self._n_reported.get(index, 0):
                    self._n_reported[index] = len(ids)
                    yield Decided(self.sentences[index].key, tuple(ids.tolist()), tuple(log_probs.tolist()))


def grouped(runtime: Runtime, sentences: Sequence[Sentence]) -> list[list[Sentence]]:
    """Divide sentences into groups, in order. A group requests the same outputs of each step as each of its sentences alone.

    (If one sentence of a group needs logits, the host ranks the whole group, and its log-probabilities may differ from the
    runtime's in the last bits.)
    """
    groups: dict[Hashable, list[Sentence]] = {}
    for sentence in sentences:
        groups.setdefault((sentence.options, group_properties(runtime, sentence)), []).append(sentence)
    return list(groups.values())


def group_properties(runtime: Runtime, sentence: Sentence) -> Hashable:
    """The properties that the sentences of a group share, in addition to their options."""
    limit = 0
    if ends_at_limit(sentence.options):
        limit = int(length_limits(runtime, [sentence.source], sentence.options)[0])
    source = sentence.source
    return len(source.prefix), source.least, bool(source.required), bool(source.forbidden), limit


def failed(sentences: Iterable[Sentence], error: Exception) -> list[Event]:
    """The events of sentences that cannot be decoded.

    An unexpected error is a fault of tfexport. The caller gets its text in a form that any process can read. The error ends
    neither the worker nor other requests.
    """
    if isinstance(error, MemoryError):
        error = UnavailableError(
            "there is not enough memory for this request. Use a smaller beam, or shorter sentences."
        )
    elif not isinstance(error, TfexportError):
        text = "".join(traceback.format_exception(error))
        error = RuntimeError(f"{type(error).__name__} in a worker")
        error.add_note(text)
    return [Failed(sentence.key, error) for sentence in sentences]


def pieces(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of sources in runs of the encoder, of similar lengths, the longest first, so that runs have little padding."""
    runs: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        piece = runs[-1] if runs else []
        # A short piece continues, because each run of the encoder has a fixed cost.
        if piece and (lengths[index] >= LIKE_LENGTH * lengths[piece[0]] or lengths[piece[0]] * len(piece) < FEWEST_IDS):
            piece.append(index)
        else:
            runs.append([index])
    return runs
