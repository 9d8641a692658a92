"""Export trained PyTorch encoder-decoder Transformers to ONNX, and decode them token for token as PyTorch would.

import tfexport

model = tfexport.load("bundle")
print(model.translate("Ein Hund läuft.", beam=4))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from tfexport.api import Classifier, Model, Output, Translation, load, load_classifier
    from tfexport.errors import TfexportError

__all__ = ["Classifier", "Model", "Output", "TfexportError", "Translation", "__version__", "load", "load_classifier"]


def __getattr__(name: str) -> Any:
    # Not imported above: the command line begins with this module, and its help needs none of it.
    if name == "TfexportError":
        from tfexport.errors import TfexportError

        return TfexportError
    if name == "__version__":
        from tfexport.system.version import version

        return version()
    if name in __all__:
        from tfexport import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
