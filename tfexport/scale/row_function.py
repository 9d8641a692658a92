"""What a model does with the rows of batches: `RowFunction`, of which `Translator`, `Scorer` and `Classifier` are kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfexport.errors import TfexportError
from tfexport.option import checked, declared

_NULLS = ("NAType", "NaTType")
"""Types of `pandas.NA` and `pandas.NaT`."""
Kind = Any
"""Of values in a column: `str`, `int`, `float`, or a list of one mapping from names to kinds, for lists of records."""


@dataclass(frozen=True)
class Row:
    """What became of a row."""

    status: str
    """As in `tfexport decode`; or `null`, `not_text`, `invalid_utf8`, `invalid_json`, `worker_ended`."""
    message: str = ""
    found: tuple[Any, ...] = ()
    """The best first; none where the row is marked. What they are is told by the function that gave them."""


class RowFunction(ABC):
    """A callable class, of which each actor of Ray Data makes one.

    It takes tables of PyArrow, dictionaries of arrays or lists, and data frames of pandas, and gives back what it got with
    the columns of `added`. A column of the batch with one of these names is renamed to `input_NAME`. A copy in another
    process, as pickle makes it, loads the model anew.
    """

    reads: tuple[str, ...]
    """The columns that have its texts."""
    _made_with: tuple[Any, Mapping[str, Any]]

    def __reduce__(self) -> tuple[Any, ...]:
        bundle, options = self._made_with
        return _made, (type(self), bundle, options)

    @classmethod
    @abstractmethod
    def described(cls, bundle: Path, options: Mapping[str, Any]) -> dict[str, Any]:
        """All that results depend on beside the bundle, JSON-ready.

        Raises:
            TfexportError: the bundle or an option cannot be used.
        """

    @classmethod
    def for_text(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options of a run that writes text alone, and needs nothing that other formats have."""
        return options

    @property
    @abstractmethod
    def added(self) -> Mapping[str, Kind]:
        """The columns that it adds."""

    @abstractmethod
    def rows(self, values: Sequence[object], place: str = "", *, singly: bool = False) -> Iterator[Row]:
        """The rows of these values, in order.

        Args:
            values: text as strings or bytes in UTF-8, or tuples of them where several columns are read. None and other
                things are marked.
            place: of the values in the corpus.
            singly: compute one row after the other. Each is read when the one before it is done.
        """

    @abstractmethod
    def _values(self, row: Row) -> Mapping[str, Any]:
        """Of the added columns, without those that are None, `status` and `message`."""

    @abstractmethod
    def line(self, row: Row) -> str:
        """A row as a line of text, without the newline; an empty one where nothing was found."""

    def columns(self, rows: Sequence[Row]) -> dict[str, list[Any]]:
        """Rows as columns."""
        records = [{"status": row.status, "message": row.message, **self._values(row)} for row in rows]
        return {name: [record.get(name) for record in records] for name in self.added}

    def __call__(self, batch: Any) -> Any:
        """The batch with what was found.

        Raises:
            TfexportError: it has no such column, or several with its name.
        """
        names = list(batch.column_names if hasattr(batch, "column_names") else batch)
        for column in self.reads:
            if column not in names:
                raise TfexportError(
                    f"there is no column {column!r}. Name another: there are {', '.join(map(str, names))}."
                )
            if names.count(column) > 1:
                raise TfexportError(
                    f"there are {names.count(column)} columns {column!r}. Rename all but the one to read."
                )
        values = joined([values_of(batch[column]) for column in self.reads])
        added = self.columns(list(self.rows(values, self._place(values))))
        kept = {name: clear_of(name, (*added, *names)) if name in added else name for name in names}
        return _with_columns(batch, kept, added, self.added)

    def _place(self, values: Sequence[object]) -> str:
        """A name for values whose place in a corpus is not known; an empty one where rows depend on no place."""
        return ""


def _made(kind: Any, bundle: Any, options: Mapping[str, Any]) -> Any:
    return kind(bundle, **options)


def refuse_others(given: Mapping[str, Any], *groups: type) -> None:
    """Raises TfexportError where something is given that is an option of no group."""
    first, *rest = groups
    known = [name for group in rest for name in declared(group)]
    checked(first, {name: value for name, value in given.items() if name not in known}, others=known)


def columns_read(**given: Any) -> tuple[str, ...]:
    """The columns that have the texts, by the arguments that name them.

    Raises:
        TfexportError: one is no string, or two are the same.
    """
    for argument, name in given.items():
        if not isinstance(name, str):
            raise TfexportError(f"{argument} is {name!r}. Give the name of a column, a string.")
    if len(set(given.values())) < len(given):
        arguments, name = " and ".join(given), next(iter(given.values()))
        raise TfexportError(f"{arguments} are both {name!r}. Name two columns.")
    return tuple(given.values())


def joined(columns: Sequence[Sequence[object]]) -> list[object]:
    """The values of columns, row by row: as they are of one column, tuples of several; a `Row` among them marks the row."""
    if len(columns) == 1:
        return list(columns[0])
    return [next((one for one in row if isinstance(one, Row)), row) for row in zip(*columns, strict=True)]


def values_of(column: Any) -> list[object]:
    """The values of a column of a batch. Strings of PyArrow come as bytes: where a damaged file has some that are not UTF-8,
    their rows are marked, and the others computed."""
    if not hasattr(column, "to_pylist"):
        return list(column)
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_null(column.type):
        return [None] * len(column)
    # Each kind of strings has its own kind of bytes.
    kinds = {pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view(), pa.string(): pa.binary()}
    return list(column.cast(kinds.get(column.type, column.type)).to_pylist())


def clear_of(name: str, taken: Sequence[str]) -> str:
    """The name of an input's column beside columns that have the same."""
    while name in taken:
        name = f"input_{name}"
    return name


def lines_of(values: Sequence[object], marked: dict[int, Row], column: int | None = None) -> Iterator[bytes]:
    """A line for each value: an empty one for those that are none, which are `marked`.

    Args:
        column: of values that are tuples, which of their parts.
    """
    for number, value in enumerate(values):
        row = marked_row(value)
        if row is not None:
            marked[number] = row
        text = b"" if row is not None else value[column] if column is not None else value  # type: ignore[index]
        yield text if isinstance(text, bytes) else str(text).encode("utf-8", "surrogatepass")


def marked_row(value: object) -> Row | None:
    """The row of a value that is no text; None for text."""
    if isinstance(value, Row):
        return value
    if isinstance(value, tuple):
        return next((row for row in map(marked_row, value) if row is not None), None)
    if _is_null(value):
        return Row("null", "there is no text")
    if not isinstance(value, str | bytes):
        return Row("not_text", f"the text is of type {type(value).__name__}")
    return None


def _is_null(value: object) -> bool:
    """Whether a value is what stands for none in a batch: None, and what pandas has for it."""
    # By their names: pandas need not be installed, and `NA == NA` is neither true nor false.
    return value is None or (isinstance(value, float) and value != value) or type(value).__name__ in _NULLS


def _with_columns(
    batch: Any, kept: Mapping[str, str], added: Mapping[str, list[Any]], kinds: Mapping[str, Kind]
) -> Any:
    if isinstance(batch, Mapping):  # also the lazy batches of `datasets`
        arrays = {name: _array(values, kinds[name]) for name, values in added.items()}
        return {**{new: batch[old] for old, new in kept.items()}, **arrays}
    if hasattr(batch, "rename_columns"):
        import pyarrow as pa

        table = batch.rename_columns([kept[name] for name in batch.column_names])
        for name, values in added.items():
            table = table.append_column(name, pa.array(values, arrow_type(kinds[name])))
        return table
    columns = {name: _frame_column(values, kinds[name]) for name, values in added.items()}
    return batch.rename(columns=dict(kept)).assign(**columns)


def _frame_column(values: list[Any], kind: Kind) -> Any:
    """A column for a data frame. Lists tell pandas no type where there are no rows, or no numbers in them."""
    import numpy as np

    if kind is str:
        return values or np.empty(0, dtype=str)
    if kind is int:  # NaN, which stands for none, is a float
        return np.array(values, dtype=float if None in values else int)
    return _array(values, kind)


def _array(values: list[Any], kind: Kind) -> Any:
    import numpy as np

    if kind is float:
        return np.array(values, dtype=float)
    array = np.empty(len(values), dtype=object)  # filled one by one: lists of one length are no matrix
    array[:] = values
    return array


def arrow_type(kind: Kind) -> Any:
    """A kind of values in tables of PyArrow."""
    import pyarrow as pa

    if isinstance(kind, list):
        (record,) = kind
        return pa.list_(pa.struct([(name, arrow_type(inner)) for name, inner in record.items()]))
    return {str: pa.string(), int: pa.int64(), float: pa.float64()}[kind]
