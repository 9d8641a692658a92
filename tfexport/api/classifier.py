"""A loaded classifier: `tfexport.load_classifier("bundle").classify("Ein Hund läuft.")`, as `tfexport classify` does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, overload

from numpy.typing import NDArray

from tfexport.api.arguments import (
    count_of,
    id_sources_of,
    path_of,
    precision_of,
    require_runtime,
    sources_of,
)
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.contract import Precision
from tfexport.decoding.classify import Classified, classify, read_labels
from tfexport.decoding.line_reader import Reader
from tfexport.decoding.request_options import InputFormat
from tfexport.runtimes import load_classifier as runtime_of_classifier
from tfexport.runtimes.base import ClassifierRuntime

__all__ = ["Classifier", "load_classifier"]


class Classifier:
    """The loaded bundle of an encoder classifier, returned by `tfexport.load_classifier`."""

    def __init__(self, bundle: Bundle, runtime: ClassifierRuntime, labels: Sequence[str] | None):
        self._bundle, self._runtime = bundle, runtime
        self.labels = labels

    @property
    def precision(self) -> Precision:
        """The precision of the weights and products."""
        return self._runtime.precision

    @overload
    def classify(self, texts: str, *, top: int = 1, batch_size: int = 32) -> Classified: ...  # type: ignore[overload-overlap]
    @overload
    def classify(
        self, texts: Iterable[str] | Iterable[Sequence[str]], *, top: int = 1, batch_size: int = 32
    ) -> list[Classified]: ...
    def classify(
        self, texts: str | Iterable[str] | Iterable[Sequence[str]], *, top: int = 1, batch_size: int = 32
    ) -> Classified | list[Classified]:
        """The `top` most likely classes of each sentence, with their probabilities and labels, in order. A single string
        has a single result. Lists of tokens are not split any further.

        Raises:
            TfexportError: an argument cannot be used. A sentence that cannot be read does not raise: its status has the
                reason.
        """
        if isinstance(texts, str):
            return self.classify([texts], top=top, batch_size=batch_size)[0]
        return self._classified(*sources_of(texts), top, batch_size)

    def classify_ids(
        self, sources: Iterable[Sequence[int]] | NDArray[Any], *, top: int = 1, batch_size: int = 32
    ) -> list[Classified]:
        """`classify` for ids as the encoder reads them; see `Model.translate_ids`."""
        return self._classified(id_sources_of(sources), "ids", top, batch_size)

    def _classified(self, lines: list[bytes], format: InputFormat, top: int, batch_size: int) -> list[Classified]:
        numbers = {"top": count_of("top", top), "batch_size": count_of("batch_size", batch_size)}
        reader = Reader.of(self._bundle, format)
        return list(classify(self._runtime, reader, lines, labels=self.labels, **numbers))


def load_classifier(
    directory: str | Path | Bundle,
    *,
    runtime: str = "ort-cpu",
    precision: str | None = None,
    threads: int | None = None,
    labels: str | Path | None = None,
) -> Classifier:
    """Load the bundle of an encoder classifier; see `load`.

    Args:
        labels: a file with the names of the classes, one per line, class 0 first.
    """
    bundle = directory if isinstance(directory, Bundle) else open_bundle(path_of("directory", directory))
    require_runtime(runtime, threads)
    loaded = runtime_of_classifier(runtime, bundle, precision=precision_of(precision), threads=threads)
    names = None if labels is None else read_labels(path_of("labels", labels), bundle.config.n_classes)
    return Classifier(bundle, loaded, names)
