"""Makes past tokens less likely (Keskar et al. 2019, section 4.1, as in Transformers)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tfexport.option import option
from tfexport.search.rules.history import PANEL, HistoryRule

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tfexport.runtimes.outputs import IntArray


@dataclass(frozen=True, kw_only=True)
class RepetitionPenalty(HistoryRule):
    """Divides positive scores of past tokens by the penalty, and multiplies negative ones. Repeated tokens count once."""

    repetition_penalty: float = option(
        1.0, above=0, help="Make tokens that the output already contains less likely, if above 1.", panel=PANEL
    )

    def is_active(self) -> bool:
        return self.repetition_penalty != 1

    def penalise(self, scores: NDArray[np.float64], history: IntArray) -> None:
        import numpy as np

        penalty = self.repetition_penalty
        seen = np.take_along_axis(scores, history, axis=1)
        np.put_along_axis(scores, history, np.where(seen < 0, seen * penalty, seen / penalty), axis=1)
