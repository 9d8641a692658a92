"""`Translator`: a bundle that decodes the rows of batches, as `Dataset.map_batches` of Ray Data gives them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfexport.api.arguments import group_of, path_of, precision_of, require_runtime
from tfexport.api.line_decoder import LineDecoder
from tfexport.api.results import Output
from tfexport.bundle.reader import open_bundle
from tfexport.decoding.options import SearchOptions
from tfexport.decoding.request_options import RuntimeOptions
from tfexport.errors import TfexportError
from tfexport.option import declared, with_keywords
from tfexport.runtimes import load_runtime
from tfexport.scale.options import TranslatorBatches


@dataclass(frozen=True)
class Row:
    """What became of a row."""

    status: str
    """As in `tfexport decode`; or `null`, `not_text`, `invalid_utf8`, `invalid_json`, `worker_ended`."""
    message: str = ""
    hypotheses: tuple[Output, ...] = ()

    @property
    def text(self) -> str:
        """Of the best hypothesis; empty where there is none."""
        return self.hypotheses[0].text if self.hypotheses else ""

    @property
    def score(self) -> float | None:
        return self.hypotheses[0].score if self.hypotheses else None


class Translator:
    """Adds translations to batches: a callable class, of which each actor of Ray Data makes one.

        dataset.map_batches(
            tfexport.scale.Translator,
            fn_constructor_args=["/models/de-en"],
            fn_constructor_kwargs={"text_column": "de", "beam": 4},
            batch_format="pyarrow", batch_size=4096, num_cpus=1, concurrency=8,
        )

    It takes tables of PyArrow, dictionaries of arrays (the default of Ray Data) and data frames of pandas, and gives
    back what it got with more columns: `text`, `status`, `message`, `score`, and `nbest` where several hypotheses are
    asked for. A column of the batch with one of these names is renamed to `input_NAME`.

    Args:
        bundle: the folder, on the machine of the actor.
        text_column: the column that has the text.
        options: fields of `SearchOptions`, `RuntimeOptions` and `TranslatorBatches`.

    Raises:
        TfexportError: the bundle or an option cannot be used.
    """

    @with_keywords(TranslatorBatches, RuntimeOptions, SearchOptions)
    def __init__(self, bundle: str | Path, *, text_column: str = "text", **options: Any):
        batches, runtime = group_of(TranslatorBatches, options), group_of(RuntimeOptions, options)
        others = {*declared(TranslatorBatches), *declared(RuntimeOptions)}
        search = {name: value for name, value in options.items() if name not in others}
        require_runtime(runtime.runtime, batches.threads)
        opened = open_bundle(path_of("bundle", bundle))
        self._text_column, self._batches = text_column, batches
        loaded = load_runtime(
            runtime.runtime, opened, precision=precision_of(runtime.precision), threads=batches.threads
        )
        self._lines, self._search = LineDecoder(opened, loaded), search
        self._options = self._lines.options(search)
        self._decoder("")  # tells of options that cannot be used

    @property
    def several(self) -> bool:
        """Whether rows have several hypotheses."""
        return has_several(self._options)

    def translate(self, values: Sequence[object], place: str = "", *, singly: bool = False) -> Iterator[Row]:
        """The rows of these values, in order.

        Args:
            values: text as strings or bytes in UTF-8. None and other things are marked.
            place: of the values in the corpus. Samples depend on it, so that those of two places differ.
            singly: decode one row after the other. Each is read when the one before it is done.
        """
        marked: dict[int, Row] = {}
        decoded = self._decoder(place, singly)(_lines(values, marked), "text", None)
        for number, found in enumerate(decoded):
            if number in marked:
                yield marked.pop(number)
            else:
                yield Row(found.status, found.message, found.hypotheses)

    def _decoder(self, place: str, singly: bool = False) -> Any:
        search = dict(self._search)
        if self._options.samples:
            name = f"{self._options.seed} {place}".encode()
            search["seed"] = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest())
        window = 1 if singly else None
        given = {**search, "max_batch_tokens": self._batches.max_batch_tokens}
        return self._lines.decoder(False, None, self._batches.batch_size, 1, given, window=window)

    def __call__(self, batch: Any) -> Any:
        """The batch with its translations.

        Raises:
            TfexportError: it has no such column.
        """
        names = list(batch.column_names if hasattr(batch, "column_names") else batch)
        if self._text_column not in names:
            raise TfexportError(
                f"there is no column {self._text_column!r}. Give text_column: there are {', '.join(names)}."
            )
        column = batch[self._text_column]
        values = column.to_pylist() if hasattr(column, "to_pylist") else list(column)
        place = (
            hashlib.blake2b(repr(values).encode("utf-8", "surrogatepass")).hexdigest() if self._options.samples else ""
        )
        added = columns(list(self.translate(values, place)), several=self.several)
        kept = {name: clear_of(name, (*added, *names)) if name in added else name for name in names}
        return _joined(batch, kept, added)


def has_several(options: SearchOptions) -> bool:
    """Whether a search gives several hypotheses."""
    return max(options.nbest, options.samples, options.alternatives) > 1


def columns(rows: Sequence[Row], *, several: bool) -> dict[str, list[Any]]:
    """Rows as columns."""
    found: dict[str, list[Any]] = {
        "text": [row.text for row in rows],
        "status": [row.status for row in rows],
        "message": [row.message for row in rows],
        "score": [row.score for row in rows],
    }
    if several:
        found["nbest"] = [[{"text": one.text, "score": one.score} for one in row.hypotheses] for row in rows]
    return found


def clear_of(name: str, taken: Sequence[str]) -> str:
    """The name of an input's column beside columns that have the same."""
    while name in taken:
        name = f"input_{name}"
    return name


def _lines(values: Sequence[object], marked: dict[int, Row]) -> Iterator[bytes]:
    """A line for each value: an empty one for those that are none, which are `marked`."""
    for number, value in enumerate(values):
        row = marked_row(value)
        if row is not None:
            marked[number] = row
        text = b"" if row is not None else value
        yield text if isinstance(text, bytes) else str(text).encode("utf-8", "surrogatepass")


def marked_row(value: object) -> Row | None:
    """The row of a value that is no text; None for text."""
    if isinstance(value, Row):
        return value
    if value is None or (isinstance(value, float) and value != value):  # pandas writes NaN for null
        return Row("null", "there is no text")
    if not isinstance(value, str | bytes):
        return Row("not_text", f"the text is of type {type(value).__name__}")
    return None


def _joined(batch: Any, kept: Mapping[str, str], added: Mapping[str, list[Any]]) -> Any:
    if isinstance(batch, dict):
        import numpy as np

        arrays = {name: np.array(values, dtype=_DTYPES.get(name, object)) for name, values in added.items()}
        return {**{new: batch[old] for old, new in kept.items()}, **arrays}
    if hasattr(batch, "rename_columns"):
        import pyarrow as pa

        table = batch.rename_columns([kept[name] for name in batch.column_names])
        for name, values in added.items():
            table = table.append_column(name, pa.array(values, arrow_type(name)))
        return table
    return batch.rename(columns=dict(kept)).assign(**added)


_DTYPES: dict[str, Any] = {"score": float}


def arrow_type(name: str) -> Any:
    """The type of an added column in tables of PyArrow."""
    import pyarrow as pa

    if name == "nbest":
        return pa.list_(pa.struct([("text", pa.string()), ("score", pa.float64())]))
    return pa.float64() if name == "score" else pa.string()
