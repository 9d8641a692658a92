"""Runs a graph on ONNX Runtime's CPU provider and returns its inner values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from tfexport import contract, kernels
from tfexport.kernels.explicit_rounding import with_explicit_rounding

onnxruntime.disable_telemetry_events()  # ONNX Runtime would report each session to its makers

ONNX_RUNTIME: str = onnxruntime.__version__
"""The version that checks graphs."""

HALVES = ("float16", "bfloat16")
WIDE = ".float32"
"""The suffix of the names of float32 values in a half-precision graph."""


class Session:
    """A graph that also returns its inner values, in types that NumPy has."""

    def __init__(
        self, proto: onnx.ModelProto, graph: contract.GraphSpec, folder: Path, inner: Sequence[str], with_kernels: bool
    ):
        outputs = [tensor.name for tensor in graph.outputs]
        inner = [name for name in dict.fromkeys(inner) if name not in outputs]
        halves = {tensor.name for tensor in (*graph.inputs, *graph.outputs) if tensor.dtype in HALVES}
        if graph.precision in HALVES:
            proto = with_explicit_rounding(folder / graph.file)  # these values have the same names there
            halves |= set(inner)
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
        _widen(proto.graph, halves)
        self._session = session_of(proto, folder, with_kernels=with_kernels)
        self._names = [*outputs, *inner]
        self._halves = halves

    def __call__(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        def full_name(name: str) -> str:
            return f"{name}{WIDE}" if name in self._halves else name

        feeds = {
            full_name(name): array.astype(np.float32) if name in self._halves else array
            for name, array in inputs.items()
        }
        return dict(zip(self._names, self._session.run([*map(full_name, self._names)], feeds), strict=True))


def _widen(graph: onnx.GraphProto, halves: Collection[str]) -> None:
    """Convert the inputs and outputs `halves` to float32 under other names, because NumPy has no bfloat16."""
    for index, value in enumerate(graph.input):
        if value.name in halves:
            to = value.type.tensor_type.elem_type
            graph.node.insert(index, helper.make_node("Cast", [f"{value.name}{WIDE}"], [value.name], to=to))
            value.name += WIDE
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    outputs = [value.name for value in graph.output]
    del graph.output[:]
    for name in outputs:
        if name in halves:
            graph.node.append(helper.make_node("Cast", [name], [f"{name}{WIDE}"], to=TensorProto.FLOAT))
            name += WIDE
        graph.output.append(onnx.ValueInfoProto(name=name))


def session_of(
    model: onnx.ModelProto | Path, folder: Path, *, with_kernels: bool = False
) -> onnxruntime.InferenceSession:
    """A session on the CPU. `folder` has the weights of a model that is not a file.

    Args:
        with_kernels: compute functions with kernels, as `ort-cpu` does; otherwise by their definitions.
    """
    options = onnxruntime.SessionOptions()
    if with_kernels:
        kernels.register(options)
    options.log_severity_level = 3  # it warns that past and present are two buffers here
    # PyTorch computes on the same CPUs between two runs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    content: Path | bytes
    if isinstance(model, Path):
        content = model
    else:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
        content = model.SerializeToString()
    # A graph runs a few times here. To fold its constants copies its weights, and takes longer than these runs.
    return onnxruntime.InferenceSession(
        content, options, providers=["CPUExecutionProvider"], disabled_optimizers=["ConstantFolding"]
    )
