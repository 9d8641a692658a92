"""Compares the graphs of a bundle, node by node, with those that this version writes for its config.

`graph_checks/check.py` compares the results of graphs on random inputs. A graph that reads one word of 32,000 as another
one, or clips numbers beyond those of the inputs, computes the same on nearly all inputs. Its nodes differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import onnx
import onnx_ir as ir

from tfexport.bundle.reader import MANIFEST, Bundle
from tfexport.contract import weights_files
from tfexport.exporter.graphs import emit
from tfexport.graphs.stored_weights import StoredWeights
from tfexport.system.version import version
from tfexport.verification.files import Mismatch, graph_specs, recorded_version


def structure_mismatches(bundle: Bundle) -> tuple[list[Mismatch], list[str]]:
    """The graphs that differ from those of this version, and the files of another version, which are not compared.

    A graph of another version than that of the manifest differs, too. A manifest of another version is one of the files:
    its entries of graphs are not compared; see `files.manifest_mismatches`.
    """
    found, others = [], []
    specs = graph_specs(bundle)
    recorded = recorded_version(json.loads((bundle.directory / MANIFEST).read_text(encoding="utf-8")))
    for graph in bundle.graphs:
        spec = specs.get((graph.role, graph.precision, graph.dialect))
        if spec is None or spec.file != graph.file:  # reported for the manifest
            continue
        try:
            written = onnx.load(bundle.directory / graph.file, load_external_data=False)
            writer = written.producer_version if written.producer_name == "tfexport" else written.producer_name
            if writer != version():
                if writer == recorded:
                    others.append(graph.file)
                else:
                    about = f"names {writer or 'nobody'} as its writer, and the manifest tfexport {recorded}"
                    found.append(Mismatch(graph.file, about))
                continue
            files = weights_files(bundle.config, graph.precision)
            stored = StoredWeights(*(bundle.directory / file for file in files))
            wanted = ir.to_proto(emit(spec, bundle.config, stored, bundle.in_float32.get(graph.precision, ())))
        except Exception as error:  # errors of ONNX, of protobuf and of broken headers have no common base class
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            found.append(Mismatch(graph.file, f"cannot be compared with the graph of this version: {told}"))
            continue
        difference = next(_differences(written, wanted), None)
        if difference is not None:
            found.append(Mismatch(graph.file, f"{difference} differs from this version's"))
    if recorded not in (None, version()):
        others.append(MANIFEST)
    return found, others


def _differences(written: onnx.ModelProto, wanted: onnx.ModelProto) -> Iterator[str]:
    """The names of the differences, in the order of the graph's computation."""
    for kind in ("input", "output", "initializer", "sparse_initializer"):
        yield from _of(kind, getattr(written.graph, kind), getattr(wanted.graph, kind))
    yield from _of("node", written.graph.node, wanted.graph.node)
    yield from _of("function", written.functions, wanted.functions)
    yield from _of("opset", written.opset_import, wanted.opset_import)


def _of(kind: str, written: Sequence[onnx.NodeProto], wanted: Sequence[onnx.NodeProto]) -> Iterator[str]:
    for one, other in zip(written, wanted, strict=False):
        if one.SerializeToString(deterministic=True) != other.SerializeToString(deterministic=True):
            yield f"{kind} {getattr(one, 'name', '') or getattr(other, 'name', '')}".rstrip()
    if len(written) != len(wanted):
        yield f"the number of its {kind}s, {len(written)} and not {len(wanted)},"
