"""The terms that describe graphs: roles, precisions, dialects, tensor names and axes. `graph_contract.py` has the graphs.

Axes: `batch` source sentences, `src` source ids, `rows` = batch * beam hypotheses (row = b * beam + k), `cache` slots of
the self-attention cache; `blocks` consecutive tensors of one cache, `width` numbers in a row of such a tensor; `candidates`
words of a shortlist, `banned` words that may not be generated. The model fixes `heads`, `head_dim`, `d_attention` (all heads
side by side), `d_model`, `best`, `vocab`, `layers`, `keys_values` (2 per decoder layer) and `classes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from tfexport.config import ModelConfig
from tfexport.errors import TfexportError

SpecialStep = Literal[
    "greedy_step", "decoder_step_attention", "beam_step_attention", "shortlist_decoder_step", "shortlist_beam_step"
]
SearchRole = Literal["greedy_search", "beam_search", "best_tokens"]
Role = Literal[
    "encoder", "decoder_step", "beam_step", "select_rows", "encoder_classifier", "shortlist", SpecialStep, SearchRole
]
Precision = Literal["float32", "float16", "bfloat16", "int8", "int4"]
Dialect = Literal["onnx24", "ort", "ort-cuda"]

FORMAT = 6
"""The format of bundles and of the functions that their graphs call. It rises by one when an older reader or kernel could
misread a bundle."""

WEIGHTS_FILE = "weights.safetensors"
SCREENING_FILE = "weights.screening.safetensors"
FEWEST_WORDS = 1024
"""The smallest vocabulary that is screened: for a smaller one the whole product takes no longer."""
GROUP = 4
"""Number of inputs whose 8-bit weights are adjacent in memory, in blocks of outputs, for CPUs (see kernels/products.h)."""

PRECISIONS: dict[str, Precision] = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "int8": "int8",
    "int4": "int4",
}
"""The precisions by the short names of flags and files."""

QUANTIZED: dict[Precision, str] = {
    "int8": "8-bit weights, one scale per column; activations are rounded to 8 bits, one scale per row; embeddings, "
    "positions, norms, attention, biases and softmax in float32",
    "int4": "4-bit weights, one scale per 32 weights of a column; the rest as in int8, with one scale per 32 numbers of a "
    "row",
}
"""Precisions of the matrices alone; activations, caches and logits are float32. Both round each row of activations by
itself, so that the rounding of a sentence does not depend on its neighbours in a batch."""

FLOATS: dict[str, Precision] = {short: name for short, name in PRECISIONS.items() if name not in QUANTIZED}
"""The precisions that GPUs compute in, by their short names."""

ITEM_SIZES = {
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "bool": 1,
    "int8": 1,
    "uint8": 1,
}

ALIGNMENT = 256
"""Alignment of tensors on a device, in bytes. TensorRT requires it of every address."""

SHAPE_NODE = "shape/"
"""The name prefix of nodes that only compute shapes."""

BEST_TOKENS = 17
"""Number of best tokens that a step returns per row: 2 * beam for beams up to 8, and one for an eos that is still banned."""

DType = Literal["int64", "int32", "bool", "float64", "float32", "float16", "bfloat16", "int8", "uint8", "float"]


@dataclass(frozen=True)
class TensorSpec:
    """One input or output. `{i}` in the name stands for the number of each decoder layer."""

    name: str
    dtype: DType
    """`float` is the precision of the graph."""
    axes: tuple[str, ...]
    about: str
    updates: str = ""
    """For an output that is an updated input: the name of that input. Both may have the same buffer."""


@dataclass(frozen=True)
class GraphSpec:
    """One graph of the contract, in one precision and dialect."""

    role: Role
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    precision: Precision = "float32"
    dialect: Dialect = "onnx24"

    @property
    def file(self) -> str:
        variant = [] if self.precision == "float32" else [short_name(self.precision)]
        variant += [] if self.dialect == "onnx24" else [self.dialect]
        return ".".join([self.role, *variant, "onnx"])

    @property
    def step(self) -> Role:
        """The role of the plain step: with scores, without attention and without a shortlist."""
        return _PLAIN_STEPS.get(self.role, self.role)

    @property
    def caches(self) -> dict[str, str]:
        """The inputs that the graph updates, and the outputs with the result: `past.0.key` to `present.0.key`."""
        return {tensor.updates: tensor.name for tensor in self.outputs if tensor.updates}

    @property
    def tells_attention(self) -> bool:
        return self.role in ATTENTION_ROLES.values()


ATTENTION_ROLES: dict[Role, Role] = {
    "decoder_step": "decoder_step_attention",
    "beam_step": "beam_step_attention",
}
"""Steps and their variants that also return attention. Separate graphs spare other callers the cost."""

SHORTLIST_ROLES: dict[Role, Role] = {"decoder_step": "shortlist_decoder_step", "beam_step": "shortlist_beam_step"}
"""Steps and their variants for a shortlist; see `shortlist_contract.py`."""

_PLAIN_STEPS: dict[Role, Role] = {
    "greedy_step": "decoder_step",
    **{special: plain for roles in (ATTENTION_ROLES, SHORTLIST_ROLES) for plain, special in roles.items()},
}


def groups_queries(config: ModelConfig) -> bool:
    """Whether ONNX Runtime's GroupQueryAttention supports these heads. If not, greedy search is a beam of one.

    It does not support relative positions: their bias differs between rows, and the operator accepts it for one row only.
    """
    return config.head_dim % 8 == 0 and config.positions != "relative"


def precisions_of(given: str, called: str = "") -> tuple[Precision, ...]:
    """The precisions of a list such as `fp32,fp16`, each once.

    Args:
        called: the argument or flag with the list, for errors.

    Raises:
        TfexportError: there is no such precision.
    """
    names = [name.strip() for name in given.split(",")]
    wrong = [name for name in names if name not in PRECISIONS]
    if wrong:
        where = f"{called} is {given!r}, and " if called else ""
        raise TfexportError(f"{where}there is no precision {wrong[0]!r}. Give one or more of {', '.join(PRECISIONS)}.")
    return tuple(PRECISIONS[name] for name in dict.fromkeys(names))


def short_name(precision: Precision) -> str:
    """The short name of a precision: `float16` to `fp16`."""
    return next(short for short, name in PRECISIONS.items() if name == precision)


def aligned_length(d_attention: int, precision: Precision) -> int:
    """The number that `length` must be a multiple of, so that a tensor [rows, heads, length, head_dim] ends aligned."""
    return ALIGNMENT // math.gcd(ALIGNMENT, d_attention * ITEM_SIZES[precision])


def weights_file(precision: Precision) -> str:
    """The weights file that the graphs of a precision refer to."""
    return WEIGHTS_FILE if precision == "float32" else f"weights.{short_name(precision)}.safetensors"


def is_screened(config: ModelConfig, precision: Precision) -> bool:
    """Whether the graphs of a model screen its vocabulary (`graphs/screening.py`). In quantized graphs the whole product is
    as cheap."""
    large = config.tgt_vocab_size >= FEWEST_WORDS and config.d_model % GROUP == 0
    return precision == "float32" and groups_queries(config) and large and not config.is_classifier


def weights_files(config: ModelConfig, precision: Precision) -> list[str]:
    """The files of all tensors that the graphs of a precision refer to."""
    files = [weights_file(precision)]
    if precision in QUANTIZED:
        files.append(WEIGHTS_FILE)
    elif is_screened(config, precision):
        files.append(SCREENING_FILE)
    return files


def expand(graph: GraphSpec, n_layers: int, precision: Precision) -> GraphSpec:
    """`graph` in a precision, with its `{i}` tensors for each layer, and its tensors of type `float` in this precision."""
    dtype: Any = "float32" if precision in QUANTIZED else precision
    inputs, outputs = (
        tuple(replace(t, dtype=dtype) if t.dtype == "float" else t for t in _of_layers(tensors, n_layers))
        for tensors in (graph.inputs, graph.outputs)
    )
    return replace(graph, inputs=inputs, outputs=outputs, precision=precision)


def _of_layers(tensors: tuple[TensorSpec, ...], n_layers: int) -> Iterable[TensorSpec]:
    index = 0
    while index < len(tensors):
        if "{i}" not in tensors[index].name:
            yield tensors[index]
            index += 1
            continue
        # A key is followed by its value: cross.0.key, cross.0.value, cross.1.key, ...
        for layer in range(n_layers):
            for tensor in tensors[index : index + 2]:
                name, updates = (text.replace("{i}", str(layer)) for text in (tensor.name, tensor.updates))
                yield replace(tensor, name=name, updates=updates)
        index += 2


def cache_names(config: ModelConfig, tensor: Literal["past", "present", "cross"]) -> list[str]:
    """The names of one kind of attention tensors, layer by layer, key before value."""
    return [f"{tensor}.{i}.{part}" for i in range(config.n_decoder_layers) for part in ("key", "value")]


def shape(tensor: TensorSpec, config: ModelConfig) -> list[str | int]:
    """The axes of `tensor`, with numbers for those that the model fixes."""
    fixed = {
        "heads": config.n_heads,
        "head_dim": config.head_dim,
        "best": min(BEST_TOKENS, config.tgt_vocab_size),
        "one": 1,
        "keys_values": 2 * config.n_decoder_layers,
        "layers": config.n_decoder_layers,
        "d_attention": config.d_attention,
        "vocab": config.tgt_vocab_size,
        "d_model": config.d_model,
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
