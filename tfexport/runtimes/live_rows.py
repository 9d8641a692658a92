"""The rows of a batch's buffers that hold live sentences: index arithmetic of runtimes with fixed buffers.

A search has rows b * beam + k, without gaps. Buffers keep the size that they were allocated with: a sentence that is done
leaves its place empty until the batch moves to smaller buffers.

    buffers   sentence 0 | sentence 1 (done) | sentence 2       places [0, 2]
    search    sentence 0 | sentence 1                           with beam 2: rows [0, 1, 4, 5] of the buffers
"""

from __future__ import annotations

import numpy as np

from tfexport.runtimes.outputs import IntArray


def fill_sources(ids: IntArray, lengths: IntArray, src_ids: IntArray, src_len: IntArray, *, pad_id: int) -> None:
    """Write `src_ids` [sentences, length] and `src_len` to `ids` [batch, src] and `lengths` [batch], which may be larger.

    Empty places hold a sentence of one pad, which the encoder can read.
    """
    sentences, length = src_ids.shape
    ids[:] = pad_id
    ids[:sentences, :length] = src_ids
    lengths[:] = 1
    lengths[:sentences] = src_len


class LiveRows:
    """The places and rows of live sentences in buffers.

    Args:
        places: the place of each sentence, [sentences], in the order of the search.
        beam: the number of rows of a sentence.
    """

    def __init__(self, places: IntArray, beam: int):
        self.places, self.beam = places, beam
        self.rows: IntArray = (places[:, None] * beam + np.arange(beam)).ravel()
        """The row in the buffers of each row of the search, [sentences * beam]."""
        is_first = bool((places == np.arange(len(places))).all())
        self.index: slice | IntArray = slice(0, len(places)) if is_first else places
        self.row_index: slice | IntArray = slice(0, len(self.rows)) if is_first else self.rows
        """`index` selects the places, and `row_index` the rows. A slice takes less time than an array of indices."""

    @classmethod
    def first(cls, sentences: int, beam: int) -> LiveRows:
        """The rows of a batch whose sentences have the first places."""
        return cls(np.arange(sentences), beam)

    def __len__(self) -> int:
        return len(self.places)

    def select(self, rows: IntArray) -> tuple[LiveRows, IntArray]:
        """Keep the sentences of `rows`; see `DecoderState.select`.

        Returns:
            The rows of these sentences, and for each hypothesis the row in the buffers that it continues, [sentences, beam].
        """
        groups = rows.reshape(-1, self.beam)
        kept = LiveRows(self.places[groups[:, 0] // self.beam], self.beam)
        return kept, kept.places[:, None] * self.beam + groups % self.beam

    def reorder(self, parents: IntArray, batch: int) -> IntArray | None:
        """The index [batch * beam] that gathers buffers for `batch` sentences so that each row continues its parent.

        None if every row continues itself.
        """
        index = np.arange(batch * self.beam)
        index[self.rows] = parents.ravel()
        return index if (index != np.arange(len(index))).any() else None

    def compact(self, parents: IntArray, batch: int) -> tuple[IntArray, IntArray]:
        """The sentences [batch] and rows [batch * beam] to gather into buffers for `batch` sentences, live ones first.

        Empty places repeat the first sentence.
        """
        empty = batch - len(self)
        sentences = np.concatenate([self.places, np.repeat(self.places[:1], empty)])
        return sentences, np.concatenate([parents, np.repeat(parents[:1], empty, axis=0)]).ravel()
