"""Weights of 8 and 4 bits: how they are rounded and stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tfexport.contract import GROUP
from tfexport.errors import TfexportError
from tfexport.graphs.linear_float32 import BLOCK
from tfexport.graphs.linear_quantized import INT4_BLOCK, dequantize, from_blocks, quantize
from tfexport.graphs.projections import Projection

Matrix = NDArray[np.float32]
bits = pytest.mark.parametrize("precision", ["int8", "int4"])
matrices = st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 5, 31, 32, 33, 64, 70]), st.integers(0, 2**31)).map(
    lambda sizes: (
        np.random.default_rng(sizes[2]).standard_normal(sizes[:2])
        * 10.0 ** np.random.default_rng(sizes[2]).integers(-6, 4, (sizes[0], 1))
    ).astype(np.float32)
)
"""[out, in] of sizes that are and are not multiples of a block, with rows of very different magnitudes."""

Arrays = dict[str, NDArray[Any]]


def stored(matrix: Matrix, precision: Any) -> Arrays:
    return quantize({"w": matrix}, [Projection("p", ("w",), ())], precision)


def read_back(tensors: Arrays, matrix: Matrix) -> Matrix:
    return dequantize(tensors, {"w": matrix}, [Projection("p", ("w",), ())])["w"]


@given(matrix=matrices)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_int8_is_at_most_half_a_step_off_and_exact_at_the_largest_of_a_column(matrix: Matrix) -> None:
    tensors = stored(matrix, "int8")
    blocks, scale = tensors["p.int8"], tensors["p.scale"]
    n_out, n_in = matrix.shape
    assert (blocks.dtype, blocks.shape) == (np.int8, (-(-n_out // BLOCK), -(-n_in // GROUP), BLOCK, GROUP))
    numbers = from_blocks(blocks, *matrix.shape)
    assert np.count_nonzero(blocks) == np.count_nonzero(numbers)  # what fills the last blocks is 0
    assert numbers[-1, -1] == blocks[(n_out - 1) // BLOCK, (n_in - 1) // GROUP, (n_out - 1) % BLOCK, (n_in - 1) % GROUP]
    assert (scale.dtype, scale.shape) == (np.float32, (len(matrix),))
    found = read_back(tensors, matrix)
    assert (found.dtype, found.shape) == (np.float32, matrix.shape)
    assert (np.abs(found - matrix) <= 0.5001 * scale[:, None]).all()
    largest = np.abs(matrix).argmax(axis=1)
    rows = np.arange(len(matrix))
    np.testing.assert_allclose(found[rows, largest], matrix[rows, largest], rtol=1e-6)
    assert (np.abs(numbers).max(axis=1) == 127).all()  # the whole range is used, and -128 is not


@given(matrix=matrices)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_int4_is_at_most_half_a_step_off_and_exact_at_the_largest_of_a_block(matrix: Matrix) -> None:
    n_out, n_in = matrix.shape
    blocks = -(-n_in // INT4_BLOCK)
    tensors = stored(matrix, "int4")
    packed, scale = tensors["p.int4"], tensors["p.scale"]
    assert (packed.dtype, packed.shape) == (np.uint8, (n_out, blocks, INT4_BLOCK // 2))
    assert (scale.dtype, scale.shape) == (np.float32, (n_out, blocks))
    found = read_back(tensors, matrix)
    assert (found.dtype, found.shape) == (np.float32, matrix.shape)
    steps = matrix / np.repeat(scale, INT4_BLOCK, axis=1)[:, :n_in]  # -8 at the largest
    error = np.abs(found - matrix) / np.abs(np.repeat(scale, INT4_BLOCK, axis=1)[:, :n_in])
    assert (error[steps <= 7.5] <= 0.5001).all()
    assert (error[steps > 7.5] <= 1.0001).all()  # the opposite of the largest has no number, 7 is next to it
    for row in range(n_out):
        for block in range(blocks):
            part = slice(block * INT4_BLOCK, (block + 1) * INT4_BLOCK)
            largest = np.abs(matrix[row, part]).argmax()
            assert found[row, part][largest] == matrix[row, part][largest]


def test_the_first_of_two_4_bit_numbers_is_the_lower_half_of_a_byte() -> None:
    """As MatMulNBits reads them: what lies behind the end stands for 0."""
    tensors = stored(np.array([[-8, 7, 1, -1, 3]], dtype=np.float32), "int4")
    assert tensors["p.scale"].tolist() == [[1.0]]
    assert tensors["p.int4"][0, 0].tolist() == [0 | 15 << 4, 9 | 7 << 4, 11 | 8 << 4] + [8 | 8 << 4] * 13


@bits
def test_zeros_are_zeros(precision: Any) -> None:
    matrix = np.zeros((3, 40), dtype=np.float32)
    matrix[1, 5] = -2.5
    tensors = stored(matrix, precision)
    assert np.isfinite(tensors["p.scale"]).all()
    assert np.array_equal(read_back(tensors, matrix), matrix)


@bits
@pytest.mark.parametrize("tiny", [1e-38, 2e-43, 1e-45])
def test_numbers_near_the_least_float_keep_their_sign(precision: Any, tiny: float) -> None:
    matrix = np.array([[tiny, -tiny, tiny / 2, 0.0]], dtype=np.float32)
    found = read_back(stored(matrix, precision), matrix)
    assert (np.abs(found - matrix) <= 1.01 * np.abs(matrix).max()).all()
    assert (found * matrix >= 0).all()


@bits
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_finite_number_is_refused_by_its_name(precision: Any, number: float) -> None:
    weights = {name: np.ones((2, 40), dtype=np.float32) for name in ("a.weight", "b.weight")}
    weights["b.weight"][1, 39] = number
    joined = [Projection("ab", ("a.weight", "b.weight"), ())]
    with pytest.raises(TfexportError, match=r"^a\.weight has weights that are not finite numbers\. Check the training"):
        quantize(weights, joined, precision)


@bits
def test_joined_matrices_lie_one_under_the_other_and_come_back_in_their_own_shapes(precision: Any) -> None:
    random = np.random.default_rng(0)
    shapes = {"a": (3, 40), "b": (5, 40, 1), "c": (1, 40)}
    weights = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    order = [Projection("one", ("b", "a"), ()), Projection("two", ("c",), ())]
    found = dequantize(quantize(weights, order, precision), weights, order)
    for name, matrix in weights.items():
        alone = stored(matrix.reshape(len(matrix), 40), precision)
        assert np.array_equal(found[name], read_back(alone, matrix.reshape(len(matrix), 40)).reshape(matrix.shape))
