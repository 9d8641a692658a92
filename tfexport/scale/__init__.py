"""Corpora: more sentences than one machine decodes, with Ray Data.

Translator       what decodes the rows of a batch: for `Dataset.map_batches`, in pipelines of your own
tfexport corpus  whole files in, whole files out, with resume

`run.py` is the file to read first.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tfexport.scale.translator import Translator

__all__ = ["Translator"]


def __getattr__(name: str) -> Any:
    if name == "Translator":
        from tfexport.scale.translator import Translator  # when it is used: the command line needs the options alone

        return Translator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
