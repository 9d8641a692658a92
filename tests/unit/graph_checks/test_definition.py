"""What the graphs of a precision are held against: rounded weights, and in 8 and 4 bits rounded activations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from makers.ort_bundles import CONFIG, random_model
from tfexport.contract import Precision
from tfexport.errors import TfexportError
from tfexport.graph_checks import definition as module
from tfexport.graph_checks.definition import BETWEEN, Definition, _Activations
from tfexport.graphs.linear_quantized import INT4_BLOCK
from tfexport.models.model import Model

MODEL = CONFIG.replace(output_bias=True)


@pytest.fixture
def exact_zero_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """No slack but that of numbers between two steps."""
    monkeypatch.setattr(module, "ZERO_POINT_ROUNDING", 0.0)


SRC, LENGTH, TGT = torch.tensor([[5, 6, 7], [4, 3, 1]]), torch.tensor([3, 2]), torch.tensor([[2, 3], [2, 0]])

QUANTIZED: tuple[Precision, ...] = ("int8", "int4")
Matrix = NDArray[np.float64]


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


@pytest.mark.parametrize("rectified", [False, True])
@pytest.mark.parametrize("precision", QUANTIZED)
@pytest.mark.parametrize("inputs", [24, 32, 40, 64, 1])
def test_activations_are_rounded_to_steps_of_each_row(precision: Any, inputs: int, rectified: bool) -> None:
    random = np.random.default_rng(inputs)
    states = random.standard_normal((5, inputs)) * np.array([[1e-3], [1.0], [50.0], [0.0], [2.0]])
    states = np.abs(states) if rectified else states
    rounding = _Activations(torch.from_numpy(random.standard_normal((7, inputs))), precision, rectified)
    found, slack = rounding.rounded(torch.from_numpy(states))
    np.testing.assert_allclose(found.numpy(), rounded_by_numpy(states, precision, rectified=rectified), rtol=1e-12)
    assert slack.shape == (5, 1)
    assert found.isfinite().all()
    assert slack.isfinite().all()
    if inputs > 1:
        assert not np.allclose(found.numpy(), states, rtol=1e-4, atol=0)
    (by_batch, slack_of_batch) = rounding.rounded(torch.from_numpy(states[None]))  # any number of axes
    assert torch.equal(by_batch[0], found)
    assert torch.equal(slack_of_batch[0], slack)


@pytest.mark.usefixtures("exact_zero_points")
@pytest.mark.parametrize("precision", QUANTIZED)
def test_a_number_between_two_steps_may_be_rounded_to_either(precision: Any) -> None:
    """Then the product may be off by that step times the largest weight of that input, and by no more."""
    weight = torch.tensor([[1.0, 2.0, 3.0, 4.0], [-5.0, 1.0, -7.0, 0.5]], dtype=torch.float64)
    rounding = _Activations(weight, precision, rectified=False)
    near, far = 0.5 + 0.4 * BETWEEN, 0.5 + 2 * BETWEEN
    states = torch.tensor(
        [[127, 3, 5, 6], [127, 2.5, 5, 6], [127, near, 1 - near, 6], [127, far, 1 - far, 6], [1.27, 0, -0.005, 0]],
        dtype=torch.float64,
    )
    found, slack = rounding.rounded(states)
    assert slack.flatten().tolist() == pytest.approx([0, 2.0, 2.0 + 7.0, 0, 0.01 * 7.0])
    assert found[3].tolist() == [127, 1, 0, 6]


@pytest.mark.usefixtures("exact_zero_points")
@pytest.mark.parametrize("precision", QUANTIZED)
def test_hardly_any_number_lies_between_two_steps(precision: Any) -> None:
    """Else a product that is wrong by a step would pass."""
    states = torch.from_numpy(np.random.default_rng(0).standard_normal((2000, 64)))
    _, slack = _Activations(torch.ones(3, 64, dtype=torch.float64), precision, rectified=False).rounded(states)
    assert 0.9 < (slack == 0).double().mean() < 1
    # Twice what float32 may be off by: 127 steps in 24 bits, after a product of some length.
    assert BETWEEN > 127 * 2**-23


@pytest.mark.usefixtures("exact_zero_points")
def test_in_4_bits_each_block_has_a_step_of_its_own() -> None:
    states = torch.zeros(1, 40, dtype=torch.float64)
    states[0, 0], states[0, 1], states[0, 39], states[0, 38] = 127, 2.5, 1.27, 0.025
    rounding = _Activations(torch.ones(3, 40, dtype=torch.float64), "int4", rectified=False)
    found, slack = rounding.rounded(states)
    assert found[0, [0, 1, 39]].tolist() == pytest.approx([127, 2, 1.27])
    assert found[0, 38].item() in (pytest.approx(0.02), pytest.approx(0.03))
    assert slack.item() == pytest.approx(1.0 + 0.01)  # one number of each block lies between two
    found, slack = _Activations(torch.ones(3, 40, dtype=torch.float64), "int8", rectified=False).rounded(states)
    assert found[0, [1, 38, 39]].tolist() == [2, 0, 1]
    assert slack.item() == pytest.approx(1.0)


def test_in_4_bits_the_sum_of_each_block_rounds() -> None:
    """ONNX Runtime subtracts it, times the zero point: much where activations do not cancel, nothing where they do."""
    weight = torch.full((3, 64), 0.5, dtype=torch.float64)
    weight[1, 40] = -2.0
    states = torch.zeros(2, 64, dtype=torch.float64)
    states[0] = 127.0
    states[1, :32], states[1, 32:48], states[1, 48:] = 0.0, 127.0, -127.0
    _, slack = _Activations(weight, "int4", rectified=False).rounded(states)
    sums = 127 * 32 * (0.5 + 2.0)
    assert slack[0].item() == pytest.approx(module.ZERO_POINT_ROUNDING * 2**-23 * sums)
    assert slack[1].item() == 0
    assert slack[0].item() < 0.01  # of products of up to 4,000
    _, slack = _Activations(weight, "int8", rectified=False).rounded(states)
    assert slack.flatten().tolist() == [0, 0]


def test_of_float32_it_is_the_model_itself() -> None:
    model: Model = random_model(MODEL)
    definition = Definition.of(model, "float32")
    assert definition.model is definition.own is model
    with definition.rounding() as slack, torch.inference_mode():
        model(SRC, LENGTH, TGT)
    assert slack == {}


def test_a_weight_that_the_precision_cannot_hold_is_refused_but_where_it_is_kept() -> None:
    model = random_model(MODEL)
    path = "decoder.layers.0.feed_forward.hidden"
    model.state_dict()[f"{path}.weight"][3, 4] = 1e6
    with pytest.raises(TfexportError, match="cannot be stored in float16"):
        Definition.of(model, "float16")
    kept = Definition.of(model, "float16", keep=[path])
    assert kept.model.state_dict()[f"{path}.weight"][3, 4] == 1e6
