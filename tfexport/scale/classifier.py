"""`Classifier`: classifies the texts of batches with an encoder classifier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfexport.api.arguments import group_of, path_of, precision_of, require_runtime
from tfexport.bundle.reader import open_bundle
from tfexport.decoding.classify import ClassWriter, classify, read_labels
from tfexport.decoding.line_reader import Reader
from tfexport.decoding.request_options import RuntimeOptions
from tfexport.errors import TfexportError
from tfexport.option import declared, with_keywords
from tfexport.runtimes import load_classifier
from tfexport.scale.options import ActorOptions, ClassOptions
from tfexport.scale.row_function import ColumnType, Row, RowFunction, columns_read, lines_of, refuse_others


class Classifier(RowFunction):
    """A callable class that adds the classes of texts to batches. Each actor of Ray Data creates one instance.

    It adds the columns `status`, `message`, `class` (a number from 0), `label` with names of classes, `probability` (from 0
    to 1), and `classes` with `top` above 1: the best classes, best first. It takes the batches that `Translator` takes.

    Args:
        bundle: the folder of an encoder classifier.
        text_column: the name of the column with the texts.
        options: fields of `ClassOptions`, `RuntimeOptions` and `ActorOptions`.

    Raises:
        TfexportError: the bundle or an option cannot be used.
    """

    @with_keywords(ClassOptions, ActorOptions, RuntimeOptions)
    def __init__(self, bundle: str | Path, *, text_column: str = "text", **options: Any):
        self.reads = columns_read(text_column=text_column)
        self._made_with = bundle, {"text_column": text_column, **options}
        refuse_others(options, ClassOptions, ActorOptions, RuntimeOptions)
        self._chosen, self._actor = group_of(ClassOptions, options), group_of(ActorOptions, options)
        runtime = group_of(RuntimeOptions, options)
        require_runtime(runtime.runtime, self._actor.threads)
        opened, precision = open_bundle(path_of("bundle", bundle)), precision_of(runtime.precision)
        self._model = load_classifier(runtime.runtime, opened, precision=precision, threads=self._actor.threads)
        self._reader = Reader.of(opened, "text")
        labels = self._chosen.labels
        self._labels = None if labels is None else read_labels(labels, opened.config.n_classes)

    @classmethod
    def described(cls, bundle: Path, options: Mapping[str, Any]) -> dict[str, Any]:
        """See `RowFunction.described`."""
        opened = open_bundle(bundle)
        if not opened.config.is_classifier:
            raise TfexportError(f"{bundle} is a translation model, which has no classes. Use `tfexport corpus`.")
        Reader.of(opened, "text")
        chosen = group_of(ClassOptions, options)
        names = None if chosen.labels is None else read_labels(chosen.labels, opened.config.n_classes)
        about = {name: options.get(name) for name in ("text_column", *declared(RuntimeOptions))}
        return {**about, "top": chosen.top, "labels": names}

    @property
    def added(self) -> Mapping[str, ColumnType]:
        """See `RowFunction.added`."""
        best: dict[str, ColumnType] = {"class": int, **({"label": str} if self._labels else {}), "probability": float}
        several = {"classes": [best]} if self._chosen.top > 1 else {}
        return {"status": str, "message": str, **best, **several}

    def rows(self, values: Sequence[object], position: str = "", *, singly: bool = False) -> Iterator[Row]:
        """The classes of texts; see `RowFunction.rows`."""
        marked: dict[int, Row] = {}
        lines, chosen = lines_of(values, marked), self._chosen
        batches: dict[str, Any] = {"batch_size": self._actor.batch_size, "window": 1 if singly else None}
        results = classify(self._model, self._reader, lines, top=chosen.top, labels=self._labels, **batches)
        for number, result in enumerate(results):
            yield marked.pop(number) if number in marked else Row(result.status, result.message, result.classes)

    def _values(self, row: Row) -> Mapping[str, Any]:
        labels = [{"label": result.label} if self._labels else {} for result in row.results]
        classes = [
            {"class": result.class_, **label, "probability": result.probability}
            for result, label in zip(row.results, labels, strict=True)
        ]
        return {**(classes[0] if classes else {}), "classes": classes}

    def line(self, row: Row) -> str:
        """Each class, or its label, and its probability, separated by tabs."""
        return ClassWriter.line_of(row.results)
