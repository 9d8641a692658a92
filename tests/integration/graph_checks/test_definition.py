"""What the graphs of a precision are held against: rounded weights, and in 8 and 4 bits rounded activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from makers.ort_bundles import CONFIG, random_model
from tfexport.contract import Precision
from tfexport.exporter.weights import write_quantized, write_variant
from tfexport.graph_checks.definition import Definition, rounded
from tfexport.graphs.linear_quantized import INT4_BLOCK, from_blocks
from tfexport.graphs.projections import projections_of
from tfexport.models.precision import to_tf32
from tfexport.models.transformer import Transformer

Matrix = NDArray[np.float64]
MODEL = CONFIG.replace(output_bias=True)
SRC, LENGTH, TGT = torch.tensor([[5, 6, 7], [4, 3, 1]]), torch.tensor([3, 2]), torch.tensor([[2, 3], [2, 0]])
QUANTIZED: tuple[Precision, ...] = ("int8", "int4")


def rounded_by_numpy(states: Matrix, precision: str, *, rectified: bool) -> Matrix:
    """Rows to whole numbers of a step: the largest is 127 (255 after a ReLU); in 4 bits each 32 numbers by themselves."""
    result = np.zeros_like(states)
    width = INT4_BLOCK if precision == "int4" else states.shape[1]
    for row in range(len(states)):
        for start in range(0, states.shape[1], width):
            part = states[row, start : start + width]
            step = np.abs(part).max() / (255 if rectified else 127)
            result[row, start : start + width] = np.rint(part / step) * step if step else 0
    return result


def linear_inputs(definition: Definition, paths: list[str]) -> dict[str, Any]:
    """What each of these layers is given, from a run of the model in which activations are rounded."""
    seen: dict[str, Any] = {}
    handles = []
    with definition.rounding() as slack, torch.inference_mode():
        for path in paths:
            module = definition.model.get_submodule(path)

            def see(module: nn.Module, given: Any, output: Any, path: str = path) -> None:
                seen[path] = given[0]

            handles.append(module.register_forward_hook(see))
        definition.model(SRC, LENGTH, TGT)
        known = set(slack)
    for handle in handles:
        handle.remove()
    assert known == set(definition.activations)
    return seen


@pytest.mark.parametrize("precision", QUANTIZED)
def test_every_quantized_layer_is_given_rounded_numbers_and_no_other(tmp_path: Path, precision: Precision) -> None:
    model = random_model(MODEL)
    definition = Definition.of(model, precision, write_quantized(model, precision, tmp_path))
    layers = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert set(definition.activations) == {*layers, "decoder.norm"}
    for path, states in linear_inputs(definition, layers).items():
        rectified = precision == "int8" and path.endswith("feed_forward.output")
        flat = states.double().flatten(0, -2).numpy()
        np.testing.assert_allclose(rounded_by_numpy(flat, precision, rectified=rectified), flat, rtol=1e-5, atol=1e-7)
        if not rectified and flat.shape[1] > 4:
            assert len(np.unique(flat[0])) > 4


def test_after_another_activation_than_a_relu_numbers_have_signs(tmp_path: Path) -> None:
    for changes, rectified in (({}, True), ({"activation": "gelu"}, False), ({"gated": True}, False)):
        model = random_model(MODEL.replace(**changes))
        definition = Definition.of(model, "int8", write_quantized(model, "int8", tmp_path))
        found = {path: rounding.rectified for path, rounding in definition.activations.items()}
        assert found["encoder.layers.0.feed_forward.output"] == rectified
        assert sum(found.values()) == (4 if rectified else 0)
    model = random_model(MODEL)
    definition = Definition.of(model, "int4", write_quantized(model, "int4", tmp_path))
    assert not any(rounding.rectified for rounding in definition.activations.values())


@pytest.mark.parametrize("precision", QUANTIZED)
def test_the_logits_are_those_of_numpy(tmp_path: Path, precision: Precision) -> None:
    """A product of numbers and steps, of the output projection as it is stored."""
    model = random_model(MODEL)
    stored = write_quantized(model, precision, tmp_path)
    definition = Definition.of(model, precision, stored)
    states: dict[str, Any] = {}
    norm = model.get_submodule("decoder.layers.1.norms.2")
    assert isinstance(norm, nn.LayerNorm)
    with definition.rounding(), torch.inference_mode():
        handle = definition.model.get_submodule("decoder.layers.1.norms.2").register_forward_hook(
            lambda module, given, output: states.update(norm=output)
        )
        logits = definition.model(SRC, LENGTH, TGT).numpy()
        handle.remove()
    exact = states["norm"].double().flatten(0, -2).numpy()
    wide = rounded_by_numpy(exact, precision, rectified=False) @ weights_of(stored, "output", precision, 37, 24).T
    wanted = wide + model.state_dict()["output_bias"].numpy()
    np.testing.assert_allclose(logits.reshape(wanted.shape), wanted, atol=2e-5)


def weights_of(stored: Any, name: str, precision: str, rows: int, columns: int) -> Matrix:
    """The matrix that the tensors of a projection stand for, computed otherwise than by the package."""
    numbers, scale = stored[f"{name}.{precision}"], stored[f"{name}.scale"].astype(np.float64)
    if precision == "int8":
        return from_blocks(np.asarray(numbers, np.int8), rows, columns).astype(np.float64) * scale[:, None]  # type: ignore[no-any-return]
    # Two numbers a byte, 0 to 15 around 8, in blocks of 32 with a scale each.
    blocks = np.asarray(numbers, np.uint8).reshape(rows, -1, INT4_BLOCK // 2)
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(rows, blocks.shape[1], INT4_BLOCK).astype(np.float64)
    return ((halves - 8) * scale.reshape(rows, -1, 1)).reshape(rows, -1)[:, :columns]  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", QUANTIZED)
def test_the_weights_are_those_that_the_stored_numbers_stand_for(tmp_path: Path, precision: Precision) -> None:
    model = random_model(MODEL)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stored = write_quantized(model, precision, tmp_path)
    variant = rounded(model, stored)
    name = "decoder.layers.1.feed_forward.output"
    found = variant.state_dict()[f"{name}.weight"].numpy()
    np.testing.assert_allclose(found, weights_of(stored, name, precision, 24, 40), rtol=1e-6)
    assert not np.array_equal(found, before[f"{name}.weight"].numpy())
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    other = dict(stored)
    other[f"{name}.scale"] = other[f"{name}.scale"] * np.float32(1.5)
    np.testing.assert_allclose(rounded(model, other).state_dict()[f"{name}.weight"].numpy(), found * 1.5, rtol=1e-6)


def test_what_is_rounded_ends_with_the_block(tmp_path: Path) -> None:
    model = random_model(MODEL)
    definition = Definition.of(model, "int4", write_quantized(model, "int4", tmp_path))
    with torch.inference_mode():
        before = definition.model(SRC, LENGTH, TGT)
        with definition.rounding():
            within = definition.model(SRC, LENGTH, TGT)
        after = definition.model(SRC, LENGTH, TGT)
        with pytest.raises(ZeroDivisionError), definition.rounding():
            raise ZeroDivisionError
        assert torch.equal(definition.model(SRC, LENGTH, TGT), before)
    assert torch.equal(before, after)
    assert not torch.equal(before, within)


@pytest.mark.parametrize("precision", QUANTIZED)
def test_modules_that_stay_in_float32_are_not_rounded(tmp_path: Path, precision: Precision) -> None:
    model = random_model(MODEL)
    keep = ["decoder.layers.0.feed_forward.hidden", "encoder.layers.1.self_attention.output", "output"]
    assert set(keep) <= {projection.name for projection in projections_of(model.config)}
    definition = Definition.of(model, precision, write_quantized(model, precision, tmp_path, keep))
    assert isinstance(definition.model, Transformer)
    assert not set(definition.activations) & {*keep, "decoder.norm"}
    for path in keep[:2]:
        name = f"{path}.weight"
        assert torch.equal(definition.model.state_dict()[name], model.state_dict()[name])
    assert torch.equal(definition.model.output_matrix(), model.output_matrix())
    other = "decoder.layers.0.feed_forward.output"
    assert other in definition.activations
    assert not torch.equal(definition.model.state_dict()[f"{other}.weight"], model.state_dict()[f"{other}.weight"])


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_of_half_precision_it_is_the_model_with_rounded_weights(tmp_path: Path, precision: Precision) -> None:
    model = random_model(MODEL)
    path, dtype = "decoder.layers.0.feed_forward.hidden", getattr(torch, precision)
    plain = Definition.of(model, precision)
    assert plain.model is plain.own
    for keep in ((), (path,)):
        definition = Definition.of(model, precision, keep=keep)
        assert definition.own.state_dict()[f"{path}.weight"].dtype == dtype
        for name, tensor in definition.model.state_dict().items():
            exact = model.state_dict()[name]
            if name.startswith("output_") or name.rpartition(".")[0] in keep:
                assert torch.equal(tensor, to_tf32(exact) if name == "output_weight" else exact), name
                assert tensor.dtype == torch.float32
            else:
                assert torch.equal(tensor, exact.to(dtype)), name
                assert tensor.dtype == dtype


def test_an_export_holds_its_graphs_against_what_it_wrote(tmp_path: Path) -> None:
    """`write_variant` gives what `Definition.of` takes."""
    model = random_model(MODEL)
    assert write_variant(model, "float32", tmp_path) is None
    assert write_variant(model, "float16", tmp_path) is None
    stored = write_variant(model, "int8", tmp_path)
    assert stored is not None
    assert isinstance(Definition.of(model, "int8", stored).model, Transformer)
