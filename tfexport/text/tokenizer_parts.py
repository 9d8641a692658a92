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
MOST_PARTS = 32
"""Of one kind, in a sequence."""
MOST_GROWTH = 64
"""How many times as long a text may become when all of it is replaced."""
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
        found = Tokenizer.from_str(json.dumps(fields))  # not the file's text, in which a key may stand twice
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
    for kind, known in PARTS.items():
        growth = 1.0
        for part in _flat(kind, fields.get(kind)):
            name = part.get("type")
            if name not in known and not (kind == "model" and name is None):  # as older files leave it out
                raise ValueError(f"it has a {kind} {str(name)[:40]!r}, which is not read")
            growth *= _growth(part)
        if growth > MOST_GROWTH:
            raise ValueError(f"its {kind} makes text up to {growth:.0f} times as long")


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


def _growth(part: Mapping[str, Any]) -> float:
    """How many times as long a part makes text at most."""
    if part.get("type") == "Precompiled":
        _check_charsmap(part.get("precompiled_charsmap"))
    if part.get("type") == "TemplateProcessing":
        _check_template(part.get("single"))
    for name in ("content", "prepend", "replacement", "prefix", "suffix", "pad_token", "word_delimiter_token"):
        if isinstance(part.get(name), str) and len(part[name]) > LONGEST_TEXT:
            raise ValueError(f"its {part.get('type')} has a {name} of {len(part[name])} characters")
    longest = part.get("max_input_chars_per_word", 0)
    if not isinstance(longest, int) or longest > LONGEST_WORD:
        raise ValueError(f"its {part.get('type')} searches words of up to {str(longest)[:20]} characters for pieces")
    pattern = part.get("pattern")
    if not isinstance(pattern, Mapping):
        return 1.0
    regex, text = pattern.get("Regex"), pattern.get("String")
    if isinstance(regex, str):
        check_pattern(regex)
    if part.get("type") != "Replace":
        return 1.0
    length = len(str(part.get("content", "")))
    return 1.0 + length if not isinstance(text, str) or not text else max(1.0, length / len(text))


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


def check_pattern(pattern: str) -> None:
    """Check that a regular expression cannot search for longer and longer: no repetition of what repeats or chooses.

    Raises:
        ValueError: it may.
    """
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"a regular expression has {len(pattern)} characters")
    varies = [False]
    closed = None
    for token in _TOKEN.findall(pattern):
        if token[0] == "\\" and (token[1:].isdigit() or token[1:] in ("g", "k")):
            raise ValueError(f"the regular expression {pattern[:60]!r} refers to its own parts")
        is_quantifier = token[0] in "*+?" or re.fullmatch(r"\{\d*,?\d*\}[+?]?", token) is not None
        if is_quantifier:
            if any(int(count) > _MOST_COUNT for count in re.findall(r"\d+", token)):
                raise ValueError(f"the regular expression {pattern[:60]!r} repeats too often")
            if closed and token[0] != "?":
                raise ValueError(f"the regular expression {pattern[:60]!r} repeats what repeats or chooses")
            varies[-1] |= not re.fullmatch(r"\{\d+\}", token)
        closed = None
        if token[0] == "(":
            varies.append(False)
        elif token == ")":
            closed = varies.pop() if len(varies) > 1 else False
            varies[-1] |= closed
        elif token == "|" and len(varies) > 1:
            varies[-1] = True


def _check_charsmap(encoded: Any) -> None:
    """Check SentencePiece's table of replacements: a double-array trie of keys, and the texts that it points to.

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
    if max(map(len, texts.split(b"\0"))) > LONGEST_REPLACEMENT:
        raise ValueError(f"its precompiled_charsmap has texts of more than {LONGEST_REPLACEMENT} bytes")
    inside = np.frombuffer(texts, np.uint8)
    starts = (inside & 0xC0) != 0x80  # of characters
    offsets = (units >> 10) << ((units & (1 << 9)) >> 6)
    places = np.arange(len(units))
    labels = units & (1 << 31 | 0xFF)
    parents = places ^ labels  # where the node must stand that leads to a unit
    can_follow = (labels > 0) & (labels < 256)
    reached, waiting = np.zeros(len(units), bool), np.array([offsets[0]])
    for _ in range(DEEPEST_KEY):
        if not len(waiting):
            return
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
    raise ValueError(f"its precompiled_charsmap has keys of more than {DEEPEST_KEY} bytes")
