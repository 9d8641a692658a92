"""The dialects of the graphs, and their requirements on a runtime and on a model."""

from __future__ import annotations

from collections.abc import Iterable

from tfexport.config import ModelConfig
from tfexport.contract import PRECISIONS, Dialect, GraphSpec, Precision, Role, groups_queries

DIALECTS: dict[Dialect, str] = {
    "onnx24": "standard operators of opset 24; attention reads the cache under a boolean mask",
    "ort": "ONNX Runtime's own operators, shaped for its CPU provider, some in functions that have kernels; beams share a "
    "cache that never moves",
    "ort-cuda": "ONNX Runtime's own operators, shaped for its CUDA provider: few launches a step; beams share a cache that "
    "never moves",
}

RUNTIME_DIALECTS: dict[str, tuple[Dialect, ...]] = {
    "ort-cpu": ("ort", "onnx24"),
    "ort-cuda": ("ort-cuda",),
    "tensorrt": ("onnx24",),
}
"""The dialects that each runtime supports, fastest first."""


def runtime_dialects(graphs: Iterable[GraphSpec]) -> dict[str, dict[str, Dialect]]:
    """The dialect of `graphs` that each runtime uses, by precision."""
    there = {(graph.dialect, graph.precision) for graph in graphs}
    return {
        runtime: {
            precision: next(dialect for dialect in dialects if (dialect, precision) in there)
            for precision in PRECISIONS.values()
            if any((dialect, precision) in there for dialect in dialects)
        }
        for runtime, dialects in RUNTIME_DIALECTS.items()
    }


LARGEST_KERNEL_HEAD = 128
"""Maximum head size of the attention kernels."""


def calls_attention_functions(config: ModelConfig, role: Role) -> bool:
    """Whether the graphs of this role in the dialect `ort` call the attention functions that have kernels.

    They do if the kernels support the head size (`has_kernel` in kernels/attention.h) and the model has no relative
    positions, because these functions add no bias to the scores.
    """
    head_dim = config.encoder_head_dim if role == "encoder" else config.head_dim
    return head_dim % 16 == 0 and head_dim <= LARGEST_KERNEL_HEAD and config.positions != "relative"


LARGEST_GROUP_HEAD = 256
"""Maximum head size of GroupQueryAttention on CUDA."""


def groups_queries_on_cuda(config: ModelConfig, precision: Precision) -> bool:
    """Whether ONNX Runtime's CUDA provider supports GroupQueryAttention for these heads; in float32 it does not."""
    return precision != "float32" and groups_queries(config) and config.head_dim <= LARGEST_GROUP_HEAD
