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

    with pytest.raises(BundleError, match=r"cannot load .*encoder\.ort\.onnx"):
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
