"""Vocabulary shortlists: the target words that the output of a source may contain.

There are three kinds of files. The first line of a file determines its kind:

    der Hund <tab> the dog dogs     CTranslate2's `vmap`: the words for one or more source words that follow each other;
                                    a line that begins with the tab has words for every source
    dog Hund 0.8                    a lexicon (Marian's and fast_align's lex.s2t): target word, source word, probability
    dog                             a list of words for every source

The end of a sentence, the unknown token and the tokens of a forced prefix are always allowed. Bos is allowed if a line of
the file has it. (CTranslate2 always allows it, but no model learns how unlikely it is among few words.) Probabilities are
normalised over the allowed words, as in CTranslate2.

Sources: CTranslate2 4.8 (`vocabulary_map.cc`), Marian 1.12 (`--shortlist FILE FIRST BEST`, `shortlist.cpp`). Unlike Marian,
tfexport skips words that a vocabulary lacks instead of using the unknown word, and does not fill up candidates to a
multiple of 8. Unlike both, the allowed words of a sentence do not depend on the other sentences of its batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.runtimes.outputs import IntArray
from tfexport.search.hypothesis import Source
from tfexport.system.input_files import LONGEST_LINE, Lines
from tfexport.system.regular_files import open_regular
from tfexport.text.tokenizers import TextTokenizer

DEFAULT_FIRST = 100
"""The number of ids from 0, the most frequent words, that a lexicon always allows. It is the default of Marian."""
DEFAULT_BEST = 100
"""The number of words that a lexicon allows for each source word. It is the default of Marian."""

SHORTLIST_ADVICE = "they need ort-cpu in fp32 or int8, return no attention, and are written by export --shortlist"
"""The requirements for fast shortlists."""

Format = Literal["vmap", "lexicon", "words"]
Ngram = tuple[int, ...]


@dataclass(frozen=True)
class Shortlist:
    """The words that the outputs of sources may contain."""

    always: frozenset[int]
    """Ids that every output may contain."""
    by_ngram: tuple[dict[Ngram, tuple[int, ...]], ...] = ()
    """For each n, from 1: the target ids that each n-gram of source ids allows."""
    copies: bool = False
    """Outputs may also contain words of the source: both sides share a vocabulary."""
    not_copied: frozenset[int] = frozenset()
    """Special tokens of sources that are not allowed in outputs."""

    def candidates(self, source: Sequence[int]) -> IntArray:
        """The sorted target ids that an output of `source` (encoder ids) may contain."""
        ids = {*self.always, *(set(source) - self.not_copied if self.copies else ())}
        for at in range(len(source)):
            for size, rules in enumerate(self.by_ngram[: len(source) - at], start=1):
                ids.update(rules.get(tuple(source[at : at + size]), ()))
        return np.array(sorted(ids), dtype=np.int64)

    def applied(self, source: Source) -> Source:
        """`source` with its candidates from this shortlist."""
        return replace(source, candidates=self.candidates(source.ids))


def read_shortlist(
    path: Path,
    config: ModelConfig,
    source: TextTokenizer | None,
    target: TextTokenizer | None,
    *,
    first: int = DEFAULT_FIRST,
    best: int = DEFAULT_BEST,
) -> Shortlist:
    """Read a file of one of the three kinds. The words of a side without vocabulary are ids.

    Args:
        first: for a lexicon, the number of ids from 0 that are always allowed.
        best: for a lexicon, the number of most probable words for each source word.

    Raises:
        TfexportError: the file cannot be read, a line is of another kind than the first, or the vocabularies lack all words.
    """
    lines = _lines(path)
    begin = next(lines, None)
    if begin is None:
        raise TfexportError(f"{path} is empty. Give a shortlist: a vmap, a lexicon, or one word per line.")
    kind, lines = _kind(begin[1]), chain([begin], lines)
    source_id, target_id = _Words(source, config.src_vocab_size), _Words(target, config.tgt_vocab_size)
    rules: list[dict[Ngram, tuple[int, ...]]] = []
    if kind == "vmap":
        rules = _vmap(path, lines, source_id, target_id)
    elif kind == "lexicon":
        rules = [_lexicon(path, lines, source_id, target_id, best)]
    else:
        rules = [{(): tuple(_known((_word(path, number, line) for number, line in lines), target_id))}]
    if not any(target_ids for by_ngram in rules for target_ids in by_ngram.values()):
        raise TfexportError(
            f"no line of the {kind} shortlist {path} has words of the vocabularies. Give a shortlist for this model."
        )
    if passed := source_id.unknown + target_id.unknown:
        logging.getLogger(__name__).warning(
            "warning: %d of %d words in %s are in no vocabulary, and are passed over",
            *(passed, source_id.asked + target_id.asked, path),
        )
    unknown = config.unk_id if target is None else target.special_id("unk")
    special = {config.eos_id, config.forced_first_id, -1 if unknown is None else unknown}
    begins = {config.bos_id} - special
    frequent = set(range(min(first, config.tgt_vocab_size) if kind == "lexicon" else 0)) - begins
    always = special | frequent | {*rules[0].pop((), ())}
    return Shortlist(
        frozenset(index for index in always if 0 <= index < config.tgt_vocab_size),
        tuple(rules),
        copies=kind == "lexicon" and config.tie_source_target,
        not_copied=frozenset(begins),
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their numbers, without their newlines."""
    try:
        with open_regular(path) as file:
            for number, line in enumerate(Lines(file, str(path)), start=1):
                if len(line) > LONGEST_LINE:
                    raise TfexportError(f"line {number} of {path} has more than {LONGEST_LINE:,} bytes. Correct it.")
                text = line.decode("utf-8").rstrip("\r\n")
                if text.strip():
                    yield number, text
    except (OSError, UnicodeDecodeError) as error:
        raise TfexportError(f"cannot read the shortlist {path}: {error}. Give a UTF-8 text file.") from error


def _kind(line: str) -> Format:
    if line.count("\t") == 1:
        return "vmap"
    return "lexicon" if len(line.split()) == 3 else "words"


class _Words:
    """Looks up words of one side in its vocabulary, or as ids if it has none."""

    def __init__(self, tokenizer: TextTokenizer | None, size: int):
        self._tokenizer, self._size = tokenizer, size
        self.asked = self.unknown = 0

    def __call__(self, word: str) -> int | None:
        """The id of a word; None if the vocabulary lacks it."""
        if self._tokenizer is not None:
            index = self._tokenizer.inner.token_to_id(word)
        else:
            index = int(word) if word.isascii() and word.isdecimal() and len(word) < 10 else None
        self.asked += 1
        if index is None or index >= self._size:
            self.unknown += 1
            return None
        return index


def _known(words: Iterable[str], id_of: _Words) -> list[int]:
    return [index for index in map(id_of, words) if index is not None]


def _vmap(
    path: Path, lines: Iterable[tuple[int, str]], source_id: _Words, target_id: _Words
) -> list[dict[Ngram, Ngram]]:
    """The target ids by n-gram. The empty n-gram is with the unigrams. The last line for an n-gram counts."""
    rules: list[dict[Ngram, Ngram]] = [{}]
    for number, line in lines:
        if line.count("\t") != 1:
            raise _unlike(path, number, "vmap", "source words, a tab and target words")
        key, _, words = line.partition("\t")
        ngram = tuple(source_id(word) for word in key.split())
        if None in ngram:
            continue
        rules += [{} for _ in range(len(rules), len(ngram))]
        rules[max(1, len(ngram)) - 1][tuple(index for index in ngram if index is not None)] = tuple(
            _known(words.split(), target_id)
        )
    return rules


def _lexicon(
    path: Path, lines: Iterable[tuple[int, str]], source_id: _Words, target_id: _Words, best: int
) -> dict[Ngram, Ngram]:
    """The `best` most probable target words of each source word, with a probability above 0. With equal probabilities the
    higher id is first, as in Marian."""
    probabilities: dict[int, dict[int, float]] = {}
    for number, line in lines:
        fields = line.split()
        try:
            target_word, source_word, number_text = fields
            probability = float(number_text)
        except ValueError:
            raise _unlike(path, number, "lexicon", "a target word, a source word and a probability") from None
        if "NULL" in (source_word, target_word):  # an empty alignment
            continue
        source, target = source_id(source_word), target_id(target_word)
        if source is not None and target is not None:
            probabilities.setdefault(source, {})[target] = probability
    return {
        (source,): tuple(
            target
            for probability, target in sorted(((p, t) for t, p in by_target.items()), reverse=True)[:best]
            if probability > 0
        )
        for source, by_target in probabilities.items()
    }


def _word(path: Path, number: int, line: str) -> str:
    if len(line.split()) != 1:
        raise _unlike(path, number, "list of words", "one word")
    return line.strip()


def _unlike(path: Path, number: int, kind: str, wanted: str) -> TfexportError:
    return TfexportError(f"{path}, line {number}: this shortlist is a {kind} by its first line, so give {wanted}.")
