"""Files of expected outputs: what is a source, an output, bos, eos and the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.models.formats.native import Tokenizers
from tfexport.text.tokenizers import TextTokenizer
from tfexport.verification.expected_outputs import Examples, Line, encoded, read_lines

PAD, BOS, EOS = 1, 2, 3
CONFIG = ModelConfig(
    d_model=8, n_heads=2, d_ff=8, n_encoder_layers=1, n_decoder_layers=1, src_vocab_size=20, tgt_vocab_size=30,
    max_source_length=9, max_target_length=8, unk_id=0, pad_id=PAD, bos_id=BOS, eos_id=EOS,
)  # fmt: skip


def words(*names: str) -> TextTokenizer:
    inner = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextTokenizer(inner)


SPECIALS = ("<unk>", "<pad>", "<sos>", "<eos>")
SOURCE, TARGET = words(*SPECIALS, "ein", "Hund"), words(*SPECIALS, "a", "dog", "barks")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "out.tsv"


def refused(file: Path, content: str | bytes) -> str:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TfexportError) as caught:
        read_lines(file)
    assert str(file) in str(caught.value)
    assert str(caught.value).endswith(".")
    return str(caught.value)


def examples(
    *pairs: tuple[Any, Any], source: TextTokenizer | None = None, target: TextTokenizer | None = None
) -> Examples:
    lines = [Line(number, *pair) for number, pair in enumerate(pairs, 1)]
    return encoded(Path("out.tsv"), lines, CONFIG, Tokenizers(source, target))


def wrong(*pairs: tuple[Any, Any], **tokenizers: TextTokenizer) -> str:
    with pytest.raises(TfexportError) as caught:
        examples(*pairs, **tokenizers).check_lengths(CONFIG)
    return str(caught.value)


def test_columns_are_a_source_and_an_output(file: Path) -> None:
    file.write_bytes(b"5 6\t7 8\r\n\nein Hund\ta dog\n4\t\n")
    assert read_lines(file) == [Line(1, "5 6", "7 8"), Line(3, "ein Hund", "a dog"), Line(4, "4", "")]


def test_json_lines_hold_text_or_ids(file: Path) -> None:
    file.write_text(
        '{"source": "5 6", "output": [7, 8]}\n' + json.dumps({"source": [5], "output": " a dog ", "line": 9}),
        encoding="utf-8",
    )
    assert read_lines(file) == [Line(1, "5 6", (7, 8)), Line(2, (5,), "a dog")]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("5 6\t7\n5 6 7\n", "line 2"),
        ("5\t6\n\n5\t6\t7\n", "line 3"),
        ("5\t6\n \t7\n", "line 2"),
        ('{"source": [5], "output": [6]}\n{"source": [5]\n', "line 2"),
        ('{"source": [5], "output": [6]}\n5\t6\n', "line 2"),
        ('{"source": [5]}\n', "line 1"),
        ('{"source": [5], "output": [6.0]}\n', "the output of line 1"),
        ('{"source": [true], "output": [6]}\n', "the source of line 1"),
        ('{"source": [], "output": [6]}\n', "line 1"),
        ("\n \n", "no expected outputs"),
        (b"5\t\xff\n", "cannot read"),
    ],
)
def test_other_lines_are_refused_with_their_number(file: Path, content: str | bytes, part: str) -> None:
    assert part in refused(file, content)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TfexportError, match="--expect"):
        read_lines(tmp_path / "none.tsv")


def test_outputs_lose_bos_eos_and_padding() -> None:
    made = examples(("5", "2 7 8 3 9"), ("6", "7 8 3 1 1"), ("7", [9, 9, 9, 1]))
    assert [row.output for row in made.rows] == [(7, 8), (7, 8), (9, 9, 9)]
    assert [row.ends for row in made.rows] == [True, True, False]
    assert [row.tokens(EOS) for row in made.rows] == [[7, 8, EOS], [7, 8, EOS], [9, 9, 9]]


def test_an_output_of_eos_alone_is_empty() -> None:
    for row in examples(("5", "3"), ("6", "")).rows:
        assert (row.output, row.ends) == ((), True)


@pytest.mark.parametrize(
    ("sources", "framing", "first"),
    [
        (("2 5 6 3", "2 7 3"), (True, True), [2, 5, 6, 3]),
        (("5 6 3", "7 3"), (False, True), [5, 6, 3]),
        (("2 5 6", "2 7"), (True, False), [2, 5, 6]),
        (("5 6 3", "7"), None, [5, 6, 3, 3]),
        (("5 6", "7"), None, [5, 6, 3]),
    ],
)
def test_sources_show_whether_they_have_bos_and_eos(
    sources: tuple[str, ...], framing: tuple[bool, bool] | None, first: list[int]
) -> None:
    """If none has them, the model's own are added."""
    made = examples(*((source, "9 3") for source in sources))
    assert made.framing == framing
    assert made.inputs(made.rows, CONFIG)[0] == first


def test_outputs_without_eos_ended_except_at_a_limit() -> None:
    """No program prints eos here: the longest outputs, and those longest beside their sources, may have been cut."""
    made = examples(("5", "7"), ("5 5 5 5", "7 7"), ("5", "7 7 7"), ("5 5 5 5 5", "7 7 7 7"), ("5", ""))
    assert [row.ends for row in made.rows] == [True, True, False, False, True]


def test_equal_lengths_are_no_limit() -> None:
    """All as long as their sources, as in a reversal: they ended."""
    made = examples(("5 6 7", "7 6 5"), ("5 6", "6 5"))
    assert [row.ends for row in made.rows] == [False, True]


def test_outputs_as_long_as_the_model_allows_may_be_cut() -> None:
    made = examples(("5", "7 7 7 7 7 7 7 7"), ("6", "8 8 8 8 8 8 8 8"))
    assert [row.ends for row in made.rows] == [False, False]
    made.check_lengths(CONFIG)


def test_text_is_read_with_the_vocabularies() -> None:
    made = examples(("ein Hund", "<sos> a dog <eos> a"), ("Hund", "dog barks cat"), source=SOURCE, target=TARGET)
    assert [row.source for row in made.rows] == [(4, 5), (5,)]
    assert [row.output for row in made.rows] == [(4, 5), (5, 6, 0)]
    assert [row.text for row in made.rows] == ["a dog", "dog barks cat"]
    assert [row.ends for row in made.rows] == [True, False]
    assert made.framing is None


def test_ids_are_read_although_there_are_vocabularies() -> None:
    made = examples(("2 4 5 3", [5, 6, 3]), ("2 5 3", [6, 3]), source=SOURCE, target=TARGET)
    assert [row.source for row in made.rows] == [(2, 4, 5, 3), (2, 5, 3)]
    assert [row.output for row in made.rows] == [(5, 6), (6,)]


def test_numbers_that_the_vocabulary_has_are_words() -> None:
    numbers = words(*SPECIALS, "7", "8")
    made = examples(("8 7", "7 8 8"), ("8", "7"), source=numbers, target=numbers)
    assert [row.source for row in made.rows] == [(5, 4), (5,)]
    assert [row.output for row in made.rows] == [(4, 5, 5), (4,)]


def test_ids_of_another_model_are_refused() -> None:
    assert "'20'" in wrong(("5", "6"), ("5 20", "6"))
    assert "line 2" in wrong(("5", "6"), ("5", "6 30"))
    assert "--src-vocab" in wrong(("ein Hund", "6"))
    assert "padding id 1" in wrong(("5 1", "6"))


def test_examples_beyond_the_model_are_refused() -> None:
    assert "line 2" in wrong(("2 5 3", "6 3"), ("2 5 5 5 5 5 5 5 5 3", "6 3"))
    assert "9 ids" in wrong(("5", "6 6 6 6 6 6 6 6 3"))


def test_a_forced_first_token_may_be_left_out() -> None:
    config = CONFIG.replace(forced_first_id=9)
    made = encoded(Path("o"), [Line(1, "5", "7 3"), Line(2, "5", "9 7 3")], config, Tokenizers(None, None))
    assert [row.output for row in made.rows] == [(9, 7), (9, 7)]


def test_the_first_difference_is_named() -> None:
    cut, ended = examples(("5", "7 8"), ("6", "7 3")).rows
    assert cut.difference([7, 8, 9], EOS) is None
    assert str(cut.difference([7, EOS], EOS)) == "line 1, token 2: the end (eos) instead of 8"
    assert str(ended.difference([7, 9, EOS], EOS)) == "line 2, token 2: 9 instead of the end (eos)"
    assert str(ended.difference([7], EOS)) == "line 2, token 2: nothing instead of the end (eos)"


def test_text_may_have_other_subwords() -> None:
    inner = Tokenizer(models.BPE({"a": 4, "b": 5, "c": 6, "ab": 7, "<sos>": 2, "<eos>": 3}, [("a", "b")]))
    inner.decoder = decoders.Fuse()
    made = examples(("5", "abc"), target=TextTokenizer(inner))
    (row,) = made.rows
    assert row.output == (7, 6)
    assert made.is_spelt(row, [4, 5, 6])
    assert not made.is_spelt(row, [4, 5])
    assert made.is_spelt(row, [4, 5], begin=True)
    assert not made.is_spelt(row, [5], begin=True)
