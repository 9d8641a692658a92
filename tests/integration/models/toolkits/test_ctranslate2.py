"""Folders that CTranslate2's converters write: n-best lists of CTranslate2 itself, older versions, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from makers import model_bin
from makers.tiny import HINTS, tiny_transformer
from tests.support import ctranslate2_models
from tests.support.checkpoints import assert_same_model, refused
from tests.support.ctranslate2_models import (
    KINDS,
    PRECISIONS,
    NBest,
    computed_positions,
    converted,
    hugging_face,
    marian,
    settings_of,
    simple,
    sources_of,
    translated,
)
from tests.support.text_models import as_in_a_bundle, read_ids
from tfexport.bundle.reader import open_bundle
from tfexport.errors import TfexportError, TokenizerError
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import Checkpoint, inspect_checkpoint, load_checkpoint
from tfexport.models.toolkits.toolkit import TextOptions
from tfexport.models.transformer import Transformer
from tfexport.runtimes import load_runtime
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import Hypothesis, SearchOptions, search

LIMIT = 14
LENGTHS = {"max_source_length": 40, "max_target_length": 40}
SCORES, TIE = 5e-5, 5e-6
"""What rounding may move a score by, and hypotheses that are as good as each other."""


def loaded(model: Path) -> Checkpoint:
    """Lengths are said of models whose positions have no end."""
    missing = inspect_checkpoint(model, {}).missing
    assert missing.keys() in (set(), LENGTHS.keys())
    return load_checkpoint(model, LENGTHS if missing else {})


def assert_same(
    checkpoint: Checkpoint,
    ours: list[list[Hypothesis]],
    theirs: Sequence[NBest],
    *,
    ties: int = 0,
    scores: float = SCORES,
) -> None:
    """The same hypotheses in the same order, and the same scores, but in so many lists whose scores are ties."""
    tokenizer = checkpoint.tokenizers.target
    assert tokenizer is not None
    differ = 0
    for found, wanted in zip(ours, theirs, strict=True):
        assert [h.score for h in found] == pytest.approx([score for _, score in wanted], abs=scores)
        words = [tuple(tokenizer.tokens(h.ids[:-1] if h.finished else h.ids)) for h in found]
        others = [k for k, (one, (other, _)) in enumerate(zip(words, wanted, strict=True)) if one != other]
        for k in others:
            assert abs(found[k].score - wanted[k][1]) < TIE
        differ += bool(others)
    assert differ <= ties


def assert_same_searches(model: Path, bundle: Path, count: int, *, ties: int = 0) -> None:
    """The n-best lists of exported graphs and those of CTranslate2, greedy and with a beam of 4."""
    checkpoint, sources = loaded(model), sources_of(model, count)
    runtime = load_runtime("ort-cpu", open_bundle(export(checkpoint, bundle, gate=None).directory))
    ids = [read_ids(checkpoint, " ".join(source)) for source in sources]
    for beam in (1, 4):
        options = SearchOptions.for_profile("opennmt", beam=beam, nbest=beam, max_length=LIMIT)
        theirs = translated(model, sources, options)
        ours = search(runtime, ids, options)
        assert_same(checkpoint, ours, theirs, ties=ties)
        assert len({wanted[0][0] for wanted in theirs}) > count // 12  # it does not say the same to all
        if count >= 100:
            assert 0 < np.mean([h.finished for found in ours for h in found]) < 1


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(("kind", "precision"), [(kind, PRECISIONS[k % 3]) for k, kind in enumerate(KINDS)])
def test_n_best_lists_are_ctranslate2s(kind: str, precision: str, tmp_path: Path) -> None:
    assert_same_searches(converted(kind, tmp_path, precision), tmp_path / "bundle", 20)


@pytest.mark.thorough
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_n_best_lists_of_200_sources_are_ctranslate2s(kind: str, precision: str, tmp_path: Path) -> None:
    assert_same_searches(converted(kind, tmp_path, precision), tmp_path / "bundle", 200, ties=2)


OTHERS: dict[str, Callable[[Path], Any]] = {
    "marian pre-norm": lambda folder: marian(folder, "pre-norm", seed=4, end=1.5),
    "marian old": lambda folder: marian(folder, "old", end=1.5),
    "t5": lambda folder: hugging_face(folder, "t5"),
    "mt5": lambda folder: hugging_face(folder, "mt5"),
    "pegasus": lambda folder: hugging_face(folder, "pegasus"),
    "m2m_100": lambda folder: hugging_face(folder, "m2m_100"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", OTHERS)
def test_n_best_lists_of_other_architectures_are_ctranslate2s(kind: str, tmp_path: Path) -> None:
    assert_same_searches(converted(OTHERS[kind], tmp_path), tmp_path / "bundle", 100, ties=2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "hints", "beams"), [("mbart", {"bos_id": 7}, (1, 4)), ("m2m_100", {"forced_first_id": 7}, (1,))]
)
def test_the_target_language_is_ctranslate2s_target_prefix(
    name: str, hints: dict[str, int], beams: tuple[int, ...], tmp_path: Path
) -> None:
    """It is the decoder's first token, or that of the output, after which CTranslate2's beam is another one."""
    model = converted(lambda folder: hugging_face(folder, name), tmp_path)
    checkpoint = load_checkpoint(model, hints)
    built, sources = checkpoint.build_model(), sources_of(model, 50)
    assert isinstance(built, Transformer)
    ids = [read_ids(checkpoint, " ".join(source)) for source in sources]
    for beam in beams:
        options = SearchOptions.for_profile("opennmt", beam=beam, nbest=beam, max_length=LIMIT)
        theirs = translated(model, sources, options, target_prefix=[["t7"]] * len(sources))
        assert_same(checkpoint, search(TorchRuntime(built), ids, options), theirs, ties=1)


def searched(checkpoint: Checkpoint, model: Path, count: int = 20, **changes: Any) -> None:
    """The same as `assert_same_searches` without an export, with a beam of 4."""
    built, sources = checkpoint.build_model(), sources_of(model, count)
    assert isinstance(built, Transformer)
    options = SearchOptions.for_profile("opennmt", beam=4, nbest=4, max_length=LIMIT)
    ids = [read_ids(checkpoint, " ".join(source)) for source in sources]
    assert_same(checkpoint, search(TorchRuntime(built), ids, options), translated(model, sources, options), **changes)


@pytest.mark.parametrize("precision", ["bfloat16", "int16", "int8_float16", "int8_bfloat16"])
def test_weights_are_what_ctranslate2_computes_with(precision: str, tmp_path: Path) -> None:
    model = converted("marian", tmp_path, precision)
    searched(load_checkpoint(model, {}), model)
    tied = model_bin.read((model / "model.bin").read_bytes()).aliases
    assert tied  # the embeddings, and their scales with them


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without position tables."""
    return simple(tmp_path_factory.mktemp("simple") / "ct2")


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted("bart", tmp_path_factory.mktemp("bart"))


# --- positions


def test_positions_that_ctranslate2_computes(plain: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(plain, LENGTHS | {"max_source_length": 1200})
    assert checkpoint.config.positions == "stored"
    table = checkpoint.weights["encoder.positions.table"].numpy()
    assert np.abs(table - computed_positions(tmp_path / "encoder", 1200, 16)).max() < 2e-5
    searched(checkpoint, plain)


def test_lengths_are_asked_for_where_positions_have_no_end(plain: Path, bart: Path) -> None:
    assert "--max-length" in refused(load_checkpoint, plain, {})
    assert inspect_checkpoint(plain, {}).missing.keys() == LENGTHS.keys()
    assert not inspect_checkpoint(plain, {}).problems
    again = load_checkpoint(plain, load_checkpoint(plain, LENGTHS).given)  # as parity reads it
    assert (again.config.max_source_length, again.config.max_target_length) == (40, 40)
    assert "above 1048576" in refused(load_checkpoint, plain, dict.fromkeys(LENGTHS, 2**30))
    assert load_checkpoint(bart, {}).config.max_source_length == 40
    assert "at most" in refused(load_checkpoint, bart, dict.fromkeys(LENGTHS, 41))


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted("t5", tmp_path_factory.mktemp("t5"))


OWN_BIAS = "{}/layer_{}/self_attention/relative_attention_{}"
"""Of the self-attention of a layer: its table of buckets (bias), and from which distance there is one bucket."""


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (9, 20)])
def test_far_tokens_are_in_the_buckets_of_ctranslate2(
    t5: Path, tmp_path: Path, buckets: int, max_distance: int
) -> None:
    model = Path(shutil.copytree(t5, tmp_path / "far"))
    content, random = model_bin.read((t5 / "model.bin").read_bytes()), np.random.default_rng(1)
    variables: dict[str, Any] = {}
    for side, layers in (("encoder", 3), ("decoder", 2)):
        table = random.standard_normal((buckets, 3)).astype(np.float32)
        for number in range(layers):
            variables[OWN_BIAS.format(side, number, "bias")] = table
            variables[OWN_BIAS.format(side, number, "max_distance")] = np.int32(max_distance)
    model_bin.write(model, content.with_variables(**variables))
    checkpoint = load_checkpoint(model, dict.fromkeys(LENGTHS, 300))
    built, sources = checkpoint.build_model(), [sources_of(model, 1, longest=n)[0] for n in (80, 290)]
    assert max(map(len, sources)) > 150
    assert isinstance(built, Transformer)
    options = SearchOptions.for_profile("opennmt", beam=2, nbest=2, max_length=150)
    ids = [read_ids(checkpoint, " ".join(source)) for source in sources]
    assert_same(checkpoint, search(TorchRuntime(built), ids, options), translated(model, sources, options))


def test_biases_of_distances_that_differ_between_layers_are_refused(t5: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(t5, tmp_path / "changed"))
    content, name = model_bin.read((t5 / "model.bin").read_bytes()), OWN_BIAS.format("decoder", 1, "bias")
    for value in (content.whole()[name] + 1, None):
        model_bin.write(model, content.with_variables(**{name: value}))
        message = refused(load_checkpoint, model, LENGTHS)
        assert "another relative_attention_bias in decoder/layer_1/self_attention" in message
    model_bin.write(model, content.with_variables(**{OWN_BIAS.format("decoder", 0, "max_distance"): np.int32(2**30)}))
    assert "another relative_attention_bias in decoder/layer_0" in refused(load_checkpoint, model, LENGTHS)
    table = {"encoder/position_encodings/encodings": np.zeros((40, 24), np.float32)}
    model_bin.write(model, content.with_variables(**table))
    assert "and relative_attention_bias; only one of them is supported" in refused(load_checkpoint, model, LENGTHS)
    whole = replace(content, variables=content.whole(), aliases={})
    model_bin.write(model, whole.with_variables(**{OWN_BIAS.format("encoder", 0, "bias"): None}))
    assert "no encoder/layer_0/self_attention/relative_attention_bias" in refused(load_checkpoint, model, LENGTHS)
    both = {OWN_BIAS.format("encoder", number, "max_distance"): np.int32(2**30) for number in range(3)}
    model_bin.write(model, content.with_variables(**both))
    assert "max_distance 1073741824, which does not fit" in refused(load_checkpoint, model, LENGTHS)


# --- versions


def old_names(name: str) -> str:
    """A variable as OpenNMT-tf called it, which the first revision kept."""
    if "decoder" in name:
        name = name.replace("/attention", "/multi_head").replace("/self_attention", "/masked_multi_head")
    name = name.replace("/self_attention", "/multi_head").replace("weight", "kernel").replace("layer_norm", "LayerNorm")
    name = name.replace("embeddings_0/kernel", "w_embs").replace("embeddings/kernel", "w_embs")
    return (
        f"transformer/{name}:0".replace("projection", "dense").replace("linear_0", "conv1d").replace("linear", "conv1d")
    )


def older(content: model_bin.Content, version: int, revision: int) -> model_bin.Content:
    """What an older converter would have written of a model that it knew."""
    variables = {name: array for name, array in content.whole().items() if array.ndim}
    stacks = {name: array for name, array in content.variables.items() if not array.ndim}
    said = ("num_heads", "pre_norm", "activation", "alignment_layer", "alignment_heads")
    if revision >= 5:
        variables |= stacks
    elif revision >= 3:
        variables |= {name: stacks[f"decoder/{name}"] for name in said}
    if revision < 4:
        variables["encoder/embeddings/weight"] = variables.pop("encoder/embeddings_0/weight")
    if revision == 1:
        variables = {old_names(name): array for name, array in variables.items()}
    spec = "TransformerSpec" if revision >= 3 else "TransformerBase" if version > 1 else ""
    return model_bin.Content(variables, {}, spec, revision, version)


@pytest.mark.parametrize(("version", "revision"), [(1, 1), (2, 1), (2, 2), (3, 3), (4, 4), (5, 5), (5, 7), (6, 6)])
def test_older_versions_are_read_as_ctranslate2_reads_them(
    plain: Path, tmp_path: Path, version: int, revision: int
) -> None:
    content = model_bin.read((plain / "model.bin").read_bytes())
    model = Path(shutil.copytree(plain, tmp_path / "old"))
    model_bin.write(model, older(content, version, revision), settings_of(plain))
    options = SearchOptions.for_profile("opennmt", beam=2, nbest=2, max_length=LIMIT)
    sources = sources_of(plain, 5)
    assert translated(model, sources, options) == translated(plain, sources, options)
    assert_same_model(load_checkpoint(model, LENGTHS), load_checkpoint(plain, LENGTHS))


def test_settings_of_older_versions_are_in_the_model(tmp_path: Path) -> None:
    model = converted("fairseq", tmp_path)
    content, config = model_bin.read((model / "model.bin").read_bytes()), settings_of(model)
    wanted = load_checkpoint(model, {})
    model_bin.write(model, replace(content, version=5), config)
    assert not (model / "config.json").exists()
    assert_same_model(load_checkpoint(model, {}), wanted)
    model_bin.write(model, replace(content, version=5), config | {"decoder_start_token": None})
    assert inspect_checkpoint(model, {}).missing.keys() == {"bos_id"}
    for vocabulary in model.glob("*.json"):
        words = json.loads(vocabulary.read_text())
        vocabulary.with_suffix(".txt").write_text("".join(f"{word}\r\n" for word in words), newline="")
        vocabulary.unlink()
    assert as_in_a_bundle(load_checkpoint(model, {"bos_id": 2})).tokenizers.source is not None
    assert read_ids(load_checkpoint(model, {"bos_id": 2}), "w0 w1 unseen") == [4, 5, 3, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 7}, "version 7 of CTranslate2's layout, and versions up to 6"),
        ({"version": 0}, "begins with version 0"),
        ({"revision": 8}, "revision 8 of CTranslate2's layout TransformerSpec"),
        ({"revision": 0}, "revision 0"),
        ({"spec": "WhisperSpec"}, "layout 'WhisperSpec', which is not supported"),
        ({"spec": "TransformerDecoderSpec"}, "layout 'TransformerDecoderSpec', which is not supported"),
    ],
)
def test_other_layouts_are_refused_by_name(plain: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model = Path(shutil.copytree(plain, tmp_path / "other"))
    model_bin.write(model, replace(model_bin.read((plain / "model.bin").read_bytes()), **changes))
    assert message in refused(load_checkpoint, model, LENGTHS)


# --- variables


TABLE = np.zeros((5, 2), np.float32)
ONES = np.ones(16, np.float32)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("decoder/layer_0/self_attention/rotary_dim", np.int32(0), "rotary_dim (rotary positions)"),
        ("encoder/layer_0/self_attention/relative_position_keys", TABLE, "(relative position representations)"),
        ("decoder/alibi", np.int8(1), "decoder/alibi (ALiBi positions)"),
        ("decoder/layer_0/self_attention/num_heads_kv", np.int32(2), "num_heads_kv 2, and only 8"),
        ("decoder/layer_1/post_feedforward_layer_norm/gamma", ONES, "(norms before and after sublayers)"),
        ("decoder/layer_1/shared_layer_norm/gamma", ONES, "(parallel residuals)"),
        ("encoder/layer_1/self_attention/q_norm/gamma", ONES, "(norms of queries and keys)"),
        ("decoder/sliding_window", np.int32(5), "(attention to a window)"),
        ("decoder/project_in/weight", TABLE, "(embeddings of another width than the layers)"),
        ("decoder/final_logit_softcapping", np.float32(5), "(capped logits)"),
        ("encoder/embeddings_1/weight", TABLE, "(several source features)"),
        ("decoder/layer_0/attention/head_dim", np.float32("inf"), "head_dim inf, not above 0"),
        ("encoder/activation", np.int8(3), "models whose stacks differ"),
        ("encoder/num_heads", np.int8(4), "encoder/num_heads 4 and decoder/num_heads 8"),
        ("encoder/scale_embeddings", np.int8(0), "encoder/scale_embeddings 0"),
        ("decoder/strange", np.zeros(3, np.int8), "decoder/strange, which is not supported"),
        ("decoder/strange", np.int8(0), "decoder/strange, which is not supported"),
        ("decoder/strange/weight", TABLE, "decoder/strange/weight, which is not supported"),
        ("decoder/layer_0/ffn/linear_0/weight_zero", TABLE, "weights of 4 bits (AWQ)"),
        ("decoder/layer_0/ffn/linear_0/weight", np.zeros((4, 4), np.int32), "in 4 bits (AWQ)"),
        ("decoder/layer_0/ffn/linear_1/weight", None, "missing: decoder/layer_0/ffn/linear_1/weight"),
        ("decoder/layer_norm/gamma", None, "missing: decoder/layer_norm/gamma"),
        ("decoder/projection/weight", None, "no decoder/projection/weight"),
        ("encoder/layer_0/ffn/linear_0/weight", ONES, "linear_0/weight, which is not a matrix"),
        ("decoder/layer_0/attention/linear_1/weight", TABLE, "misshapen: decoder/layer_0/attention/linear_1/weight"),
    ],
)
def test_variables_that_are_not_supported_are_refused_by_name(
    plain: Path, tmp_path: Path, name: str, value: Any, message: str
) -> None:
    model = Path(shutil.copytree(plain, tmp_path / "changed"))
    content = model_bin.read((plain / "model.bin").read_bytes())
    model_bin.write(model, content.with_variables(**{name: value}))
    assert message in refused(load_checkpoint, model, LENGTHS)


@pytest.mark.parametrize("activation", [5, 6, 200 - 256])
def test_activations_that_are_not_supported_are_refused(plain: Path, tmp_path: Path, activation: int) -> None:
    model = Path(shutil.copytree(plain, tmp_path / "changed"))
    both = {f"{side}/activation": np.int8(activation) for side in ("encoder", "decoder")}
    model_bin.write(model, model_bin.read((plain / "model.bin").read_bytes()).with_variables(**both))
    assert f"activation {activation}, which is not supported" in refused(load_checkpoint, model, LENGTHS)


CHANGES: dict[str, dict[str, Any]] = {
    "activations": {"activation": np.int8(1)},
    "swish": {"activation": np.int8(2)},
    "sigmoid": {"activation": np.int8(4)},
    "no scale": {"scale_embeddings": np.int8(0)},
    "another scale": {"scale_embeddings": np.float32(2.5)},
    "post-norm": {"pre_norm": np.int8(0)},
    "queries": {"layer_0/self_attention/queries_scale": np.float32(0.3)},
    "zeros first": {"start_from_zero_embedding": np.int8(1)},
    "scaled outputs": {"scale_outputs": np.float32(0.4)},
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("change", CHANGES)
def test_settings_change_what_they_change_in_ctranslate2(plain: Path, tmp_path: Path, change: str) -> None:
    model = Path(shutil.copytree(plain, tmp_path / "changed"))
    sides = ("decoder",) if change in ("zeros first", "scaled outputs") else ("encoder", "decoder")
    variables = {f"{side}/{name}": value for side in sides for name, value in CHANGES[change].items()}
    model_bin.write(model, model_bin.read((plain / "model.bin").read_bytes()).with_variables(**variables))
    searched(load_checkpoint(model, LENGTHS), model)
    sources = sources_of(plain, 20)
    options = SearchOptions.for_profile("opennmt", beam=4, nbest=4, max_length=LIMIT)
    assert translated(model, sources, options) != translated(plain, sources, options)


def test_outputs_are_scaled_where_there_is_no_norm(plain: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(plain, tmp_path / "changed"))
    sides = ("encoder", "decoder")
    norms: dict[str, Any] = {f"{side}/layer_norm/{part}": None for side in sides for part in ("gamma", "beta")}
    norms |= {f"{side}/scale_embeddings": np.int8(0) for side in sides}
    content = model_bin.read((plain / "model.bin").read_bytes())
    table = content.variables["decoder/embeddings/weight"]
    tied = content.with_variables(
        **norms, **{"decoder/projection/weight": table, "decoder/scale_outputs": np.float32(0.1)}
    )
    model_bin.write(model, tied)
    checkpoint = load_checkpoint(model, LENGTHS)
    assert not checkpoint.config.final_norm
    assert not checkpoint.config.tie_output
    searched(checkpoint, model, scores=5e-4)  # both are that far from float64: nothing bounds the states


def test_an_epsilon_of_the_norms_is_read(plain: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(plain, tmp_path / "changed"))
    (model / "config.json").write_text(json.dumps(settings_of(plain) | {"layer_norm_epsilon": 0.25}))
    checkpoint = load_checkpoint(model, LENGTHS)
    assert checkpoint.config.norm_eps == 0.25
    searched(checkpoint, model)


# --- config.json and vocabularies


@pytest.fixture
def changed(bart: Path, tmp_path: Path) -> Callable[..., Path]:
    """bart with another config.json, and other words in its vocabulary."""

    def changed(words: Any = None, **settings: Any) -> Path:
        model = Path(shutil.copytree(bart, tmp_path / "changed", dirs_exist_ok=True))
        (model / "config.json").write_text(json.dumps(settings_of(bart) | settings))
        if words is not None:
            (model / "shared_vocabulary.json").write_text(json.dumps(words))
        return model

    return changed


def words_of(model: Path) -> list[str]:
    return json.loads((model / "shared_vocabulary.json").read_text())


def test_sources_end_as_config_json_says_or_their_user(bart: Path, changed: Callable[..., Path]) -> None:
    checkpoint = load_checkpoint(bart, {})
    assert any("leaves it to the input whether sources end with </s>" in note for note in checkpoint.notes)
    assert read_ids(checkpoint, "t7 t8 unseen </s>") == [7, 8, 3, 2]
    assert read_ids(load_checkpoint(bart, {"source_eos": True}), "t7 t8") == [7, 8, 2]
    added = load_checkpoint(changed(add_source_eos=True, add_source_bos=True, decoder_start_token="<s>"), {})
    assert read_ids(added, "t7 t8") == [0, 7, 8, 2]
    assert added.notes == ()
    assert "source_eos is True" in refused(load_checkpoint, changed(add_source_eos=True), {"source_eos": False})


def test_the_first_token_is_asked_for_where_whoever_translates_gives_it(changed: Callable[..., Path]) -> None:
    model = changed(decoder_start_token=None)
    assert "--bos" in refused(load_checkpoint, model, {})
    assert load_checkpoint(model, {"bos_id": 9}).config.bos_id == 9


def test_text_options_of_a_folder_without_languages(bart: Path) -> None:
    assert read_ids(load_checkpoint(bart, {}, text=TextOptions(prefix="t9 ")), "t7") == [9, 7]
    message = refused(load_checkpoint, bart, {}, text=TextOptions(target_language="t9"))
    assert "forced_first_id" in message
    assert load_checkpoint(bart, {"forced_first_id": 9}).config.forced_first_id == 9


def test_a_word_that_is_there_twice_has_the_first_id(bart: Path, changed: Callable[..., Path]) -> None:
    checkpoint = load_checkpoint(changed([*words_of(bart)[:-1], "t7"]), {})
    assert read_ids(checkpoint, "t7 t52") == [7, 3]


def test_what_is_wrong_beside_the_model_is_told(bart: Path, changed: Callable[..., Path]) -> None:
    words = words_of(bart)
    for arguments, message in (
        ({"words": [*words, "more"]}, "has 54 words, the model 53"),
        ({"words": [*words[:-1], "\ud800"]}, "is not a JSON list of words"),
        ({"words": {"a": 1}}, "is not a JSON list of words"),
        ({"words": [word for word in words if word != "</s>"]}, "has eos_token '</s>', which the vocabularies"),
        ({"decoder_start_token": "x"}, "has decoder_start_token 'x', which"),
        ({"decoder_start_token": 7}, "decoder_start_token 7, not a text"),
        ({"add_source_eos": "yes"}, "add_source_eos 'yes', not true or false"),
        ({"add_source_bos": True}, "has add_source_bos, and '<s>' is not the same id"),
        ({"layer_norm_epsilon": "x"}, "norm_eps"),
        ({"quantization_type": 1}, "quantization_type 1: weights of 4 bits (AWQ)"),
    ):
        assert message in refused(load_checkpoint, changed(**arguments), {}), arguments
    assert any("were not read: strange" in note for note in load_checkpoint(changed(strange=1), {}).notes)
    model = changed()
    (model / "shared_vocabulary.json").unlink()
    assert "no source_vocabulary.json" in refused(load_checkpoint, model, {})
    (model / "source_1_vocabulary.json").write_text('["a"]')
    assert "source features" in refused(load_checkpoint, model, {})
    for content in ("[1", "[]"):
        (model / "config.json").write_text(content)
        with pytest.raises(TfexportError, match=r"config\.json"):
            load_checkpoint(model, {})
    (model / "config.json").unlink()
    assert "config.json" in refused(load_checkpoint, model, {})


def test_vocabularies_in_lines_are_read_as_ctranslate2_reads_them(bart: Path, changed: Callable[..., Path]) -> None:
    words, model = words_of(bart), changed()
    (model / "shared_vocabulary.json").unlink()
    (model / "shared_vocabulary.txt").write_text("\n".join([*words[:-1], "t52\r"]) + "\n", newline="")
    tokenizer = load_checkpoint(model, {}).tokenizers.target
    assert tokenizer is not None
    assert tokenizer.tokens([7, 52]) == ["t7", "t52\r"]
    (model / "shared_vocabulary.txt").write_bytes(b"\xff\n")
    with pytest.raises(TokenizerError, match=r"cannot read .*shared_vocabulary\.txt"):
        load_checkpoint(model, {})


def test_what_belongs_to_it_is_told(bart: Path, changed: Callable[..., Path]) -> None:
    model = changed()
    (model / "vmap.txt").write_text("\tt7\n")
    content = model_bin.read((bart / "model.bin").read_bytes())
    model_bin.write(model, content.with_variables(decoder__alignment_layer=np.int16(0)))
    notes = load_checkpoint(model, {}).notes
    assert any("vmap.txt beside it is a shortlist" in note for note in notes)
    assert any("give --alignment-layer 0" in note for note in notes)


def test_the_file_stands_for_its_folder(bart: Path, changed: Callable[..., Path]) -> None:
    found = load_checkpoint(bart / "model.bin", {})
    assert_same_model(found, load_checkpoint(bart, {}))
    assert found.sha256 == load_checkpoint(bart, {}).sha256
    assert found.family == "ctranslate2"
    assert found.sha256 != load_checkpoint(changed(layer_norm_epsilon=1e-6), {}).sha256
    assert torch.equal(
        found.weights["encoder.tokens.weight"], load_checkpoint(bart, {}).weights["encoder.tokens.weight"]
    )
    assert ctranslate2_models.ctranslate2.contains_model(str(bart))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        (b"", "ends where 4 more bytes should be, so it is damaged"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
            "pointer of Git LFS .* `git lfs pull`",
        ),
        (b"<!DOCTYPE html>", "begins with no version of CTranslate2's layout, so it is damaged"),
    ],
)
def test_a_model_that_did_not_come_is_told(
    bart: Path, changed: Callable[..., Path], content: bytes | None, message: str
) -> None:
    """The files beside it tell whose folder it is."""
    model = changed()
    (model / "model.bin").unlink()
    if content is not None:
        (model / "model.bin").write_bytes(content)
    for path in (model, model / "model.bin"):
        with pytest.raises(TfexportError, match=rf"model.bin.*{message}" if content is not None else message):
            load_checkpoint(path, {})


def test_a_file_of_pytorch_may_have_the_same_name(tmp_path: Path) -> None:
    weights = tiny_transformer().state_dict()
    for number, zipped in enumerate((True, False)):
        path = tmp_path / str(number) / "model.bin"
        path.parent.mkdir()
        torch.save(weights, path, _use_new_zipfile_serialization=zipped)
        assert load_checkpoint(path, HINTS).family == "tutorial"
        assert "config.json" in refused(load_checkpoint, path.parent, HINTS)
    assert "there is no file" in refused(load_checkpoint, tmp_path / "model.bin", {})
