"""Checkpoint files of every kind, good and bad: tensors by name, or a refusal that says what is wrong."""

from __future__ import annotations

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
from safetensors.torch import save_file
from torch import nn

from tests.support.checkpoints import (
    QUERY,
    Weights,
    assert_same_model,
    refused,
    saved,
    weights_of,
)
from tests.support.tiny import (
    HINTS,
    TinyCheckpoint,
    tiny_transformer,
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
