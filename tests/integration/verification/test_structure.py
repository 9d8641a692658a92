"""Whether the nodes of a bundle's graphs are those that this version writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from makers.ort_bundles import CONFIG, random_model, write_bundle
from tfexport import contract
from tfexport.bundle.reader import Bundle, file_sha256, open_bundle
from tfexport.verification.parity import check
from tfexport.verification.structure import structure_mismatches

Change = Callable[[onnx.ModelProto], None]
PRECISIONS: tuple[contract.Precision, ...] = tuple(contract.PRECISIONS.values())


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """In all precisions. Not to be changed."""
    return write_bundle(random_model(CONFIG), tmp_path_factory.mktemp("clean") / "bundle", PRECISIONS)


def mutant(clean: Bundle, folder: Path, file: str, change: Change) -> Bundle:
    """A copy of the bundle with a change to one graph, whose checksum is right."""
    shutil.copytree(clean.directory, folder)
    model = onnx.load(folder / file, load_external_data=False)
    change(model)
    onnx.save(model, folder / file)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"][file]["sha256"] = file_sha256(folder / file)
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return open_bundle(folder)


def one_word_for_another(model: onnx.ModelProto) -> None:
    """Source id 20 is read as 21."""
    for name, number in (("one", 20), ("other", 21)):
        model.graph.initializer.append(numpy_helper.from_array(np.array(number, np.int64), name))
    for node in model.graph.node:
        node.input[:] = ["replaced" if name == "src_ids" and node.op_type == "Gather" else name for name in node.input]
    planted = [
        helper.make_node("Sub", ["src_ids", "one"], ["off"], name="planted/Sub"),
        helper.make_node("Cast", ["off"], ["is_another"], name="planted/Cast", to=onnx.TensorProto.BOOL),
        helper.make_node("Where", ["is_another", "src_ids", "other"], ["replaced"], name="planted/Where"),
    ]
    for index, node in enumerate(planted):
        model.graph.node.insert(index, node)


def other_epsilon(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if "norms.0" in node.name and node.attribute)
    (attribute,) = [attribute for attribute in node.attribute if attribute.name == "epsilon"]
    attribute.f = 2e-5


def other_function(model: onnx.ModelProto) -> None:
    del model.functions[-1]


def one_output_less(model: onnx.ModelProto) -> None:
    del model.graph.output[-1]


def test_clean_graphs_are_as_this_version_writes_them(clean: Bundle) -> None:
    assert {graph.precision for graph in clean.graphs} == set(PRECISIONS)
    assert structure_mismatches(clean) == []


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("file", "change", "about"),
    [
        ("encoder.onnx", one_word_for_another, "the number of its initializers"),
        ("encoder.int8.ort.onnx", one_word_for_another, "the number of its initializers"),
        ("decoder_step.fp16.onnx", other_epsilon, "node decoder.layers.0.norms.0/"),
        ("beam_step.ort.onnx", other_function, "the number of its functions"),
        ("encoder.bf16.onnx", one_output_less, "the number of its outputs"),
    ],
)
def test_a_changed_graph_is_told_with_what_differs(
    clean: Bundle, tmp_path: Path, file: str, change: Change, about: str
) -> None:
    found = structure_mismatches(mutant(clean, tmp_path / "mutant", file, change))
    assert [mismatch.file for mismatch in found] == [file]
    assert found[0].about.startswith(about)
    assert found[0].about.endswith("differs from this version's")


@pytest.mark.thorough
def test_parity_fails_for_a_word_that_no_line_has(clean: Bundle, tmp_path: Path) -> None:
    bundle = mutant(clean, tmp_path / "mutant", "encoder.ort.onnx", one_word_for_another)
    lines = [b"4 5 6", b"7 8"]
    found = check(bundle.directory, lines, ["ort-cpu"], precisions=("float32",), input_format="ids", say=lambda _: None)
    assert all(report.passed for report in found.reports)
    assert [mismatch.file for mismatch in found.mismatches] == ["encoder.ort.onnx"]
    assert not found.passed


def test_graphs_that_name_another_version_are_compared_all_the_same(clean: Bundle, tmp_path: Path) -> None:
    def rename(model: onnx.ModelProto) -> None:
        model.producer_version = "0.0.9"

    def change(model: onnx.ModelProto) -> None:
        rename(model)
        other_epsilon(model)

    assert structure_mismatches(mutant(clean, tmp_path / "same", "encoder.onnx", rename)) == []
    (found,) = structure_mismatches(mutant(clean, tmp_path / "mutant", "encoder.onnx", change))
    assert found.file == "encoder.onnx"
    assert found.about.startswith("node ")
    assert found.about.endswith("It names tfexport 0.0.9 as its writer: export the bundle again")


def test_a_graph_that_cannot_be_read_is_told(clean: Bundle, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(clean.directory, tmp_path / "broken"))
    (folder / "encoder.onnx").write_bytes(b"no graph")
    (found,) = structure_mismatches(replace(clean, directory=folder))
    assert found.about.startswith("cannot be compared with the graph of this version: ")
