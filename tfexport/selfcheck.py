"""Exported graphs on ONNX Runtime against PyTorch, before a bundle is moved into place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from tfexport import contract
from tfexport.errors import TfexportError
from tfexport.graph_modules import Model, arguments_of, grouped, module_of, random_inputs

ONNX_RUNTIME: str = onnxruntime.__version__
"""The version that graphs are checked with."""

TOLERANCE: dict[contract.Precision, float] = {"float32": 1e-4, "float16": 2e-2}
"""Largest difference to float32 PyTorch that is accepted, relative to the tensor's root mean square (at least 1), for
each precision that ONNX Runtime's CPU provider runs. Different orders of summation in float32 stay below 1e-5. One
rounding to float16 is 5e-4, and they add up over the layers."""


def self_check(model: Model, graphs: Sequence[contract.GraphSpec], folder: Path) -> float:
    """Run `graphs` on ONNX Runtime against the float32 `model`, at sizes that the export did not see.

    Returns the largest relative error.

    Raises:
        TfexportError: the error is above `TOLERANCE`.
    """
    random = np.random.default_rng(1)
    worst = 0.0
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns that past and present are two buffers here
    for graph in graphs:
        session = onnxruntime.InferenceSession(folder / graph.file, options, providers=["CPUExecutionProvider"])
        for sizes in (
            {"batch": 1, "rows": 1, "src": 1, "cache": 1, "blocks": 2, "from": 1, "width": 1},
            {"batch": 3, "rows": 12, "src": 6, "cache": 9, "blocks": 4, "from": 5, "width": 6},
            {"batch": 2, "rows": 2, "src": 4, "cache": 3, "blocks": 2, "from": 7, "width": 5},
        ):
            inputs = random_inputs(graph, model.config, sizes, random)
            found = session.run(None, inputs)
            worst = max(worst, _largest_error(model, graph, inputs, found))
    return worst


def _largest_error(
    model: Model, graph: contract.GraphSpec, inputs: Mapping[str, np.ndarray], found: Sequence[np.ndarray]
) -> float:
    exact = [tensor.float() if tensor.is_floating_point() else tensor for tensor in arguments_of(inputs, graph)]
    with torch.inference_mode():
        expected = module_of(model, graph.role)(*grouped(exact, graph, model.config))
    results = dict(zip((tensor.name for tensor in graph.outputs), found, strict=True))
    worst = 0.0
    for tensor, wanted in zip(graph.outputs, expected, strict=True):
        got = results[tensor.name].astype(np.float32)
        if tensor.name == "best.ids":  # where two tokens are as good, either will do: judged by its log-probability
            log_probs = torch.log_softmax(expected[0], -1)
            wanted, got = expected[1], log_probs.gather(1, torch.from_numpy(results[tensor.name])).numpy()
        error = float(np.abs(wanted.numpy() - got).max() / max(1.0, wanted.square().mean().sqrt().item()))
        tolerance = TOLERANCE[graph.precision]
        if not error <= tolerance:
            raise TfexportError(
                f"{graph.file} computes {tensor.name} with an error of {error:.1e} against PyTorch (at most "
                f"{tolerance:.0e} is accepted), so nothing was exported. "
                + (
                    "Report this with the checkpoint's config."
                    if graph.precision == "float32"
                    else "Its activations do not fit this precision: export in fp32, or in bf16, which has its range."
                )
            )
        worst = max(worst, error)
    return worst
