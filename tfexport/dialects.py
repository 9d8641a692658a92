"""The dialects of the graphs, and what they ask of a runtime and of a model."""

from __future__ import annotations

from collections.abc import Iterable

from tfexport.config import ModelConfig
from tfexport.contract import PRECISIONS, Dialect, GraphSpec, Precision, groups_queries

DIALECTS: dict[Dialect, str] = {
    "onnx24": "standard operators of opset 24; attention reads the cache under a boolean mask",
    "onnx24-lengths": "the same, with attention told the number of valid keys: the form that flash kernels take",
    "ort": "ONNX Runtime's own operators, shaped for its CPU provider, some in functions that have kernels; beams share a "
    "cache that never moves",
    "ort-cuda": "ONNX Runtime's own operators, shaped for its CUDA provider: few launches a step; beams share a cache that "
    "never moves",
}

RUNTIME_DIALECTS: dict[str, tuple[Dialect, ...]] = {
    "ort-cpu": ("ort", "onnx24"),
    "ort-cuda": ("ort-cuda", "onnx24-lengths"),
    "tensorrt": ("onnx24",),
}
"""The dialects that each runtime takes, the one that it is fastest with first. ONNX Runtime's CUDA provider prefers flash
attention in half precision, which takes lengths and no mask; TensorRT ignores such lengths without a word. Bundles of before
have no `ort-cuda`."""


def runtime_dialects(graphs: Iterable[GraphSpec]) -> dict[str, dict[str, Dialect]]:
    """The dialect that each runtime uses of `graphs`, by their precision."""
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
"""Numbers of a head that the attention kernels take at most."""


def calls_attention_functions(config: ModelConfig) -> bool:
    """Whether the graphs of the dialect `ort` call functions for attention, for which there are kernels.

    They do with heads of the sizes that the kernels take (`has_kernel` in kernels/attention.h), and without relative
    positions, because these functions add no bias to the scores.
    """
    return config.head_dim % 16 == 0 and config.head_dim <= LARGEST_KERNEL_HEAD and config.positions != "relative"


LARGEST_GROUP_HEAD = 256
"""Numbers of a head that GroupQueryAttention takes at most on CUDA."""


def groups_queries_on_cuda(config: ModelConfig, precision: Precision) -> bool:
    """Whether ONNX Runtime's CUDA provider has GroupQueryAttention for these heads; it has none in float32."""
    return precision != "float32" and groups_queries(config) and config.head_dim <= LARGEST_GROUP_HEAD
