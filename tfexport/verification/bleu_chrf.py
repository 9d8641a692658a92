"""BLEU (Papineni et al. 2002) and chrF (Popović 2015) of decoded text, computed by sacrebleu with its defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfexport.system.imports import import_failure


def scorer() -> Any:
    """The module `sacrebleu`.

    Raises:
        RuntimeUnavailable: it is not installed.
    """
    try:
        import sacrebleu
    except ImportError as error:
        absent = "BLEU and chrF need sacrebleu, which is not installed: pip install 'tfexport[report]'."
        raise import_failure(error, "sacrebleu", absent) from error
    return sacrebleu


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
