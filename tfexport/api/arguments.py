"""Checks of the arguments of the Python API. An error names the wrong argument and what to give instead."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from tfexport.contract import Precision, precisions_of
from tfexport.decoding.glossary import Entry, Glossary
from tfexport.decoding.line_reader import TargetReader
from tfexport.decoding.request_options import AlignmentOptions, BatchLimits, InputFormat, KeepOptions, is_utf8
from tfexport.decoding.shortlist import Shortlist
from tfexport.decoding.terminology import Terminology
from tfexport.documents.options import DocumentOptions
from tfexport.errors import TfexportError
from tfexport.option import Given, checked, declared
from tfexport.search.options import SearchOptions

Group = TypeVar("Group")

MOST_THREADS = 256
"""The largest number of threads or processes: a larger number is a mistake, and would overload the machine."""
_SHOWN = 60
_SOURCES = "Give a string, a list of strings, or a list of lists of tokens."
_PHRASES = "Give a list of strings for each sentence."
NOT_OF_SEARCH = (
    *("batch_size", "workers", "prefix", "shortlist", "constraints", "glossary"),
    *declared(KeepOptions),
    *declared(AlignmentOptions),
    *declared(BatchLimits),
)
"""Arguments of the methods of `Model` that are not options of a search."""
_NOT_BOTH = "Give strings or lists of tokens, not both."


def path_of(name: str, value: Any) -> Path:
    """The path of an argument. Raises: TfexportError: it is not a path, or no file can have this path."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise _wrong(name, value, "Give a path.")
    try:
        os.lstat(path)
    except ValueError as error:
        raise _wrong(name, value, f"No file can have this name ({error}). Give another.") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise _wrong(name, value, "No file can have a name of this length. Give another.") from error
    return Path(path)


def count_of(name: str, value: Any, *, minimum: int = 1, maximum: int | None = None) -> int:
    """The whole number of an argument. Raises: TfexportError: it is not a whole number, or is out of bounds."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise _wrong(name, value, f"Give a whole number{' above 0' if minimum else ', or 0'}.")
    count = int(value)
    if maximum is not None and count > maximum:
        raise _wrong(name, value, f"Give at most {maximum}.")
    return count


def flag_of(name: str, value: Any) -> bool:
    """The flag of an argument. Raises: TfexportError: it is neither True nor False."""
    if not isinstance(value, bool):
        raise _wrong(name, value, "Give True or False.")
    return value


def tolerance_of(value: Any) -> float | None:
    """The tolerance of an argument. Raises: TfexportError: it is neither a number from 0 on nor None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise _wrong("tolerance", value, "Give a number from 0 on.")
    return float(value)


def names_of(name: str, value: Any, advice: str) -> list[str]:
    """One name, or a list of names.

    Raises:
        TfexportError: the argument is something else, or empty.
    """
    names = [value] if isinstance(value, str) else list(_several(name, value, advice))
    if not names or not all(isinstance(element, str) for element in names):
        raise _wrong(name, value, advice)
    return names


def require(kind: type, name: str, value: Any, advice: str) -> None:
    """Raises TfexportError if an argument is neither of this type nor None."""
    if value is not None and not isinstance(value, kind):
        raise _wrong(name, value, advice)


def require_runtime(runtime: Any, threads: Any) -> None:
    """Raises TfexportError if these are not the name of a runtime and a number of threads, or None."""
    require(str, "runtime", runtime, "Give the name of a runtime, such as ort-cpu.")
    if threads is not None:
        count_of("threads", threads, maximum=MOST_THREADS)


def precision_of(name: Any) -> Precision | None:
    """The precision of a name; None for None.

    Raises:
        TfexportError: the argument is not a name, or there is no such precision.
    """
    if name is None:
        return None
    require(str, "precision", name, "Give a string such as int8.")
    chosen, *more = precisions_of(name, "precision")
    if more:
        raise TfexportError(f"a model is loaded in one precision, not {name}. Give one, or load it twice.")
    return chosen


def pairs_of(texts: Any, targets: Any) -> tuple[Any, Any]:
    """Sources and outputs as lists.

    Raises:
        TfexportError: only one of them is a string.
    """
    if isinstance(texts, str) != isinstance(targets, str):
        raise TfexportError("texts and targets are two strings, or two lists of strings. Give the same of both.")
    return ([texts], [targets]) if isinstance(texts, str) else (texts, targets)


def line_of(name: str, value: Any) -> bytes:
    """A sentence in the form of a line of a file.

    Raises:
        TfexportError: the argument is not a string.
    """
    if not isinstance(value, str):
        raise _wrong(name, value, "Give a string for each sentence.")
    # A lone surrogate is not UTF-8, which the reader of lines reports.
    return value.encode("utf-8", "surrogatepass")


def lines_of(name: str, values: Any) -> Iterator[bytes]:
    """`line_of` for each of several sentences, checked as they are read.

    Raises:
        TfexportError: the argument is not an iterable of sentences (raised at once), or a sentence is not a string.
    """
    return (line_of(name, value) for value in _several(name, values, "Give a list of strings."))


def phrases_of(values: Any) -> Iterator[list[bytes]]:
    """The phrases of each sentence, checked as they are read.

    Raises:
        TfexportError: the argument is not an iterable (raised at once), or an element is not a list of strings.
    """
    return (phrases_of_one(value) for value in _several("constraints", values, _PHRASES))


def phrases_of_one(value: Any) -> list[bytes]:
    """The phrases of a sentence.

    Raises:
        TfexportError: the argument is not a list of strings.
    """
    return [line_of("constraints", phrase) for phrase in _several("constraints", value, _PHRASES)]


def glossary_of(terms: Mapping[Any, Any]) -> Glossary:
    """A glossary from a dictionary of source phrases and target phrases.

    Raises:
        TfexportError: a phrase is not a string, has no words, or cannot be written as UTF-8.
    """
    for phrase in (*terms, *terms.values()):
        if not isinstance(phrase, str) or not phrase.strip():
            raise _wrong("glossary", phrase, "Give phrases as strings.", part=True)
        if not is_utf8(phrase):
            raise _wrong("glossary", phrase, "Give phrases that can be written as UTF-8.", part=True)
    return Glossary.of(Entry(source, target, False, "glossary") for source, target in terms.items())


def sources_of(values: Any) -> tuple[list[bytes], InputFormat]:
    """Sentences, or lists of tokens, as lines; and the format of the lines.

    Raises:
        TfexportError: the argument is something else, or a token has white space.
    """
    several = list(require_several(values))
    if all(isinstance(value, str) for value in several):
        return [line_of("texts", value) for value in several], "text"
    for wrong in (value for value in several if isinstance(value, str) or not _is_list(value)):
        raise _wrong("texts", wrong, _NOT_BOTH if isinstance(wrong, str) else _SOURCES, part=True)
    return [_joined(tokens) for tokens in map(_plain, several)], "tokens"


def require_several(values: Any) -> Iterable[Any]:
    """The argument, checked. Raises: TfexportError: it is not several sentences."""
    return _several("texts", values, _SOURCES)


def live_sources_of(values: Iterable[Any]) -> tuple[Iterator[bytes], InputFormat]:
    """`sources_of` that reads only the first sentence, whose type must be that of all sentences.

    Raises:
        TfexportError: the first sentence is something else. Later sentences raise it when they are read.
    """
    waiting = iter(values)
    for first in waiting:
        if isinstance(first, str):
            return map(_live_text, chain([first], waiting)), "text"
        return map(_live_tokens, chain([first], waiting)), "tokens"
    return iter(()), "text"


def _live_text(value: Any) -> bytes:
    if not isinstance(value, str):
        raise _wrong("texts", value, _NOT_BOTH if _is_list(value) else _SOURCES, part=True)
    return line_of("texts", value)


def _live_tokens(value: Any) -> bytes:
    if isinstance(value, str) or not _is_list(value):
        raise _wrong("texts", value, _NOT_BOTH if isinstance(value, str) else _SOURCES, part=True)
    return _joined(_plain(value))


def id_sources_of(values: Any) -> list[bytes]:
    """Encoder ids of sentences, lists or arrays or tensors, as lines.

    Raises:
        TfexportError: the argument is something else.
    """
    advice = "Give a list of ids for each sentence, as in [[14, 15, 3]]."
    lines = []
    for source in _several("sources", _plain(values), advice):
        ids = _plain(source)
        if isinstance(ids, str | bytes | bytearray) or not isinstance(ids, Sequence):
            raise _wrong("sources", source, advice, part=True)
        ids = [_plain(index) for index in ids]
        for index in ids:
            if isinstance(index, bool) or not isinstance(index, Integral):
                raise _wrong("sources", index, "Give ids as whole numbers.", part=True)
        lines.append(" ".join(str(int(index)) for index in ids).encode())
    return lines


def group_of(group: type[Group], options: Mapping[str, Any]) -> Group:
    """The options of a group. Options of other groups are ignored, and None is the default.

    Raises:
        TfexportError: an option has another type, or is out of range.
    """
    own = {name: options[name] for name in declared(group) if options.get(name) is not None}
    return group(**checked(group, own))


@dataclass(frozen=True)
class Keywords:
    """The options of a method of `Model`, each in its group."""

    search: Given[SearchOptions]
    alignments: AlignmentOptions
    keep: KeepOptions
    limits: BatchLimits
    documents: DocumentOptions

    @classmethod
    def parse(cls, options: Mapping[str, Any], *groups: type) -> Keywords:
        """Parse the options of a method.

        Args:
            groups: the groups that the method has besides the options of a search.

        Raises:
            TfexportError: the method has no such option, or its value cannot be used.
        """
        try:  # requests to a server have few kinds of options
            return _parsed(groups, *chain.from_iterable(options.items()))
        except TypeError:  # a list cannot be hashed
            return cls._parse(options, groups)

    @classmethod
    def _parse(cls, options: Mapping[str, Any], groups: tuple[type, ...]) -> Keywords:
        names = {name for group in groups for name in declared(group)}
        search = {name: value for name, value in options.items() if name not in names}
        others = {name: value for name, value in options.items() if name in names}
        return cls(
            Given.parse(SearchOptions, search, others=NOT_OF_SEARCH),
            group_of(AlignmentOptions, others),
            group_of(KeepOptions, others),
            group_of(BatchLimits, others),
            group_of(DocumentOptions, {"split": "sentences"} | {n: v for n, v in others.items() if v is not None}),
        )


@lru_cache(maxsize=128, typed=True)  # typed, because 1 == True, and a flag is no number
def _parsed(groups: tuple[type, ...], *names_and_values: Any) -> Keywords:
    names, values = names_and_values[::2], names_and_values[1::2]
    return Keywords._parse(dict(zip(names, values, strict=True)), groups)


def terms_of(
    keep: KeepOptions, glossary: Any, phrases: Iterable[Sequence[bytes]] | None, target: Callable[[], TargetReader]
) -> Terminology | None:
    """The required and forbidden phrases; None if there are none.

    Args:
        phrases: the required phrases of each line.
        target: returns the reader of phrases.

    Raises:
        TfexportError: the glossary is neither a `Glossary` nor a dictionary.
    """
    if isinstance(glossary, Mapping):
        glossary = glossary_of(glossary)
    elif glossary is not None:
        require(Glossary, "glossary", glossary, "Give what Model.read_glossary returns, or a dictionary.")
    if keep.keep_between is None and glossary is None and phrases is None:
        return None
    return Terminology(target(), phrases=phrases, glossary=glossary, keep=keep.keep_between)


def require_shortlist(value: Any) -> None:
    """Raises TfexportError if an argument is neither a shortlist nor None."""
    require(Shortlist, "shortlist", value, "Give what Model.read_shortlist returns.")


def texts_of(texts: Any) -> list[str]:
    """The texts of documents.

    Raises:
        TfexportError: the argument is neither a string nor several strings.
    """
    several = [texts] if isinstance(texts, str) else texts
    if isinstance(several, bytes | Mapping) or not isinstance(several, Iterable):
        raise TfexportError(f"texts is {texts!r:.60}. Give a string, or a list of strings.")
    values = list(several)
    for text in values:
        if text is None:
            raise TfexportError("texts has None. Give strings.")
        require(str, "texts", text, "Give a string, or a list of strings.")
    return values


def _several(name: str, values: Any, advice: str) -> Iterable[Any]:
    has_none = isinstance(values, str | bytes | bytearray | Mapping | Set) or not isinstance(values, Iterable)
    if has_none or getattr(values, "ndim", 1) == 0:  # a zero-dimensional array has no elements
        raise _wrong(name, values, advice)
    return values


def _is_list(value: Any) -> bool:
    plain = _plain(value)
    return isinstance(plain, Sequence) and not isinstance(plain, str | bytes | bytearray)


def _plain(value: Any) -> Any:
    """NumPy arrays and PyTorch tensors as lists."""
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
