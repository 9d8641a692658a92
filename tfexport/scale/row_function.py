"""`RowFunction`: computes the rows of batches with a model. `Translator`, `Scorer` and `Classifier` are its subclasses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tfexport.errors import TfexportError
from tfexport.option import checked, declared

_NULLS = ("NAType", "NaTType")
"""The types of `pandas.NA` and `pandas.NaT`."""
ColumnType: TypeAlias = "type[str] | type[int] | type[float] | list[dict[str, ColumnType]]"
"""The type of the values in a column. `[{"text": str, "score": float}]` is for lists of records with these fields."""


@dataclass(frozen=True)
class Row:
    """The result of a row."""

    status: str
    """A status of `tfexport decode`; or `null`, `not_text`, `invalid_utf8`, `invalid_json`, `worker_ended`."""
    message: str = ""
    results: tuple[Any, ...] = ()
    """The results, best first; empty for a row that was not computed. Their type depends on the function."""


class RowFunction(ABC):
    """A callable class that adds columns to batches. Each actor of Ray Data creates one instance.

    It takes tables of PyArrow, dictionaries of arrays or lists, and data frames of pandas, and returns a batch of the same
    type with the columns of `added`. A column of the batch with one of these names is renamed to `input_NAME`. A pickled
    copy loads the model anew.
    """

    reads: tuple[str, ...]
    """The names of the columns with the texts."""
    _made_with: tuple[Any, Mapping[str, Any]]

    def __reduce__(self) -> tuple[Any, ...]:
        bundle, options = self._made_with
        return _made, (type(self), bundle, options)

    @classmethod
    @abstractmethod
    def described(cls, bundle: Path, options: Mapping[str, Any]) -> dict[str, Any]:
        """Everything except the bundle that results depend on, JSON-ready.

        Raises:
            TfexportError: the bundle or an option cannot be used.
        """

    @classmethod
    def for_text(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options of a run that writes lines of text, without options that only other formats need."""
        return options

    @property
    @abstractmethod
    def added(self) -> Mapping[str, ColumnType]:
        """The names and types of the added columns."""

    @abstractmethod
    def rows(self, values: Sequence[object], position: str = "", *, singly: bool = False) -> Iterator[Row]:
        """The results of values, in order.

        Args:
            values: texts as strings or as bytes in UTF-8; tuples of texts if several columns are read. A `Row` is yielded
                as it is. For None and values of other types, the status tells that there is no text.
            position: the position of the values in the corpus, such as `FILE:ROW`. Samples depend on it.
            singly: decode rows one after the other. Each value is read after the row before it is yielded.
        """

    @abstractmethod
    def _values(self, row: Row) -> Mapping[str, Any]:
        """The values of the added columns, without `status`, `message`, and columns without a value."""

    @abstractmethod
    def line(self, row: Row) -> str:
        """A row as a line of text, without the newline; an empty line if there are no results."""

    def columns(self, rows: Sequence[Row]) -> dict[str, list[Any]]:
        """The added columns of rows: a list of len(rows) values for each name."""
        records = [{"status": row.status, "message": row.message, **self._values(row)} for row in rows]
        return {name: [record.get(name) for record in records] for name in self.added}

    def __call__(self, batch: Any) -> Any:
        """The batch with the added columns.

        Raises:
            TfexportError: the batch lacks a column that the function reads, or has several columns of its name.
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
        added = self.columns(list(self.rows(values, self._position(values))))
        kept = {name: clear_of(name, (*added, *names)) if name in added else name for name in names}
        return _with_columns(batch, kept, added, self.added)

    def _position(self, values: Sequence[object]) -> str:
        """A name in place of the position of values in a corpus; an empty string if results depend on no position."""
        return ""


def _made(kind: Any, bundle: Any, options: Mapping[str, Any]) -> Any:
    return kind(bundle, **options)


def refuse_others(options: Mapping[str, Any], *groups: type) -> None:
    """Raises TfexportError if an option belongs to no group."""
    first, *rest = groups
    known = [name for group in rest for name in declared(group)]
    checked(first, {name: value for name, value in options.items() if name not in known}, others=known)


def columns_read(**columns: Any) -> tuple[str, ...]:
    """The names of the columns with the texts, checked.

    Args:
        columns: the names of columns, by the arguments that give them.

    Raises:
        TfexportError: a name is not a string, or two names are the same.
    """
    for argument, name in columns.items():
        if not isinstance(name, str):
            raise TfexportError(f"{argument} is {name!r}. Give the name of a column, a string.")
    if len(set(columns.values())) < len(columns):
        arguments, name = " and ".join(columns), next(iter(columns.values()))
        raise TfexportError(f"{arguments} are both {name!r}. Name two columns.")
    return tuple(columns.values())


def joined(columns: Sequence[Sequence[object]]) -> list[object]:
    """A value for each row: the value of the only column, or a tuple of the values of several. A `Row` among several values
    is the value of the row."""
    if len(columns) == 1:
        return list(columns[0])
    return [
        next((value for value in values if isinstance(value, Row)), values) for values in zip(*columns, strict=True)
    ]


def values_of(column: Any) -> list[object]:
    """The values of a column of a batch. Strings of PyArrow become bytes: in a damaged file some are not UTF-8, and only
    their rows must fail."""
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
    """A name for a column of the input that no other column has: `name` with `input_` before it, as often as needed."""
    while name in taken:
        name = f"input_{name}"
    return name


def lines_of(values: Sequence[object], marked: dict[int, Row], column: int | None = None) -> Iterator[bytes]:
    """A line for each value: its text in UTF-8; an empty line for a value without text.

    Args:
        marked: gets the row of each value without text, by the number of the value.
        column: the item to read if values are tuples.
    """
    for number, value in enumerate(values):
        row = marked_row(value)
        if row is not None:
            marked[number] = row
        text = b"" if row is not None else value[column] if column is not None else value  # type: ignore[index]
        yield text if isinstance(text, bytes) else str(text).encode("utf-8", "surrogatepass")


def marked_row(value: object) -> Row | None:
    """The row of a value without text; None for text."""
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
    """Whether a value is None, NaN, or a missing value of pandas."""
    # By type name: pandas need not be installed, and `NA == NA` is neither true nor false.
    return value is None or (isinstance(value, float) and value != value) or type(value).__name__ in _NULLS


def _with_columns(
    batch: Any, kept: Mapping[str, str], added: Mapping[str, list[Any]], types: Mapping[str, ColumnType]
) -> Any:
    if isinstance(batch, Mapping):  # also the lazy batches of `datasets`
        arrays = {name: _array(values, types[name]) for name, values in added.items()}
        return {**{new: batch[old] for old, new in kept.items()}, **arrays}
    if hasattr(batch, "rename_columns"):
        import pyarrow as pa

        table = batch.rename_columns([kept[name] for name in batch.column_names])
        for name, values in added.items():
            table = table.append_column(name, pa.array(values, arrow_type(types[name])))
        return table
    columns = {name: _frame_column(values, types[name]) for name, values in added.items()}
    return batch.rename(columns=dict(kept)).assign(**columns)


def _frame_column(values: list[Any], type_: ColumnType) -> Any:
    """A column for a data frame. A list without rows, or without numbers, would have no type in pandas."""
    import numpy as np

    if type_ is str:
        return values or np.empty(0, dtype=str)
    if type_ is int:  # NaN, for a missing value, is a float
        return np.array(values, dtype=float if None in values else int)
    return _array(values, type_)


def _array(values: list[Any], type_: ColumnType) -> Any:
    import numpy as np

    if type_ is float:
        return np.array(values, dtype=float)
    array = np.empty(len(values), dtype=object)  # then filled: `np.array` makes a matrix of lists of equal length
    array[:] = values
    return array


def arrow_type(type_: ColumnType) -> Any:
    """The `pyarrow.DataType` of a column."""
    import pyarrow as pa

    if isinstance(type_, list):
        (record,) = type_
        return pa.list_(pa.struct([(name, arrow_type(field)) for name, field in record.items()]))
    return {str: pa.string(), int: pa.int64(), float: pa.float64()}[type_]
