"""Word alignments and replaced unknown tokens, from lines to lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tfexport
from makers.references.tutorial import TutorialTransformer
from makers.tiny import TinyCheckpoint
from tests.support.fakes import (
    ATTENTION_HEADS,
    ATTENTION_LAYERS,
    tiny_config,
)
from tfexport.__main__ import main
from tfexport.errors import TfexportError
from tfexport.text.tokenizers import word_tokenizer

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "a", "b", "c", "d"]
VOCABULARY = word_tokenizer({word: index for index, word in enumerate(WORDS)})
CONFIG = tiny_config(
    src_vocab_size=8, tgt_vocab_size=8, unk_id=3, n_decoder_layers=ATTENTION_LAYERS, n_heads=ATTENTION_HEADS, d_model=6
)


# --- formats


# --- the tokens of sources


# --- lines to lines, on a fake


# --- the command, on a real bundle


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    def run_main(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["tfexport", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run_main


LINES = {"de5 de6": [2, 5, 6, 3], "de9 Zwerg de30": [2, 9, 0, 30, 3], "de30 de4 de4 de7": [2, 30, 4, 4, 7, 3]}


def naive_attention(model: TutorialTransformer, source: list[int], ids: list[int]) -> np.ndarray:
    """The last layer's, the mean of its heads, by the tutorial's own code."""
    with torch.no_grad():
        model(torch.tensor([source]), torch.tensor([[2, *ids[:-1]]]))
    return model.decoder.layers[-1].encoder_attention.weights[0].mean(dim=0).numpy()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("flags", [[], ["--beam", 3, "--nbest", 2], ["--workers", 2], ["--runtime", "torch"]])
def test_decode_writes_what_the_checkpoint_attends_to(
    run: Run, aligned_bundle: Path, tiny_checkpoint: TinyCheckpoint, tmp_path: Path, flags: list[Any]
) -> None:
    (tmp_path / "in").write_text("\n".join(LINES) + "\n\n", encoding="utf-8")
    asked = ["decode", aligned_bundle, tmp_path / "in", "--threads", 1, *flags]
    code, out, _ = run(*asked, "--alignments", "hard", "--output-format", "jsonl")
    assert code == 0
    *records, empty = [json.loads(line) for line in out.splitlines()]
    assert "source_tokens" not in empty
    _, text, _ = run(*asked, "--alignments", "hard")
    _, plain, _ = run(*asked)
    for (line, source), record, row, bare in zip(
        LINES.items(), records, text.splitlines(), plain.splitlines(), strict=False
    ):
        assert record["source_tokens"] == ["<sos>", *line.split(), "<eos>"]
        assert record["source_text"] == [1, len(source) - 1]
        pairs = []
        for found in record["hypotheses"]:
            wanted = naive_attention(tiny_checkpoint.model, source, found["ids"])
            np.testing.assert_allclose(found["attention"], wanted, atol=2e-4)
            own = wanted[: len(found["ids"]) - (found["ids"][-1] == 3), 1:-1]
            assert found["alignment"] == sorted([int(best), t] for t, best in enumerate(own.argmax(axis=1)))
            pairs.append(" ".join(f"{s}-{t}" for s, t in found["alignment"]))
        assert [one.split(" ||| ") for one in row.split("\t")] == [
            [one, aligned] for one, aligned in zip(bare.split("\t"), pairs, strict=True)
        ]


def test_decode_replaces_unknown_words(
    run: Run, aligned_bundle: Path, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    """An output is made to begin with one."""
    (tmp_path / "in").write_text("de9 Zwerg de30\n")
    (tmp_path / "starts").write_text("<unk>\n")
    asked = ["decode", aligned_bundle, tmp_path / "in", "--threads", 1, "--prefix-file", tmp_path / "starts"]
    plain = run(*asked)[1]
    assert plain.startswith("<unk> ")
    best = naive_attention(tiny_checkpoint.model, [2, 9, 0, 30, 3], [0])[0, 1:-1].argmax()
    word = ["de9", "Zwerg", "de30"][best]
    assert run(*asked, "--replace-unk")[1] == plain.replace("<unk>", word)
    (tmp_path / "words").write_text(f"{word}\tdwarf\n")
    told = run(*asked, "--replace-unk", "--unk-dictionary", tmp_path / "words")[1]
    assert told == plain.replace("<unk>", "dwarf")
    assert run(*asked, "--replace-unk", "--precision", "int8")[0] == 0


def test_a_coverage_penalty_reaches_the_search(run: Run, aligned_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("de9 de5 de30\n")
    asked = ["decode", aligned_bundle, tmp_path / "in", "--threads", 1, "--beam", 3, "--output-format", "jsonl"]
    scores = [json.loads(run(*asked, *more)[1])["hypotheses"][0]["score"] for more in ([], ["--coverage-penalty", 0.2])]
    assert scores[1] < scores[0]


def test_so_it_does_from_python(aligned_bundle: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    model = tfexport.load(aligned_bundle, threads=1)
    found = model.translate("de9 Zwerg de30", beam=3, nbest=2, attention=True, coverage_penalty=0.2)
    assert model.translate("de9", beam=2).hypotheses[0].attention is None
    for output in found.hypotheses:
        wanted = naive_attention(tiny_checkpoint.model, [2, 9, 0, 30, 3], list(output.ids))
        np.testing.assert_allclose(output.attention, wanted, atol=1e-4)


def test_python_has_the_fields_of_json_lines(run: Run, aligned_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("de9 Zwerg de30\n")
    asked = ["decode", aligned_bundle, tmp_path / "in", "--threads", 1, "--beam", 2, "--output-format", "jsonl"]
    record = json.loads(run(*asked, "--alignments", "hard")[1])
    (wanted,) = record["hypotheses"]
    model = tfexport.load(aligned_bundle, threads=1)
    found = model.translate("de9 Zwerg de30", beam=2, alignments="hard").hypotheses[0]
    assert {"source_tokens": list(found.source_tokens), "source_text": list(found.source_text)} == {
        name: record[name] for name in ("source_tokens", "source_text")
    }
    assert [list(pair) for pair in found.alignment] == wanted["alignment"]
    np.testing.assert_allclose(found.attention, wanted["attention"], atol=1e-4)
    with_attention = model.translate("de9 Zwerg de30", attention=True).hypotheses[0]
    assert with_attention.source_tokens == found.source_tokens
    assert with_attention.attention.shape[1] == len(found.source_tokens)
    assert with_attention.alignment == ()


def test_python_replaces_unknown_words(aligned_bundle: Path, tmp_path: Path) -> None:
    model = tfexport.load(aligned_bundle, threads=1)
    plain = model.translate("de9 Zwerg de30", prefix="<unk>")
    assert plain.text.startswith("<unk> ")
    replaced = model.translate("de9 Zwerg de30", prefix="<unk>", replace_unk=True)
    word = replaced.text.split()[0]
    assert word in ("de9", "Zwerg", "de30")
    assert replaced.text == plain.text.replace("<unk>", word)
    assert replaced.hypotheses[0].tokens[0] == word
    (tmp_path / "words").write_text(f"{word}\tdwarf\n")
    told = model.translate("de9 Zwerg de30", prefix="<unk>", replace_unk=True, unk_dictionary=tmp_path / "words")
    assert told.text == plain.text.replace("<unk>", "dwarf")
    with pytest.raises(TfexportError, match="Give hard, soft, or a threshold"):
        model.translate("de9", alignments="so")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--alignments", "soft-ish"], "--alignments is 'soft-ish'. Give hard, soft, or a threshold"),
        (
            ["--alignment-layer", 0],
            "--alignment-layer needs --alignments, --replace-unk or --coverage-penalty. Add one.",
        ),
        (["--alignments", "hard", "--alignment-layer", 7], "no decoder layer 7: this model has 1"),
        (["--unk-dictionary", "x"], "Add --replace-unk."),
        (["--replace-unk", "--output-format", "ids"], "which the format ids cannot contain"),
        (["--replace-unk", "--unk-dictionary", "nowhere"], "cannot read the dictionary nowhere"),
    ],
)
def test_flags_that_cannot_be_used_are_one_line(run: Run, aligned_bundle: Path, flags: list[Any], message: str) -> None:
    code, out, err = run("decode", aligned_bundle, "benchmarks/sentences.de", "--threads", 1, *flags)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_bundle_without_such_graphs_says_how_to_get_them(run: Run, tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("de5\n")
    asked = ["decode", tiny_bundle, tmp_path / "in", "--threads", 1, "--alignments", "hard"]
    code, out, err = run(*asked, "-o", tmp_path / "out")
    assert (code, out) == (2, "")
    assert "Export again with --alignments, or decode with --runtime torch" in err
    assert not (tmp_path / "out").exists()
    assert run(*asked, "--runtime", "torch")[0] == 0
