"""Changes to the files of a bundle: weights in place, nodes and functions of graphs, tokenizers, the manifest.

Each `in_...` makes a function that changes a file in a folder. Weights keep their places in the file, because graphs point
there. `signed` then lets the manifest tell the sums of the changed files.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from tfexport.bundle.reader import CERTIFICATES, MANIFEST, file_sha256

Plant = Callable[[Path], None]
Array = NDArray[Any]
Tensors = dict[str, Array]
Nodes = onnx.GraphProto | onnx.FunctionProto
"""What has nodes."""

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}


def signed(folder: Path) -> None:
    """Write the sums and sizes of all files into the manifest, so that only a comparison finds what was changed."""
    path = folder / MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8"))
    for name in manifest["files"]:
        file = folder / name
        manifest["files"][name] |= {"sha256": file_sha256(file), "bytes": file.stat().st_size}
    path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    (folder / CERTIFICATES).unlink(missing_ok=True)


# --- weights


def in_weights(file: str, change: Callable[[Tensors], None]) -> Plant:
    """`change` writes into the tensors of a safetensors file."""

    def plant(folder: Path) -> None:
        content = bytearray((folder / file).read_bytes())
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            part = memoryview(content)[begin:end]
            tensors[name] = np.frombuffer(part, _DTYPES[entry["dtype"]]).reshape(entry["shape"])
        change(tensors)
        del tensors, part
        (folder / file).write_bytes(content)

    return plant


def scaled(name: str, factor: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name][...] = tensors[name] * np.asarray(factor, tensors[name].dtype)

    return change


def filled(name: str, value: float, row: int | slice = slice(None)) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name][row] = value

    return change


def rows_swapped(name: str, one: int, other: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name][[one, other]] = tensors[name][[other, one]]

    return change


def tensors_swapped(one: str, other: str) -> Callable[[Tensors], None]:
    """All tensors of two modules, or of two layers, change places."""

    def change(tensors: Tensors) -> None:
        pairs = [
            (name, other + name.removeprefix(one)) for name in tensors if name == one or name.startswith(f"{one}.")
        ]
        assert pairs
        for name, instead in pairs:
            kept = tensors[name].copy()
            tensors[name][...], tensors[instead][...] = tensors[instead], kept

    return change


def transposed(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name][...] = tensors[name].T.copy()

    return change


# --- graphs


def in_graph(file: str, *changes: Callable[[onnx.GraphProto], None]) -> Plant:
    """`changes` of the nodes of a graph."""
    return in_model(file, *((lambda model, folder, change=change: change(model.graph)) for change in changes))


def in_function(file: str, name: str, *changes: Callable[[onnx.FunctionProto], None]) -> Plant:
    """`changes` of the definition of a function that a graph calls."""

    def change(model: onnx.ModelProto, folder: Path) -> None:
        (function,) = (function for function in model.functions if function.name == name)
        for each in changes:
            each(function)

    return in_model(file, change)


def in_model(file: str, *changes: Callable[[onnx.ModelProto, Path], None]) -> Plant:
    def plant(folder: Path) -> None:
        model = onnx.load(folder / file, load_external_data=False)
        for change in changes:
            change(model, folder)
        (folder / file).write_bytes(model.SerializeToString())

    return plant


def every(files: Sequence[str], make: Callable[[str], Plant]) -> Plant:
    """The same change in several files."""

    def plant(folder: Path) -> None:
        for file in files:
            make(file)(folder)

    return plant


def find(graph: Nodes, module: str, op_type: str, number: int = 0) -> onnx.NodeProto:
    """The node of this operator within a module, whose name is empty for nodes of no module."""
    return [n for n in graph.node if n.op_type == op_type and n.name.rpartition("/")[0] == module][number]


def attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    """Set an attribute."""
    kept = [each for each in node.attribute if each.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def with_attribute(module: str, op_type: str, name: str, value: Any, number: int = 0) -> Callable[[Nodes], None]:
    return lambda graph: attribute(find(graph, module, op_type, number), name, value)


def with_input(module: str, op_type: str, index: int, name: str, number: int = 0) -> Callable[[Nodes], None]:
    """A node is fed something else."""

    def change(graph: Nodes) -> None:
        node = find(graph, module, op_type, number)
        assert node.input[index] != name
        node.input[index] = name

    return change


def with_operator(module: str, old: str, new: str, number: int = 0) -> Callable[[Nodes], None]:
    def change(graph: Nodes) -> None:
        find(graph, module, old, number).op_type = new

    return change


def inputs_swapped(module: str, op_type: str, one: int, other: int) -> Callable[[Nodes], None]:
    def change(graph: Nodes) -> None:
        node = find(graph, module, op_type)
        assert node.input[one] != node.input[other]
        node.input[one], node.input[other] = node.input[other], node.input[one]

    return change


def constant(graph: Nodes, index: int, value: Any) -> str:
    """Add a constant before node `index`; returns its name."""
    name = f"planted.{len(graph.node)}"
    graph.node.insert(index, helper.make_node("Constant", [], [name], name, value=numpy_helper.from_array(value)))
    return name


def then(value: str, op_type: str, *operands: Any, before: str = "") -> Callable[[Nodes], None]:
    """`value` goes through one more operator, with constants; all who read it read what that gives.

    Args:
        before: a module; then it alone reads that.
    """

    def change(graph: Nodes) -> None:
        index = next((i + 1 for i, node in enumerate(graph.node) if value in node.output), 0)
        given = value
        if before or index == 0:
            new = f"{value}.planted"
            readers = [n for n in graph.node if not before or n.name.rpartition("/")[0] == before]
            assert any(value in node.input for node in readers)
            for node in readers:
                for place, name in enumerate(node.input):
                    if name == value:
                        node.input[place] = new
        else:
            given, new = f"{value}.planted", value
            made = graph.node[index - 1]
            made.output[list(made.output).index(value)] = given
        names = []
        for operand in operands:
            names.append(constant(graph, index, np.asarray(operand)))
            index += 1
        graph.node.insert(index, helper.make_node(op_type, [given, *names], [new], name=f"planted/{op_type}"))

    return change


def outputs_swapped(one: str, other: str) -> Callable[[onnx.GraphProto], None]:
    """Two outputs of a graph change places."""

    def change(graph: onnx.GraphProto) -> None:
        renamed = {one: other, other: one}
        for node in graph.node:
            for names in (node.output, node.input):
                for place, name in enumerate(names):
                    made = names is node.output or not name.startswith(("past.", "cross."))
                    if made and name in renamed:
                        names[place] = renamed[name]

    return change


def readers_swapped(one: str, other: str) -> Callable[[Nodes], None]:
    """Whoever read one value reads the other."""

    def change(graph: Nodes) -> None:
        renamed = {one: other, other: one}
        found = 0
        for node in graph.node:
            for place, name in enumerate(node.input):
                if name in renamed:
                    node.input[place] = renamed[name]
                    found += 1
        assert found

    return change


def read_instead(old: str, new: str) -> Callable[[Nodes], None]:
    """Whoever read `old` reads `new`."""

    def change(graph: Nodes) -> None:
        found = [(node, place) for node in graph.node for place, name in enumerate(node.input) if name == old]
        assert found
        for node, place in found:
            node.input[place] = new

    return change


def bypassed(module: str, op_type: str) -> Callable[[Nodes], None]:
    """Whoever read what a node gives reads its first input."""

    def change(graph: Nodes) -> None:
        node = find(graph, module, op_type)
        read_instead(node.output[0], node.input[0])(graph)

    return change


def initializer(graph: onnx.GraphProto, start: str) -> onnx.TensorProto:
    (tensor,) = (tensor for tensor in graph.initializer if tensor.name.startswith(start))
    return tensor


def other_number(start: str, change: Callable[[Array], Array]) -> Callable[[onnx.GraphProto], None]:
    """A constant that lies in the graph itself, whose name begins so."""

    def edit(graph: onnx.GraphProto) -> None:
        tensor = initializer(graph, start)
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(np.asarray(change(array), array.dtype), tensor.name))

    return edit


def other_constant(start: str, change: Callable[[Array], Array]) -> Callable[[onnx.FunctionProto], None]:
    """The same of a function's definition."""

    def edit(function: onnx.FunctionProto) -> None:
        (node,) = (n for n in function.node if n.op_type == "Constant" and n.output[0].startswith(start))
        array = numpy_helper.to_array(node.attribute[0].t)
        attribute(node, "value", numpy_helper.from_array(np.asarray(change(array), array.dtype)))

    return edit


def own_copy(name: str, change: Callable[[Array], Array]) -> Callable[[onnx.ModelProto, Path], None]:
    """A weight as a constant of the graph itself, changed; the weights file stays as it is."""

    def edit(model: onnx.ModelProto, folder: Path) -> None:
        tensor = initializer(model.graph, name)
        assert tensor.name == name
        array = numpy_helper.to_array(tensor, base_dir=str(folder))
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(change(array.copy())), name))

    return edit


def places_swapped(one: str, other: str) -> Callable[[onnx.GraphProto], None]:
    """Two weights point to each other's place in the weights file."""

    def edit(graph: onnx.GraphProto) -> None:
        first, second = initializer(graph, one), initializer(graph, other)
        assert list(first.dims) == list(second.dims)
        kept = onnx.TensorProto()
        kept.CopyFrom(first)
        for tensor, source in ((first, second), (second, kept)):
            entries = list(source.external_data)
            del tensor.external_data[:]
            tensor.external_data.extend(entries)

    return edit


# --- tokenizers, the manifest, whole files


def in_json(file: str, change: Callable[[Any], None]) -> Plant:
    def plant(folder: Path) -> None:
        content = json.loads((folder / file).read_text(encoding="utf-8"))
        change(content)
        (folder / file).write_text(json.dumps(content, indent=1 if file == MANIFEST else None), encoding="utf-8")

    return plant


def in_config(name: str, value: Any) -> Plant:
    """A field of the model in the manifest."""

    def change(manifest: Any) -> None:
        assert manifest["config"][name] != value
        manifest["config"][name] = value

    return in_json(MANIFEST, change)


def words_swapped(side: str, one: int, other: int) -> Plant:
    """Two words of a vocabulary change their ids."""

    def change(content: Any) -> None:
        words = content["tokenizer"]["model"]["vocab"]
        first, second = (next(word for word, index in words.items() if index == wanted) for wanted in (one, other))
        words[first], words[second] = other, one

    return in_json(f"{side}_tokenizer.json", change)


def files_swapped(one: str, other: str) -> Plant:
    """Two files of a bundle change places, under each other's names."""

    def plant(folder: Path) -> None:
        kept = (folder / one).read_bytes()
        (folder / one).write_bytes((folder / other).read_bytes())
        (folder / other).write_bytes(kept)

    return plant


def file_replaced(file: str, by: str) -> Plant:
    return lambda folder: (folder / file).write_bytes((folder / by).read_bytes()) and None
