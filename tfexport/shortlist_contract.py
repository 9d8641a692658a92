"""The tensors of the graphs for shortlists; `graph_contract.py` has those of all other graphs.

One graph gathers the output projection of a batch's candidates. The step graphs use it instead of their own weights.
"""

from __future__ import annotations

from dataclasses import replace

from tfexport.config import ModelConfig
from tfexport.contract import SHORTLIST_ROLES, GraphSpec, Precision, TensorSpec
from tfexport.graph_contract import graphs_of

LISTED = "listed."
"""The prefix of the inputs that replace weights of the output projection."""

SHORTLIST_PRECISIONS: tuple[Precision, ...] = ("float32", "int8")
"""Precisions with graphs for shortlists. The int4 operator fixes the size of its matrix in the graph."""

_LISTED_BIAS = TensorSpec(f"{LISTED}output_bias", "float32", ("candidates",), "their biases")
_LISTED_WEIGHTS: dict[Precision, tuple[TensorSpec, ...]] = {
    "float32": (TensorSpec(f"{LISTED}output_weight", "float32", ("candidates", "d_model"), "rows of the projection"),),
    "int8": (
        TensorSpec(f"{LISTED}output.int8", "uint8", ("d_model", "candidates"), "columns in 8 bits, 128 for 0"),
        TensorSpec(f"{LISTED}output.scale", "float32", ("candidates",), "their scales"),
    ),
}
_CANDIDATES = TensorSpec("candidates", "int64", ("candidates",), "target ids that may come in outputs of the batch")
_LEFT_OUT = TensorSpec(
    "left_out", "float32", ("rows", "candidates"), "added to logits: -inf if the row's sentence does not list the word"
)


def shortlist_graphs_of(config: ModelConfig, precision: Precision = "float32") -> tuple[GraphSpec, ...]:
    """The graphs for shortlists, in the dialect `ort`; empty for precisions outside `SHORTLIST_PRECISIONS`.

    The steps are those of `graphs_of` with the candidates instead of the vocabulary: logits are [rows, candidates], and
    `best.ids` are indices of candidates.
    """
    if precision not in SHORTLIST_PRECISIONS:
        return ()
    weights = (*_LISTED_WEIGHTS[precision], *([_LISTED_BIAS] if config.output_bias else []))
    steps = []
    for graph in graphs_of(config, precision, "ort"):
        if graph.role in SHORTLIST_ROLES:
            outputs = tuple(replace(t, axes=("rows", "candidates")) if t.name == "logits" else t for t in graph.outputs)
            role = SHORTLIST_ROLES[graph.role]
            steps.append(replace(graph, role=role, inputs=(*graph.inputs, *weights, _LEFT_OUT), outputs=outputs))
    gather = GraphSpec("shortlist", (_CANDIDATES,), weights, precision, "ort")
    return (gather, *steps) if steps else ()
