"""Lines that are too long are marked before anything that takes time is done with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.fakes import ScriptedRuntime, echo_model, tiny_config
from tfexport.decoding.classify import classify
from tfexport.decoding.line_reader import Reader, TargetReader, Unreadable, most_bytes, read_pairs, source_lengths
from tfexport.decoding.translate import translate
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Capacity
from tfexport.search.search import SearchOptions
from tfexport.system.input_files import LONGEST_LINE, EndlessLine
from tfexport.text import tokenizers
from tfexport.text.tokenizers import LONGEST_WORD, TextTokenizer, WordTooLong, word_tokenizer

WORDS = word_tokenizer({word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", "a", "b"])})
CONFIG = tiny_config(src_vocab_size=6, tgt_vocab_size=6, unk_id=3)
MOST = most_bytes(CONFIG.max_source_length)


class NeverAsked(TextTokenizer):
    def encode(self, text: str) -> list[int]:
        raise AssertionError("a line is tokenised that is too long")


NEVER = NeverAsked(WORDS.inner)
LONG = b"(" * (MOST + 1)


def status(ids: Any) -> str:
    with pytest.raises(Unreadable) as caught:
        ids()
    return caught.value.status


def test_the_limit_follows_from_the_model() -> None:
    assert most_bytes(1) == most_bytes(100) == 8192
    assert most_bytes(1024) == 32 * 1024
    assert 2 * most_bytes(10**9) + len(b"\t") <= LONGEST_LINE + 1  # one of two columns is too long where a line was cut


@pytest.mark.parametrize("format", ["text", "tokens", "ids"])
def test_a_long_line_is_marked_and_not_tokenised(format: Any) -> None:
    assert status(lambda: Reader(CONFIG, NEVER, format).ids(LONG)) == "too_long"
    assert status(lambda: TargetReader(CONFIG, NEVER, format).source([4], LONG, 1)) == "too_long"
    assert status(lambda: Reader(CONFIG, NEVER, format).ids(b" " * len(LONG))) == "too_long"  # it may have been cut


def test_a_line_of_as_many_bytes_as_it_may_have_is_read() -> None:
    assert Reader(CONFIG, WORDS, "text").ids(b"a" + b" " * (MOST - 2) + b"\n") == [4, 2]


def test_every_command_passes_over_long_lines() -> None:
    reader = Reader(CONFIG, WORDS, "text")
    lines = [b"a\n", LONG, b"b\n"]
    runtime = ScriptedRuntime(echo_model(6), CONFIG)
    assert [found.status for found in translate(runtime, reader, lines, SearchOptions())] == ["ok", "too_long", "ok"]
    assert source_lengths(reader, lines) == [2, 2]
    assert read_pairs(lines, None, reader, lambda note: None)[0] == [[4, 2], [5, 2]]


def test_a_target_that_was_cut_is_refused() -> None:
    reader = Reader(CONFIG, WORDS, "text")
    with pytest.raises(TfexportError, match="target 2 has more than"):
        read_pairs([b"a\n", b"b\n"], [b"a\n", b"a" * (LONGEST_LINE + 1)], reader, lambda note: None)


def test_results_come_before_the_error_of_a_line_without_an_end() -> None:
    def lines() -> Any:
        yield b"a\n"
        raise EndlessLine("the input ends badly")

    runtime = ScriptedRuntime(echo_model(6), CONFIG)
    results = translate(runtime, Reader(CONFIG, WORDS, "text"), lines(), SearchOptions())
    assert next(results).status == "ok"
    with pytest.raises(TfexportError, match="ends badly"):
        next(results)


class NoClassifier:
    capacity = Capacity.of_model(CONFIG)

    def logits(self, *_: Any) -> Any:
        raise AssertionError("there is nothing to classify")


def test_classify_marks_long_lines_and_tells_of_them_before_an_error() -> None:
    def lines() -> Any:
        yield LONG
        raise EndlessLine("the input ends badly")

    classifier: Any = NoClassifier()
    found = classify(classifier, Reader(CONFIG, NEVER, "text"), lines())
    assert next(found).status == "too_long"
    with pytest.raises(TfexportError, match="ends badly"):
        next(found)


def test_a_word_that_rules_would_take_long_for_is_not_split() -> None:
    spacy = pytest.importorskip("spacy")
    split = word_tokenizer({"<unk>": 0, "a": 1}, spacy_language="de")
    assert len(split.encode("( " * 9 + "(" * 20)) == 29
    for text in ("(" * (LONGEST_WORD + 1), "a " + "(" * 20_000):
        with pytest.raises(WordTooLong, match="characters without white space"):
            split.encode(text)
        assert status(lambda text=text: Reader(CONFIG, split, "text").ids(text.encode())) == "too_long"
    assert spacy.__version__


def test_words_for_codes_have_a_limit_and_words_of_a_vocabulary_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("subword_nmt")
    by_codes = replace(WORDS, subwords=tokenizers.Subwords("#version: 0.2\na b\n"))
    with pytest.raises(WordTooLong):
        by_codes.encode("a" * (LONGEST_WORD + 1))
    assert WORDS.encode("a" * (LONGEST_WORD + 1)) == [3]
