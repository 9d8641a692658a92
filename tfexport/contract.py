"""The one table of every tensor of every graph: export, manifest, runtimes, parity and the README read it from here.

Axes: `batch` source sentences, `src` source ids, `rows` = batch * beam hypotheses (row = b * beam + k), `cache` slots of
the self-attention cache; `heads`, `head_dim`, `vocab` and `classes` are fixed by the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from tfexport.config import ModelConfig

Role = Literal["encoder", "decoder_step", "encoder_classifier"]
DYNAMIC_AXES = ("batch", "src", "rows", "cache")
WEIGHTS_FILE = "weights.safetensors"
DIALECT = "onnx24"
"""Standard operators of opset 24 only: `TensorScatter` writes the cache, `Attention` reads it under a bool mask."""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output. A `{i}` in the name stands for every decoder layer."""

    name: str
    dtype: Literal["int64", "float32"]
    axes: tuple[str, ...]
    about: str


@dataclass(frozen=True)
class GraphSpec:
    """One graph of the contract."""

    role: Role
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def file(self) -> str:
        return f"{self.role}.onnx"


def _pair(name: str, axes: tuple[str, ...], about: str) -> tuple[TensorSpec, TensorSpec]:
    return TensorSpec(f"{name}.key", "float32", axes, f"{about} keys"), TensorSpec(
        f"{name}.value", "float32", axes, f"{about} values"
    )


_CACHE = ("rows", "heads", "cache", "head_dim")
_SRC_IDS = TensorSpec("src_ids", "int64", ("batch", "src"), "source ids; anything may follow the first `src_len`")
_SRC_LEN = TensorSpec("src_len", "int64", ("batch",), "source ids that count, at least 1")
_CROSS = _pair("cross.{i}", ("batch", "heads", "src", "head_dim"), "cross-attention")

ENCODER = GraphSpec("encoder", (_SRC_IDS, _SRC_LEN), _CROSS)
DECODER_STEP = GraphSpec(
    "decoder_step",
    (
        TensorSpec("tokens", "int64", ("rows",), "the last token of each hypothesis, at first bos"),
        TensorSpec("position", "int64", ("rows",), "its position, which is the number of filled cache slots"),
        _SRC_LEN,
        *_pair("past.{i}", _CACHE, "self-attention cache, zeroed at first:"),
        *_CROSS,
    ),
    (
        TensorSpec("logits", "float32", ("rows", "vocab"), "of the token that follows"),
        *_pair("present.{i}", _CACHE, "`past` with one more slot written (give it the same buffer):"),
    ),
)
ENCODER_CLASSIFIER = GraphSpec(
    "encoder_classifier",
    (_SRC_IDS, _SRC_LEN),
    (TensorSpec("logits", "float32", ("batch", "classes"), "of the classes"),),
)


def graphs_of(config: ModelConfig) -> tuple[GraphSpec, ...]:
    """The graphs that a model of this config is exported to, with a tensor for every layer."""
    graphs = (ENCODER_CLASSIFIER,) if config.is_classifier else (ENCODER, DECODER_STEP)
    return tuple(expand(graph, config.n_decoder_layers) for graph in graphs)


def expand(graph: GraphSpec, n_layers: int) -> GraphSpec:
    """`graph` with its `{i}` tensors written out, layer by layer."""
    return GraphSpec(graph.role, tuple(_expand(graph.inputs, n_layers)), tuple(_expand(graph.outputs, n_layers)))


def _expand(tensors: tuple[TensorSpec, ...], n_layers: int) -> Iterable[TensorSpec]:
    index = 0
    while index < len(tensors):
        if "{i}" not in tensors[index].name:
            yield tensors[index]
            index += 1
            continue
        # A key and its value stand together: cross.0.key, cross.0.value, cross.1.key, ...
        for layer in range(n_layers):
            for tensor in tensors[index : index + 2]:
                yield TensorSpec(tensor.name.replace("{i}", str(layer)), tensor.dtype, tensor.axes, tensor.about)
        index += 2


def cache_names(config: ModelConfig, tensor: Literal["past", "present", "cross"]) -> list[str]:
    """The names of one kind of attention tensors, layer by layer, key before value."""
    return [f"{tensor}.{i}.{part}" for i in range(config.n_decoder_layers) for part in ("key", "value")]


def shape(tensor: TensorSpec, config: ModelConfig) -> list[str | int]:
    """The axes of `tensor` with the numbers that this model fixes."""
    fixed = {
        "heads": config.n_heads,
        "head_dim": config.head_dim,
        "vocab": config.tgt_vocab_size,
        "classes": config.n_classes,
    }
    return [fixed.get(axis, axis) for axis in tensor.axes]


def describe(graph: GraphSpec, config: ModelConfig) -> dict[str, Any]:
    """The JSON form of an expanded graph for the manifest."""
    sides = {"inputs": graph.inputs, "outputs": graph.outputs}
    return {
        side: [{"name": t.name, "dtype": t.dtype, "shape": shape(t, config)} for t in tensors]
        for side, tensors in sides.items()
    }


def markdown_table() -> str:
    """The contract as the README shows it."""
    lines = ["| graph | | tensor | type | axes | what |", "|---|---|---|---|---|---|"]
    for graph in (ENCODER, DECODER_STEP, ENCODER_CLASSIFIER):
        for side, tensors in (("in", graph.inputs), ("out", graph.outputs)):
            for t in tensors:
                lines.append(f"| `{graph.file}` | {side} | `{t.name}` | {t.dtype} | {', '.join(t.axes)} | {t.about} |")
    return "\n".join(lines)
