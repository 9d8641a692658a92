"""Lines in, classes out: the counterpart of `translate` for encoder classifiers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfexport.decoding.batches import batches_by_length
from tfexport.decoding.line_reader import Reader, Status
from tfexport.decoding.translate import pass_over, read_window, until_failure, window_size
from tfexport.errors import TfexportError
from tfexport.runtimes.base import ClassifierRuntime
from tfexport.search.source_batch import pad
from tfexport.search.token_rules import log_softmax, require_finite
from tfexport.system.regular_files import read_text


class ClassProbability(NamedTuple):
    """A class and its probability. In JSON the fields are `class`, `probability` and, if there are labels, `label`."""

    class_: int
    """The number of the class, from 0."""
    probability: float
    label: str | None = None
    """The name of the class, if labels were given."""


@dataclass(frozen=True)
class Classified:
    """The result of one input line."""

    line: int
    """Counted from 1."""
    status: Status
    """The status of the line, as for decoded lines; `length_limit` does not occur."""
    message: str
    """The problem, for every status except `ok` and `empty`."""
    classes: tuple[ClassProbability, ...] = ()
    """The most likely classes, best first; classes of equal probability in the order of their numbers. Empty if the line
    cannot be read."""


def classify(
    classifier: ClassifierRuntime,
    reader: Reader,
    lines: Iterable[bytes],
    *,
    top: int = 1,
    batch_size: int = 32,
    window: int | None = None,
    done: int = 0,
    labels: Sequence[str] | None = None,
) -> Iterator[Classified]:
    """The `top` most likely classes of each line, in order.

    Args:
        batch_size: the largest number of sentences computed together; long sentences have smaller batches.
        window: lines read before the first is computed; by default the lines of some batches. 1 answers each line at once.
        done: lines to skip, because their results exist already.
        labels: the names of the classes, for the results.

    Raises:
        TfexportError: the model returns numbers that are not finite, or there are fewer lines than `done`.
    """
    stream = enumerate(reader.lines(lines, None), start=1)
    pass_over(stream, done)
    size = classifier.capacity.batch_size(batch_size, 1)
    failed: list[Exception] = []
    readable_lines = until_failure(stream, failed)
    while True:
        chunk = islice(readable_lines, window or window_size(batch_size, 1))
        unread, readable = read_window(classifier.capacity, reader, None, chunk)
        if not unread and not readable:
            break
        results = {number: Classified(number, result.status, result.message) for number, result in unread.items()}
        numbers, sources = list(readable), list(readable.values())
        for places in batches_by_length([len(source) for source in sources], size):
            logits = classifier.logits(*pad([sources[place].ids for place in places], reader.config.pad_id))
            require_finite(logits)
            for place, scores in zip(places, log_softmax(logits), strict=True):
                best = np.argsort(-scores, kind="stable")[:top]
                classes = tuple(
                    ClassProbability(int(index), float(np.exp(scores[index])), labels[index] if labels else None)
                    for index in best
                )
                results[numbers[place]] = Classified(numbers[place], "ok", "", classes)
        yield from (results[number] for number in sorted(results))
    if failed:
        raise failed[0]


def read_labels(path: Path, n_classes: int) -> list[str]:
    """Read the names of the classes, one per line, class 0 first.

    Raises:
        TfexportError: the file cannot be read, or the numbers of names and classes differ.
    """
    try:
        labels = read_text(path, "utf-8-sig").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TfexportError(f"cannot read the labels {path}: {error}. Give a UTF-8 text file.") from error
    labels = [" ".join(label.split()) for label in labels]
    if len(labels) != n_classes or not all(labels):
        raise TfexportError(
            f"{path} has {sum(map(bool, labels))} labels, the model {n_classes} classes. Give one label per line."
        )
    return labels


class ClassWriter:
    """Writes results as output lines, without the newline: the labels of classes, or their numbers without labels."""

    def line(self, result: Classified) -> str:
        """Classes and probabilities, the best first, separated by tabs; an empty line if the input could not be read."""
        return self.line_of(result.classes)

    @staticmethod
    def line_of(classes: Iterable[ClassProbability]) -> str:
        """The output line of these classes; see `line`."""
        return "\t".join(
            f"{result.class_ if result.label is None else result.label}\t{result.probability:.6f}" for result in classes
        )

    def record(self, result: Classified) -> dict[str, Any]:
        """All fields, for JSON."""
        message = {"message": result.message} if result.message else {}
        classes = [
            {
                "class": likely.class_,
                **({} if likely.label is None else {"label": likely.label}),
                "probability": round(likely.probability, 6),
            }
            for likely in result.classes
        ]
        return {"line": result.line, "status": result.status, **message, "classes": classes}
