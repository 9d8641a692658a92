"""Inputs for graphs of the dialect `ort-cuda`: the cases of the dialect `ort`, with heads side by side."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tfexport import contract
from tfexport.graph_checks import cases_ort
from tfexport.graph_checks.cases_portable import Arrays, Case, Outputs
from tfexport.models.model import Model
from tfexport.models.transformer import Transformer


def case(
    model: Transformer,
    graph: contract.GraphSpec,
    sizes: Mapping[str, int],
    random: np.random.Generator,
    steps: cases_ort.Steps | None = None,
) -> Case:
    """A random case of a graph; see `cases_ort.case`."""
    ort_case = cases_ort.case(model, graph, sizes, random, steps)
    flat = {tensor.name for tensor in (*graph.inputs, *graph.outputs) if "d_attention" in tensor.axes}
    wanted = {tensor.name: tensor.dtype for tensor in graph.inputs}
    inputs: Arrays = {}
    for name, array in ort_case.inputs.items():
        if name in wanted:  # not `count` and `total`
            array = _side_by_side(torch.from_numpy(array)).numpy() if name in flat else array
            inputs[name] = array.astype(np.int64) if wanted[name] == "int64" else array

    def outputs(model: Model) -> Outputs:
        tensors = ort_case.outputs(model)
        if graph.role == "encoder":
            tensors = dict(zip(contract.cache_names(model.config, "cross"), tensors["cross"], strict=True))
        return {name: _side_by_side(tensor) if name in flat else tensor for name, tensor in tensors.items()}

    return Case(inputs, outputs)


def _side_by_side(tensor: Tensor) -> Tensor:
    """[batch, heads, length, head_dim] to [batch, length, heads * head_dim]."""
    return tensor.transpose(1, 2).flatten(2).contiguous()
