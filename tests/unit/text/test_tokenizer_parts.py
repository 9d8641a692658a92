"""Tokenizers that ask for more than a tokenizer does are refused when they are read; what stops the library is told."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from tfexport.config import ModelConfig
from tfexport.decoding.line_reader import Reader, Unreadable
from tfexport.errors import TokenizerError
from tfexport.text import tokenizer_parts
from tfexport.text.tokenizer_parts import PanicError, check_pattern, telling_of_panics
from tfexport.text.tokenizers import TextTokenizer
from tfexport.text.vocabularies import read_vocabulary

WORDS = {"<unk>": 0, "a": 1, "b": 2}
CONFIG = ModelConfig(
    **{"d_model": 4, "n_heads": 1, "d_ff": 4, "n_encoder_layers": 1, "n_decoder_layers": 1},
    **{"src_vocab_size": 9, "tgt_vocab_size": 9, "max_source_length": 9, "max_target_length": 9},
    **{"unk_id": 0, "pad_id": 5, "bos_id": 3, "eos_id": 4},
)


def with_parts(**parts: Any) -> dict[str, Any]:
    """The fields of a tokenizer of words with other parts."""
    inner = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return {**json.loads(inner.to_str()), **parts}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(parts)}


def replace(pattern: str, content: str, *, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def charsmap(units: list[int], texts: bytes) -> dict[str, Any]:
    """SentencePiece's table of replacements of these units."""
    table = struct.pack(f"<{len(units)}I", *units)
    raw = struct.pack("<I", len(table)) + table + texts
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(raw).decode()}


def leading_to(value: int, n_units: int = 512) -> list[int]:
    """A table of the key `a` alone, with this value: units as Darts-clone has them."""
    units = [0] * n_units
    units[0] = 1 << 10  # of the root: its children are at 1 ^ label
    units[1 ^ ord("a")] = ord("a") | 1 << 8 | 2 << 10  # has a leaf, at its place ^ 2
    units[1 ^ ord("a") ^ 2] = 1 << 31 | value
    return units


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1000,
    "pair": [],
    "special_tokens": {},
}
REFUSED = {
    "growing text": (with_parts(normalizer=sequence(*[replace("a", "aa" * 5)] * 10)), "times as long"),
    "growing by a pattern": (with_parts(normalizer=sequence(*[replace("", "aa", kind="Regex")] * 10)), "times as long"),
    "growing output": (
        with_parts(decoder={"type": "Sequence", "decoders": [replace("a", "aa")] * 10}),
        "decoder makes text up to 1024 times",
    ),
    "long text": (with_parts(normalizer={"type": "Prepend", "prepend": "x" * 10_000}), "prepend of 10000 characters"),
    "many parts": (with_parts(normalizer=sequence(*[{"type": "NFC"}] * 1000)), "more than 32 parts"),
    "two lists": (
        with_parts(normalizer={"type": "Sequence", "decoders": [], "normalizers": [replace("a", "a" * 10)] * 10}),
        "times as long",
    ),
    "a list of another kind": (with_parts(decoder={"type": "Sequence", "normalizers": []}), "is not a list"),
    "a table that is a number": (
        with_parts(normalizer={"type": "Precompiled", "precompiled_charsmap": 10**12}),
        "is cut",
    ),
    "long words": (
        with_parts(model={"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 10**9}),
        "words of up to 1000000000",
    ),
    "an unknown part": (with_parts(normalizer={"type": "Eval"}), "normalizer 'Eval'"),
    "exploding normalizer": (
        with_parts(normalizer=replace("(a+)+$", "", kind="Regex")),
        "repeats a part that itself repeats",
    ),
    "exploding splitter": (
        with_parts(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a|a)*c"}, "behavior": "Removed", "invert": False}
        ),
        "repeats a part that itself repeats or chooses",
    ),
    "bytes as characters, again and again": (
        with_parts(normalizer=sequence(*[{"type": "ByteLevel"}] * 9)),
        "normalizer makes text up to 512 times",
    ),
    "words of bytes as characters": (
        with_parts(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 5}),
        "pre_tokenizer makes text up to 1024 times",
    ),
    "spaces before spaces": (
        with_parts(
            pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Metaspace", "replacement": "▁"}] * 30}
        ),
        "times as long",
    ),
    "normalized, then split": (
        with_parts(
            normalizer=sequence(*[{"type": "ByteLevel"}] * 7),
            pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False},
        ),
        "pre_tokenizer makes text up to 512 times",
    ),
    "decomposed again and again": (
        with_parts(normalizer=sequence(*[{"type": "NFKD"}, replace("\u0627", "\ufdfa")] * 4)),
        "times as long",
    ),
    "tables one after the other": (
        with_parts(normalizer=sequence(*[charsmap(leading_to(0), b"b" * 20 + b"\0")] * 2)),
        "normalizer makes text up to 400 times",
    ),
    "a space between all characters": (
        with_parts(decoder={"type": "BPEDecoder", "suffix": ""}),
        "has an empty suffix",
    ),
    "a space for nothing": (
        with_parts(decoder={"type": "CTC", "pad_token": "<p>", "word_delimiter_token": "", "cleanup": False}),
        "has an empty word_delimiter_token",
    ),
    "a long mark of pieces": (
        with_parts(model={"type": "WordPiece", "vocab": {"a": 0}, "continuing_subword_prefix": "#" * 1000}),
        "continuing_subword_prefix of 1000 characters",
    ),
    "a long mark of ends": (
        with_parts(model={"type": "BPE", "vocab": {"a": 0}, "merges": [], "end_of_word_suffix": "x" * 1000}),
        "end_of_word_suffix of 1000 characters",
    ),
    "long added tokens": (
        with_parts(
            normalizer=replace(".", "b" * 60, kind="Regex"),
            added_tokens=[{"id": 3, "content": "a" * 200_000, "normalized": True}],
        ),
        "added tokens have up to 12200000 bytes",
    ),
    "many repetitions": (with_parts(normalizer=replace("a*a*a*(?=c)", "", kind="Regex")), "too many ways"),
    "repeated text": (with_parts(post_processor=TEMPLATE), "repeats the text"),
    "a cut table": (with_parts(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "is cut"),
    "an empty table": (with_parts(normalizer=charsmap([], b"a\0")), "is cut"),
    "a table that ends": (with_parts(normalizer=charsmap([1 << 10], b"a\0")), "leads out of its table"),
    "a text that is not there": (with_parts(normalizer=charsmap(leading_to(100), b"b\0")), "leads out of its texts"),
    "half a character": (
        with_parts(normalizer=charsmap(leading_to(1), "é\0".encode())),
        "leads out of its texts",
    ),
    "a long replacement": (with_parts(normalizer=charsmap(leading_to(0), b"b" * 1000)), "texts of more than 256 bytes"),
    "no object": ([1], "not a JSON object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tokenizers_that_ask_for_too_much_are_refused(tmp_path: Path, name: str) -> None:
    fields, problem = REFUSED[name]
    with pytest.raises(TokenizerError, match="here is not a tokenizer") as caught:
        TextTokenizer.from_dict({"tokenizer": fields}, where="here")
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_table_that_is_sound_is_read() -> None:
    fields = with_parts(normalizer=charsmap(leading_to(0), b"b\0"))
    assert TextTokenizer.from_dict({"tokenizer": fields}, where="here").encode("a b") == [2, 2]


PATTERNS = (
    *(r"(?<= |^)(?= )", r"(?<!@@)$", " {2,}", r"\s+", r"\d{1,3}(?=(?:\d{3})*\b)", r" ?[^(\s|[.,!?…。])]+"),
    r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|\s+",
)


USUAL: dict[str, dict[str, Any]] = {
    "T5": with_parts(
        normalizer=sequence(charsmap(leading_to(0), b"b" * 11 + b"\0"), replace(" {2,}", "▁", kind="Regex")),
        pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        added_tokens=[{"id": 3 + index, "content": f"<extra_id_{index}>", "normalized": True} for index in range(1000)],
    ),
    "ALBERT": with_parts(
        normalizer=sequence(
            *(replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, {"type": "StripAccents"}),
            *({"type": "Lowercase"}, charsmap(leading_to(0), b"b" * 11 + b"\0"), replace(" {2,}", " ", kind="Regex")),
        ),
        pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    ),
    "BART": with_parts(pre_tokenizer={"type": "ByteLevel"}, decoder={"type": "ByteLevel"}),
    "BERT": with_parts(
        normalizer={"type": "BertNormalizer"},
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
    ),
    "GPT": with_parts(
        model={"type": "BPE", "vocab": {"a": 0}, "merges": [], "end_of_word_suffix": "</w>"},
        decoder={"type": "BPEDecoder", "suffix": "</w>"},
    ),
}
"""Parts as the tokenizers of these models have them."""


@pytest.mark.parametrize("name", USUAL)
def test_parts_of_usual_tokenizers_are_taken(name: str) -> None:
    tokenizer_parts.check_parts(USUAL[name])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_tokenizers_are_taken(pattern: str) -> None:
    check_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        *("((a*))*", "(?:a{1,5}){3,}", "a{100000}", r"(a)\1+", r"(?<x>a|\g<x>b)", "a" * 6000),
        *("a?" * 30 + "a" * 30, "(?:a|a)" * 30 + "b", "a{0,9}" * 9, "a{1,}a+a{,900}b", "(?~b)c", "(?:a*a*|b)a*c"),
    ],
)
def test_patterns_that_search_for_ever_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="regular expression"):
        check_pattern(pattern)


class Stopping:
    """A tokenizer whose library stops at some text and some ids, as a panic of Rust does."""

    def __init__(self, panic: BaseException):
        self._panic = panic

    def encode(self, text: str, **options: Any) -> Any:
        if "a" in text:
            raise self._panic
        return Tokenizer(models.WordLevel(WORDS, unk_token="<unk>")).encode(text, **options)

    def decode(self, ids: list[int], **options: Any) -> str:
        raise self._panic


@pytest.fixture
def panic(monkeypatch: pytest.MonkeyPatch) -> BaseException:
    """What the library raises when it panics: its class is not an Exception, and cannot be imported."""
    monkeypatch.setattr(tokenizer_parts, "check_parts", lambda fields: None)
    fields = with_parts(normalizer=replace("(a+)+$", "", kind="Regex"))
    inner = Tokenizer.from_str(json.dumps(fields))
    with pytest.raises(BaseException, match="retry-limit") as caught:  # where it has learned to search: another panic
        inner.encode("a" * 40 + "b")
    assert not isinstance(caught.value, Exception)
    return caught.value


def test_a_panic_is_an_error_with_one_line(panic: BaseException) -> None:
    with (
        pytest.raises(PanicError, match="it cannot be read: the tokenizers library stopped") as caught,
        telling_of_panics("it cannot be read"),
    ):
        raise panic
    assert "\n" not in str(caught.value)
    with pytest.raises(KeyboardInterrupt), telling_of_panics("it"):
        raise KeyboardInterrupt


def test_a_line_at_which_the_library_stops_is_marked_and_others_are_read(panic: BaseException) -> None:
    reader = Reader(CONFIG, TextTokenizer(Stopping(panic)), "text")  # type: ignore[arg-type]
    with pytest.raises(Unreadable) as caught:
        reader.ids(b"a\n")
    assert caught.value.status == "tokenizer_error"
    assert reader.ids(b"b\n") == [2, 4]


def test_a_file_is_refused_in_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(REFUSED["exploding normalizer"][0]), encoding="utf-8")
    with pytest.raises(TokenizerError, match="repeats a part that itself repeats"):
        read_vocabulary(tmp_path / "tokenizer.json")


def test_normalizers_of_the_library_are_all_known() -> None:
    """A kind that a later version adds is refused until someone has looked at it."""
    for found in (normalizers.NFC(), normalizers.Strip(), normalizers.Replace("a", "b"), normalizers.StripAccents()):
        inner = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
        inner.normalizer = found
        tokenizer_parts.check_parts(json.loads(inner.to_str()))


@pytest.mark.parametrize("ids", [[2**64], [-1], ["x"], [1.5], [True]])
@pytest.mark.parametrize("side", ["before", "after"])
def test_ids_around_text_that_are_none_are_refused(side: str, ids: list[Any]) -> None:
    fields = {"tokenizer": with_parts(), side: ids}
    with pytest.raises(TokenizerError, match="here is not a tokenizer"):
        TextTokenizer.from_dict(fields, where="here")


def test_a_word_whose_id_the_model_lacks_marks_its_line() -> None:
    """A vocabulary of another model: its ids would lead out of the embedding."""
    tokenizer = TextTokenizer.from_dict({"tokenizer": with_parts(), "before": [2**31 - 1]}, where="here")
    with pytest.raises(Unreadable, match="it has the id 2147483647, the model's last is 8") as caught:
        Reader(CONFIG, tokenizer, "text").ids(b"b\n")
    assert caught.value.status == "invalid_ids"


@pytest.mark.parametrize("strategy", [{"Fixed": 2**31}, {"Fixed": 2**63}])
def test_padding_of_any_length_is_not_made(strategy: dict[str, int]) -> None:
    """2 GiB for each list of numbers, and as many texts."""
    padding = {"strategy": strategy, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    found = tokenizer_parts.library_tokenizer(
        with_parts(padding={**padding, "pad_token": "<pad>"}, truncation=cut), "tokenizer.json"
    )
    assert found.encode("a b a").ids == [1, 2, 1]
