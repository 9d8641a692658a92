"""What a `tokenizer.json` may ask of the library that runs it: parts that are known, and text that grows little.

A tokenizer is a small program: normalizers that replace text, regular expressions, tables. A few hundred bytes of it can
turn a word into gigabytes or search for ever, and a damaged table stops the library in the middle of a line. Its parts are
checked before the library reads them. What remains is turned into errors by `telling_of_panics`.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tfexport.errors import TokenizerError

PARTS: Mapping[str, frozenset[str]] = {
    "normalizer": frozenset(
        ("Sequence", "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled")
    )
    | {"Prepend", "Replace", "Strip", "StripAccents"},
    "pre_tokenizer": frozenset(
        ("Sequence", "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace")
    )
    | {"Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"},
    "post_processor": frozenset(("Sequence", "BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing")),
    "decoder": frozenset(
        (
            "Sequence",
            "BPEDecoder",
            "ByteFallback",
            "ByteLevel",
            "CTC",
            "Fuse",
            "Metaspace",
            "Replace",
            "Strip",
            "WordPiece",
        )
    ),
    "model": frozenset(("BPE", "Unigram", "WordLevel", "WordPiece")),
}
"""The kinds of each part of a tokenizer that are read."""
_LISTS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
"""What the list of a sequence is called."""
_TEXTS = (
    *("content", "prepend", "replacement", "prefix", "suffix", "pad_token", "word_delimiter_token"),
    *("continuing_subword_prefix", "end_of_word_suffix"),
)
"""Fields of parts that are put into text, or searched for in it."""
_REPLACING = ("BPEDecoder", "CTC")
"""The kinds that replace what these fields say, wherever it stands."""
MOST_PARTS = 32
"""Of one kind, in a sequence."""
MOST_GROWTH = 256
"""How many times as many bytes a text may become until its words are looked up, and tokens until they are text."""
FORMS = ("NFKC", "NFKD")
_FORM_GROWTH = 11
"""How many times as many bytes a text of these forms may have (U+FDFA is one character and becomes 18). The first of them
is not counted: whatever it makes longer stands in the line itself."""
MOST_ADDED = 2**20
"""Bytes of all added tokens when they are normalized. The library takes about 70 times as many for the search of them."""
LONGEST_PATTERN = 5000
LONGEST_TEXT = 100
"""Characters that a part puts into text: markers and spaces."""
LONGEST_WORD = 1000
"""Characters of a word that WordPiece searches; the time grows with their square, and the usual number is 100."""
LONGEST_REPLACEMENT = 256
"""Bytes in the place of a character in a table of SentencePiece; NFKC has up to 33."""
DEEPEST_KEY = 256
"""Bytes of a key of such a table."""


class PanicError(TokenizerError):
    """The library that splits text stopped in the middle of it."""


@contextmanager
def telling_of_panics(what: str) -> Iterator[None]:
    """Raise PanicError where the library panics, which is no `Exception` in Python.

    Args:
        what: what cannot be done, for the message.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        reason = " ".join(str(error).split())[:200]
        raise PanicError(f"{what}: the tokenizers library stopped ({reason}). Take a sound tokenizer.") from None


SAMPLE = f"The cat, 7 dogs; it's a <s> x\u0301 \ufb01 \u2603 \u4f60\u597d {' ' * 40}{'a' * 200}!"
"""Text that every tokenizer must be able to read: one that stops at it would stop at most lines."""


def library_tokenizer(fields: Any, where: str) -> Tokenizer:
    """The tokenizer of the content of a `tokenizer.json`, which comes from `where`.

    Raises:
        PanicError: the library stops at it, or at a short text.
        ValueError: it has parts that are not read; see `check_parts`.
        Exception: it is no tokenizer.
    """
    check_parts(fields)
    with telling_of_panics(f"{where} cannot be read"):
        # Not the file's text, in which a key may stand twice. Text is not padded, for which a file may say any length.
        found = Tokenizer.from_str(json.dumps({**fields, "padding": None, "truncation": None}))
        with suppress(Exception):  # a vocabulary without an unknown token, which lines are told of
            found.encode(SAMPLE, add_special_tokens=False)
        found.decode([0, 1, 2])
    return found


def check_parts(fields: Any) -> None:
    """Check the content of a `tokenizer.json`.

    Raises:
        ValueError: it has a part that is not known, or that makes text far longer, or that cannot be run.
    """
    if not isinstance(fields, Mapping):
        raise ValueError("it is no object of JSON")
    before: dict[str, float] = {}
    for kind, known in PARTS.items():
        growth, n_forms = before.get(kind, 1.0), 0
        for part in _flat(kind, fields.get(kind)):
            name = part.get("type")
            if name not in known and not (kind == "model" and name is None):  # as older files leave it out
                raise ValueError(f"it has a {kind} {str(name)[:40]!r}, which is not read")
            growth *= _growth(kind, part)
            n_forms += name in FORMS
        growth *= _FORM_GROWTH ** max(0, n_forms - 1)
        if growth > MOST_GROWTH:
            raise ValueError(f"its {kind} makes text up to {growth:.0f} times as long")
        if kind == "normalizer":
            before["pre_tokenizer"] = growth  # which is given what this one makes
            _check_added(fields.get("added_tokens"), growth)


def _flat(kind: str, part: Any) -> Iterator[Mapping[str, Any]]:
    """The parts within sequences."""
    waiting, n_parts = [part] * (part is not None), 0
    while waiting:
        part, n_parts = waiting.pop(0), n_parts + 1
        if not isinstance(part, Mapping) or n_parts > MOST_PARTS:
            raise ValueError(f"its {kind} has no type, or more than {MOST_PARTS} parts")
        yield part
        if part.get("type") == "Sequence":
            inner = part.get(_LISTS[kind]) if kind in _LISTS else None
            if not isinstance(inner, list):
                raise ValueError(f"its {kind} is no list")
            waiting += inner


def _growth(kind: str, part: Mapping[str, Any]) -> float:
    """How many times as many bytes a part makes of text at most."""
    name = part.get("type")
    for field in _TEXTS:
        if isinstance(part.get(field), str) and len(part[field]) > LONGEST_TEXT:
            raise ValueError(f"its {name} has a {field} of {len(part[field])} characters")
        if name in _REPLACING and part.get(field) == "":  # it would stand between all characters
            raise ValueError(f"its {name} has an empty {field}")
    longest = part.get("max_input_chars_per_word", 0)
    if not isinstance(longest, int) or longest > LONGEST_WORD:
        raise ValueError(f"its {name} searches words of up to {str(longest)[:20]} characters for pieces")
    pattern = part.get("pattern")
    regex, text = (pattern.get("Regex"), pattern.get("String")) if isinstance(pattern, Mapping) else (None, None)
    if isinstance(regex, str):
        check_pattern(regex)
    if name == "Precompiled":
        return _charsmap_growth(part.get("precompiled_charsmap"))
    if name == "TemplateProcessing":
        _check_template(part.get("single"))
    if name == "ByteLevel" and kind != "decoder":  # a byte becomes a character of two, and a word may be given a space
        return 2.0 if kind == "normalizer" else 4.0
    if name == "Metaspace" and kind != "decoder":  # before each word
        return 1.0 + _n_bytes(part.get("replacement"))
    if name == "BertNormalizer":  # spaces around Chinese characters
        return 5 / 3
    if name != "Replace":
        return 1.0
    length = _n_bytes(part.get("content"))
    return max(1.0, length / _n_bytes(text)) if isinstance(text, str) and text else 1.0 + length


def _n_bytes(text: Any) -> int:
    return len(str(text or "").encode("utf-8", "surrogatepass"))


def _check_added(tokens: Any, growth: float) -> None:
    """The library normalizes added tokens and puts them all into one table, when it reads the file."""
    found = [token for token in tokens if isinstance(token, Mapping)] if isinstance(tokens, list) else []
    size = sum(_n_bytes(token.get("content")) * (growth if token.get("normalized", True) else 1) for token in found)
    if size > MOST_ADDED:
        raise ValueError(f"its added tokens have up to {size:.0f} bytes, above {MOST_ADDED}")


def _check_template(pieces: Any) -> None:
    """The text may stand in a template once."""
    texts = [piece for piece in pieces if "Sequence" in piece] if isinstance(pieces, list) else []
    if len(texts) > 1:
        raise ValueError("its post_processor repeats the text")


_TOKEN = re.compile(
    r"\\.|\[(?:\^?\])?(?:\\.|\[(?:\\.|[^\]\\])*\]|[^\]\\])*\]|\(\?[<!=:>#\w\-]*|[()|]|[*+?][+?]?|\{\d*,?\d*\}[+?]?|.",
    re.DOTALL,
)
"""Parts of a regular expression: an escape, a class, the beginning of a group, a quantifier, or one character."""
_MOST_COUNT = 1000


_LONGEST_MATCH = 1000
"""Characters that a repetition without a limit is taken to try, one after the other."""
_MOST_TRIES = 2**27
"""Ways to match at one place: two such repetitions and a few choices. They multiply where they follow each other."""


def check_pattern(pattern: str) -> None:
    """Check that a regular expression cannot search for longer and longer.

    That is so where what repeats or chooses is repeated, and where many repetitions or choices follow each other.

    Raises:
        ValueError: it may.
    """
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"a regular expression has {len(pattern)} characters")
    where = f"the regular expression {pattern[:60]!r}"
    levels = [_Level()]
    closed = None
    for token in _TOKEN.findall(pattern):
        if token.startswith("\\") and (token[1:].isdigit() or token[1:] in ("g", "k")):
            raise ValueError(f"{where} refers to its own parts")
        if token[0] in "*+?" or re.fullmatch(r"\{\d*,?\d*\}[+?]?", token) is not None:
            counts = [int(count) for count in re.findall(r"\d+", token)]
            if any(count > _MOST_COUNT for count in counts):
                raise ValueError(f"{where} repeats too often")
            if closed and token[0] != "?":
                raise ValueError(f"{where} repeats what repeats or chooses")
            levels[-1].varies |= not re.fullmatch(r"\{\d+\}", token)
            levels[-1].tries *= _tries(token, counts)
        closed = None
        if token[0] == "(":
            if token.startswith("(?") and len(token) == 2:  # such as the absent operator, (?~
                raise ValueError(f"{where} has a group of an unknown kind")
            levels.append(_Level())
        elif token == ")" and len(levels) > 1:
            inner = levels.pop()
            closed = inner.varies
            levels[-1].varies |= closed
            levels[-1].tries *= inner.tries + inner.others
        elif token == "|":
            levels[-1].others += levels[-1].tries
            levels[-1].tries = 1
            levels[-1].varies |= len(levels) > 1
        if levels[-1].tries + levels[-1].others > _MOST_TRIES:
            raise ValueError(f"{where} can match in too many ways")


@dataclass
class _Level:
    """A group of a regular expression, as far as it was read."""

    varies: bool = False
    """It matches texts of several lengths, or chooses."""
    tries: int = 1
    """Ways to match the alternative that is read."""
    others: int = 0
    """Ways to match those before it."""


def _tries(quantifier: str, counts: list[int]) -> int:
    """How many numbers of repetitions a quantifier allows."""
    if quantifier[0] == "?":
        return 2
    if quantifier[0] in "*+" or "," in quantifier.removesuffix("?").removesuffix("+")[-2:]:
        return _LONGEST_MATCH
    return 1 if "," not in quantifier else counts[-1] - (counts[0] if len(counts) > 1 else 0) + 1


def _charsmap_growth(encoded: Any) -> float:
    """How many times as many bytes SentencePiece's table of replacements makes of text at most.

    It is a double-array trie of keys, and the texts that it points to; all of it is looked at.

    Raises:
        ValueError: a key leads out of the table or of the texts, or a text is far longer than what it replaces.
    """
    content = base64.b64decode(encoded, validate=True) if isinstance(encoded, str) else b""
    size = struct.unpack_from("<I", content)[0] if len(content) >= 4 else 0
    if not 4 <= size <= len(content) - 4 or size % 4:
        raise ValueError("its precompiled_charsmap is cut")
    units = np.frombuffer(content, "<u4", size // 4, 4).astype(np.int64)
    texts = content[4 + size :]
    texts.decode("utf-8")
    lengths = np.array([len(text) for text in texts.split(b"\0")])
    if lengths.max() > LONGEST_REPLACEMENT:
        raise ValueError(f"its precompiled_charsmap has texts of more than {LONGEST_REPLACEMENT} bytes")
    inside = np.frombuffer(texts, np.uint8)
    text_ends = np.cumsum(lengths + 1) - 1
    starts = (inside & 0xC0) != 0x80  # of characters
    offsets = (units >> 10) << ((units & (1 << 9)) >> 6)
    places = np.arange(len(units))
    labels = units & (1 << 31 | 0xFF)
    parents = places ^ labels  # where the node must stand that leads to a unit
    can_follow = (labels > 0) & (labels < 256)
    reached, waiting = np.zeros(len(units), bool), np.array([offsets[0]])
    growth = 1.0
    for n_bytes in range(1, DEEPEST_KEY + 1):
        if not len(waiting):
            return growth
        if int((waiting | 0xFF).max()) >= len(units):
            raise ValueError("its precompiled_charsmap leads out of its table")
        nodes = np.zeros(len(units), bool)
        nodes[waiting] = True
        found = np.flatnonzero(can_follow & ~reached & nodes[np.where(can_follow, parents, 0) % len(units)])
        reached[found] = True
        waiting = np.unique(found ^ offsets[found])
        leaves = found[(units[found] >> 8) & 1 == 1]
        ends = leaves ^ offsets[leaves]
        if len(ends) and int(ends.max()) >= len(units):
            raise ValueError("its precompiled_charsmap leads out of its table")
        values = units[ends] & (2**31 - 1)
        if len(values) and (int(values.max()) >= len(texts) or not starts[values].all()):
            raise ValueError("its precompiled_charsmap leads out of its texts")
        if len(values):
            growth = max(growth, float((text_ends[np.searchsorted(text_ends, values)] - values).max()) / n_bytes)
    raise ValueError(f"its precompiled_charsmap has keys of more than {DEEPEST_KEY} bytes")
