"""What stays in float32 for a budget: what harms, nothing more, in graphs that compute it so."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file

from makers.tiny import TinyCheckpoint, overflowing, randomised
from tests.support.checkpoints import NATIVE
from tests.support.graph_checks import self_check
from tfexport.bundle.reader import open_bundle
from tfexport.contract import Precision
from tfexport.decoding.line_reader import Reader
from tfexport.decoding.translate import Writer
from tfexport.errors import TfexportError
from tfexport.exporter.graphs import write_graphs
from tfexport.exporter.pipeline import export
from tfexport.exporter.weights import write_variant, write_weights
from tfexport.models.model import build_model
from tfexport.models.transformer import Transformer
from tfexport.runtimes import load_runtime
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions
from tfexport.verification.budget import Budget, BudgetChooser, modules_of
from tfexport.verification.budget_text import Text
from tfexport.verification.parity import compare, random_sources


def model_of(**changes: Any) -> Transformer:
    model = randomised(Transformer(NATIVE.replace(**changes)))
    assert isinstance(model, Transformer)
    return model


# --- graphs with modules in float32


def graphs_with(
    model: Transformer, precision: Precision, folder: Path, keep: Callable[[dict[str, int]], Collection[str]]
) -> tuple[float, dict[str, onnx.GraphProto]]:
    """The largest error of any value, as a part of what rounding explains, and the graphs by file."""
    write_weights(model, "float32", folder)
    write_variant(model, precision, folder, ())
    kept = list(keep(modules_of(model, precision, folder)))
    write_variant(model, precision, folder, kept)
    written = write_graphs(model.config, precision, folder, kept)
    error = self_check(model, written, folder, kept)
    return error, {spec.file: onnx.load(folder / spec.file, load_external_data=False).graph for spec in written}


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("precision", ["float16", "int8", "int4"])
@pytest.mark.parametrize("changes", [{}, {"norm_first": True, "final_norm": True, "tie_output": False}])
def test_with_all_modules_kept_graphs_compute_what_float32_does(
    tmp_path: Path, precision: Precision, changes: dict[str, Any]
) -> None:
    error, graphs = graphs_with(model_of(**changes), precision, tmp_path, lambda sizes: sizes)
    assert 0 < error < 1
    for graph in graphs.values():
        if precision != "float16":
            assert not [node.op_type for node in graph.node if "Integer" in node.op_type or "NBits" in node.op_type]


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["float16", "int8", "int4"])
def test_any_single_module_can_be_kept_or_let_go(tmp_path: Path, precision: Precision) -> None:
    model = model_of()
    write_weights(model, "float32", tmp_path)
    write_variant(model, precision, tmp_path, ())
    sizes = modules_of(model, precision, tmp_path)
    first_layers = [name for name in sizes if "layers.1" not in name]
    for index, name in enumerate(first_layers[:: 3 if precision == "float16" else 1]):
        keep = [name] if index % 2 else list(sizes.keys() - {name})
        write_variant(model, precision, tmp_path, keep)
        assert self_check(model, write_graphs(model.config, precision, tmp_path, keep), tmp_path, keep) < 1


def test_kept_modules_take_float32_weights_and_others_do_not(tmp_path: Path) -> None:
    kept = "decoder.layers.0.feed_forward.hidden"
    _, graphs = graphs_with(model_of(), "float16", tmp_path, lambda _: [kept])
    graph = graphs["decoder_step.fp16.onnx"]
    wide = {t.name for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT and "weight" in t.name}
    assert wide == {f"{kept}.weight.float32", "output_weight"}
    assert [n.op_type for n in graph.node if n.name.startswith("cast/")] == ["Cast", "Cast"]  # into it, and out of it


def test_between_kept_modules_nothing_is_cast(tmp_path: Path) -> None:
    model = model_of()
    overflowing(model, "decoder.layers.0.feed_forward")
    path = "decoder.layers.0.feed_forward"
    with pytest.raises(TfexportError, match="activations may not fit"):
        graphs_with(model, "float16", tmp_path, lambda _: [f"{path}.hidden", f"{path}.output"])
    error, _ = graphs_with(model, "float16", tmp_path, lambda _: [f"{path}.hidden", path, f"{path}.output"])
    assert error < 1


def test_modules_are_all_that_compute_in_half_precision(tmp_path: Path) -> None:
    model = model_of()
    write_weights(model, "float32", tmp_path)
    write_variant(model, "float16", tmp_path, ())
    found = set(modules_of(model, "float16", tmp_path))
    assert not [path for path in found if path.startswith(("shape", "mask", "cast")) or path in ("", "output")]
    layers = {path for path, child in model.named_modules() if isinstance(child, torch.nn.Linear | torch.nn.LayerNorm)}
    assert layers <= found
    assert {"encoder.tokens", "decoder.tokens", "encoder.layers.0", "decoder.layers.0.cross_attention"} <= found


# --- the whole way


@pytest.mark.thorough
def test_overflow_is_found_and_only_it_is_kept(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint.load()
    model = checkpoint.build_model()
    assert isinstance(model, Transformer)
    overflowing(model, "decoder.layers.0.feed_forward")
    checkpoint = replace(checkpoint, weights=model.state_dict())
    text = Text(model, random_sources(model.config, 12))
    with pytest.raises(TfexportError, match="activations may not fit"):
        export(checkpoint, tmp_path / "plain", precisions=("float16",))
    choosers = {"float16": BudgetChooser(Budget.parse("top1=0.9"), text)}
    done = export(checkpoint, tmp_path / "auto", precisions=("float16",), choosers=choosers)  # type: ignore[arg-type]
    choice = done.choices["float16"]
    path = "decoder.layers.0.feed_forward"
    assert {kept.module for kept in choice.kept} == {f"{path}.hidden", path, f"{path}.output"}
    assert choice.lost_without > 0.9
    assert choice.lost <= 0.1
    bundle = open_bundle(tmp_path / "auto")
    report = compare(
        TorchRuntime.from_bundle(bundle),
        load_runtime("ort-cpu", bundle, precision="float16"),
        random_sources(bundle.config, 12),
        SearchOptions(),
    )
    assert report.logits.error < 0.1
    manifest = json.loads((tmp_path / "auto" / "manifest.json").read_text())
    assert set(manifest["budgets"]["fp16"]["float32"]) == {kept.module for kept in choice.kept}
    assert manifest["budgets"]["fp16"]["budget"] == "top1=0.9"


@pytest.mark.thorough
def test_int8_keeps_its_budget(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint.load()
    model = checkpoint.build_model()
    assert isinstance(model, Transformer)
    text = Text(model, random_sources(model.config, 30))
    choosers = {"int8": BudgetChooser(Budget.parse("top1=1"), text)}
    done = export(checkpoint, tmp_path / "auto", precisions=("int8",), choosers=choosers)  # type: ignore[arg-type]
    choice = done.choices["int8"]
    assert choice.lost == 0 < choice.lost_without
    runtime = load_runtime("ort-cpu", open_bundle(tmp_path / "auto"), precision="int8")
    assert text.loss(runtime, "top1") == 0  # the bundle is what was tried
    assert 0 < len(choice.kept) < choice.modules
    for kept in choice.kept:
        assert kept.loss > 0


def test_text_measures_what_a_runtime_loses(tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    bundle = open_bundle(tiny_bundle)
    model = build_model(bundle.config, load_file(bundle.weights))
    assert isinstance(model, Transformer)
    other = build_model(bundle.config, load_file(bundle.weights))
    assert isinstance(other, Transformer)
    with torch.no_grad():
        other.output_matrix()[:] = other.output_matrix().flip(0)
    lines = [b"de4 de5", b"", b"de6 de7 de8", b"de9"]
    targets = [b"en4", b"none", b"en5 en6", b"en7"]
    notes: list[str] = []
    text = Text.read(model, Reader.of(bundle, None), Writer.of(bundle, "text"), lines, targets, notes.append)
    assert text.sentences == 3
    for metric in ("bleu", "chrf", "top1", "identical"):
        assert text.loss(TorchRuntime(model), metric) == 0  # type: ignore[arg-type]
    assert text.loss(TorchRuntime(other), "identical") == 1
    assert text.loss(TorchRuntime(other), "top1") > 0.5
    assert 0 <= text.harm(TorchRuntime(model)) < 1e-9
    assert text.harm(TorchRuntime(other)) > 0.1
    with torch.no_grad():
        other.output_matrix()[:] = np.nan
    assert text.loss(TorchRuntime(other), "top1") == 1
    assert text.loss(TorchRuntime(other), "bleu") == math.inf
    assert text.harm(TorchRuntime(other)) == math.inf


def test_mixed_emitter_without_anything_kept_emits_the_same_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    write_weights(model, "float32", tmp_path)
    write_variant(model, "float16", tmp_path, ())
    plain = [
        (tmp_path / g.file).read_bytes() for g in write_graphs(model.config, "float16", tmp_path, dialects=["onnx24"])
    ]
    mixed = [
        (tmp_path / g.file).read_bytes()
        for g in write_graphs(model.config, "float16", tmp_path, ["no such module"], dialects=["onnx24"])
    ]
    assert plain == mixed
