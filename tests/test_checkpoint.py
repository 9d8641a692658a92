"""Checkpoint files of every kind, good and bad: read completely, or refused with a message that says what is wrong."""

from __future__ import annotations

import builtins
import io
import json
import math
import os
import pickle
import random
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from references.annotated import AnnotatedTransformer
from references.per_head import PerHeadTransformer
from references.tutorial import TutorialTransformer
from safetensors.torch import save_file
from tiny import (
    BOS,
    ENCODER,
    EOS,
    HINTS,
    IDS,
    MAX_LENGTH,
    SPECIALS,
    SRC_VOCAB,
    TGT_VOCAB,
    TinyCheckpoint,
    randomised,
    tiny_classifier,
    tiny_transformer,
)
from torch import Tensor, nn

from tfexport.config import ModelConfig
from tfexport.errors import CheckpointError, ConfigError, TfexportError
from tfexport.models import native
from tfexport.models.checkpoint import Checkpoint, inspect_checkpoint, load_checkpoint, read_hints
from tfexport.models.native import Tokenizers
from tfexport.models.transformer import Transformer
from tfexport.tokenizers import read_vocabulary, word_tokenizer

Weights = dict[str, Tensor]
VOCABS = {"src_vocab": SRC_VOCAB, "tgt_vocab": TGT_VOCAB}
QUERY = "encoder.layers.0.self_attention.fc_q.weight"


def weights_of(family: str) -> Weights:
    """A state_dict of a tiny random model; every call gives the same."""
    models: dict[str, Callable[[], nn.Module]] = {
        "tutorial": tiny_transformer,
        "tutorial-classifier": tiny_classifier,
        "annotated": lambda: randomised(AnnotatedTransformer(**VOCABS, **ENCODER, n_decoder_layers=1)),
        "per-head": lambda: randomised(PerHeadTransformer(**VOCABS, **ENCODER, n_decoder_layers=1)),
    }
    return dict(models[family]().state_dict())


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Checkpoint]:
    """Save what is given as a `.pt` file and read it."""

    def save_and_load(content: Any, hints: Mapping[str, Any] = HINTS, **options: Any) -> Checkpoint:
        torch.save(content, tmp_path / "saved.pt")
        return load_checkpoint(tmp_path / "saved.pt", hints, **options)

    return save_and_load


def refused(load: Callable[..., Checkpoint], content: Any, *arguments: Any, **options: Any) -> str:
    """The message with which `load` refuses it, which is one line."""
    with pytest.raises(TfexportError) as caught:
        load(content, *arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_same_model(one: Checkpoint, other: Checkpoint) -> None:
    assert one.config == other.config
    assert one.weights.keys() == other.weights.keys()
    for name, tensor in one.weights.items():
        assert torch.equal(tensor, other.weights[name]), name


def naive_logits(model: TutorialTransformer) -> Tensor:
    src, tgt = torch.tensor([[BOS, 5, 6, 7, EOS], [BOS, 9, 4, 30, EOS]]), torch.tensor([[BOS, 4, 9], [BOS, 30, 7]])
    with torch.no_grad():
        return model(src, tgt)


def logits(checkpoint: Checkpoint) -> Tensor:
    model = checkpoint.build_model()
    src, tgt = torch.tensor([[BOS, 5, 6, 7, EOS], [BOS, 9, 4, 30, EOS]]), torch.tensor([[BOS, 4, 9], [BOS, 30, 7]])
    with torch.no_grad():
        return model(src, torch.tensor([5, 5]), tgt)


# --- families


SIZES = {"d_model": 24, "n_heads": 3, "d_ff": 40, "n_encoder_layers": 2, "n_decoder_layers": 1, "n_classes": 0}
SIZES |= {"src_vocab_size": SRC_VOCAB, "tgt_vocab_size": TGT_VOCAB, "max_source_length": MAX_LENGTH}
ARITHMETIC = {
    "tutorial": {"positions": "learned", "norm_first": False, "source_bos": True, "tie_output": False},
    "tutorial-classifier": {"n_decoder_layers": 0, "tgt_vocab_size": 0, "max_target_length": 0, "n_classes": 5},
    "annotated": {"positions": "stored", "norm_first": True, "final_norm": True, "source_eos": True},
    "per-head": {"positions": "stored", "position_offset": 1, "shared_norm": True, "tie_output": True},
}


@pytest.mark.parametrize("family", ARITHMETIC)
def test_family_and_sizes_are_told_by_the_file(load: Callable[..., Checkpoint], family: str) -> None:
    checkpoint = load(weights_of(family))
    assert checkpoint.family == family
    expected = {**SIZES, "max_target_length": MAX_LENGTH, "embedding_scale": math.sqrt(24), **ARITHMETIC[family]}
    assert {name: getattr(checkpoint.config, name) for name in expected} == expected
    assert all(tensor.dtype == torch.float32 for tensor in checkpoint.weights.values())


@pytest.mark.parametrize("family", ARITHMETIC)
def test_inspection_needs_no_hints(tmp_path: Path, family: str) -> None:
    torch.save(weights_of(family), tmp_path / "saved.pt")
    inspection = inspect_checkpoint(tmp_path / "saved.pt", {})
    assert inspection.family == family
    assert inspection.problems == ()
    assert inspection.n_parameters == sum(tensor.numel() for tensor in weights_of(family).values())
    heads = {} if family == "per-head" else {"n_heads": "--heads N"}
    assert inspection.missing == {**heads, "pad_id": "--pad N", "bos_id": "--bos N", "eos_id": "--eos N"}


def older_tutorial() -> tuple[TutorialTransformer, Weights]:
    """The tutorial's first layout, one `layer_norm` for all sublayers of a layer, and a model that computes it."""
    model = tiny_transformer()
    for side in (model.encoder, model.decoder):
        for layer in side.layers:
            layer.ff_layer_norm = layer.self_attn_layer_norm
            if side is model.decoder:
                layer.enc_attn_layer_norm = layer.self_attn_layer_norm
    state = model.state_dict()
    weights = {name: tensor for name, tensor in state.items() if "ff_layer" not in name and "enc_attn_l" not in name}
    return model, {name.replace("self_attn_layer_norm", "layer_norm"): tensor for name, tensor in weights.items()}


def test_older_tutorial_layout_has_one_norm_for_a_layer(load: Callable[..., Checkpoint]) -> None:
    model, weights = older_tutorial()
    checkpoint = load(weights)
    assert checkpoint.family == "tutorial"
    assert checkpoint.config.shared_norm
    assert (logits(checkpoint) - naive_logits(model)).abs().max() < 1e-5


def test_named_family_is_used(load: Callable[..., Checkpoint]) -> None:
    assert load(weights_of("annotated"), family="annotated").family == "annotated"


def test_unknown_family_names_those_there_are(load: Callable[..., Checkpoint]) -> None:
    for name in ("nosuch", "native"):
        message = refused(load, weights_of("tutorial"), family=name)
        assert repr(name) in message
        assert "tutorial, tutorial-classifier, annotated, per-head" in message


def test_wrong_family_names_what_the_file_lacks(load: Callable[..., Checkpoint]) -> None:
    message = refused(load, weights_of("tutorial"), family="annotated")
    assert "not of the family annotated" in message
    assert "src_embed.0.lut.weight" in message


def test_no_family_names_the_nearest_and_what_differs(load: Callable[..., Checkpoint]) -> None:
    weights = weights_of("tutorial")
    weights["encoder.my_positions.weight"] = weights.pop("encoder.pos_embedding.weight")
    message = refused(load, weights)
    assert "Nearest is tutorial," in message
    assert "it has no encoder.pos_embedding.weight;" in message
    assert "the family has no encoder.my_positions.weight." in message


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_the_transformer_of_pytorch_is_refused(load: Callable[..., Checkpoint]) -> None:
    message = refused(load, nn.Transformer(24, 3, 2, 1, 40).state_dict())
    assert "no known family" in message
    assert "encoder.layers.0.self_attn.in_proj_weight" in message


# --- wrappers, prefixes, precisions, formats, devices


def nested(*keys: str) -> Callable[[Weights], Any]:
    def wrap(weights: Weights) -> Any:
        content: Any = weights
        for key in reversed(keys):
            content = {"epoch": 3, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}, key: content}
        return content

    return wrap


@pytest.mark.parametrize(
    "wrap",
    [nested(key) for key in ("model_state_dict", "state_dict", "model_state", "model")]
    + [nested("model", "state_dict")]
    + [
        lambda weights, prefix=prefix: {prefix + name: tensor for name, tensor in weights.items()}
        for prefix in ("module.", "_orig_mod.", "model.", "module._orig_mod.", "model._orig_mod.module.")
    ]
    + [lambda weights: {"state_dict": {f"model.{name}": tensor for name, tensor in weights.items()}, "epoch": 1}],
)
def test_what_is_put_around_the_weights_is_taken_off(
    load: Callable[..., Checkpoint], tiny_checkpoint: TinyCheckpoint, wrap: Callable[[Weights], Any]
) -> None:
    assert_same_model(load(wrap(weights_of("tutorial"))), load_checkpoint(tiny_checkpoint.path, HINTS))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn], ids=str)
def test_any_float_precision_is_read_as_float32(tmp_path: Path, dtype: torch.dtype, suffix: str) -> None:
    stored = {name: tensor.to(dtype) for name, tensor in weights_of("tutorial").items()}
    path = tmp_path / f"stored{suffix}"
    if suffix == ".pt":
        torch.save(stored, path)
    else:
        save_file(stored, path)
    checkpoint = load_checkpoint(path, HINTS)
    read = checkpoint.weights["encoder.layers.0.self_attention.query.weight"]
    assert read.dtype == torch.float32
    assert torch.equal(read, stored[QUERY].float())


def test_formats_hold_the_same_model(tmp_path: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    weights = weights_of("tutorial")
    torch.save(weights, tmp_path / "older.pt", _use_new_zipfile_serialization=False)
    save_file(weights, tmp_path / "saved.safetensors")
    for name in ("older.pt", "saved.safetensors"):
        assert_same_model(load_checkpoint(tmp_path / name, HINTS), load_checkpoint(tiny_checkpoint.path, HINTS))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU at hand, PyTorch would read the file without help")
@pytest.mark.parametrize("zipped", [True, False])
def test_weights_saved_on_a_gpu_load_without_one(
    tmp_path: Path, tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, zipped: bool
) -> None:
    # No GPU is needed to write such a file: the device is a word beside each tensor.
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
    path = tmp_path / "gpu.pt"
    torch.save(weights_of("tutorial"), path, _use_new_zipfile_serialization=zipped)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(path, weights_only=True)
    assert_same_model(load_checkpoint(path, HINTS), load_checkpoint(tiny_checkpoint.path, HINTS))


# --- weights that do not fit


def test_all_that_is_wrong_is_told_at_once_in_the_names_of_the_file(load: Callable[..., Checkpoint]) -> None:
    weights = weights_of("tutorial")
    del weights["decoder.layers.0.enc_attn_layer_norm.bias"]
    weights["decoder.layers.0.gate.weight"] = torch.ones(3)
    weights["encoder.layers.1.positionwise_feedforward.fc_2.weight"] = torch.ones(24, 39)
    weights["decoder.fc_out.bias"] = torch.ones(TGT_VOCAB, dtype=torch.int64)
    message = refused(load, weights)
    assert "missing: decoder.layers.0.enc_attn_layer_norm.bias;" in message
    assert "unexpected: decoder.layers.0.gate.weight;" in message
    assert "misshapen: encoder.layers.1.positionwise_feedforward.fc_2.weight is [24, 39], not [24, 40];" in message
    assert "not plain floating-point numbers: decoder.fc_out.bias." in message


def test_inspection_tells_problems_instead_of_failing(tmp_path: Path) -> None:
    weights = weights_of("tutorial")
    del weights["decoder.fc_out.bias"]
    torch.save(weights, tmp_path / "saved.pt")
    assert inspect_checkpoint(tmp_path / "saved.pt", {}).problems == ("missing: decoder.fc_out.bias",)


@pytest.mark.parametrize("absent", [["bias"], ["weight", "bias"]])
def test_older_layout_s_problems_are_told_in_its_own_names(load: Callable[..., Checkpoint], absent: list[str]) -> None:
    _, weights = older_tutorial()
    names = [f"decoder.layers.0.layer_norm.{part}" for part in absent]
    for name in names:
        del weights[name]
    assert f"missing: {', '.join(names)}." in refused(load, weights)


@pytest.mark.parametrize(
    ("family", "name", "tensor"),
    [
        ("per-head", "encoder.encoder_layers.0.self_attention.attentions.1.q_w.weight", torch.ones(8, 23)),
        ("per-head", "encoder.encoder_layers.0.self_attention.attentions.1.q_w.weight", torch.ones(7, 24)),
        ("annotated", "encoder.norm.a_2", torch.tensor(1.0)),
        ("annotated", "encoder.norm.a_2", torch.ones(0)),
        ("annotated", "decoder.layers.0.sublayer.1.norm.b_2", torch.ones(25)),
        ("tutorial", QUERY, torch.tensor(1.0)),
    ],
)
def test_any_wrong_shape_is_refused_with_the_name(
    load: Callable[..., Checkpoint], family: str, name: str, tensor: Tensor
) -> None:
    message = refused(load, {**weights_of(family), name: tensor})
    assert name in message.replace("{h}", "1")  # heads are joined before they are compared


def test_a_weight_that_tells_sizes_is_named_when_it_has_none(load: Callable[..., Checkpoint]) -> None:
    message = refused(load, {**weights_of("tutorial"), "encoder.pos_embedding.weight": torch.tensor(1.0)})
    assert "saved.pt" in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_are_refused(load: Callable[..., Checkpoint], value: float) -> None:
    weights = weights_of("tutorial")
    weights[QUERY][3, 4] = value
    assert f"NaN or infinite: {QUERY}." in refused(load, weights)


def test_a_number_too_large_for_float32_is_refused(load: Callable[..., Checkpoint]) -> None:
    weights = {name: tensor.double() for name, tensor in weights_of("tutorial").items()}
    weights[QUERY][3, 4] = 1e300
    assert QUERY in refused(load, weights)


@pytest.mark.parametrize("odd", [lambda tensor: tensor.to_sparse(), lambda tensor: tensor.to("meta")])
def test_tensors_without_plain_numbers_are_refused(
    load: Callable[..., Checkpoint], odd: Callable[[Tensor], Tensor]
) -> None:
    weights = weights_of("tutorial")
    assert QUERY in refused(load, {**weights, QUERY: odd(weights[QUERY])})


# --- what the file does not tell


@pytest.mark.parametrize("family", ["tutorial", "tutorial-classifier", "annotated"])
def test_all_that_is_missing_is_asked_for_at_once(load: Callable[..., Checkpoint], family: str) -> None:
    message = refused(load, weights_of(family), {})
    assert "n_heads, pad_id, bos_id, eos_id" in message
    assert "--heads N --pad N --bos N --eos N" in message
    usual = "--heads 8, --pad 2, --bos 0, --eos 1" if family == "annotated" else "--heads 8, --pad 1, --bos 2, --eos 3"
    assert usual in message


def test_only_what_is_missing_is_asked_for(load: Callable[..., Checkpoint]) -> None:
    assert "Give --pad N --bos N --eos N, " in refused(load, weights_of("per-head"), {})
    assert "Give --bos N, " in refused(load, weights_of("tutorial"), {"n_heads": 3, "pad_id": 1, "eos_id": 3})


def test_special_ids_are_found_in_the_vocabularies(tiny_checkpoint: TinyCheckpoint) -> None:
    config = tiny_checkpoint.load().config
    assert {name: getattr(config, name) for name in IDS} == IDS


def test_vocabularies_that_disagree_tell_nothing(
    load: Callable[..., Checkpoint], tiny_checkpoint: TinyCheckpoint
) -> None:
    source = tiny_checkpoint.tokenizers().source
    target = word_tokenizer({word: index for index, word in enumerate(["<unk>", "<sos>", "<pad>", "<eos>"])})
    message = refused(load, weights_of("tutorial"), {"n_heads": 3}, tokenizers=Tokenizers(source, target))
    assert "Give --pad N --bos N, " in message


def test_what_the_user_says_wins_over_the_vocabularies(
    load: Callable[..., Checkpoint], tiny_checkpoint: TinyCheckpoint
) -> None:
    hints = {"n_heads": 3, "pad_id": 7}
    checkpoint = load(weights_of("tutorial"), hints, tokenizers=tiny_checkpoint.tokenizers())
    assert (checkpoint.config.pad_id, checkpoint.config.bos_id) == (7, BOS)
    assert checkpoint.given == {"n_heads": 3, **IDS, "pad_id": 7}


def test_what_was_given_reads_the_file_again_as_it_was(tiny_checkpoint: TinyCheckpoint) -> None:
    first = tiny_checkpoint.load()
    assert_same_model(load_checkpoint(tiny_checkpoint.path, first.given, family=first.family), first)


@pytest.mark.parametrize(("family", "offset"), [("tutorial", 0), ("annotated", 0), ("per-head", 1)])
def test_lengths_may_be_limited(load: Callable[..., Checkpoint], family: str, offset: int) -> None:
    whole = load(weights_of(family))
    cut = load(weights_of(family), {**HINTS, "max_source_length": 7, "max_target_length": 5})
    for side, length in (("encoder", 7), ("decoder", 5)):
        table = f"{side}.positions.table"
        assert cut.weights[table].shape == (length + offset, 24)
        assert torch.equal(cut.weights[table], whole.weights[table][: length + offset])
    assert (cut.config.max_source_length, cut.config.max_target_length) == (7, 5)


def test_lengths_beyond_the_positions_are_refused(load: Callable[..., Checkpoint]) -> None:
    message = refused(load, weights_of("tutorial"), {**HINTS, "max_source_length": 21})
    assert "has positions for a max_source_length of 20, not 21" in message


def test_heads_must_divide_the_model(load: Callable[..., Checkpoint]) -> None:
    assert "d_model 24 is not a multiple of n_heads 5" in refused(load, weights_of("tutorial"), {**HINTS, "n_heads": 5})


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_vocabulary_larger_than_the_embedding_is_refused(tiny_checkpoint: TinyCheckpoint, side: str) -> None:
    large = word_tokenizer({word: index for index, word in enumerate([*SPECIALS, *map(str, range(40))])})
    words = {"source": tiny_checkpoint.tokenizers().source, "target": tiny_checkpoint.tokenizers().target, side: large}
    rows = {"source": SRC_VOCAB, "target": TGT_VOCAB}[side]
    with pytest.raises(ConfigError, match=f"the {side} vocabulary has ids up to 43, .* has {rows} rows"):
        load_checkpoint(tiny_checkpoint.path, HINTS, tokenizers=Tokenizers(**words))


# --- files that are not checkpoints


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Checkpoint]:
    """Write bytes to a file and read it as a checkpoint."""

    def write_and_read(content: bytes, *, name: str = "given.pt") -> Checkpoint:
        (tmp_path / name).write_bytes(content)
        return load_checkpoint(tmp_path / name, HINTS)

    return write_and_read


def saved(content: Any, *, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


class Payload:
    """What unpickling it without protection calls."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("hide", [lambda payload: payload, *map(nested, ["model", "state_dict"])])
@pytest.mark.parametrize("call", [os.system, builtins.open, builtins.exec])
@pytest.mark.parametrize("form", ["zip", "older", "bare pickle"])
def test_code_in_a_file_is_refused_and_not_run(
    read: Callable[..., Checkpoint], tmp_path: Path, form: str, call: Any, hide: Callable[[Any], Any]
) -> None:
    marker = tmp_path / "marker"
    arguments = {
        os.system: (f"touch {marker}",),
        builtins.open: (str(marker), "w"),
        builtins.exec: (f"open({str(marker)!r}, 'w')",),
    }
    payload = Payload(call, *arguments[call])
    pickle.loads(pickle.dumps(payload))
    assert marker.exists()  # it would have worked
    marker.unlink()

    content = hide(payload)
    if content is not payload:
        content["weights"] = weights_of("tutorial")
    raw = pickle.dumps(content, protocol=2) if form == "bare pickle" else saved(content, zipped=form == "zip")
    message = refused(read, raw)
    assert not marker.exists()
    assert "Nothing in it was run" in message


def test_refusal_names_what_would_have_been_run_and_not_how_to_allow_it(read: Callable[..., Checkpoint]) -> None:
    message = refused(read, saved({"state_dict": weights_of("tutorial"), "hook": Payload(os.system, "true")}))
    assert "posix.system" in message
    for advice in ("weights_only", "add_safe_globals", "will likely succeed"):
        assert advice not in message


def test_a_whole_module_names_its_class_and_how_to_save_it(read: Callable[..., Checkpoint]) -> None:
    message = refused(read, saved(tiny_transformer()))
    assert "references.tutorial.TutorialTransformer" in message
    assert "torch.save(model.state_dict(), 'ckpt.pt')" in message


def torchscript() -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # writing such files is deprecated, which does not rid the world of them
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), buffer)
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore:'torch.load' received a zip file that looks like a TorchScript archive")
def test_torchscript_is_refused_without_advice_to_switch_protection_off(read: Callable[..., Checkpoint]) -> None:
    message = refused(read, torchscript())
    assert "TorchScript" in message
    assert "will likely succeed" not in message


@pytest.mark.parametrize("content", [torchscript, lambda: pickle.dumps({"a": 1}, protocol=4)])
def test_a_refusal_is_not_surrounded_by_warnings_of_the_library(
    read: Callable[..., Checkpoint], recwarn: pytest.WarningsRecorder, content: Callable[[], bytes]
) -> None:
    raw = content()
    recwarn.clear()
    refused(read, raw)
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("zipped", [True, False])
def test_a_cut_file_is_refused(read: Callable[..., Checkpoint], zipped: bool) -> None:
    whole = saved(weights_of("tutorial"), zipped=zipped)
    for length in range(0, len(whole), len(whole) // 97):
        message = refused(read, whole[:length])
        assert "Check that it was copied completely" in message or "not a file of plain tensors" in message


@pytest.mark.parametrize("name", ["given.pt", "given.safetensors"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello\n",
        b"0,1,2\n",
        b'{"a": 1}',
        b"<!DOCTYPE html>\n",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n",
        bytes(1000),
    ],
)
def test_other_files_are_refused(read: Callable[..., Checkpoint], content: bytes, name: str) -> None:
    assert name in refused(read, content, name=name)


def test_random_bytes_are_refused(read: Callable[..., Checkpoint]) -> None:
    generator = random.Random(0)
    for _ in range(200):
        refused(read, generator.randbytes(generator.choice([1, 2, 3, 10, 100])))


def test_changed_bytes_are_refused_or_read(tmp_path: Path) -> None:
    """Whatever a byte becomes, the error is ours; most changes hit numbers and go unseen."""
    generator = random.Random(0)
    small = {"a.weight": torch.ones(2, 2), "b": torch.zeros(3)}
    for content in (saved(small), saved(small, zipped=False)):
        for _ in range(150):
            changed = bytearray(content)
            changed[generator.randrange(300)] = generator.randrange(256)
            (tmp_path / "changed.pt").write_bytes(changed)
            with pytest.raises(TfexportError):  # at the latest because the names are of no family
                inspect_checkpoint(tmp_path / "changed.pt", {})


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.pt", tmp_path):
        with pytest.raises(CheckpointError, match=f"there is no file {path}"):
            load_checkpoint(path, HINTS)


@pytest.mark.parametrize("content", [[1, 2], torch.ones(3), {}, {"state_dict": {}}, {"a": 1, "b": {"c": 2}}])
def test_content_without_weights_by_name_is_refused(load: Callable[..., Checkpoint], content: Any) -> None:
    assert "holds no weights by name" in refused(load, content)


def test_entries_beside_the_weights_are_named(load: Callable[..., Checkpoint]) -> None:
    assert "tensors: epoch, best_loss." in refused(load, {**weights_of("tutorial"), "epoch": 3, "best_loss": 0.5})


class Stuck(BaseException):
    """Not an `Exception`, which a reader of broken files may take for one of the file's own."""


@pytest.fixture
def five_seconds() -> Iterator[None]:
    """Break off what hangs."""

    def break_off(*_: object) -> None:
        raise Stuck

    before = signal.signal(signal.SIGALRM, break_off)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("five_seconds")
def test_a_wrapper_that_holds_itself_is_refused(load: Callable[..., Checkpoint]) -> None:
    content: dict[str, Any] = {"epoch": 1}
    content["model"] = content
    refused(load, content)


# --- equal matrices


def tied(kind: str) -> TutorialTransformer:
    model = tiny_transformer(tgt_vocab=SRC_VOCAB)
    source, target, output = model.encoder.tok_embedding, model.decoder.tok_embedding, model.decoder.fc_out
    with torch.no_grad():
        if kind in ("source and target", "all"):
            target.weight.copy_(source.weight)
        if kind in ("target and output", "all"):
            output.weight.copy_(target.weight)
        if kind == "source and output":  # which no runtime could use
            output.weight.copy_(source.weight)
    return model


@pytest.mark.parametrize(
    ("kind", "tie_source_target", "tie_output"),
    [
        ("none", False, False),
        ("source and target", True, False),
        ("target and output", False, True),
        ("all", True, True),
        ("source and output", False, False),
    ],
)
def test_equal_embeddings_are_stored_once_and_compute_the_same(
    load: Callable[..., Checkpoint], kind: str, tie_source_target: bool, tie_output: bool
) -> None:
    model = tied(kind)
    checkpoint = load(model.state_dict())
    assert checkpoint.config.tie_source_target == tie_source_target
    assert checkpoint.config.tie_output == tie_output
    assert ("decoder.tokens.weight" in checkpoint.weights) != tie_source_target
    assert ("output_weight" in checkpoint.weights) != tie_output
    assert (logits(checkpoint) - naive_logits(model)).abs().max() < 1e-5


# --- native checkpoints


NATIVE = ModelConfig(
    d_model=12,
    n_heads=3,
    d_ff=20,
    n_encoder_layers=1,
    n_decoder_layers=2,
    src_vocab_size=TGT_VOCAB,
    tgt_vocab_size=TGT_VOCAB,
    max_source_length=9,
    max_target_length=11,
    tie_source_target=True,
    activation="gelu",
    norm_eps=1e-6,
    dropout=0.1,
    **IDS,
)


def native_weights() -> Weights:
    torch.manual_seed(0)
    return dict(Transformer(NATIVE).state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_native_round_trip(tmp_path: Path, tiny_checkpoint: TinyCheckpoint, dtype: torch.dtype) -> None:
    tokenizers, weights = tiny_checkpoint.tokenizers(), native_weights()
    native.save(tmp_path / "model.safetensors", weights, NATIVE, tokenizers, dtype)
    checkpoint = load_checkpoint(tmp_path / "model.safetensors", {})
    assert checkpoint.family == "native"
    assert checkpoint.config == NATIVE
    assert checkpoint.weights.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(checkpoint.weights[name], tensor.to(dtype).float())
    assert checkpoint.tokenizers.source.encode("de5 nothing de7") == [5, 0, 7]
    assert checkpoint.tokenizers.target.decode([5, 6]) == "wört5 wört6"
    inspection = inspect_checkpoint(tmp_path / "model.safetensors", {})
    assert (inspection.vocabulary, inspection.missing, inspection.problems) == (True, {}, ())


def test_native_joint_vocabulary_is_stored_once(tmp_path: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    joint = tiny_checkpoint.tokenizers().target
    sizes = []
    for tokenizers in (Tokenizers(joint, joint), Tokenizers(joint, None)):
        native.save(tmp_path / "model.safetensors", native_weights(), NATIVE, tokenizers, torch.float32)
        sizes.append((tmp_path / "model.safetensors").stat().st_size)
        read = load_checkpoint(tmp_path / "model.safetensors", {}).tokenizers
        assert read.source.to_dict() == joint.to_dict()
        assert (read.target is None) == (tokenizers.target is None)
    assert abs(sizes[0] - sizes[1]) < 50


def test_native_fields_may_be_overruled(tmp_path: Path) -> None:
    native.save(tmp_path / "model.safetensors", native_weights(), NATIVE, Tokenizers(None, None), torch.float32)
    checkpoint = load_checkpoint(tmp_path / "model.safetensors", {"max_source_length": 4})
    assert checkpoint.config == NATIVE.replace(max_source_length=4)
    assert checkpoint.weights["encoder.positions.table"].shape == (4, 12)


def test_native_output_equal_to_the_shared_embedding_is_stored_once(tmp_path: Path) -> None:
    weights = native_weights()
    weights["output_weight"] = weights["encoder.tokens.weight"].clone()
    native.save(tmp_path / "model.safetensors", weights, NATIVE, Tokenizers(None, None), torch.float32)
    checkpoint = load_checkpoint(tmp_path / "model.safetensors", {})
    assert checkpoint.config == NATIVE.replace(tie_output=True)
    assert "output_weight" not in checkpoint.weights


def test_native_vocabularies_are_replaced_one_by_one(tmp_path: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    native.save(tmp_path / "model.safetensors", native_weights(), NATIVE, tiny_checkpoint.tokenizers(), torch.float32)
    other = read_vocabulary(tiny_checkpoint.tgt_vocab)
    read = load_checkpoint(tmp_path / "model.safetensors", {}, tokenizers=Tokenizers(other, None)).tokenizers
    assert read.source is other
    assert read.target is not None


def test_native_checkpoint_of_another_family_is_refused(tmp_path: Path) -> None:
    native.save(tmp_path / "model.safetensors", native_weights(), NATIVE, Tokenizers(None, None), torch.float32)
    with pytest.raises(CheckpointError, match="of the family native, not tutorial"):
        load_checkpoint(tmp_path / "model.safetensors", {}, family="tutorial")
    assert load_checkpoint(tmp_path / "model.safetensors", {}, family="native").family == "native"


DESCRIPTION = {"revision": native.REVISION, "config": NATIVE.to_dict(), "tokenizers": {}}


@pytest.mark.parametrize(
    "description",
    [{**DESCRIPTION, "revision": native.REVISION + 1}, {"revision": native.REVISION + 1, "model": {"layers": []}}],
    ids=["same keys", "other keys"],
)
def test_native_newer_revision_asks_for_an_upgrade(tmp_path: Path, description: dict[str, Any]) -> None:
    save_file(native_weights(), tmp_path / "model.safetensors", {"tfexport": json.dumps(description)})
    with pytest.raises(CheckpointError, match=rf"of revision {native.REVISION + 1}.*Upgrade tfexport"):
        load_checkpoint(tmp_path / "model.safetensors", {})


@pytest.mark.parametrize(
    "description",
    [
        "",
        "{",
        "[]",
        "5",
        "{}",
        "[" * 100_000,
        json.dumps({**DESCRIPTION, "config": 5}),
        json.dumps({**DESCRIPTION, "config": {}}),
        json.dumps({**DESCRIPTION, "config": {**NATIVE.to_dict(), "d_model": "12"}}),
        json.dumps({**DESCRIPTION, "config": {**NATIVE.to_dict(), "colour": "red"}}),
        json.dumps({**DESCRIPTION, "config": {**NATIVE.to_dict(), "d_ff": 21}}),
        json.dumps({**DESCRIPTION, "tokenizers": 5}),
        json.dumps({**DESCRIPTION, "tokenizers": {"joint": 5}}),
        json.dumps({**DESCRIPTION, "tokenizers": {"source": {"tokenizer": {}}}}),
    ],
)
def test_native_corrupt_description_is_refused(tmp_path: Path, description: str) -> None:
    save_file(native_weights(), tmp_path / "model.safetensors", {"tfexport": description})
    with pytest.raises(TfexportError, match=r"model\.safetensors|the model configuration"):
        load_checkpoint(tmp_path / "model.safetensors", {})


# --- configuration


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({"d_model": 13}, ["d_model 13 is not a multiple of n_heads 3"]),
        ({"d_model": 0, "n_heads": -1}, ["d_model is 0, not above 0", "n_heads is -1, not above 0"]),
        ({"n_decoder_layers": 0, "tgt_vocab_size": 0}, ["n_decoder_layers is 0", "tgt_vocab_size is 0"]),
        ({"pad_id": -1, "bos_id": 99}, ["pad_id -1 is not in the target", "bos_id 99 is not in the target"]),
        ({"src_vocab_size": 3}, ["eos_id 3 is not in the source vocabulary", "of one size, not 3 and 37"]),
        ({"unk_id": 40}, ["unk_id 40 is not in the source vocabulary"]),
        ({"unk_id": -7}, ["unk_id"]),
        ({"norm_eps": math.nan, "dropout": 1.0}, ["norm_eps is nan", "dropout is 1.0"]),
        ({"embedding_scale": math.inf, "position_offset": -1}, ["embedding_scale", "position_offset is -1"]),
        ({"embedding_scale": 10**400}, ["embedding_scale"]),
        ({"n_classes": 2}, ["n_decoder_layers 0", "no embeddings to tie"]),
        ({"d_model": "12", "norm_first": 1, "dropout": "0"}, ["d_model is '12', not int", "norm_first is 1, not bool"]),
        ({"n_heads": True, "d_ff": 20.0, "norm_eps": None}, ["n_heads is True", "d_ff is 20.0", "norm_eps is None"]),
        ({"activation": "tanh", "positions": []}, ["activation is 'tanh', not one of relu, gelu", "positions is []"]),
    ],
)
def test_every_problem_of_a_configuration_is_named(changes: dict[str, Any], problems: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict({**NATIVE.to_dict(), **changes})
    for problem in problems:
        assert problem in str(caught.value)


def test_configuration_round_trip() -> None:
    assert ModelConfig.from_dict(json.loads(json.dumps(NATIVE.to_dict()))) == NATIVE


def test_unknown_and_missing_fields_are_named_together() -> None:
    fields = NATIVE.to_dict()
    del fields["d_ff"], fields["eos_id"]
    with pytest.raises(ConfigError, match=r"here .*unknown: colour, heads; missing: d_ff, eos_id"):
        ModelConfig.from_dict({**fields, "heads": 3, "colour": "red"}, where="here")


def test_a_size_beyond_all_tensors_is_refused(load: Callable[..., Checkpoint]) -> None:
    refused(load, weights_of("tutorial"), {**HINTS, "d_ff": 10**20})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read the configuration"),
        ("[" * 100_000, "cannot read the configuration"),
        ("[1]", "Give a JSON object"),
        ('{"heads": 8}', "heads"),
    ],
)
def test_hints_that_are_none_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "hints.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_hints(tmp_path / "hints.json")


def test_hints_are_read(tmp_path: Path) -> None:
    (tmp_path / "hints.json").write_text('{"n_heads": 3, "activation": "gelu"}')
    assert read_hints(tmp_path / "hints.json") == {"n_heads": 3, "activation": "gelu"}


def test_a_name_before_every_name_is_taken_off(load: Callable[..., Checkpoint]) -> None:
    """A user's own class that holds the model."""
    weights = {f"net.transformer.{name}": tensor for name, tensor in weights_of("tutorial").items()}
    assert load(weights).family == "tutorial"


@pytest.mark.parametrize(
    "content", [b"version https://git-lfs.github.com/spec/v1\n", b"<!doctype html><html>", b"hello"]
)
def test_what_is_no_checkpoint_at_all_is_told(read: Callable[..., Checkpoint], content: bytes) -> None:
    message = refused(read, content)
    assert "written by neither torch.save nor safetensors" in message
    assert repr(content[:16]) in message


def test_safetensors_are_known_by_their_content(tmp_path: Path) -> None:
    save_file(weights_of("tutorial"), tmp_path / "ckpt.pt")
    assert load_checkpoint(tmp_path / "ckpt.pt", HINTS).family == "tutorial"


def test_an_unknown_field_names_its_likes(tmp_path: Path) -> None:
    (tmp_path / "hints.json").write_text('{"heads": 8}')
    with pytest.raises(ConfigError, match=r"unknown field heads.*n_heads"):
        read_hints(tmp_path / "hints.json")
