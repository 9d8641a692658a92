"""The weights of a file and the user's own module: what fits, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

from tests.support.own_code import CODE, SPECIAL, built, write
from tfexport.errors import CheckpointError
from tfexport.models.checkpoints.own_module import load_weights, module_of, read_own_module
from tfexport.models.formats.files import read_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("own"))


def test_two_tensors_of_a_file_cannot_be_one_of_the_module(folder: Path, tmp_path: Path) -> None:
    state = torch.load(folder / "ckpt.pt")
    torch.save({**state, "out.weight": state["out.weight"] + 1}, tmp_path / "ckpt.pt")
    own = module_of(f"{folder / 'my_code.py'}:build")
    with pytest.raises(CheckpointError, match=r"one tensor for tgt\.weight and out\.weight, and .* has two"):
        read_own_module(tmp_path / "ckpt.pt", own, SPECIAL)


@pytest.mark.parametrize("values", ["ones", "randn"])
def test_a_buffer_that_a_file_lacks_must_be_the_same_in_each_module(tmp_path: Path, values: str) -> None:
    code = CODE.replace(
        "super().__init__()", f"super().__init__()\n        self.register_buffer('more', torch.{values}(16))"
    )
    (tmp_path / "my_code.py").write_text(code.replace("return self.out(", "return self.out(self.more * "))
    state = built(tmp_path).state_dict()
    torch.save({name: tensor for name, tensor in state.items() if name != "more"}, tmp_path / "ckpt.pt")
    own = module_of(f"{tmp_path / 'my_code.py'}:build")
    if values == "ones":
        read_own_module(tmp_path / "ckpt.pt", own, SPECIAL)
        return
    with pytest.raises(CheckpointError, match=r"lacks more, which .* fills at random"):
        read_own_module(tmp_path / "ckpt.pt", own, SPECIAL)


@pytest.mark.parametrize(
    "line", ["self.register_buffer('more', torch.randn(16), persistent=False)", "self.more = torch.randn(16)"]
)
def test_a_random_tensor_that_no_file_has_is_refused(tmp_path: Path, line: str) -> None:
    code = CODE.replace("super().__init__()", f"super().__init__()\n        {line}")
    (tmp_path / "my_code.py").write_text(code.replace("return self.out(", "return self.out(self.more * "))
    torch.save(built(tmp_path).state_dict(), tmp_path / "ckpt.pt")
    with pytest.raises(CheckpointError, match=r"lacks more, which .* fills at random"):
        read_own_module(tmp_path / "ckpt.pt", module_of(f"{tmp_path / 'my_code.py'}:build"), SPECIAL)


@pytest.mark.parametrize("out", [nn.LazyLinear(19, bias=False), nn.Linear(16, 19, bias=False, device="meta")])
def test_a_module_without_numbers_is_refused(tmp_path: Path, out: nn.Module) -> None:
    module = nn.Module()
    module.out = out
    with pytest.raises(CheckpointError, match=r"gives no numbers to out\.weight"):
        load_weights(module, {"out.weight": torch.ones(19, 16)}, tmp_path, "my_code.py:build")


@pytest.mark.parametrize(
    "saved",
    [
        lambda sd: sd,
        lambda sd: {f"module.{name}": tensor for name, tensor in sd.items()},
        lambda sd: {f"_orig_mod.{name}": tensor for name, tensor in sd.items()},
        lambda sd: {"epoch": 3, "model": {f"net.{name}": tensor for name, tensor in sd.items()}},
        lambda sd: {name: tensor for name, tensor in sd.items() if name != "out.weight"},
    ],
    ids=["plain", "module.", "_orig_mod.", "net. in a training checkpoint", "a tied name is missing"],
)
def test_names_are_matched_under_any_prefix(folder: Path, tmp_path: Path, saved: Any) -> None:
    state = torch.load(folder / "ckpt.pt")
    torch.save(saved(state), tmp_path / "ckpt.pt")
    module = built(folder)
    load_weights(module, read_file(tmp_path / "ckpt.pt").weights, tmp_path / "ckpt.pt", "my_code.py")
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_a_name_that_safetensors_dropped_is_the_tensor_that_it_names(folder: Path, tmp_path: Path) -> None:
    module = built(folder)
    save_model(module, str(tmp_path / "tied.safetensors"))
    raw, other = read_file(tmp_path / "tied.safetensors"), built(folder)
    load_weights(other, raw.weights, tmp_path / "tied.safetensors", "my_code.py")
    assert torch.equal(other.out.weight, module.tgt.weight)  # type: ignore[union-attr, arg-type]


def test_a_prefix_that_all_names_of_the_module_have_is_its_own(folder: Path, tmp_path: Path) -> None:
    holder = nn.ModuleDict({"net": built(folder)})
    torch.save(holder.state_dict(), tmp_path / "ckpt.pt")
    other = nn.ModuleDict({"net": built(folder)})
    load_weights(other, read_file(tmp_path / "ckpt.pt").weights, tmp_path / "ckpt.pt", "my_code.py")
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, holder.state_dict()[name]), name


@pytest.mark.parametrize(
    ("change", "about"),
    [
        (lambda sd: sd.pop("src.weight"), "missing: src.weight"),
        (lambda sd: sd.update({"extra.weight": torch.zeros(2)}), "unexpected: extra.weight"),
        (lambda sd: sd.update({"src.weight": torch.zeros(22, 16)}), r"src.weight is \[22, 16\], not \[21, 16\]"),
    ],
)
def test_weights_of_another_module_are_refused_by_name(folder: Path, change: Any, about: str) -> None:
    state = torch.load(folder / "ckpt.pt")
    change(state)
    with pytest.raises(CheckpointError, match=about):
        load_weights(built(folder), state, Path("ckpt.pt"), "my_code.py:build")
