"""Corpora: decoding, scoring and classification of many files with Ray Data.

Translator, Scorer, Classifier  callable classes for `Dataset.map_batches`, for pipelines of your own
tfexport corpus                 reads whole files and writes whole files, with resume; also corpus-score, corpus-classify

Read `run.py` first.
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
    # Imported when they are used: the command line needs only the options.
    if name == "Classifier":
        from tfexport.scale.classifier import Classifier

        return Classifier
    if name == "Scorer":
        from tfexport.scale.scorer import Scorer

        return Scorer
    if name == "Translator":
        from tfexport.scale.translator import Translator

        return Translator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
