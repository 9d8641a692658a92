"""Compares the graphs of a bundle, node by node, with those that this version writes for its config.

`graph_checks/check.py` compares the results of graphs on random inputs. A graph that reads one word of 32,000 as another
one, or clips numbers beyond those of the inputs, computes the same on nearly all inputs. Its nodes differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx
import onnx_ir as ir

from tfexport.bundle.reader import Bundle
from tfexport.contract import weights_files
from tfexport.exporter.graphs import emit
from tfexport.graphs.stored_weights import StoredWeights
from tfexport.system.version import version
from tfexport.verification.files import Mismatch, graph_specs


def structure_mismatches(bundle: Bundle) -> list[Mismatch]:
    """The graphs that differ from those that this version writes, whatever version they name as their writer."""
    mismatches = []
    specs = graph_specs(bundle)
    for graph in bundle.graphs:
        spec = specs.get((graph.role, graph.precision, graph.dialect))
        if spec is None or spec.file != graph.file:  # reported for the manifest
            continue
        try:
            written = onnx.load(bundle.directory / graph.file, load_external_data=False)
            files = weights_files(bundle.config, graph.precision)
            stored = StoredWeights(*(bundle.directory / file for file in files))
            wanted = ir.to_proto(emit(spec, bundle.config, stored, bundle.in_float32.get(graph.precision, ())))
        except Exception as error:  # errors of ONNX, of protobuf and of broken headers have no common base class
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            mismatches.append(Mismatch(graph.file, f"cannot be compared with the graph of this version: {reason}"))
            continue
        difference = next(_differences(written, wanted), None)
        if difference is not None:
            about = f"{difference} differs from this version's"
            if (writer := f"{written.producer_name} {written.producer_version}") != f"tfexport {version()}":
                about = f"{about}. It names {writer.strip() or 'nobody'} as its writer: export the bundle again"
            mismatches.append(Mismatch(graph.file, about))
    return mismatches


def _differences(written: onnx.ModelProto, wanted: onnx.ModelProto) -> Iterator[str]:
    """The names of the differences, in the order of the graph's computation."""
    for kind in ("input", "output", "initializer", "sparse_initializer"):
        yield from _of(kind, getattr(written.graph, kind), getattr(wanted.graph, kind))
    yield from _of("node", written.graph.node, wanted.graph.node)
    yield from _of("function", written.functions, wanted.functions)
    yield from _of("opset", written.opset_import, wanted.opset_import)


def _of(kind: str, written: Sequence[onnx.NodeProto], wanted: Sequence[onnx.NodeProto]) -> Iterator[str]:
    for left, right in zip(written, wanted, strict=False):
        if left.SerializeToString(deterministic=True) != right.SerializeToString(deterministic=True):
            yield f"{kind} {getattr(left, 'name', '') or getattr(right, 'name', '')}".rstrip()
    if len(written) != len(wanted):
        yield f"the number of its {kind}s, {len(written)} and not {len(wanted)},"
