"""Export trained PyTorch encoder-decoder Transformers to ONNX, and decode them token for token as PyTorch would.

import tfexport

tfexport.export("ckpt.pt", "bundle", heads=8)
model = tfexport.load("bundle")
print(model.translate("Ein Hund läuft.", beam=4))
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # no import of typing: the command line starts here, and Ctrl-C prints a traceback until it runs
if TYPE_CHECKING:
    from typing import Any

    __version__: str
    from tfexport.api.checkpoints import export, inspect, parity
    from tfexport.api.classifier import Classifier, load_classifier
    from tfexport.api.documents import DocumentTranslation, SentenceTranslation
    from tfexport.api.model import Model, load
    from tfexport.api.results import Output, Translation
    from tfexport.config import ModelConfig
    from tfexport.decoding.classify import Classified
    from tfexport.decoding.shortlist import Shortlist
    from tfexport.decoding.stream import Step
    from tfexport.errors import (
        BundleError,
        CheckpointError,
        ConfigError,
        DeadlineError,
        QueueFullError,
        RuntimeUnavailable,
        TfexportError,
        UnavailableError,
    )
    from tfexport.exporter.pipeline import Exported
    from tfexport.models.checkpoints.load import Inspection
    from tfexport.models.families.family import Family, count_indices
    from tfexport.models.families.pieced import pieced_family
    from tfexport.search.options import SearchOptions
    from tfexport.verification.parity import Comparison
    from tfexport.verification.report import ParityReport

_HOMES = {
    "tfexport.api.checkpoints": ("export", "inspect", "parity"),
    "tfexport.api.classifier": ("Classifier", "load_classifier"),
    "tfexport.api.documents": ("DocumentTranslation", "SentenceTranslation"),
    "tfexport.api.model": ("Model", "load"),
    "tfexport.api.results": ("Output", "Translation"),
    "tfexport.config": ("ModelConfig",),
    "tfexport.decoding.classify": ("Classified",),
    "tfexport.search.options": ("SearchOptions",),
    "tfexport.decoding.shortlist": ("Shortlist",),
    "tfexport.decoding.stream": ("Step",),
    "tfexport.errors": (
        *("BundleError", "CheckpointError", "ConfigError", "DeadlineError"),
        *("QueueFullError", "RuntimeUnavailable", "TfexportError", "UnavailableError"),
    ),
    "tfexport.exporter.pipeline": ("Exported",),
    "tfexport.models.checkpoints.load": ("Inspection",),
    "tfexport.models.families.family": ("Family", "count_indices"),
    "tfexport.models.families.pieced": ("pieced_family",),
    "tfexport.verification.parity": ("Comparison",),
    "tfexport.verification.report": ("ParityReport",),
}
"""The module of each public name. It is imported on first use: the command line starts here, and its help needs none."""

_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BundleError",
    "CheckpointError",
    "Classified",
    "Classifier",
    "Comparison",
    "ConfigError",
    "DeadlineError",
    "DocumentTranslation",
    "Exported",
    "Family",
    "Inspection",
    "Model",
    "ModelConfig",
    "Output",
    "ParityReport",
    "QueueFullError",
    "RuntimeUnavailable",
    "SearchOptions",
    "SentenceTranslation",
    "Shortlist",
    "Step",
    "TfexportError",
    "Translation",
    "UnavailableError",
    "__version__",
    "count_indices",
    "export",
    "inspect",
    "load",
    "load_classifier",
    "parity",
    "pieced_family",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from tfexport.system.version import version

        return version()
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
