"""fairseq's checkpoints, made by fairseq itself: its logits, its tokens, its dictionaries, and what is refused."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from makers.paths import DATA
from tests.support.originals import assert_same_logits, assert_same_searches, expected
from tfexport.errors import ConfigError, TfexportError, TokenizerError
from tfexport.models.checkpoints.load import inspect_checkpoint, load_checkpoint
from tfexport.models.checkpoints.options import TextSettings
from tfexport.models.checkpoints.reading import with_codes
from tfexport.models.formats.native import Tokenizers
from tfexport.models.formats.pickled_options import plain, read_inert
from tfexport.models.toolkits.toolkit import TextOptions
from tfexport.text.tokenizers import TextTokenizer
from tfexport.text.vocabularies import read_vocabulary
from tfexport.verification.probe import probe

FOLDER = DATA / "fairseq"
EXPECTED = expected("fairseq")
FORMS = {
    "cfg": {"activation": "gelu", "norm_first": False, "final_norm": False},
    "dictconfig": {"activation": "gelu_tanh", "norm_first": True, "final_norm": True, "tie_output": True},
    "args": {"norm_first": True, "embedding_scale": 1.0},
    "fused": {"embedding_norm": True, "norm_first": False, "tie_source_target": True, "tie_output": True},
}
"""As versions 0.12, 0.10, 0.9 and 0.6 write them; each model has other options too."""
MAX_LENGTH = 12  # 11 tokens and eos


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("form", FORMS)
def test_logits_and_tokens_are_fairseq_s_own(form: str, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(FOLDER / f"{form}.pt", {})
    assert FORMS[form].items() <= checkpoint.config.to_dict().items()
    assert_same_logits(checkpoint, EXPECTED[form])
    assert_same_searches(checkpoint, EXPECTED[form], tmp_path / "bundle", "fairseq", MAX_LENGTH)


def test_nothing_is_to_be_said_with_flags() -> None:
    found = inspect_checkpoint(FOLDER / "cfg.pt", {})
    assert found.family == "fairseq"
    assert not found.missing
    assert not found.problems
    assert found.vocabulary
    assert {"bos_id": 2, "eos_id": 2, "pad_id": 1, "unk_id": 3, "source_eos": True}.items() <= found.fields.items()
    assert found.notes == ()


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("n_heads", 4, "--heads"),
        ("norm_first", True, "--norm-first"),
        ("activation", "relu", "--activation"),
        ("bos_id", 0, "--bos"),
        ("embedding_scale", 1.0, "--embedding-scale"),
        ("d_model", 24, "d_model of --config"),
    ],
)
def test_flags_that_contradict_the_file_are_refused(field: str, value: Any, flag: str) -> None:
    told = load_checkpoint(FOLDER / "cfg.pt", {}).config.to_dict()
    for read in (load_checkpoint, inspect_checkpoint):
        with pytest.raises(ConfigError, match=rf"{field} is {told[field]}, not {value}\. Leave out {flag}\."):
            read(FOLDER / "cfg.pt", {field: value})


def test_flags_that_repeat_the_file_or_choose_are_taken() -> None:
    told = load_checkpoint(FOLDER / "cfg.pt", {})
    again = load_checkpoint(FOLDER / "cfg.pt", {**told.given, "embedding_scale": "sqrt", "norm_first": False})
    assert again.config == told.config
    chosen = {"max_source_length": 5, "suppressed_ids": (1, 4)}
    assert load_checkpoint(FOLDER / "cfg.pt", chosen).config == told.config.replace(**chosen)


def test_a_folder_of_checkpoints_is_told_to_name_one(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "cfg.pt", tmp_path / "checkpoint_best.pt")
    with pytest.raises(TfexportError, match=r"It has checkpoint_best\.pt: give the path of one, such as .*best\.pt"):
        load_checkpoint(tmp_path, {})


# --- dictionaries


def test_dictionaries_lie_beside_the_checkpoint() -> None:
    tokenizers = load_checkpoint(FOLDER / "cfg.pt", {}).tokenizers
    assert tokenizers.source is not None
    assert tokenizers.target is not None
    assert tokenizers.source.encode(" w0  w22\tunseen ") == [4, 26, 3]
    assert tokenizers.target.tokens([0, 1, 2, 3, 4]) == ["<s>", "<pad>", "</s>", "<unk>", "v0"]
    framed = load_checkpoint(FOLDER / "cfg.pt", {}, text=TextOptions(prefix="w1 ")).tokenizers.source
    assert framed is not None
    assert framed.encode("w0") == [5, 4]


def test_text_is_written_as_fairseq_writes_it() -> None:
    """Without bos, which its model may choose like any word; and `<s>` in a source is that word."""
    tokenizers = load_checkpoint(FOLDER / "cfg.pt", {}).tokenizers
    assert tokenizers.target is not None
    assert tokenizers.target.decode([0, 4, 0, 3, 5]) == "v0 <unk> v1"
    for read in (tokenizers.target, TextTokenizer.from_dict(tokenizers.target.to_dict(), where="here")):
        assert read.encode("<s> v0 <s>v0") == [0, 4, 3]
        assert read.decode([0, 4]) == "v0"


def test_without_dictionaries_it_says_where_they_belong(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "cfg.pt", tmp_path)
    checkpoint = load_checkpoint(tmp_path / "cfg.pt", {})
    assert checkpoint.tokenizers.source is None
    assert "dict.de.txt is not next to it: put it there, or give it with --src-vocab" in checkpoint.notes
    (tmp_path / "dict.en.txt").write_text("of 3\nanother 2\n")
    notes = load_checkpoint(tmp_path / "cfg.pt", {}).notes
    assert any(note.startswith("dict.en.txt next to it has 6 words, the model 23") for note in notes)
    with pytest.raises(ConfigError, match="no dictionary next to it"):
        load_checkpoint(tmp_path / "cfg.pt", {}, text=TextOptions(prefix="w1 "))


def test_given_vocabularies_that_do_not_fit_are_told(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "cfg.pt", tmp_path)
    (tmp_path / "own.json").write_text('["</s>", "<unk>", "w0"]')
    given = Tokenizers(read_vocabulary(tmp_path / "own.json"), None)
    checkpoint = load_checkpoint(tmp_path / "cfg.pt", {}, tokenizers=given)
    config = checkpoint.config
    assert checkpoint.notes == (
        "dict.en.txt is not next to it: put it there, or give it with --tgt-vocab",  # and nothing of the other
        f"the source vocabulary has 3 words, the model's embedding {config.src_vocab_size} rows",
        "unk_id is 3, the source vocabulary's own is 1",
        "eos_id is 2, the source vocabulary's own is 0",
    )
    own = Tokenizers(read_vocabulary(FOLDER / "dict.de.txt"), read_vocabulary(FOLDER / "dict.en.txt"))
    assert load_checkpoint(tmp_path / "cfg.pt", {}, tokenizers=own).notes == ()


def test_probe_says_nothing_odd_of_fairseq_s_own_ids() -> None:
    """Its dictionaries have a bos with which decoding does not begin."""
    (check,) = (check for check in probe(FOLDER / "cfg.pt", {}).checks if check.name == "special ids")
    assert check.passed
    assert "vocabulary's own" not in check.about


def test_subwords_that_nothing_splits_are_told(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "cfg.pt", tmp_path)
    shutil.copy(FOLDER / "dict.en.txt", tmp_path)
    lines = (FOLDER / "dict.de.txt").read_text().splitlines()
    for word, advice in (("w0@@", "--src-bpe"), ("▁w0", "SentencePiece")):
        (tmp_path / "dict.de.txt").write_text("\n".join([f"{word} 99", *lines[1:]]), encoding="utf-8")
        for read in (load_checkpoint, inspect_checkpoint):
            (note,) = read(tmp_path / "cfg.pt", {}).notes
            assert advice in note
    (tmp_path / "dict.de.txt").write_text("\n".join(["w0@@ 99", *lines[1:]]), encoding="utf-8")
    (tmp_path / "codes").write_text("#version: 0.2\na b</w>\n")
    checkpoint = load_checkpoint(tmp_path / "cfg.pt", {})
    assert (
        replace(
            checkpoint, tokenizers=with_codes(checkpoint.tokenizers, TextSettings(src_bpe=tmp_path / "codes"))
        ).notes
        == ()
    )


def test_dictionaries_are_vocabularies_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "dict.de.txt"
    path.write_text("der 20\nein#fall 5\n<unk> 4 #fairseq:overwrite\n99 1\n", encoding="utf-8")
    read = read_vocabulary(path)
    assert read.ids(["<s>", "<pad>", "</s>", "der", "ein#fall", "99", "20"]) == [0, 1, 2, 4, 5, 7, 6]
    assert read.size == 8
    path.write_text("der 20\nder 5\n")
    with pytest.raises(TokenizerError, match="'der' twice"):
        read_vocabulary(path)
    path.write_text("der 20\ndie\n")  # words of which one looks as if it were counted
    assert read_vocabulary(path).size == 2


# --- what is not supported


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    def changed(weights: dict[str, Any] | None = None, **options: Any) -> Path:
        content = read_inert(FOLDER / "args.pt")
        args = argparse.Namespace(**{**plain(content["args"], "args"), **options})
        path = tmp_path / "model.pt"
        torch.save({**content, "args": args, "model": {**content["model"], **(weights or {})}}, path)
        return path

    return changed


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("arch", "fconv_wmt_en_de"),
        ("arch", "transformer_lm"),
        ("arch", "transformer_unidirectional_iwslt_de_en"),
        ("arch", "transformer_xl"),
        ("arch", "transformer_pointer_generator"),
        ("task", "translation_multi_simple_epoch"),
        ("adaptive_softmax_cutoff", "10,15"),
        ("adaptive_input", True),
        ("no_cross_attention", True),
        ("cross_self_attention", True),
        ("no_token_positional_embeddings", True),
        ("quant_noise_pq", 0.1),
        ("quant_noise_scalar", 0.1),
        ("char_inputs", True),
        ("base_layers", 1),
        ("decoder_layers_to_keep", "0"),
        ("activation_fn", "tanh"),
        ("decoder_normalize_before", False),
        ("decoder_attention_heads", 2),
        ("decoder_ffn_embed_dim", 20),
        ("decoder_embed_dim", 20),
        ("encoder_learned_pos", False),
        ("encoder_layers", None),
        ("layernorm_embedding", "yes"),
    ],
)
def test_options_that_are_not_supported_are_refused_by_name(
    changed: Callable[..., Path], option: str, value: Any
) -> None:
    with pytest.raises(TfexportError, match=option):
        load_checkpoint(changed(**{option: value}), {})


@pytest.mark.parametrize("option", ["dropout", "encoder_layerdrop", "label_smoothing", "user_dir", "left_pad_source"])
def test_options_of_training_change_nothing(changed: Callable[..., Path], option: str) -> None:
    one = load_checkpoint(changed(**{option: 0.5}), {})
    assert one.config == load_checkpoint(FOLDER / "args.pt", {}).config


@pytest.mark.parametrize(
    "arch",
    [
        "transformer",
        "transformer_tiny",
        "transformer_wmt_en_de_big_align",
        "transformer_vaswani_wmt_en_fr_big",
        "bart_base",
    ],
)
def test_fairseq_s_own_variants_are_read(changed: Callable[..., Path], arch: str) -> None:
    assert load_checkpoint(changed(arch=arch), {}).config == load_checkpoint(FOLDER / "args.pt", {}).config


def test_options_that_are_not_known_are_told(changed: Callable[..., Path]) -> None:
    notes = load_checkpoint(changed(encoder_strange=3, decoder_strange=0), {}).notes
    assert any(note.endswith("has options that were not read: encoder_strange") for note in notes)


def test_weights_beyond_the_options_are_told(changed: Callable[..., Path]) -> None:
    with pytest.raises(TfexportError, match=r"unexpected: decoder\.project_out_dim\.weight"):
        load_checkpoint(changed({"decoder.project_out_dim.weight": torch.ones(3, 12)}), {})
    with pytest.raises(TfexportError, match="not a tensor"):
        load_checkpoint(changed({"decoder.more": [1]}), {})
    content = read_inert(FOLDER / "args.pt")
    del content["model"]["encoder.layer_norm.weight"]
    torch.save({**content, "args": argparse.Namespace(**plain(content["args"], "args"))}, path := changed())
    with pytest.raises(TfexportError, match="one stack has a final norm"):
        load_checkpoint(path, {})


def test_languages_are_those_of_the_model(changed: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="one pair of languages"):
        load_checkpoint(FOLDER / "args.pt", {}, text=TextOptions(source_language="de"))


def test_interpolated_options_are_looked_up(tmp_path: Path) -> None:
    content = read_inert(FOLDER / "cfg.pt")
    cfg = plain(content["cfg"], "cfg")
    cfg["model"]["max_source_positions"] = "${task.max_source_positions}"
    cfg["task"]["max_source_positions"] = 17
    torch.save({**content, "cfg": cfg}, tmp_path / "model.pt")
    assert load_checkpoint(tmp_path / "model.pt", {}).config.max_source_length == 17
