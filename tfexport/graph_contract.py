"""The single table of all tensors of all graphs. Export, manifest, runtimes, parity and docs/reference/contract.md use it.

`contract.py` defines the axes; `shortlist_contract.py` has the graphs for shortlists.
"""

from __future__ import annotations

from dataclasses import replace

from tfexport.config import ModelConfig
from tfexport.contract import (
    ATTENTION_ROLES,
    QUANTIZED,
    Dialect,
    GraphSpec,
    Precision,
    Role,
    TensorSpec,
    expand,
    groups_queries,
)


def _pair(name: str, axes: tuple[str, ...], about: str, updates: str = "") -> tuple[TensorSpec, TensorSpec]:
    key, value = (
        TensorSpec(f"{name}.{part}", "float", axes, f"{about} {part}s", f"{updates}.{part}" if updates else "")
        for part in ("key", "value")
    )
    return key, value


_CACHE = ("rows", "heads", "cache", "head_dim")
_SRC_IDS = TensorSpec("src_ids", "int64", ("batch", "src"), "source ids; any ids may follow the first `src_len`")
_SRC_LEN = TensorSpec("src_len", "int64", ("batch",), "number of valid source ids, at least 1")
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
        TensorSpec("best.log_probs", "float32", ("rows", "best"), "log-probabilities of the best tokens, best first"),
        TensorSpec("best.ids", "int64", ("rows", "best"), "these tokens"),
        *_pair(
            "present.{i}", _CACHE, "`past` with one more slot written (give it the same buffer):", updates="past.{i}"
        ),
    ),
)
SELECT_ROWS = GraphSpec(
    "select_rows",
    (
        TensorSpec("tensors", "float", ("blocks", "from", "width"), "all keys and values of a cache, in one buffer"),
        TensorSpec("index", "int64", ("rows",), "the row that each new row continues"),
    ),
    (TensorSpec("selected", "float", ("blocks", "rows", "width"), "the chosen rows, in another buffer"),),
)
# One step of a search, for runtimes that choose tokens on the device. The graphs depend on the size of the vocabulary and
# on nothing else of the model.
_BEST_OF_ROWS = (
    TensorSpec("best.log_probs", "float32", ("rows", "found"), "log-probabilities of the best tokens, best first"),
    TensorSpec("best.ids", "int64", ("rows", "found"), "these tokens"),
)
_BIAS = TensorSpec("bias", "float32", ("vocab",), "added to log-probabilities: -inf for banned tokens, else 0")
BEST_TOKENS = GraphSpec(
    "best_tokens",
    (
        TensorSpec("logits", "float32", ("rows", "vocab"), "of a step"),
        TensorSpec("places", "float32", ("found",), "its length is the number of best tokens to return"),
    ),
    _BEST_OF_ROWS,
)
GREEDY_SEARCH = GraphSpec(
    "greedy_search",
    (*_BEST_OF_ROWS, _BIAS),
    (
        TensorSpec("next.tokens", "int64", ("rows", "one"), "the best token of each row"),
        TensorSpec("next.log_probs", "float32", ("rows", "one"), "its log-probability"),
    ),
)
BEAM_SEARCH = GraphSpec(
    "beam_search",
    (
        *_BEST_OF_ROWS,
        _BIAS,
        TensorSpec("scores", "float64", ("batch", "beam"), "log-probabilities of the live hypotheses"),
        TensorSpec("mask", "bool", ("batch", "one", "beam", "cache"), "the cache slots that are their past"),
        TensorSpec("first_row", "int64", ("batch", "one"), "beam times the sentence's number: 0, beam, 2 * beam, .."),
        TensorSpec("slots", "int64", ("cache",), "0, 1, 2, .."),
        TensorSpec("own", "int64", ("beam", "one"), "the slot that each hypothesis' next token gets"),
        TensorSpec("leaving", "float32", ("vocab",), "minus `candidates` for tokens that end a hypothesis, else 0"),
        TensorSpec("order", "float32", ("candidates",), "0, -1, -2, .."),
        TensorSpec("found", "int64", ("one",), "the number of best tokens of a row"),
    ),
    (
        TensorSpec(
            "candidates.log_probs",
            "float64",
            ("batch", "candidates"),
            "of the best continuations of a sentence, best first",
        ),
        TensorSpec("candidates.parents", "int64", ("batch", "candidates"), "the hypothesis that each continues"),
        TensorSpec("candidates.tokens", "int64", ("batch", "candidates"), "its token"),
        TensorSpec("next.tokens", "int64", ("batch", "beam"), "of the best continuations that do not end"),
        TensorSpec("next.scores", "float64", ("batch", "beam"), "their log-probabilities"),
        TensorSpec("next.mask", "bool", ("batch", "one", "beam", "cache"), "the cache slots that are their past"),
    ),
)
SEARCH_GRAPHS = (GREEDY_SEARCH, BEAM_SEARCH, BEST_TOKENS)

WITHOUT_MODULES: tuple[Role, ...] = ("select_rows", *(graph.role for graph in SEARCH_GRAPHS))
"""Graphs without a computation of a module of the model."""

ENCODER_CLASSIFIER = GraphSpec(
    "encoder_classifier",
    (_SRC_IDS, _SRC_LEN),
    (TensorSpec("logits", "float32", ("batch", "classes"), "of the classes"),),
)

# The graphs of the dialect `ort`. A beam's hypotheses share one cache: each step appends their new slots, and a mask marks
# the past of each hypothesis. A beam reorder moves the mask, never keys and values.
_INT32_LEN = replace(_SRC_LEN, dtype="int32")
_COUNT = TensorSpec("count", "int64", ("one",), "number of best tokens to return")
_BANNED = TensorSpec("banned", "int64", ("banned",), "banned ids, each once")
_FOUND = (
    DECODER_STEP.outputs[0],
    *(replace(found, axes=("rows", "count")) for found in DECODER_STEP.outputs[1:3]),
)
_SLOTS = ("batch", "heads", "cache", "head_dim")

ORT_ENCODER = GraphSpec(
    "encoder",
    (_SRC_IDS, _INT32_LEN),
    (
        TensorSpec(
            "cross",
            "float",
            ("keys_values", "batch", "heads", "src", "head_dim"),
            "cross-attention keys and values, layer by layer",
        ),
    ),
    dialect="ort",
)
ORT_DECODER_STEP = GraphSpec(
    "decoder_step",
    (
        TensorSpec("tokens", "int64", ("rows",), "the last token of each sentence, at first bos"),
        TensorSpec("position", "int32", ("rows",), "its position, which is the number of filled cache slots"),
        TensorSpec("total", "int32", ("one",), "1 + the largest `position`"),
        _COUNT,
        _INT32_LEN,
        *_pair("past.{i}", _CACHE, "self-attention cache:"),
        *_CROSS,
    ),
    (
        *_FOUND,
        *_pair(
            "present.{i}", _CACHE, "`past` with one more slot written (give it the same buffer):", updates="past.{i}"
        ),
    ),
    dialect="ort",
)
ORT_GREEDY_STEP = GraphSpec(
    "greedy_step",
    tuple(_BANNED if tensor == _COUNT else tensor for tensor in ORT_DECODER_STEP.inputs),
    (
        TensorSpec("best.logits", "float32", ("rows", "one"), "the largest logit of the tokens that are not banned"),
        TensorSpec("best.ids", "int64", ("rows", "one"), "its token"),
        *ORT_DECODER_STEP.outputs[3:],
    ),
    dialect="ort",
)
"""`decoder_step` without scores. It returns the best token in much less time; see `graphs/screening.py`."""
ORT_BEAM_STEP = GraphSpec(
    "beam_step",
    (
        TensorSpec("tokens", "int64", ("batch", "beam"), "the last token of each hypothesis, at first bos"),
        TensorSpec("position", "int32", ("batch", "beam"), "its position"),
        TensorSpec("slot", "int64", ("batch",), "the first new slot of a sentence: it gets one per hypothesis"),
        TensorSpec(
            "mask", "bool", ("batch", "one", "beam", "cache"), "the slots of a hypothesis' past and its new slot"
        ),
        _COUNT,
        _INT32_LEN,
        *_pair("past.{i}", _SLOTS, "self-attention cache of all hypotheses of a sentence, zeroed at first:"),
        *_CROSS,
    ),
    (
        *_FOUND,
        *_pair(
            "present.{i}", _SLOTS, "`past` with the new slots written (give it the same buffer):", updates="past.{i}"
        ),
    ),
    dialect="ort",
)

# The graphs of the dialect `ort-cuda`. Heads are side by side, as the projections return them, so nothing is transposed.
# Only the caches of `decoder_step` have one head after the other, for GroupQueryAttention.
_FLAT_CROSS = _pair("cross.{i}", ("batch", "src", "d_attention"), "cross-attention, heads side by side:")
_FLAT_SLOTS = ("batch", "cache", "d_attention")

CUDA_ENCODER = GraphSpec("encoder", (_SRC_IDS, _SRC_LEN), _FLAT_CROSS, dialect="ort-cuda")
CUDA_DECODER_STEP = GraphSpec(
    "decoder_step",
    (
        *ORT_DECODER_STEP.inputs[:2],
        _SRC_LEN,
        *_pair("past.{i}", _CACHE, "self-attention cache, zeroed at first:"),
        *_FLAT_CROSS,
    ),
    DECODER_STEP.outputs,
    dialect="ort-cuda",
)
"""One row per sentence: greedy search, and sampling of one output."""
CUDA_BEAM_STEP = GraphSpec(
    "beam_step",
    (
        *ORT_BEAM_STEP.inputs[:4],
        _SRC_LEN,
        *_pair("past.{i}", _FLAT_SLOTS, "self-attention cache of all hypotheses of a sentence, zeroed at first:"),
        *_FLAT_CROSS,
    ),
    (
        *DECODER_STEP.outputs[:3],
        *_pair(
            "present.{i}",
            _FLAT_SLOTS,
            "`past` with the new slots written (give it the same buffer):",
            updates="past.{i}",
        ),
    ),
    dialect="ort-cuda",
)

ATTENTION = TensorSpec(
    "attention",
    "float32",
    ("layers", "rows", "heads", "src"),
    "cross-attention weights of the tokens fed, in every layer and head; 0 behind `src_len`",
)

ATTENTION_DIALECTS: tuple[Dialect, ...] = ("ort", "onnx24")


def attention_graphs_of(
    config: ModelConfig, precision: Precision = "float32", dialect: Dialect = "onnx24"
) -> tuple[GraphSpec, ...]:
    """The steps of `graphs_of` that also return their cross-attention; empty for dialects outside `ATTENTION_DIALECTS`."""
    if dialect not in ATTENTION_DIALECTS:
        return ()
    return tuple(
        replace(graph, role=ATTENTION_ROLES[graph.role], outputs=(*graph.outputs, ATTENTION))
        for graph in graphs_of(config, precision, dialect)
        if graph.role in ATTENTION_ROLES
    )


def graphs_of(
    config: ModelConfig, precision: Precision = "float32", dialect: Dialect = "onnx24"
) -> tuple[GraphSpec, ...]:
    """The graphs of an exported model with this config, with the tensors of all layers.

    The dialect `ort` is for decoding on a CPU, in float32 and quantized; `ort-cuda` is for decoding on a GPU. Classifiers
    have neither.
    """
    if dialect == "ort":
        wanted = not config.is_classifier and (precision == "float32" or precision in QUANTIZED)
        steps = (ORT_DECODER_STEP, ORT_BEAM_STEP, ORT_GREEDY_STEP) if groups_queries(config) else (ORT_BEAM_STEP,)
        roles = (ORT_ENCODER, *steps) if wanted else ()
    elif precision in QUANTIZED:
        roles = ()
    elif config.is_classifier:
        roles = () if dialect == "ort-cuda" else (ENCODER_CLASSIFIER,)
    elif dialect == "ort-cuda":
        roles = (CUDA_ENCODER, CUDA_DECODER_STEP, CUDA_BEAM_STEP)
    else:
        roles = (ENCODER, DECODER_STEP, SELECT_ROWS, *SEARCH_GRAPHS)
    return tuple(replace(expand(graph, config.n_decoder_layers, precision), dialect=dialect) for graph in roles)
