"""BLEU (Papineni et al. 2002) and chrF (Popović 2015) of decoded text, computed by sacrebleu with its defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfexport.system.imports import imported


def scorer() -> Any:
    """The module `sacrebleu`.

    Raises:
        RuntimeUnavailable: it is not installed.
    """
    absent = "BLEU and chrF need sacrebleu, which is not installed: pip install 'tfexport[report]'."
    return imported("sacrebleu", absent)


@dataclass(frozen=True)
class Quality:
    """The scores of a corpus, both from 0 to 100. Outputs and targets are compared unchanged: case and spaces count."""

    bleu: float
    chrf: float

    @classmethod
    def of(cls, outputs: Sequence[str], targets: Sequence[str]) -> Quality:
        """The quality of detokenised `outputs`, with one target for each.

        Raises:
            RuntimeUnavailable: sacrebleu is not installed.
        """
        sacrebleu = scorer()
        # `force`: otherwise sacrebleu warns of outputs with separated words, which a vocabulary of words produces.
        bleu = sacrebleu.corpus_bleu(list(outputs), [list(targets)], force=True)
        chrf = sacrebleu.corpus_chrf(list(outputs), [list(targets)])
        return cls(float(bleu.score), float(chrf.score))
