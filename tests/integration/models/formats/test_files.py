"""Checkpoint files of every kind, good and bad: tensors by name, or a refusal that says what is wrong."""

from __future__ import annotations

import argparse
import builtins
import io
import os
import pickle
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from makers.tiny import (
    HINTS,
    TinyCheckpoint,
    tiny_transformer,
)
from tests.support.checkpoints import (
    QUERY,
    Weights,
    assert_same_model,
    refused,
    saved,
    weights_of,
)
from tfexport.errors import CheckpointError, TfexportError
from tfexport.models.checkpoints.load import Checkpoint, inspect_checkpoint, load_checkpoint


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


class Payload:
    """What unpickling it without protection calls."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("hide", [lambda payload: payload, *map(nested, ["model", "state_dict"])])
@pytest.mark.parametrize("call", [os.system, builtins.open, builtins.exec])
@pytest.mark.parametrize("form", ["zip", "older", "bare pickle"])
def test_code_in_a_file_is_not_run(
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
    if content is payload or form == "bare pickle":
        assert "Nothing in it was run" in refused(read, raw)
    else:  # the weights beside it are read
        assert torch.equal(read(raw).weights["output_weight"], weights_of("tutorial")["decoder.fc_out.weight"])
    assert not marker.exists()


def test_refusal_names_what_would_have_been_run_and_not_how_to_allow_it(read: Callable[..., Checkpoint]) -> None:
    message = refused(read, saved(Payload(os.system, "true")))
    assert "posix.system" in message
    for advice in ("weights_only", "add_safe_globals", "will likely succeed"):
        assert advice not in message


def test_a_whole_module_is_read_as_its_state_dict(read: Callable[..., Checkpoint]) -> None:
    module = tiny_transformer()
    wanted = read(saved(module.state_dict()))
    assert_same_model(read(saved(module)), wanted)
    assert_same_model(read(saved({"epoch": 3, "net": nn.DataParallel(module)})), wanted)


def norms_in_parts(module: nn.Module) -> None:
    weight_norm(module.decoder.fc_out)
    weight_norm(module.encoder.layers[0].self_attention.fc_q, dim=1)
    weight_norm(module.encoder.layers[0].self_attention.fc_k, dim=None)


def parametrized_norms(module: nn.Module) -> None:
    parametrizations.weight_norm(module.decoder.fc_out)
    parametrizations.weight_norm(module.encoder.layers[0].self_attention.fc_q, dim=1)
    parametrizations.weight_norm(module.encoder.layers[0].self_attention.fc_k, dim=None)


def pruned(module: nn.Module) -> None:
    prune.l1_unstructured(module.decoder.fc_out, "weight", 0.4)
    prune.random_unstructured(module.decoder.fc_out, "bias", 0.4)
    prune.ln_structured(module.encoder.layers[0].self_attention.fc_q, "weight", 0.5, n=2, dim=0)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("change", [norms_in_parts, parametrized_norms, pruned])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_weights_in_parts_are_those_that_torch_computes(
    read: Callable[..., Checkpoint], change: Callable[[nn.Module], None], prefix: str
) -> None:
    module = tiny_transformer()
    change(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("_g", "original0")):
                parameter *= 1.25  # or else the norms would be those of the parts
    state = {f"{prefix}{name}": tensor for name, tensor in module.state_dict().items()}
    assert any("_g" in name or "original0" in name or "_mask" in name for name in state)
    loaded = read(saved(state))
    src, tgt = torch.tensor([[2, 5, 6, 7, 3]]), torch.tensor([[2, 4, 9]])
    for layer, ours in (
        (module.decoder.fc_out, "output"),
        (module.encoder.layers[0].self_attention.fc_q, "encoder.layers.0.self_attention.query."),
        (module.encoder.layers[0].self_attention.fc_k, "encoder.layers.0.self_attention.key."),
    ):
        with torch.no_grad():
            layer(torch.ones(1, layer.in_features))  # the old hooks compute the weight in a forward pass
        name = f"{ours}_weight" if ours == "output" else f"{ours}weight"
        assert torch.equal(loaded.weights[name], layer.weight)
    with torch.no_grad():
        assert torch.allclose(loaded.build_model()(src, torch.tensor([5]), tgt), module(src, tgt), atol=1e-5)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            spectral_norm,
            "decoder.fc_out.weight in parts, of spectral norm that is not computed. Call torch.nn.utils.remove_",
        ),
        (
            lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
            "decoder.fc_out.weight in parts, of a parametrization that is not computed",
        ),
    ],
)
def test_parts_of_another_kind_are_refused_by_name(
    read: Callable[..., Checkpoint], change: Callable[[nn.Module], None], message: str
) -> None:
    module = tiny_transformer()
    change(module.decoder.fc_out)
    assert message in refused(read, saved(module.state_dict()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_quantized_model_is_refused_with_the_way_out(read: Callable[..., Checkpoint]) -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this build of PyTorch quantizes nothing")
    module = torch.ao.quantization.quantize_dynamic(tiny_transformer(), {nn.Linear}, dtype=torch.qint8)
    message = refused(read, saved(module.state_dict()))
    assert "_packed_params" in message
    assert "Give the checkpoint from before the quantization" in message


def test_a_sparse_tensor_is_refused_by_name(read: Callable[..., Checkpoint]) -> None:
    weights = weights_of("tutorial")
    assert f"has a sparse tensor, {QUERY}. Save plain tensors" in refused(
        read, saved({**weights, QUERY: weights[QUERY].to_sparse()})
    )


def test_compiled_parts_are_read(read: Callable[..., Checkpoint]) -> None:
    weights = weights_of("tutorial")
    compiled = {name.replace("encoder.", "encoder._orig_mod."): tensor for name, tensor in weights.items()}
    assert_same_model(read(saved(compiled)), read(saved(weights)))


def test_names_that_safetensors_dropped_are_restored(tmp_path: Path) -> None:
    module = tiny_transformer()
    module.decoder.fc_out.weight = module.decoder.tok_embedding.weight
    save_model(module, str(tmp_path / "tied.safetensors"), {"format": "pt", "best": "12.5"})
    torch.save(module.state_dict(), tmp_path / "tied.pt")
    restored, wanted = (load_checkpoint(tmp_path / f"tied.{end}", HINTS) for end in ("safetensors", "pt"))
    assert wanted.config.tie_output
    assert_same_model(restored, wanted)


def test_an_object_of_another_class_names_it_and_how_to_save_weights(read: Callable[..., Checkpoint]) -> None:
    message = refused(read, saved(argparse.Namespace(weight=torch.ones(2))))
    assert "an object of argparse.Namespace" in message
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


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("part", range(4))
def test_a_cut_file_is_refused(read: Callable[..., Checkpoint], zipped: bool, part: int) -> None:
    whole = saved(weights_of("tutorial"), zipped=zipped)
    step = len(whole) // 97
    for length in range(part * step, len(whole), 4 * step):
        message = refused(read, whole[:length])
        assert "that it was copied completely" in message


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


def test_a_device_is_refused_by_its_kind() -> None:
    with pytest.raises(CheckpointError, match="/dev/zero is a pipe or a device"):
        load_checkpoint(Path("/dev/zero"), HINTS)


@pytest.mark.parametrize("content", [[1, 2], torch.ones(3), {}, {"state_dict": {}}, {"a": 1, "b": {"c": 2}}])
def test_content_without_weights_by_name_is_refused(load: Callable[..., Checkpoint], content: Any) -> None:
    assert "contains no weights by name" in refused(load, content)


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


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.float8_e4m3fn, torch.complex64])
@pytest.mark.parametrize("direction", [(), (0, 3), (3, 0), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("magnitude", [(), (1,), (3, 1), (1, 4), (3, 4), (0, 1), (2, 1, 1), (1, 3, 1)])
def test_parts_of_any_shape_and_type_stop_nothing(
    load: Callable[..., Checkpoint], dtype: torch.dtype, direction: tuple[int, ...], magnitude: tuple[int, ...]
) -> None:
    """torch's own function ends the process for some."""
    layer = "decoder.fc_out."
    weights = {name: tensor for name, tensor in weights_of("tutorial").items() if name != f"{layer}weight"}
    parts = {"weight_g": magnitude, "weight_v": direction}
    weights |= {f"{layer}{part}": torch.ones(shape).to(dtype) for part, shape in parts.items()}
    assert "decoder.fc_out.weight" in refused(load, weights)
