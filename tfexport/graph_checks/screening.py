"""Compares each function of screening with its definition.

With models and random states, the best word of a row is almost always among the candidates. So a check of the whole graph
does not test the proof and the product with all words. This check compares the bounds with those of the proof. Then it gives
bounds that prove nothing: the graph must still find the best word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper
from safetensors.numpy import load_file

from tfexport.contract import SCREENING_FILE
from tfexport.graph_checks.definition import Definition
from tfexport.graph_checks.rounding import Rounding, logit_size
from tfexport.graph_checks.session import session_of
from tfexport.graph_checks.values import distances
from tfexport.graphs.linear_quantized import from_blocks
from tfexport.graphs.screening import LEVELS
from tfexport.models.transformer import Transformer

ROWS = 32
PREFIX = "screening/"
Found = tuple[str, str, Rounding]
"""The node that computed a value, a description of the value, and its distances."""


def screening_distances(
    model: onnx.ModelProto, definition: Definition, folder: Path, *, with_kernels: bool
) -> Iterator[Found]:
    """The distances of the bounds that a graph's screening computes, and of the best word if the bounds prove nothing."""
    transformer = definition.model
    assert isinstance(transformer, Transformer)
    nodes = {node.op_type: node for node in model.graph.node if node.name.startswith(PREFIX) and node.domain}
    weight = transformer.output_matrix().detach().double()
    size = weight.shape[1]
    random = np.random.default_rng(2)
    states = random.standard_normal((ROWS, size)).astype(np.float32)
    states[:, random.integers(size)] *= 100  # makes the rounding steps of the other numbers coarse
    rounded = {name: np.asarray(array) for name, array in load_file(folder / SCREENING_FILE).items()}

    def run(op_type: str, arrays: Mapping[int, NDArray[Any]]) -> list[NDArray[Any]]:
        """The outputs of a function. `arrays` has some of its inputs, by their places."""
        alone = _alone(model, nodes[op_type], arrays)
        session = session_of(alone, folder, with_kernels=with_kernels)
        return list(session.run(None, {nodes[op_type].input[place]: array for place, array in arrays.items()}))

    numbers, scale, room = run("ScreenStates", {0: states})
    steps, exact = numbers.astype(np.float64) - (LEVELS + 1), states.astype(np.float64)
    largest = np.abs(exact).max(axis=1, keepdims=True)
    yield _compared(nodes["ScreenStates"], "scale of the states", largest / LEVELS, scale)
    far = np.abs(steps - exact * LEVELS / largest).max()
    yield nodes["ScreenStates"].name, "states in 7 bits", Rounding(max(0.0, float(far) - 0.5), 0.0, float(LEVELS))
    lengths = (np.linalg.norm(exact * LEVELS / largest - steps, axis=1).max(), np.linalg.norm(steps, axis=1).max())
    norm, error = (rounded[f"screening.{name}"].astype(np.float64) for name in ("norm", "error"))
    bound = norm * lengths[0] + error * lengths[1]
    yield _compared(nodes["ScreenStates"], "room above a logit", bound, room)

    (bounds,) = run("ScreenProduct", {0: numbers, 3: room})
    words = from_blocks(rounded["screening.int8"].astype(np.int8), len(weight), size).astype(np.float64)
    product = steps @ words.T * rounded["screening.scale"].astype(np.float64)
    yield _compared(nodes["ScreenProduct"], "bounds of the logits", product + room, bounds)

    logits = torch.from_numpy(exact) @ weight.T
    if transformer.output_bias is not None:
        logits += transformer.output_bias.detach().double()
    useless = np.full(bounds.shape, 1e9, np.float32)  # nothing is proven, and no word is a better candidate
    none, those = np.zeros(0, np.int64), np.unique(logits.argmax(1).numpy())
    for given_bounds, banned in ((bounds, none), (useless, none), (useless, those)):
        allowed = logits.index_fill(1, torch.from_numpy(banned), -torch.inf)
        best, ids = run("ScreenBest", {0: given_bounds, 1: scale, 2: states, 5: banned})
        own = (torch.from_numpy(states) @ weight.float().T).double()
        rounding = (own - torch.from_numpy(exact) @ weight.T).abs().max().item(), logit_size(logits.numpy())
        word_logits = allowed.gather(1, torch.from_numpy(ids))
        for about, got in (("best logit", torch.from_numpy(best).double()), ("best word", word_logits)):
            yield nodes["ScreenBest"].name, about, Rounding(distances(allowed.amax(1, True), got, got).error, *rounding)


def _compared(node: onnx.NodeProto, about: str, exact: NDArray[Any], computed: NDArray[Any]) -> Found:
    tensor, got = torch.from_numpy(np.asarray(exact)), torch.from_numpy(computed.astype(np.float64))
    measured = distances(tensor, tensor, got)
    return (
        node.name,
        about,
        Rounding(measured.error, measured.own, measured.size),
    )  # no means, because the input norms are rounded too


def _alone(model: onnx.ModelProto, node: onnx.NodeProto, arrays: Mapping[int, NDArray[Any]]) -> onnx.ModelProto:
    """A graph of one node. Some inputs are given, the others are weights."""
    alone = onnx.ModelProto()
    alone.CopyFrom(model)
    del alone.graph.node[:], alone.graph.input[:], alone.graph.output[:], alone.graph.value_info[:]
    needed = {name for place, name in enumerate(node.input) if place not in arrays}
    kept = [node]
    for other in reversed(model.graph.node):
        if needed & set(other.output):
            kept.insert(0, other)
            needed |= set(other.input)
    alone.graph.node.extend(kept)
    for place, array in arrays.items():
        dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
        alone.graph.input.append(helper.make_tensor_value_info(node.input[place], dtype, [None] * array.ndim))
    alone.graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output)
    return alone
