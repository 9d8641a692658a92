"""Codes of subword-nmt: the ids of text are those that its own `apply_bpe` gives words of a vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from makers.tiny import HEADS, TinyCheckpoint
from tfexport.bundle.reader import open_bundle
from tfexport.cli import app
from tfexport.text.subword_nmt import Subwords
from tfexport.text.tokenizers import TextTokenizer, word_tokenizer
from tfexport.training.vocabulary import train_words


def test_readable_text_has_subwords_joined() -> None:
    words = {word: index for index, word in enumerate(["<unk>", "ab@@", "c", "d@@", "@@", "e@@f", "x"])}
    read = word_tokenizer(words)
    again = TextTokenizer.from_dict(json.loads(json.dumps(read.to_dict())), where="here")
    for tokenizer in (read, again):
        assert tokenizer.decode([1, 2, 6]) == "abc x"
        assert tokenizer.decode([3, 1, 2, 5, 6, 1]) == "dabc e@@f x ab"  # the last one's word goes on nowhere
        assert tokenizer.decode([]) == ""
        assert tokenizer.tokens([1, 2]) == ["ab@@", "c"]
    assert word_tokenizer({"<unk>": 0, "a": 1, "@@": 2}).decode([1, 2, 1]) == "a @@ a"
    assert train_words(["a@@ b"], min_frequency=1).decode([4, 5]) == "a@@ b"  # what one trains on is what one gets


def test_export_with_codes(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    codes = tmp_path / "codes"
    codes.write_text("#version: 0.2\nd e</w>\n")
    ids = ["--heads", str(HEADS), "--unk", "0", "--pad", "1", "--bos", "2", "--eos", "3"]
    result = CliRunner().invoke(app, ["export", str(tiny_checkpoint.path), *ids, "--src-bpe", str(codes)])
    assert "no source vocabulary" in str(result.exception)
    flags = [*tiny_checkpoint.flags, "--src-bpe", str(codes), "--tgt-bpe", str(codes), "--no-parity"]
    result = CliRunner().invoke(app, ["export", str(tiny_checkpoint.path), "-o", str(tmp_path / "out"), *flags])
    assert result.exit_code == 0, result.output
    bundle = open_bundle(tmp_path / "out")
    for side in ("source", "target"):
        tokenizer = bundle.tokenizer(side)
        assert tokenizer is not None
        assert tokenizer.subwords == Subwords(codes.read_text())
