"""The model in half precision: what is halved and what stays float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from makers.tiny import (
    randomised,
)
from tests.support.checkpoints import NATIVE
from tfexport.errors import TfexportError
from tfexport.models.precision import in_precision, to_tf32
from tfexport.models.transformer import Transformer

LARGEST = 65504.0
"""The largest number of float16."""

half = pytest.mark.parametrize("precision", ["float16", "bfloat16"])


def native_model(**changes: Any) -> Transformer:
    model = randomised(Transformer(NATIVE.replace(**changes)))
    assert isinstance(model, Transformer)
    return model


@half
@pytest.mark.parametrize("tied", [False, True])
def test_all_weights_are_halved_but_the_output_projection(precision: Any, tied: bool) -> None:
    model = native_model(tie_output=tied, output_bias=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    variant = in_precision(model, precision)
    assert not variant.training
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in variant.state_dict().items()}
    islands = {"output_weight", "output_bias"}
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == islands
    assert set(dtypes.values()) == {precision, "float32"}
    assert set(dtypes) == set(before) | islands
    for name, tensor in model.state_dict().items():  # the model itself is as it was
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, before[name])


def test_float32_is_the_model_itself() -> None:
    model = native_model()
    assert in_precision(model, "float32") is model


@half
def test_a_tied_output_is_stored_twice_and_once_as_tf32_has_it(precision: Any) -> None:
    model = native_model(tie_output=True)
    variant = in_precision(model, precision)
    assert isinstance(variant, Transformer)
    exact = model.encoder.tokens.weight
    assert torch.equal(variant.output_matrix(), to_tf32(exact))
    assert not torch.equal(variant.output_matrix(), exact)
    assert torch.equal(variant.encoder.tokens.weight, exact.to(getattr(torch, precision)))
    assert not torch.equal(variant.encoder.tokens.weight.float(), exact)  # rounding is seen here
    src, length, tgt = torch.tensor([[5, 6, 7]]), torch.tensor([3]), torch.tensor([[2, 9, 4]])
    with torch.no_grad():
        found, wanted = variant(src, length, tgt), model(src, length, tgt)
    assert found.dtype == torch.float32
    assert 0 < (found - wanted).abs().max() < (0.02 if precision == "float16" else 0.2)


@pytest.mark.parametrize("number", [65536.0, -1e5, 1e30])
@pytest.mark.parametrize("name", ["encoder.tokens.weight", "decoder.layers.1.norms.2.bias", "encoder.positions.table"])
def test_a_weight_that_float16_cannot_hold_is_refused(name: str, number: float) -> None:
    model = native_model()
    model.state_dict()[name].view(-1)[7] = number
    with pytest.raises(TfexportError) as caught:
        in_precision(model, "float16")
    message = str(caught.value)
    assert message.startswith(f"{name} cannot be stored in float16: ")
    assert message.endswith("Export in fp32, or in bf16, which has float32's range.")
    assert "\n" not in message
    assert in_precision(model, "bfloat16").state_dict()[name].view(-1)[7] == torch.tensor(number).bfloat16()


@half
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused(precision: Any, number: float) -> None:
    model = native_model()
    model.decoder.layers[0].norms[0].weight.data[0] = number
    with pytest.raises(TfexportError, match=rf"decoder\.layers\.0\.norms\.0\.weight cannot be stored in {precision}"):
        in_precision(model, precision)


def test_what_stays_float32_may_be_larger() -> None:
    model = native_model(output_bias=True)
    assert model.output_bias is not None
    model.output_bias.data[3] = 1e5
    model.encoder.positions.table[0] = LARGEST
    variant = in_precision(model, "float16")
    assert isinstance(variant, Transformer)
    assert variant.output_bias[3] == 1e5
    assert variant.encoder.positions.table[0, 0] == LARGEST


def test_tf32_is_the_nearest_number_with_10_fraction_bits() -> None:
    numbers = torch.randn(1000) * torch.logspace(-30, 30, 1000)
    found = to_tf32(numbers)
    assert not (found.view(torch.int32) & (2**13 - 1)).any()
    assert ((found - numbers).abs() <= numbers.abs() * 2.0**-11).all()
    assert torch.equal(to_tf32(found), found)
    step = 2.0**-10
    ties = torch.tensor([1 + step / 2, 1 + 3 * step / 2, -1 - step / 2, -1 - 3 * step / 2, 2 - step / 2])
    assert to_tf32(ties).tolist() == [1, 1 + 2 * step, -1, -1 - 2 * step, 2]
    for exact in (torch.float16, torch.bfloat16):
        rounded = torch.randn(1000).to(exact).float()
        assert torch.equal(to_tf32(rounded), rounded)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    assert torch.equal(to_tf32(special).view(torch.int32), special.view(torch.int32))
