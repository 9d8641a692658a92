"""An output contains no n-gram twice (Paulus et al. 2018, section 2.5). Bos counts as a token."""

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
class NoRepeatNgram(HistoryRule):
    """Bans each token that would repeat an n-gram of the output."""

    no_repeat_ngram: int = option(
        0,
        minimum=0,
        help="Allow no sequence of N tokens twice in an output; 0 switches this off.",
        panel=PANEL,
        also=("no_repeat_ngram_size",),
    )

    def is_active(self) -> bool:
        return self.no_repeat_ngram > 0

    def ban(self, allowed: NDArray[np.bool_], history: IntArray, sources: Sequence[Sequence[int]] = ()) -> None:
        import numpy as np

        n = self.no_repeat_ngram
        if history.shape[1] < n:
            return
        ngrams = np.lib.stride_tricks.sliding_window_view(history, n, axis=1)  # [rows, places, n]
        last = history[:, history.shape[1] - (n - 1) :]
        rows, places = np.nonzero((ngrams[..., :-1] == last[:, None]).all(axis=2))
        allowed[rows, ngrams[rows, places, -1]] = False

    def excludes(self, phrases: Sequence[tuple[int, ...]], source: Sequence[int]) -> bool:
        ngrams = [ngram for ids in phrases for ngram in ngrams_of(ids, self.no_repeat_ngram)]
        return len({*ngrams}) < len(ngrams)
