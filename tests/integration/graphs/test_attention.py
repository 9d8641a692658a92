"""Steps that tell their cross-attention: the weights that the step itself used, in graphs beside the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from makers.ort_bundles import CONFIG, outputs_of, random_model
from makers.tiny import HINTS, TinyCheckpoint, tiny_classifier
from tests.support.fakes import tiny_config
from tests.support.graph_checks import definition_of, self_check
from tfexport import contract, graph_contract
from tfexport.bundle.reader import open_bundle
from tfexport.config import ModelConfig
from tfexport.errors import BundleError, TfexportError
from tfexport.exporter.graphs import write_graphs
from tfexport.exporter.pipeline import export
from tfexport.exporter.weights import write_quantized, write_weights
from tfexport.graph_checks.check import SIZES, case_of, check_graph
from tfexport.graph_checks.definition import rounded
from tfexport.graph_checks.session import session_of
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.precision import in_precision
from tfexport.models.transformer import Transformer

RELATIVE: dict[str, Any] = {"positions": "relative", "max_distance": 6, "norm": "rms", "gated": True}
# Other kinds of models: graph_checks/test_check.py.
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads of 24": {"n_heads": 1},
    "narrow heads": {"n_heads": 6},
    "heads apart from d_model": {"d_head": 16},
    "relative positions, heads apart": {**RELATIVE, "d_head": 5},
}


def written(config: ModelConfig, folder: Path, precision: Any = "float32") -> tuple[Transformer, list[Any]]:
    """The model whose weights the graphs of a precision have, and those graphs that tell attention."""
    model = random_model(config)
    folder.mkdir(exist_ok=True)
    write_weights(model, "float32", folder)
    if precision in contract.QUANTIZED:
        model = rounded(model, write_quantized(model, precision, folder))
    elif precision != "float32":
        write_weights(in_precision(model, precision), precision, folder)
    graphs = write_graphs(config, precision, folder, alignments=True)
    return model, [graph for graph in graphs if graph.tells_attention]


# --- the contract


def test_graphs_that_tell_attention_are_steps_with_one_more_output() -> None:
    config = tiny_config(d_model=8, n_heads=1)
    for dialect, roles in (
        ("onnx24", ["decoder_step_attention"]),
        ("ort-cuda", []),
        ("ort", ["decoder_step_attention", "beam_step_attention"]),
    ):
        plain = {graph.role: graph for graph in graph_contract.graphs_of(config, "float32", dialect)}  # type: ignore[arg-type]
        telling = graph_contract.attention_graphs_of(config, "float32", dialect)  # type: ignore[arg-type]
        assert [graph.role for graph in telling] == roles
        for graph in telling:
            assert graph.tells_attention
            assert not plain[graph.step].tells_attention
            assert graph.inputs == plain[graph.step].inputs
            assert graph.outputs == (*plain[graph.step].outputs, graph_contract.ATTENTION)
    assert graph_contract.attention_graphs_of(config, "int8", "ort")[1].file == "beam_step_attention.int8.ort.onnx"
    assert contract.shape(graph_contract.ATTENTION, config) == [1, "rows", 1, "src"]


def test_the_other_graphs_are_what_they_are_without(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    precisions: Any = ("float16", "int8")
    plain = export(tiny_checkpoint.load(), tmp_path / "plain", precisions=precisions, gate=None).directory
    more = export(
        tiny_checkpoint.load(), tmp_path / "more", precisions=precisions, alignments=True, gate=None
    ).directory
    names = {path.name for path in plain.iterdir()}
    for name in names - {"manifest.json"}:
        assert (plain / name).read_bytes() == (more / name).read_bytes(), name
    added = {path.name for path in more.iterdir()} - names
    assert added == {
        *(f"decoder_step_attention{variant}.onnx" for variant in ("", ".fp16", ".ort", ".int8.ort")),
        *(f"beam_step_attention{variant}.ort.onnx" for variant in ("", ".int8")),
    }
    assert all((more / name).stat().st_size < 50_000 for name in added)  # no weights in them
    bundle = open_bundle(more)
    assert bundle.has_graph("beam_step_attention", "int8", "ort")
    with pytest.raises(BundleError, match=r"has no graphs that return attention\. Export again with --alignments"):
        open_bundle(plain).graph("decoder_step_attention")


def test_a_classifier_has_nothing_to_align(tmp_path: Path) -> None:
    torch.save(tiny_classifier().state_dict(), tmp_path / "classifier.pt")
    with pytest.raises(TfexportError, match="has no output to align"):
        export(load_checkpoint(tmp_path / "classifier.pt", HINTS), tmp_path / "out", alignments=True)
    assert not (tmp_path / "out").exists()


# --- the numbers


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", CHANGES)
def test_attention_is_what_pytorch_computes(tmp_path: Path, name: str) -> None:
    model, graphs = written(CONFIG.replace(**CHANGES[name]), tmp_path)
    assert {(graph.dialect, graph.step) for graph in graphs} >= {("onnx24", "decoder_step"), ("ort", "beam_step")}
    random, definition = np.random.default_rng(3), definition_of(model, "float32", tmp_path)
    for graph in graphs:
        session = session_of(tmp_path / graph.file, tmp_path)
        for sizes in SIZES:
            checked = case_of(model, graph, sizes, random)
            with torch.inference_mode():
                wanted = checked.outputs(model)
            found = outputs_of(session, checked.inputs)
            attention, rows = found["attention"], checked.inputs["tokens"].size
            batch, src = len(checked.inputs["src_len"]), checked.inputs["cross.0.key"].shape[2]
            assert attention.shape == (model.config.n_decoder_layers, rows, model.config.n_heads, src)
            np.testing.assert_allclose(attention, wanted["attention"], atol=1e-4)
            np.testing.assert_allclose(found["logits"], wanted["logits"], atol=1e-4)
            np.testing.assert_allclose(attention.sum(axis=-1), 1, atol=1e-5)
            lengths = np.repeat(checked.inputs["src_len"], rows // batch)
            assert all(not attention[:, row, :, length:].any() for row, length in enumerate(lengths))
        assert check_graph(definition, graph, tmp_path).first is None


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("float32", 1e-5), ("int8", 1e-5), ("int4", 1e-5), ("float16", 2e-3)]
)
def test_they_are_the_weights_that_the_attention_itself_used(tmp_path: Path, precision: Any, tolerance: float) -> None:
    """Values mixed with them are what the fused operator of the same graph gives."""
    model, graphs = written(CONFIG, tmp_path, precision)
    config, random = model.config, np.random.default_rng(5)
    for graph in graphs:
        proto = onnx.load(tmp_path / graph.file, load_external_data=False)
        fused = [
            node
            for node in proto.graph.node
            if node.op_type in ("Attention", "MultiHeadAttention") and "cross_attention" in node.name
        ]
        assert len(fused) == config.n_decoder_layers
        proto.graph.output.extend(onnx.ValueInfoProto(name=node.output[0]) for node in fused)
        session = session_of(proto, tmp_path)
        for sizes in SIZES[1:]:
            inputs = case_of(model, graph, sizes, random).inputs
            if precision == "float16":
                inputs = {n: a.astype(np.float16) if a.dtype == np.float32 else a for n, a in inputs.items()}
            found = outputs_of(session, inputs)
            batch, heads = len(inputs["src_len"]), config.n_heads
            for layer, node in enumerate(fused):
                weights = found["attention"][layer].reshape(batch, -1, heads, found["attention"].shape[-1])
                mixed = np.einsum("bkhs,bhsd->bkhd", weights, inputs[f"cross.{layer}.value"].astype(np.float32))
                theirs = found[node.output[0]].astype(np.float32)
                if graph.dialect == "onnx24":  # [batch, heads, beam, head_dim]
                    theirs = theirs.swapaxes(1, 2)
                np.testing.assert_allclose(mixed.reshape(theirs.shape), theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.thorough
def test_the_self_check_compares_attention(tmp_path: Path) -> None:
    """A graph that tells what it did not use is not exported."""
    model, graphs = written(CONFIG, tmp_path)
    assert 0 < self_check(model, graphs, tmp_path) < 1
    for graph in graphs:
        proto = onnx.load(tmp_path / graph.file, load_external_data=False)
        (softmax, *_) = [node for node in proto.graph.node if node.op_type == "Softmax"]
        (scores,) = [node for node in proto.graph.node if softmax.input[0] in node.output]
        softmax.input[0] = scores.input[1]  # without the mask
        onnx.save(proto, tmp_path / graph.file)
        with pytest.raises(TfexportError, match=rf"{graph.file} departs .*: the graph's attention is off by"):
            self_check(model, [graph], tmp_path)
