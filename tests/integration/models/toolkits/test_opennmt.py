"""OpenNMT-py's checkpoints, made by its versions 1.2, 2.3 and 3.5: logits, tokens, vocabularies, and what is refused."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from makers.paths import DATA
from tests.support.checkpoints import assert_same_model
from tests.support.originals import assert_same_logits, assert_same_searches, expected
from tfexport.errors import ConfigError, TfexportError
from tfexport.models.checkpoints.load import inspect_checkpoint, load_checkpoint
from tfexport.models.formats.pickled_options import plain, read_inert
from tfexport.models.toolkits.toolkit import TextOptions

FOLDER = DATA / "opennmt"
EXPECTED = expected("opennmt")
FILES = {
    "v1": {"activation": "relu", "tie_source_target": True, "tie_output": True, "attention_bias": True},
    "v2": {"activation": "gelu", "gated": False, "tie_output": False, "norm_eps": 1e-6, "bos_id": 2},
    "v3": {"activation": "silu", "gated": True, "norm": "rms", "attention_bias": False, "norm_eps": 1e-5},
    "v3-biases": {"activation": "gelu", "gated": True, "tie_output": True, "feed_forward_bias": True},
}
MAX_LENGTH = 11


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", FILES)
def test_logits_and_tokens_are_opennmt_s_own(name: str, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(FOLDER / f"{name}.pt", {})
    assert FILES[name].items() <= checkpoint.config.to_dict().items()
    assert_same_logits(checkpoint, EXPECTED[name])
    assert_same_searches(checkpoint, EXPECTED[name], tmp_path / "bundle", "tfexport", MAX_LENGTH)


@pytest.mark.parametrize("name", FILES)
def test_vocabularies_are_in_the_file(name: str) -> None:
    tokenizers = load_checkpoint(FOLDER / f"{name}.pt", {}).tokenizers
    assert tokenizers.source is not None
    assert tokenizers.target is not None
    first = tokenizers.source.tokens(range(tokenizers.source.size)).index("w0")
    assert first == (2 if name == "v2" else 4)  # sources of that version have neither bos nor eos of their own
    assert tokenizers.source.encode(" w0 w20 unseen") == [first, first + 20, 0]
    # Version 3 splits at spaces alone, and older ones at any whitespace.
    assert tokenizers.source.encode("w0  w1\tw2") == ([first, 0, 0] if "v3" in name else [first, first + 1, first + 2])
    assert tokenizers.target.tokens(range(4)) == ["<unk>", "<blank>", "<s>", "</s>"]


def test_nothing_is_to_be_said_with_flags() -> None:
    found = inspect_checkpoint(FOLDER / "v2.pt", {})
    assert found.family == "opennmt-py"
    assert not found.missing
    assert not found.problems
    assert found.vocabulary
    assert {"bos_id": 2, "eos_id": 3, "pad_id": 1, "unk_id": 0, "source_eos": False}.items() <= found.fields.items()


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """v3-biases.pt with other options, weights (None takes one away) or vocabularies."""

    def changed(weights: dict[str, Any] | None = None, vocab: dict[str, Any] | None = None, **options: Any) -> Path:
        content = read_inert(FOLDER / "v3-biases.pt")
        opt = argparse.Namespace(**{**plain(content["opt"], "opt"), **options})
        model = {**content["model"], **(weights or {})}
        model = {name: tensor for name, tensor in model.items() if tensor is not None}
        path = tmp_path / "model.pt"
        torch.save({**content, "opt": opt, "model": model, "vocab": {**content["vocab"], **(vocab or {})}}, path)
        return path

    return changed


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_relative_positions", 20),
        ("max_relative_positions", -1),
        ("relative_positions_buckets", 32),
        ("multiquery", True),
        ("num_kv", 1),
        ("sliding_window", 100),
        ("num_experts", 2),
        ("parallel_residual", True),
        ("copy_attn", True),
        ("lora_layers", ["linear_query"]),
        ("quant_layers", ["w_1"]),
        ("encoder_type", "rnn"),
        ("decoder_type", "transformer_lm"),
        ("model_task", "lm"),
        ("self_attn_type", "average"),
        ("position_encoding", False),
        ("generator_function", "sparsemax"),
        ("pos_ffn_activation_fn", "tanh"),
        ("layer_norm", "other"),
        ("heads", None),
    ],
)
def test_options_that_are_not_supported_are_refused_by_name(
    changed: Callable[..., Path], option: str, value: Any
) -> None:
    with pytest.raises(TfexportError, match=option):
        load_checkpoint(changed(**{option: value}), {})


def test_options_that_are_not_known_are_told(changed: Callable[..., Path]) -> None:
    notes = load_checkpoint(changed(pos_strange=3), {}).notes
    assert any(note.endswith("has options that were not read: pos_strange") for note in notes)


def test_biases_that_some_layers_lack_are_zeros(changed: Callable[..., Path]) -> None:
    name = "decoder.transformer_layers.0.context_attn.final_linear.bias"
    without = load_checkpoint(changed({name: None}), {}).weights
    with_zeros = load_checkpoint(changed({name: torch.zeros(12)}), {}).weights
    assert all(torch.equal(tensor, with_zeros[name]) for name, tensor in without.items())


def test_norms_of_version_0_have_other_names(changed: Callable[..., Path]) -> None:
    weights = read_inert(FOLDER / "v3-biases.pt")["model"]
    norms = [name for name in weights if "layer_norm" in name]
    older = {name: name.replace(".weight", ".a_2").replace(".bias", ".b_2") for name in norms}
    renamed = {older[name]: weights[name] for name in norms} | dict.fromkeys(norms)
    found, wanted = (load_checkpoint(path, {}).weights for path in (changed(renamed), FOLDER / "v3-biases.pt"))
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())


def test_what_the_file_lacks_or_has_beyond_is_told(changed: Callable[..., Path]) -> None:
    embeddings = "encoder.embeddings.make_embedding"
    for weights, message in (
        ({f"{embeddings}.emb_luts.1.weight": torch.ones(3, 4)}, r"unexpected: encoder\..*emb_luts\.1\.weight"),
        ({f"{embeddings}.emb_luts.0.weight": None}, r"has no encoder\..*emb_luts\.0\.weight"),
        ({f"{embeddings}.pe.pe": None}, r"has no encoder\..*pe\.pe"),
        ({"encoder.layer_norm.weight": None}, r"missing: encoder\.layer_norm\.weight"),
        ({"encoder.layer_norm.weight": [1]}, "not a tensor"),
    ):
        with pytest.raises(TfexportError, match=message):
            load_checkpoint(changed(weights), {})


def test_vocabularies_that_are_not_the_model_s_are_refused(changed: Callable[..., Path]) -> None:
    words = read_inert(FOLDER / "v3-biases.pt")["vocab"]["tgt"]
    for vocab, message in (
        ({"tgt": words[:-1]}, "has 24 words, the model 25"),
        ({"tgt": [*words[:-1], "<unk>"]}, "a word twice"),
        ({"tgt": [word.strip("<>") for word in words]}, "has no <unk>, <blank>, </s>, <s>"),
        ({"tgt": 7}, "no tgt vocabulary"),
        ({"decoder_start_token": "<start>"}, "has no <start>"),
    ):
        with pytest.raises(TfexportError, match=message):
            load_checkpoint(changed(vocab=vocab), {})
    start = load_checkpoint(changed(vocab={"decoder_start_token": "</s>"}), {}).config
    assert start.bos_id == start.eos_id == 3


@pytest.mark.parametrize("absent", ["model", "generator"])
def test_half_a_model_is_refused(tmp_path: Path, absent: str) -> None:
    content = read_inert(FOLDER / "v3.pt")
    opt = argparse.Namespace(**plain(content["opt"], "opt"))
    torch.save({**{name: content[name] for name in content if name != absent}, "opt": opt}, tmp_path / "model.pt")
    with pytest.raises(TfexportError, match=r"no whole model \(`model` and `generator`\)"):
        load_checkpoint(tmp_path / "model.pt", {})


# --- save_format safetensors


def test_weights_in_a_file_beside_it_are_read() -> None:
    """OpenNMT-py 3.5.1 wrote the same model in both forms."""
    found = load_checkpoint(FOLDER / "v3-parts.pt", {})
    assert_same_model(found, load_checkpoint(FOLDER / "v3.pt", {}))
    assert found.sha256 != load_checkpoint(FOLDER / "v3.pt", {}).sha256


@pytest.fixture
def in_parts(tmp_path: Path) -> Callable[..., Path]:
    """v3-parts.pt as `name`, its weights in so many numbered files."""

    def in_parts(parts: int, name: str = "model [1].pt") -> Path:
        path = tmp_path / name
        shutil.copyfile(FOLDER / "v3-parts.pt", path)
        weights = load_file(FOLDER / "v3-parts.safetensors")
        for number in range(parts):
            kept = {key: weights[key] for key in list(weights)[number::parts]}
            save_file(kept, tmp_path / f"{name.removesuffix('.pt')}.{number:02d}.safetensors")
        return path

    return in_parts


@pytest.mark.parametrize("name", ["model [1].pt", "model"])
def test_weights_in_several_files_are_read(in_parts: Callable[..., Path], name: str) -> None:
    path = in_parts(3, name)
    shutil.copyfile(FOLDER / "v3-parts.safetensors", path.with_name("other.safetensors"))
    first = load_checkpoint(path, {})
    assert_same_model(first, load_checkpoint(FOLDER / "v3.pt", {}))
    last = path.with_name(f"{name.removesuffix('.pt')}.02.safetensors")
    weights = load_file(last)
    save_file({name: tensor + 1 for name, tensor in weights.items()}, last)
    assert load_checkpoint(path, {}).sha256 != first.sha256


def test_parts_that_are_missing_or_too_many_are_told(in_parts: Callable[..., Path], tmp_path: Path) -> None:
    path = in_parts(3)

    def refused(message: str) -> None:
        with pytest.raises(TfexportError, match=message):
            load_checkpoint(path, {})

    first, second, third = (tmp_path / f"model [1].{number:02d}.safetensors" for number in range(3))
    with pytest.raises(TfexportError, match=r"an OpenNMT-py model alone\. Give the \.pt beside it"):
        load_checkpoint(first, {})
    content = second.read_bytes()
    second.write_bytes(content[:-8])
    refused(r"model \[1\]\.01\.safetensors cannot be read as a checkpoint")
    second.unlink()
    refused(r"00\.safetensors, .*02\.safetensors, and part 1 is missing\. Put model \[1\]\.01\.safetensors beside it")
    third.rename(tmp_path / "model [1].0.safetensors")  # the same number twice
    refused("two of which have the same number")
    (tmp_path / "model [1].0.safetensors").rename(tmp_path / "model [1].999999999.safetensors")
    refused("part 1 is missing")
    (tmp_path / "model [1].999999999.safetensors").unlink()
    refused(r"the model in .*model \[1\]\.00\.safetensors has no|missing: ")
    shutil.copyfile(first, second)
    refused(r"01\.safetensors has .*, which another part also has")
    shutil.copyfile(first, tmp_path / "model [1].safetensors")
    refused(r"are in model \[1\]\.safetensors and in model \[1\]\.00\.safetensors, model \[1\]\.01\.safetensors")
    for file in (first, second, tmp_path / "model [1].safetensors"):
        file.unlink()
    refused("no weights: .* beside it. Put them there")
    (tmp_path / "other.safetensors").touch()
    refused(r"beside it \(there is other\.safetensors\)\. Put them there")


def test_how_its_texts_were_split_is_told(changed: Callable[..., Path]) -> None:
    path = changed(transforms=["filtertoolong", "sentencepiece"], src_subword_model="de.model")
    (note,) = load_checkpoint(path, {}).notes
    assert note.startswith("its texts are split by sentencepiece (de.model) first")


def test_all_that_was_done_to_its_texts_is_told(changed: Callable[..., Path]) -> None:
    corpora = {
        "a": {"path_src": "a.de", "transforms": ["prefix", "bpe"], "src_prefix": "<2en>"},
        "b": {"path_src": "b.de", "transforms": ["normalize", "filtertoolong"]},
        "valid": {"path_src": "c.de", "transforms": None},
    }
    split, done = load_checkpoint(changed(data=corpora, transforms=["filtertoolong"]), {}).notes
    assert split.startswith("its texts are split by bpe first")
    assert done.startswith("its texts went through prefix, normalize (src_prefix '<2en>') in training")
    assert load_checkpoint(changed(transforms=["filtertoolong"], data="data/as/in/version/1"), {}).notes == ()


@pytest.mark.parametrize("options", [{"transforms": 3}, {"transforms": [3]}, {"data": {"a": {"transforms": "bpe"}}}])
def test_transforms_that_are_no_list_are_refused(changed: Callable[..., Path], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"has transforms .*, not a list of texts"):
        load_checkpoint(changed(**options), {})


def test_a_prefix_is_kept_and_languages_are_refused() -> None:
    tokenizer = load_checkpoint(FOLDER / "v1.pt", {}, text=TextOptions(prefix="w1 ")).tokenizers.source
    assert tokenizer is not None
    assert tokenizer.encode("w0") == [5, 4]
    with pytest.raises(ConfigError, match="knows no languages"):
        load_checkpoint(FOLDER / "v1.pt", {}, text=TextOptions(target_language="de"))
