"""Corpora: more sentences than one machine decodes, with Ray Data.

Translator, Scorer, Classifier  what computes the rows of a batch: for `Dataset.map_batches`, in pipelines of your own
tfexport corpus                 whole files in, whole files out, with resume; also corpus-score and corpus-classify

`run.py` is the file to read first.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tfexport.scale.classifier import Classifier
    from tfexport.scale.scorer import Scorer
    from tfexport.scale.translator import Translator

__all__ = ["Classifier", "Scorer", "Translator"]


def __getattr__(name: str) -> Any:
    # When they are used: the command line needs the options alone.
    if name == "Classifier":
        from tfexport.scale.classifier import Classifier as found
    elif name == "Scorer":
        from tfexport.scale.scorer import Scorer as found  # type: ignore[assignment]
    elif name == "Translator":
        from tfexport.scale.translator import Translator as found  # type: ignore[assignment]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
