"""The lower bound against what real bundles hold, and what a real search computes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

from makers.ahead import on_host
from makers.ort_bundles import random_model, random_sources, with_end, write_bundle
from tfexport.bench.lower_bound import StepSize, encoder_work, step_work
from tfexport.config import ModelConfig
from tfexport.contract import PRECISIONS
from tfexport.runtimes import load_runtime
from tfexport.runtimes.ort_cpu.beam_state import BeamState
from tfexport.runtimes.ort_cpu.bound_graphs import StepGraph
from tfexport.search.search import SearchOptions

WHOLE = ModelConfig(
    d_model=96,
    n_heads=6,
    d_ff=192,
    n_encoder_layers=2,
    n_decoder_layers=3,
    src_vocab_size=50,
    tgt_vocab_size=144,
    max_source_length=20,
    max_target_length=30,
    unk_id=0,
    pad_id=1,
    bos_id=2,
    eos_id=3,
)
"""All sizes are multiples of those of blocks of quantized weights, so that no stored number is padding."""

KINDS: dict[str, dict[str, Any]] = {
    "as in the paper": {},
    "heads wider than d_model": {"d_head": 32},
    "heads narrower than d_model": {"d_head": 8},
    "gated": {"gated": True},
    "gated and wide heads": {"gated": True, "d_head": 32, "norm": "rms", "norm_first": True},
    "tied": {"src_vocab_size": 144, "tie_source_target": True, "tie_output": True},
    "relative positions": {"positions": "relative", "max_distance": 8, "d_head": 32},
    "odd sizes": {"d_model": 40, "n_heads": 5, "d_ff": 33, "tgt_vocab_size": 37},
}
BATCH, SOURCE, CACHE = 3, 11, 7


def matrix_bytes(graph: onnx.GraphProto) -> int:
    """Bytes of the stored matrices that a graph multiplies with: not of tables of which it takes rows, nor of scales."""
    used = {name for node in graph.node if node.op_type not in ("Gather", "Slice") for name in node.input}
    return sum(
        int(entry.value)
        for tensor in graph.initializer
        for entry in tensor.external_data
        if entry.key == "length" and len(tensor.dims) > 1 and tensor.name in used and "scale" not in tensor.name
    )


def cache_bytes(graph: onnx.GraphProto) -> int:
    """Bytes of the keys and values that a step of `BATCH` sentences is given, with one hypothesis each."""
    sizes = {"batch": BATCH, "rows": BATCH, "src": SOURCE, "cache": CACHE}
    total = 0
    for value in graph.input:
        if value.name.startswith(("past.", "cross.")):
            tensor = value.type.tensor_type
            axes = [sizes[dim.dim_param] if dim.dim_param else dim.dim_value for dim in tensor.shape.dim]
            total += math.prod(axes) * helper.tensor_dtype_to_np_dtype(tensor.elem_type).itemsize
    return total


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("kind", KINDS)
def test_no_graph_has_fewer_weights_or_smaller_caches(kind: str, tmp_path: Path) -> None:
    """And those of regular sizes have no more, or the bound could be a better one."""
    config = WHOLE.replace(**KINDS[kind])
    precisions = [*PRECISIONS.values()] if kind == "as in the paper" else ["float32", "float16", "int8"]
    bundle = write_bundle(random_model(config), tmp_path / "bundle", precisions)
    size = StepSize(BATCH, BATCH * (SOURCE + CACHE), BATCH * (SOURCE + CACHE))
    roles: set[str] = set()
    for graph in bundle.graphs:
        if graph.role not in ("encoder", "decoder_step", "beam_step"):
            continue
        roles.add(f"{graph.role} {graph.dialect}")
        path = bundle.graph(graph.role, graph.precision, graph.dialect)
        content = onnx.load(path, load_external_data=False).graph
        if graph.role == "encoder":
            weights = encoder_work(config, graph.precision, [SOURCE]).bytes
        else:
            weights = step_work(config, graph.precision, StepSize(0, 0, 0)).bytes
            caches = step_work(config, graph.precision, size).bytes - weights
            assert caches == cache_bytes(content), graph.file
        assert weights <= matrix_bytes(content), graph.file
        if kind != "odd sizes":
            assert weights == matrix_bytes(content), graph.file
    assert {"encoder onnx24", "decoder_step onnx24", "encoder ort", "beam_step ort"} <= roles


@pytest.mark.parametrize("beam", [1, 4])
def test_no_search_computes_less(beam: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hypotheses that `ort-cpu` computes and the cache slots that they see, in all steps of a search."""
    model = with_end(random_model(WHOLE.replace(output_bias=True)), -30)
    runtime = load_runtime("ort-cpu", write_bundle(model, tmp_path / "bundle"), threads=1)
    rows = slots = 0
    run, run_beam = StepGraph.run, BeamState._run

    def watched(self: StepGraph, count: int = 1) -> None:
        nonlocal rows
        rows += self.tokens.size
        run(self, count)

    def seen(self: BeamState, *arguments: Any) -> StepGraph:
        nonlocal slots
        step = run_beam(self, *arguments)
        slots += int(self._mask[:, 0].any(axis=1).sum())
        return step

    monkeypatch.setattr(StepGraph, "run", watched)
    monkeypatch.setattr(BeamState, "_run", seen)
    sources = random_sources(WHOLE, [7, 3, 12])
    found = on_host(runtime, sources, SearchOptions(beam=beam, max_length=9))
    lengths = [len(hypotheses[0].ids) for hypotheses in found]
    assert lengths == [9] * 3
    least = StepSize.mean([7, 3, 12], lengths, beam=beam, steps=1)
    assert least.rows <= rows
    if beam > 1:
        assert least.stored - 9 * (7 + 3 + 12) <= slots
