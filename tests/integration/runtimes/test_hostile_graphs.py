"""A bundle whose manifest vouches for a graph that is not ours: loading or running it is an error of ours."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from tfexport.bundle.reader import Bundle, file_sha256, open_bundle
from tfexport.errors import BundleError
from tfexport.runtimes import load_runtime
from tfexport.verification.parity import check

FILE = "encoder.ort.onnx"


def altered(folder: Path, change: Callable[[onnx.GraphProto], None]) -> Bundle:
    """The bundle with a change to one graph, and the checksum of that."""
    proto = onnx.load(folder / FILE, load_external_data=False)
    change(proto.graph)
    onnx.save(proto, folder / FILE)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"][FILE]["sha256"] = file_sha256(folder / FILE)
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return open_bundle(folder)


@pytest.mark.parametrize("place", ["../weights.safetensors", "/{outside}", "x/../../weights.safetensors"])
def test_weights_outside_the_bundle_are_not_read(own_bundle: Path, place: str) -> None:
    outside = Path(shutil.copy(own_bundle / "weights.safetensors", own_bundle.parent))  # there is something to be read
    place = place.format(outside=str(outside).removeprefix("/"))

    def point(graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = place

    with pytest.raises(BundleError, match=r"encoder\.ort\.onnx .* does not list as weights"):
        load_runtime("ort-cpu", altered(own_bundle, point), threads=1)


def other_name(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name == "src_ids":
                node.input[index] = "other"
    next(value for value in graph.input if value.name == "src_ids").name = "other"


def one_more(graph: onnx.GraphProto) -> None:
    graph.input.append(onnx.helper.make_tensor_value_info("more", onnx.TensorProto.FLOAT, [1]))


@pytest.mark.parametrize("change", [other_name, one_more])
def test_other_inputs_than_the_contracts_are_refused(
    own_bundle: Path, change: Callable[[onnx.GraphProto], None]
) -> None:
    with pytest.raises(BundleError, match="other inputs or outputs than the contract says"):
        load_runtime("ort-cpu", altered(own_bundle, change), threads=1)


def test_what_fails_when_it_runs_is_told(own_bundle: Path) -> None:
    def turn(graph: onnx.GraphProto) -> None:
        node = next(node for node in graph.node if node.output[0] == "cross")
        next(attribute for attribute in node.attribute if attribute.name == "perm").ints[:] = [0, 1, 2, 3, 4]

    runtime = load_runtime("ort-cpu", altered(own_bundle, turn), threads=1)
    with pytest.raises(BundleError, match=r"ONNX Runtime cannot run this graph: .* export again"):
        runtime.encode(np.array([[4, 5, 6]]), np.array([3]))


def test_weights_in_a_file_that_the_manifest_does_not_list_are_not_read(own_bundle: Path) -> None:
    """Its checksum is nobody's, so its numbers could be any."""
    shutil.copyfile(own_bundle / "weights.safetensors", own_bundle / "other.bin")

    def point(graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = "other.bin"

    with pytest.raises(BundleError, match=r"'other\.bin', a file that the manifest does not list"):
        load_runtime("ort-cpu", altered(own_bundle, point), threads=1)


def test_a_size_that_is_computed_while_the_graph_is_loaded_is_refused(own_bundle: Path) -> None:
    """ONNX Runtime would make room for 8 GiB before a line is decoded."""

    def enlarge(graph: onnx.GraphProto) -> None:
        graph.initializer.append(onnx.numpy_helper.from_array(np.array([2**31]), "huge"))
        graph.node.insert(0, onnx.helper.make_node("ConstantOfShape", ["huge"], ["unused"]))

    with pytest.raises(BundleError, match="the operator ConstantOfShape"):
        load_runtime("ort-cpu", altered(own_bundle, enlarge), threads=1)


@pytest.mark.thorough
def test_parity_tells_of_a_graph_that_no_export_writes(own_bundle: Path) -> None:
    """Also where no runtime that is compared loads it."""
    change = onnx.load(own_bundle / "encoder.onnx", load_external_data=False)
    change.graph.node.append(onnx.helper.make_node("Loop", ["", ""], ["unused"], name="loop"))
    onnx.save(change, own_bundle / "encoder.onnx")
    manifest = json.loads((own_bundle / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"]["encoder.onnx"]["sha256"] = file_sha256(own_bundle / "encoder.onnx")
    (own_bundle / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    found = check(own_bundle, None, ["ort-cpu"])
    assert not found.passed
    broken = [graph for graphs in found.graphs.values() for graph in graphs if graph.is_broken]
    assert [graph.file for graph in broken] == ["encoder.onnx"]
