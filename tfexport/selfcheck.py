"""Exported graphs on ONNX Runtime against PyTorch, before a bundle is moved into place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor

from tfexport import contract, kernels
from tfexport.errors import TfexportError
from tfexport.explicit_rounding import with_explicit_rounding
from tfexport.graph_modules import Model, arguments_of, grouped, module_of, random_inputs
from tfexport.models.transformer import Transformer
from tfexport.ort_cases import Case, case

onnxruntime.disable_telemetry_events()  # ONNX Runtime would tell its makers of each session

ONNX_RUNTIME: str = onnxruntime.__version__
"""The version that graphs are checked with."""

TOLERANCE: dict[contract.Precision, float] = {"float32": 1e-4, "float16": 2e-2, "int8": 0.5, "int4": 0.25}
"""Largest difference to PyTorch that is accepted, relative to the tensor's root mean square (at least 1), for each precision
that ONNX Runtime's CPU provider runs. Different orders of summation in float32 stay below 1e-5. One rounding to float16 is
5e-4, and they add up over the layers. Quantized graphs are compared with a model that has their rounded weights, so that
only the rounding of activations to 8 bits differs: steps of 1/127 of the largest of a row, again and again. That is 0.1 in
trained models and up to 0.45 in random ones; a smaller fault is found in the graph of float32, which the same lines emit."""

REMEDY: dict[contract.Precision, str] = {
    "float16": "Activations do not fit this precision: export in fp32, or in bf16, which has its range.",
    "int8": "Its activations may be too uneven for 8 bits: leave int8 out.",
    "int4": "Its weights may be too uneven for 4 bits: leave int4 out.",
}
"""What may be done about a graph that is too far off, where it is not a fault of ours."""

SIZES = (
    {"batch": 1, "rows": 1, "beam": 1, "src": 1, "cache": 1, "count": 1, "blocks": 2, "from": 1, "width": 1},
    {"batch": 3, "rows": 12, "beam": 4, "src": 6, "cache": 9, "count": 5, "blocks": 4, "from": 5, "width": 6},
    {"batch": 2, "rows": 2, "beam": 2, "src": 4, "cache": 3, "count": 2, "blocks": 2, "from": 7, "width": 5},
)
"""Of the random cases: the smallest, and others with no two alike where that is possible."""


def self_check(model: Model, graphs: Sequence[contract.GraphSpec], folder: Path) -> float:
    """Run `graphs` on ONNX Runtime against the float32 `model`.

    Returns the largest relative error.

    Raises:
        TfexportError: the error is above `TOLERANCE`.
    """
    random = np.random.default_rng(1)
    worst = 0.0
    for graph in graphs:
        session = _session(graph, folder)
        for sizes in SIZES:
            with torch.inference_mode():
                checked = case_of(model, graph, sizes, random)
            found = dict(zip((t.name for t in graph.outputs), session.run(None, checked.inputs), strict=True))
            worst = max(worst, _largest_error(graph, checked, found))
    return worst


def _session(graph: contract.GraphSpec, folder: Path) -> onnxruntime.InferenceSession:
    if graph.precision in ("float16", "bfloat16"):
        return session_of(with_explicit_rounding(folder / graph.file), folder)
    return session_of(folder / graph.file, folder)


def session_of(
    model: onnx.ModelProto | Path, folder: Path, *, with_kernels: bool = False
) -> onnxruntime.InferenceSession:
    """A session on the CPU; the weights of a model that is no file lie in `folder`.

    Args:
        with_kernels: as `ort-cpu` runs it; without, by the definitions of its functions.
    """
    options = onnxruntime.SessionOptions()
    if with_kernels:
        kernels.register(options)
    options.log_severity_level = 3  # it warns that past and present are two buffers here
    if isinstance(model, Path):
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def case_of(model: Model, graph: contract.GraphSpec, sizes: Mapping[str, int], random: np.random.Generator) -> Case:
    """Random inputs of a graph, and the outputs that `model` has for them."""
    if graph.dialect == "ort":
        assert isinstance(model, Transformer)
        return case(model, graph, sizes, random)
    inputs = random_inputs(graph, model.config, sizes, random)
    exact = [tensor.float() if tensor.is_floating_point() else tensor for tensor in arguments_of(inputs, graph)]
    expected = module_of(model, graph.role)(*grouped(exact, graph, model.config))
    outputs = dict(zip((tensor.name for tensor in graph.outputs), expected, strict=True))
    return Case(inputs, outputs, outputs.get("logits"))


def _largest_error(graph: contract.GraphSpec, checked: Case, found: Mapping[str, np.ndarray]) -> float:
    worst = 0.0
    for name, error in output_errors(graph, checked, found):
        tolerance = TOLERANCE[graph.precision]
        if not error <= tolerance:
            raise TfexportError(
                f"{graph.file} computes {name} with an error of {error:.1e} against PyTorch (at most "
                f"{tolerance:.1e} is accepted), so nothing was exported. "
                + REMEDY.get(graph.precision, "Report this with the checkpoint's config.")
            )
        worst = max(worst, error)
    return worst


def output_errors(
    graph: contract.GraphSpec, checked: Case, found: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, float]]:
    """The relative error of each output of a graph by its name."""
    for tensor in graph.outputs:
        got = torch.from_numpy(found[tensor.name].astype(np.float32))
        if tensor.name.startswith("best."):
            assert checked.logits is not None
            got, wanted = _best(checked, checked.logits, tensor.name, found)
        else:
            wanted = checked.outputs[tensor.name].float()
        if graph.step == "decoder_step" and tensor.name.startswith("present.") and graph.dialect == "ort":
            got = _filled(got, checked)
        yield tensor.name, relative_error(wanted, got)


def relative_error(wanted: Tensor, got: Tensor) -> float:
    """The largest difference over the root mean square of `wanted`, or over 1; NaN where there is one."""
    return float((wanted - got).abs().max() / max(1.0, wanted.square().mean().sqrt().item()))


def _best(checked: Case, logits: Tensor, name: str, found: Mapping[str, np.ndarray]) -> tuple[Tensor, Tensor]:
    """What to compare: the log-probabilities or logits that the graph tells, or those of the tokens that it tells.

    Where two tokens are as good, either will do: a token is judged by its score.
    """
    scores = logits if "best.logits" in found else torch.log_softmax(logits, -1)
    ids = torch.from_numpy(found["best.ids"])
    wanted = scores.topk(int(checked.inputs.get("count", ids.shape[-1:])[0])).values
    return scores.gather(1, ids) if name == "best.ids" else torch.from_numpy(found[name]), wanted


def _filled(cache: Tensor, checked: Case) -> Tensor:
    """A cache [rows, heads, slots, head_dim] with zeros behind its filled slots."""
    behind = torch.arange(cache.shape[2]) > torch.from_numpy(checked.inputs["position"])[:, None]
    return cache.masked_fill(behind[:, None, :, None], 0.0)
