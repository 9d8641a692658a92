"""Vocabulary files of all formats: their words or pieces, and the tokenizers made from them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from tfexport.errors import TokenizerError
from tfexport.system.regular_files import read_text
from tfexport.system.yaml_files import read_words, read_yaml_file
from tfexport.text.sentencepiece import PieceModel
from tfexport.text.tokenizers import TextTokenizer, word_tokenizer

FAIRSEQ_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
"""Ids 0 to 3 of every dictionary of fairseq."""


def read_vocabulary(
    path: Path, *, lowercase: bool = False, spacy_language: str | None = None, unk_id: int | None = None
) -> TextTokenizer:
    """Read a vocabulary file: a `tokenizer.json`, a JSON list or dict of words, a YAML dict, one word per line, a word and
    its id per line, fairseq's dictionary, or a SentencePiece model (.spm, .model) with its own ids.

    Text is split into words at whitespace, or by spaCy's rules. `lowercase` and `unk_id` apply to word vocabularies;
    `unk_id` is the id of the unknown word, if its name does not identify it.

    Raises:
        TokenizerError: the file has none of these formats.
        RuntimeUnavailable: a required library is not installed, or spaCy does not support the language.
    """
    is_pieces = path.suffix in (".spm", ".model")
    content = None if is_pieces else _content(path)
    if is_pieces or (isinstance(content, dict) and isinstance(content.get("model"), dict)):
        if lowercase or spacy_language:
            raise TokenizerError(f"{path} has its own normalisation: leave out --lowercase and the spaCy tokeniser.")
        if is_pieces:
            return TextTokenizer.from_inner(PieceModel.read(path).tokenizer(), skips_special=True)
        return TextTokenizer.from_dict({"tokenizer": content}, where=str(path))
    words = _word_ids(content, path)
    try:
        unknown = next((word for word, index in words.items() if index == unk_id), None)
        # fairseq writes text without its bos, which is a normal word to its models.
        hidden = FAIRSEQ_SPECIALS[:1] if isinstance(content, _Dictionary) else ()
        tokenizer = word_tokenizer(
            words, lowercase=lowercase, spacy_language=spacy_language, unknown=unknown, hidden=hidden
        )
        tokenizer.encode("")  # reports an unknown spaCy language now, not at the first sentence
        return tokenizer
    except TypeError:  # a lone surrogate, which JSON can contain
        raise TokenizerError(f"{path} is not a vocabulary: a word is not valid Unicode. Correct it.") from None


def vocabulary_words(path: Path) -> dict[str, int]:
    """The words and ids of a vocabulary file that is not a tokenizer.

    Raises:
        TokenizerError: the file is not such a vocabulary.
        RuntimeUnavailable: the file is YAML, and PyYAML is not installed.
    """
    return _word_ids(_content(path), path)


def _content(path: Path) -> Any:
    """The content of a text vocabulary: JSON values, the words and ids of YAML, or lines."""
    if path.suffix in (".yml", ".yaml"):
        return read_words(read_yaml_file(path, TokenizerError), str(path))
    try:
        text = read_text(path, "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, UnicodeDecodeError) and error.object[:2] in (b"PK", b"\x80\x02", b"\x80\x04"):
            raise TokenizerError(
                f"{path} is a pickle or a file of PyTorch, such as a vocabulary of torchtext. Write its words in the order "
                'of their ids, one a line: open("vocab.txt", "w").write("\\n".join(vocab.get_itos())).'
            ) from error
        raise TokenizerError(
            f"cannot read the vocabulary {path}: {error}. Give a UTF-8 text or JSON file, or a SentencePiece model named "
            ".model or .spm."
        ) from error
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except _KeyTwice as twice:
        raise TokenizerError(f"{path} has the word {str(twice)!r} twice. Make its words unique.") from None
    except (ValueError, RecursionError):
        if path.suffix == ".json":
            raise TokenizerError(f"{path} is not valid JSON. Give a JSON list or dict, or one token a line.") from None
        lines = text.removesuffix("\n").split("\n") if text else []
        if lines and all(map(_ENTRY.fullmatch, lines)):
            raise TokenizerError(
                f"{path} has a part of JSON in each line ({lines[0]!r}). Give one JSON list or dict, or one word a line."
            ) from None
        return _with_ids(lines, path) or _counted(lines, path) or lines


class _KeyTwice(Exception):
    pass


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise _KeyTwice(next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
    return content


_ENTRY = re.compile(r'\s*(?:"(?:[^"\\]|\\.)*"\s*:\s*\d+,?|\{".*\}|\[".*\])\s*')
"""A line of a JSON dict without its braces, or a line of JSON Lines."""
_NUMBER = re.compile(r"[0-9]{1,9}")


def _with_ids(lines: list[str], path: Path) -> dict[str, int]:
    """The words of a file with a word and its id per line, or an id and its word. Empty if the file has another form.

    Raises:
        TokenizerError: the second column is a count or a score, from which no id follows.
    """
    separator = next((mark for mark in ("\t", " ", ",") if lines and mark in lines[0]), " ")
    if not lines or not all(separator in line for line in lines):
        return {}
    columns = [line.rstrip("\r").rsplit(separator, 1) for line in lines]
    first, last = map(list, zip(*columns, strict=True))
    for words, numbers in ((first, last), (last, first)):
        if not all(map(_NUMBER.fullmatch, numbers)):
            continue
        ids = list(map(int, numbers))
        if sorted(ids) == list(range(len(ids))) and len(set(words)) == len(words):
            return dict(zip(words, ids, strict=True))
    # Words may contain spaces and commas. Every line of a file does not end in one and a number by chance.
    if separator == "\t" or (separator == "," and all(map(_NUMBER.fullmatch, last))):
        raise TokenizerError(_no_ids(lines, last, path))
    return {}


def _no_ids(lines: list[str], numbers: list[str], path: Path) -> str:
    """The message for lines with a tab, where no column has the ids 0, 1, 2 and so on."""
    if any(number.startswith("-") for number in numbers):
        return (
            f"{path} is the list of pieces of a SentencePiece model ({lines[-1]!r}), which does not cut text. Give the "
            "model itself, a file that ends in .model."
        )
    return (
        f"{path} has two columns ({lines[0]!r}), and none has the ids 0, 1, 2 and so on once each: they may be counts. Give "
        "the words in the order of their ids, one a line."
    )


_COUNTED = re.compile(r"(.+) \d+( #fairseq:overwrite)?")


class _Dictionary(dict[str, int]):
    """The words of a dictionary of fairseq."""


def _counted(lines: list[str], path: Path) -> _Dictionary:
    """The words of fairseq's `dict.xx.txt`, which has a word and its count per line, after the special tokens.

    The file omits the special tokens. The result is empty if a line has no count. With `#fairseq:overwrite`, an earlier word
    moves to this line's id.
    """
    words = _Dictionary({word: index for index, word in enumerate(FAIRSEQ_SPECIALS)})
    for index, line in enumerate(lines, len(words)):
        match = _COUNTED.fullmatch(line.rstrip())
        if match is None:
            return _Dictionary()
        if match[1] in FAIRSEQ_SPECIALS and not match[2]:  # fairseq's dictionaries leave these out
            raise TokenizerError(_no_ids(lines, [line.rsplit(" ", 1)[-1] for line in lines], path))
        if match[1] in words and not match[2]:
            raise TokenizerError(f"{path} has the word {match[1]!r} twice. Make its words unique.")
        words[match[1]] = index
    return words if lines else _Dictionary()


def _word_ids(content: Any, path: Path) -> dict[str, int]:
    if isinstance(content, dict) and isinstance(content.get("itos"), list):  # torchtext's name of a list of words
        content = content["itos"]
    if isinstance(content, dict) and content and all(isinstance(word, str) for word in content.values()):
        numbers = sorted(int(number) for number in content if _NUMBER.fullmatch(number))
        if numbers == list(range(len(content))):
            content = [content[str(number)] for number in numbers]
    if isinstance(content, list) and content and all(isinstance(word, str) for word in content):
        words = {word: index for index, word in enumerate(content)}
        if len(words) < len(content):
            twice = sorted(word for word, count in Counter(content).items() if count > 1)[:5]
            raise TokenizerError(f"{path} has words twice: {twice}. Make its lines unique: the position is the id.")
        return words
    if (
        isinstance(content, dict)
        and content
        and all(type(index) is int and 0 <= index < 2**31 for index in content.values())
    ):
        if len(set(content.values())) < len(content):
            raise TokenizerError(f"{path} gives one id to several words. Make the ids unique.")
        return content
    raise TokenizerError(
        f"{path} is not a vocabulary. Give a tokenizer.json, a JSON list or dict of words, one word a line, a "
        "SentencePiece model named .model or .spm, or a dict.xx.txt of fairseq."
    )
