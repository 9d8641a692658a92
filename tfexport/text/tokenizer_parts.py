"""Checks of a `tokenizer.json` before the library runs it: known parts only, and limited growth of text.

A tokenizer is a small program: normalizers that replace text, regular expressions, tables. A few hundred bytes of it can
turn a word into gigabytes or search endlessly, and a damaged table stops the library in the middle of a line. The parts are
checked before the library reads them. `telling_of_panics` turns the remaining failures into errors.
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
"""The supported types of each part of a tokenizer."""
_LISTS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
"""The name of the list in a sequence."""
_TEXTS = (
    *("content", "prepend", "replacement", "prefix", "suffix", "pad_token", "word_delimiter_token"),
    *("continuing_subword_prefix", "end_of_word_suffix"),
)
"""Fields of parts whose value is inserted into text, or searched for in it."""
_REPLACING = ("BPEDecoder", "CTC")
"""The types that replace every occurrence of these fields' values."""
MOST_PARTS = 32
"""Maximum number of parts of one kind in a sequence."""
MOST_GROWTH = 256
"""Maximum growth of text before its words are looked up, and of tokens until they are text, as a factor of bytes."""
FORMS = ("NFKC", "NFKD")
_FORM_GROWTH = 11
"""Growth of text in these normal forms, as a factor of bytes (U+FDFA is one character and becomes 18). The first of them is
not counted, because only characters of the line itself can make it longer."""
MOST_ADDED = 2**20
"""Maximum size of all normalized added tokens in bytes. The library's search table takes about 70 times as many."""
LONGEST_PATTERN = 5000
LONGEST_TEXT = 100
"""Maximum number of characters that a part inserts into text, such as markers and spaces."""
LONGEST_WORD = 1000
"""Maximum number of characters of a word for WordPiece. The time grows with its square; the usual limit is 100."""
LONGEST_REPLACEMENT = 256
"""Maximum size of a replacement in a table of SentencePiece, in bytes; NFKC has up to 33."""
DEEPEST_KEY = 256
"""Maximum size of a key of such a table, in bytes."""


class PanicError(TokenizerError):
    """The tokenizers library panicked while it processed text."""


@contextmanager
def telling_of_panics(what: str) -> Iterator[None]:
    """Raise PanicError if the library panics. In Python, its panic is no `Exception`.

    Args:
        what: the failed operation, for the message.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        reason = " ".join(str(error).split())[:200]
        raise PanicError(f"{what}: the tokenizers library stopped ({reason}). Take a sound tokenizer.") from None


SAMPLE = f"The cat, 7 dogs; it's a <s> x\u0301 \ufb01 \u2603 \u4f60\u597d {' ' * 40}{'a' * 200}!"
"""Text that every tokenizer must be able to read. A tokenizer that panics on it would panic on most lines."""


def library_tokenizer(fields: Any, where: str) -> Tokenizer:
    """The tokenizer for the content of a `tokenizer.json`, whose origin is `where`.

    Raises:
        PanicError: the library panics on the content, or on a short text.
        ValueError: the content has unsupported parts; see `check_parts`.
        Exception: the content is no tokenizer.
    """
    check_parts(fields)
    with telling_of_panics(f"{where} cannot be read"):
        # Not the file's text, which may contain a key twice. Text is not padded: a file may request any length.
        tokenizer = Tokenizer.from_str(json.dumps({**fields, "padding": None, "truncation": None}))
        with suppress(Exception):  # a vocabulary without an unknown token; lines report this error
            tokenizer.encode(SAMPLE, add_special_tokens=False)
        tokenizer.decode([0, 1, 2])
    return tokenizer


def check_parts(fields: Any) -> None:
    """Check the content of a `tokenizer.json`.

    Raises:
        ValueError: a part is unknown, makes text far longer, or cannot be run.
    """
    if not isinstance(fields, Mapping):
        raise ValueError("it is not a JSON object")
    before: dict[str, float] = {}
    for kind, known in PARTS.items():
        growth, n_forms = before.get(kind, 1.0), 0
        for part in _flat(kind, fields.get(kind)):
            name = part.get("type")
            if name not in known and not (kind == "model" and name is None):  # older files omit it
                raise ValueError(f"it has a {kind} {str(name)[:40]!r}, which is not supported")
            growth *= _growth(kind, part)
            n_forms += name in FORMS
        growth *= _FORM_GROWTH ** max(0, n_forms - 1)
        if growth > MOST_GROWTH:
            raise ValueError(f"its {kind} makes text up to {growth:.0f} times as long")
        if kind == "normalizer":
            before["pre_tokenizer"] = growth  # the pre-tokenizer reads the normalizer's result
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
                raise ValueError(f"its {kind} is not a list")
            waiting += inner


def _growth(kind: str, part: Mapping[str, Any]) -> float:
    """The maximum growth of text by a part, as a factor of bytes."""
    name = part.get("type")
    for field in _TEXTS:
        if isinstance(part.get(field), str) and len(part[field]) > LONGEST_TEXT:
            raise ValueError(f"its {name} has a {field} of {len(part[field])} characters")
        if name in _REPLACING and part.get(field) == "":  # it would be inserted between all characters
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
    if name == "ByteLevel" and kind != "decoder":  # a byte becomes a character of two bytes, and a word may get a space
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
    """Check the added tokens: the library normalizes them and puts all into one table when it reads the file."""
    added = [token for token in tokens if isinstance(token, Mapping)] if isinstance(tokens, list) else []
    size = sum(_n_bytes(token.get("content")) * (growth if token.get("normalized", True) else 1) for token in added)
    if size > MOST_ADDED:
        raise ValueError(f"its added tokens have up to {size:.0f} bytes, above {MOST_ADDED}")


def _check_template(pieces: Any) -> None:
    """Check a template: it may contain the text once."""
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
"""Assumed number of characters that an unlimited repetition tries, one after the other."""
_MOST_TRIES = 2**27
"""Maximum number of ways to match at one place: two such repetitions and a few choices, whose numbers multiply."""


def check_pattern(pattern: str) -> None:
    """Check that the search time of a regular expression cannot explode.

    It can if a repeated part itself repeats or chooses, or if many repetitions or choices follow each other.

    Raises:
        ValueError: the time may explode.
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
                raise ValueError(f"{where} repeats a part that itself repeats or chooses")
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
    """A group of a regular expression, up to the current position."""

    varies: bool = False
    """Whether the group matches texts of several lengths, or chooses."""
    tries: int = 1
    """Number of ways to match the current alternative."""
    others: int = 0
    """Number of ways to match the earlier alternatives."""


def _tries(quantifier: str, counts: list[int]) -> int:
    """The number of different repetition counts that a quantifier allows."""
    if quantifier[0] == "?":
        return 2
    if quantifier[0] in "*+" or "," in quantifier.removesuffix("?").removesuffix("+")[-2:]:
        return _LONGEST_MATCH
    return 1 if "," not in quantifier else counts[-1] - (counts[0] if len(counts) > 1 else 0) + 1


def _charsmap_growth(encoded: Any) -> float:
    """The maximum growth of text by SentencePiece's table of replacements, as a factor of bytes.

    The table is a double-array trie of keys, and the texts that it points to. All of it is checked.

    Raises:
        ValueError: a key points outside the table or the texts, or a text is far longer than its key.
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
    starts = (inside & 0xC0) != 0x80  # first bytes of characters
    offsets = (units >> 10) << ((units & (1 << 9)) >> 6)
    places = np.arange(len(units))
    labels = units & (1 << 31 | 0xFF)
    parents = places ^ labels  # the index of the node that leads to each unit
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
        new = np.flatnonzero(can_follow & ~reached & nodes[np.where(can_follow, parents, 0) % len(units)])
        reached[new] = True
        waiting = np.unique(new ^ offsets[new])
        leaves = new[(units[new] >> 8) & 1 == 1]
        ends = leaves ^ offsets[leaves]
        if len(ends) and int(ends.max()) >= len(units):
            raise ValueError("its precompiled_charsmap leads out of its table")
        values = units[ends] & (2**31 - 1)
        if len(values) and (int(values.max()) >= len(texts) or not starts[values].all()):
            raise ValueError("its precompiled_charsmap leads out of its texts")
        if len(values):
            growth = max(growth, float((text_ends[np.searchsorted(text_ends, values)] - values).max()) / n_bytes)
    raise ValueError(f"its precompiled_charsmap has keys of more than {DEEPEST_KEY} bytes")
