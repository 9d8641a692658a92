"""What the functions of the Python API are given, checked: a wrong argument is named, and what to give instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from numbers import Integral
from pathlib import Path
from typing import Any

from tfexport.contract import Precision, precisions_of
from tfexport.decoding.request_options import InputFormat
from tfexport.errors import TfexportError

_SHOWN = 60


def path_of(name: str, value: Any) -> Path:
    """Raises: TfexportError where an argument is no path."""
    if not isinstance(value, str | Path):
        raise _wrong(name, value, "Give a path.")
    return Path(value)


def count_of(name: str, value: Any) -> int:
    """Raises: TfexportError where an argument is no whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise _wrong(name, value, "Give a whole number above 0.")
    return int(value)


def require(kind: type, name: str, value: Any, advice: str) -> None:
    """Raises TfexportError where an argument is neither of this type nor None."""
    if value is not None and not isinstance(value, kind):
        raise _wrong(name, value, advice)


def require_runtime(runtime: Any, threads: Any) -> None:
    """Raises TfexportError where these are not the name of a runtime and a number of threads, or None."""
    require(str, "runtime", runtime, "Give the name of a runtime, such as ort-cpu.")
    if threads is not None:
        count_of("threads", threads)


def precision_of(given: Any) -> Precision | None:
    """The precision of a name.

    Raises:
        TfexportError: it is no name, or there is no such precision.
    """
    if given is None:
        return None
    require(str, "precision", given, "Give a string such as int8.")
    chosen, *more = precisions_of(given)
    if more:
        raise TfexportError(f"a model is loaded in one precision, not {given}. Give one, or load it twice.")
    return chosen


def line_of(name: str, value: Any) -> bytes:
    """A sentence as lines of files have it.

    Raises:
        TfexportError: it is no string.
    """
    if not isinstance(value, str):
        raise _wrong(name, value, "Give a string for each sentence.")
    # A lone surrogate is not UTF-8, as the reader of lines says.
    return value.encode("utf-8", "surrogatepass")


def lines_of(name: str, values: Any) -> Iterator[bytes]:
    """`line_of` each of several sentences, as they are read.

    Raises:
        TfexportError: it is not several things, at once.
    """
    return (line_of(name, value) for value in _several(name, values, "Give a list of strings."))


def sources_of(values: Any) -> tuple[list[bytes], InputFormat]:
    """Sentences, or lists of tokens, as lines; and what these are.

    Raises:
        TfexportError: they are something else, or a token has white space.
    """
    advice = "Give a string, a list of strings, or a list of lists of tokens."
    several = list(_several("texts", values, advice))
    if all(isinstance(value, str) for value in several):
        return [line_of("texts", value) for value in several], "text"
    for wrong in (value for value in several if isinstance(value, str) or not _is_list(value)):
        has_both = isinstance(wrong, str)
        raise _wrong("texts", wrong, "Give strings or lists of tokens, not both." if has_both else advice, part=True)
    return [_joined(tokens) for tokens in map(_plain, several)], "tokens"


def id_sources_of(values: Any) -> list[bytes]:
    """Encoder ids of sentences, lists or arrays or tensors, as lines.

    Raises:
        TfexportError: they are something else.
    """
    advice = "Give a list of ids for each sentence, as in [[14, 15, 3]]."
    lines = []
    for source in _several("sources", _plain(values), advice):
        ids = _plain(source)
        if isinstance(ids, str) or not isinstance(ids, Sequence):
            raise _wrong("sources", source, advice, part=True)
        for index in ids:
            if isinstance(index, bool) or not isinstance(index, Integral):
                raise _wrong("sources", index, "Give ids as whole numbers.", part=True)
        lines.append(" ".join(str(int(index)) for index in ids).encode())
    return lines


def _several(name: str, values: Any, advice: str) -> Iterable[Any]:
    if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
        raise _wrong(name, values, advice)
    return values


def _is_list(value: Any) -> bool:
    plain = _plain(value)
    return isinstance(plain, Sequence) and not isinstance(plain, str | bytes)


def _plain(value: Any) -> Any:
    """Arrays of NumPy and tensors of PyTorch as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _joined(tokens: Sequence[Any]) -> bytes:
    for token in tokens:
        if isinstance(token, Integral):
            raise _wrong("texts", token, "Give ids to translate_ids.", part=True)
        if not isinstance(token, str) or token.split() != [token]:
            raise _wrong("texts", token, "Give tokens as strings without white space.", part=True)
    return line_of("texts", " ".join(tokens))


def _wrong(name: str, value: Any, advice: str, *, part: bool = False) -> TfexportError:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return TfexportError(f"{name} {'has' if part else 'is'} {shown}. {advice}")
