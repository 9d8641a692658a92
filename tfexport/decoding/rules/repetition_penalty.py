"""Tokens that came before are less likely (Keskar et al. 2019, section 4.1, as Transformers has it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tfexport.decoding.rules.history import PANEL, HistoryRule
from tfexport.option import option

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tfexport.runtimes.base import IntArray


@dataclass(frozen=True, kw_only=True)
class RepetitionPenalty(HistoryRule):
    """Divides the scores of past tokens where positive, and multiplies them where negative; once, however often one came."""

    repetition_penalty: float = option(
        1.0, above=0, help="Above 1 makes tokens that the output already contains less likely.", panel=PANEL
    )

    def is_active(self) -> bool:
        return self.repetition_penalty != 1

    def penalise(self, scores: NDArray[np.float64], history: IntArray) -> None:
        import numpy as np

        penalty = self.repetition_penalty
        seen = np.take_along_axis(scores, history, axis=1)
        np.put_along_axis(scores, history, np.where(seen < 0, seen * penalty, seen / penalty), axis=1)
