"""Codes of subword-nmt: the ids of text are those that its own `apply_bpe` gives words of a vocabulary."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.text_models import WORDS
from tfexport.errors import TokenizerError
from tfexport.text.subword_nmt import Subwords
from tfexport.text.tokenizers import TextTokenizer, word_tokenizer
from tfexport.text.vocabularies import read_vocabulary

OLD = "t h\nth e\nthe </w>\na t\nat </w>\nc at</w>\n"
"""Version 0.1, which says no version: the end of a word is a symbol of its own."""

NEW = "#version: 0.2\nt h\nth e</w>\na t</w>\nc at</w>\na t\n"


def learned() -> str:
    """Codes that subword-nmt learns of a small text."""
    learn_bpe = pytest.importorskip("subword_nmt.learn_bpe")
    codes = io.StringIO()
    learn_bpe.learn_bpe(io.StringIO(f"{WORDS} " * 3), codes, 60)
    return codes.getvalue()


def vocabulary_of(apply: Any) -> dict[str, int]:
    """Some of the subwords of the text, and of words that it does not have."""
    found = apply.process_line(f"{WORDS} unseen xyzzy catat über").split()
    words = ["<unk>", "<pad>", "<s>", "</s>", *dict.fromkeys(found[::2] + found[:9])]
    return {word: index for index, word in enumerate(words)}


@pytest.mark.parametrize("version", ["old", "new", "learned"])
def test_ids_are_those_of_apply_bpe_and_the_vocabulary(version: str, tmp_path: Path) -> None:
    apply_bpe = pytest.importorskip("subword_nmt.apply_bpe")
    codes = {"old": OLD, "new": NEW}.get(version) or learned()
    theirs = apply_bpe.BPE(io.StringIO(codes))
    words = vocabulary_of(theirs)
    (tmp_path / "codes").write_text(codes, encoding="utf-8")
    tokenizer = word_tokenizer(words).with_codes(tmp_path / "codes", where="here")
    ours = TextTokenizer.from_dict(json.loads(json.dumps(tokenizer.to_dict())), where="here")

    @settings(max_examples=300, deadline=None)
    @given(
        st.one_of(
            st.text(), st.lists(st.sampled_from([*WORDS.split(), "@@", "a@@", "</w>", "<unk>", "☃"])).map(" ".join)
        )
    )
    def same(text: str) -> None:
        line = theirs.process_line(text.strip())
        assert ours.encode(text.strip()) == [words.get(word, 0) for word in line.split()]

    same()
    assert ours.encode(WORDS) == [words.get(word, 0) for word in theirs.process_line(WORDS).split()]


def test_subwords_by_hand() -> None:
    pytest.importorskip("subword_nmt")
    assert Subwords(NEW).split(["the", "cats", "that"]) == ["the", "c@@", "at@@", "s", "th@@", "at"]
    assert Subwords(OLD).split(["the", "cats"]) == ["the", "c@@", "at@@", "s"]
    # What the vocabulary lacks is split again, as far as it goes.
    assert Subwords(NEW, frozenset({"th@@", "e", "c@@", "at"})).split(["the", "cat"]) == ["th@@", "e", "c@@", "at"]


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ("#version: 0.2\na b\na b c\n", "line 3 is not two subwords"),
        ("a b\nabc\n", "line 2"),
        ("#version: 7.1\na b\n", "version: 7.1"),
        ("#version: 0.2\n", "line 2"),
        ("", "line 1"),
        ("\n", "line 1"),
    ],
)
def test_what_is_no_codes_is_refused(tmp_path: Path, codes: str, message: str) -> None:
    path = tmp_path / "codes"
    path.write_text(codes)
    with pytest.raises(TokenizerError, match=message):
        Subwords.from_file(path)
    fields = {**word_tokenizer({"<unk>": 0}).to_dict(), "codes": codes}
    with pytest.raises(TokenizerError, match=message):
        TextTokenizer.from_dict(fields, where="here")


def test_lower_case_comes_before_subwords(tmp_path: Path) -> None:
    pytest.importorskip("subword_nmt")
    (tmp_path / "codes").write_text(NEW)
    tokenizer = word_tokenizer({"<unk>": 0, "the": 1, "c@@": 2}, lowercase=True)
    assert tokenizer.with_codes(tmp_path / "codes", where="here").encode("THE Cu") == [1, 2, 0]


def test_a_tokenizer_that_splits_text_by_itself_has_no_codes(tmp_path: Path) -> None:
    (tmp_path / "codes").write_text(NEW)
    (tmp_path / "tokenizer.json").write_text(
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
    )
    with pytest.raises(TokenizerError, match="by itself"):
        read_vocabulary(tmp_path / "tokenizer.json").with_codes(tmp_path / "codes", where="the source vocabulary")
