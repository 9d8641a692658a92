"""Outputs contain no n-gram of the source (`encoder_no_repeat_ngram_size` of Transformers)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tfexport.option import option
from tfexport.search.rules.history import PANEL, HistoryRule, ngrams_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tfexport.runtimes.outputs import IntArray


@dataclass(frozen=True, kw_only=True)
class EncoderNoRepeatNgram(HistoryRule):
    """Bans each token that would end an n-gram of the encoder's ids. Ids are compared, so both sides should share a
    vocabulary. Eos counts as an id. Padding does not count (in batches of Transformers it does)."""

    encoder_no_repeat_ngram: int = option(
        0,
        minimum=0,
        help="Allow no sequence of N source tokens in the output; 0 switches this off.",
        panel=PANEL,
        also=("encoder_no_repeat_ngram_size",),
    )

    def is_active(self) -> bool:
        return self.encoder_no_repeat_ngram > 0

    def ban(self, allowed: NDArray[np.bool_], history: IntArray, sources: Sequence[Sequence[int]] = ()) -> None:
        n = self.encoder_no_repeat_ngram
        length = history.shape[1]
        vocabulary = allowed.shape[1]
        if length < n - 1:
            return
        for row, (past, source) in enumerate(zip(history.tolist(), sources, strict=True)):
            last = past[length - (n - 1) :]
            for place in range(len(source) - (n - 1)):
                if list(source[place : place + n - 1]) == last and source[place + n - 1] < vocabulary:
                    allowed[row, source[place + n - 1]] = False

    def excludes(self, phrases: Sequence[tuple[int, ...]], source: Sequence[int]) -> bool:
        n = self.encoder_no_repeat_ngram
        banned = {*ngrams_of(source, n)}
        return any(ngram in banned for ids in phrases for ngram in ngrams_of(ids, n))
