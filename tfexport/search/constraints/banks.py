"""Dynamic beam allocation (Post & Vilar 2018, section 3; Hu et al. 2019).

    banks 3 3 3 2 2 2 1 1 0      candidates by bank and, in a bank, by score
    order 0 4 7 1 5 8 2 6 3      the best of each bank, then the second of each, and so on

So hypotheses with many phrase tokens do not compete with hypotheses that have none.
"""

from __future__ import annotations

import numpy as np

from tfexport.runtimes.outputs import IntArray
from tfexport.search.token_rules import LogProbs

BANK_WEIGHT = 100.0
"""fairseq sorts by the bank times this weight plus the log-probability, which is nearly the same as by bank first."""


def allocated(log_probs: LogProbs, banks: IntArray) -> IntArray:
    """The order of candidates in a beam: round-robin over their banks, the fullest bank first.

    The sort is stable. The order equals that of fairseq 0.12 (`LexicallyConstrainedBeamSearch`), even if a bank occurs in
    several runs because its log-probabilities are more than `BANK_WEIGHT` apart. Then each run counts as a new bank.

    Args:
        log_probs: the finite log-probability of each candidate, [candidates].
        banks: the bank of each candidate, [candidates].
    """
    count = len(banks)
    by_bank = np.argsort(-(BANK_WEIGHT * banks + log_probs), kind="stable")
    sorted_banks = banks[by_bank]
    places = np.arange(count)
    begins_run = np.diff(sorted_banks, prepend=sorted_banks[:1] - 1) != 0
    rank_in_run = places - np.maximum.accumulate(np.where(begins_run, places, 0))
    return by_bank[np.argsort(rank_in_run * (count + 1) - sorted_banks, kind="stable")]
