"""Checks that the weights of a graph refer to the tensors of their names in the weights files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import TensorProto

from tfexport import contract
from tfexport.contract import SCREENING_FILE
from tfexport.graph_checks.session import HALVES, WIDE
from tfexport.graphs.stored_weights import StoredWeights

MOST_NUMBERS = 64
"""The largest size of a constant in a graph: shapes and scalars. Weights are in the weights files, and compared there."""


def misplaced(model: onnx.ModelProto, precision: contract.Precision, folder: Path) -> Iterator[tuple[str, str]]:
    """Weights of a graph that are not at their place: the node that reads them, and the problem.

    The weights files are compared number by number elsewhere (`verification/files.py`).
    """
    users: dict[str, str] = {}
    for node in model.graph.node:
        for name in node.input:
            users.setdefault(name, node.name)
    if precision in HALVES:
        files = [contract.weights_file(precision)]
    else:
        files = [contract.WEIGHTS_FILE, contract.weights_file(precision), SCREENING_FILE]
    stored = StoredWeights(*(folder / file for file in dict.fromkeys(files) if (folder / file).exists()))
    exact = StoredWeights(folder / contract.WEIGHTS_FILE)
    for tensor in model.graph.initializer:
        about = None
        if tensor.data_location != TensorProto.EXTERNAL:
            if math.prod(tensor.dims) > MOST_NUMBERS:
                about = f"{tensor.name}, which is stored in the graph"
        else:
            name = tensor.name.removesuffix(WIDE)
            source = stored if name == tensor.name else exact
            place = {entry.key: entry.value for entry in tensor.external_data}
            if name not in source:
                about = f"{tensor.name}, which is not in the weights file"
            else:
                lies = source.tensor(name)
                wanted = (lies.location, lies.offset, lies.length, [*lies.shape], int(lies.dtype))
                location = (place.get("location"), int(place.get("offset", 0)), int(place.get("length", -1)))
                if (*location, list(tensor.dims), tensor.data_type) != wanted:
                    about = f"{tensor.name}, which is elsewhere in the weights file"
        if about is not None:
            yield users.get(tensor.name, tensor.name), f"weights {about}"
    for owner, nodes in (("", model.graph.node), *((f"{f.name}/", f.node) for f in model.functions)):
        for node in nodes:
            if _numbers(node) > MOST_NUMBERS:
                yield f"{owner}{node.name}", "weights in an attribute"
    if model.graph.sparse_initializer:
        yield model.graph.name, "weights in a sparse form, which this version does not write"


def _numbers(node: onnx.NodeProto) -> int:
    """The count of numbers in a node's attributes; large if an attribute is a graph, which this version does not write."""
    count = 0
    for attribute in node.attribute:
        has_graph = attribute.HasField("g") or attribute.graphs or attribute.HasField("sparse_tensor")
        tensors = [attribute.t, *attribute.tensors]
        count += MOST_NUMBERS + 1 if has_graph else sum(math.prod(t.dims) for t in tensors if t.dims)
        count += len(attribute.floats) + len(attribute.ints) + len(attribute.strings)
    return count
