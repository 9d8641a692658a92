"""The model that a forward computes: the fields of `ModelConfig` that follow from it, and its canonical tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tfexport.config import Side
from tfexport.models.live.attentions import read_attentions
from tfexport.models.live.errors import NotCanonical
from tfexport.models.live.feed_forwards import read_feed_forwards
from tfexport.models.live.fits import Norm, NormKind, affine, exact, is_close
from tfexport.models.live.products import Graph, Product
from tfexport.models.live.recording import Call, record
from tfexport.models.live.streams import Embedding, Stack, embedding_projections, read_stack
from tfexport.models.live.sublayers import Scaled, Sublayer
from tfexport.models.live.tape import Node, constants_in

SOURCE, TARGET = 7, 5
"""Lengths of the recorded forward. They differ, so that no axis can be taken for another one."""
_ORDERS = {False: "post-norm", True: "pre-norm"}


@dataclass(frozen=True)
class Structure:
    """A model as its forward computes it."""

    fields: Mapping[str, Any]
    """Fields of `ModelConfig`, without lengths, special ids and biases."""
    tensors: Mapping[str, Scaled]
    """Canonical tensors by name, in float64, without position tables. Biases are there also where they are zero."""
    embeddings: Mapping[Side, Embedding]
    norm_kind: NormKind
    returns: str
    """The kind of the module's result: logits, log-probabilities or probabilities."""
    notes: Sequence[str]
    limits: Sequence[str] = ()
    """Operations that change values beyond a limit, which perhaps none reached, such as `clamp, my_code.py, line 41`."""


_LIMITS = frozenset(
    ["clamp", "clamp_min", "clamp_max", "hardtanh", "minimum", "maximum", "fmin", "fmax", "nan_to_num", "renorm"]
)


def read_structure(call: Call, ids: Callable[[int, int], Tensor]) -> Structure:
    """Read the model that a module computes.

    Args:
        call: calls the module, whose weights are float64.
        ids: gives random int64 ids [1, length] of a length and a seed, without special ids.

    Raises:
        NotCanonical: the canonical model cannot compute what the module computes.
    """
    graph = Graph(record(call, ids(SOURCE, 0), ids(TARGET, 1)))
    other = Graph(record(call, ids(SOURCE, 2), ids(TARGET, 3)))
    if [node.op for node in graph.nodes] != [node.op for node in other.nodes]:
        raise NotCanonical("the operations depend on the ids")
    last, output, returns = _output(graph)
    attentions = read_attentions(graph, last)
    used = {last.index} | {index for attention in attentions for index in _products_of(graph, attention)}
    used |= {index for attention in attentions for index in embedding_projections(graph, attention)}
    rest = [product for index, product in graph.products.items() if index not in used]
    sublayers = sorted([*attentions, *read_feed_forwards(graph, rest)], key=lambda sublayer: sublayer.last.index)
    crosses = [sublayer for sublayer in attentions if sublayer.kind == "cross"]
    if not crosses:
        raise NotCanonical("no attention of the decoder reads the encoder")
    memory = crosses[0].memory
    assert memory is not None
    for cross in crosses:
        _fold_memory(cross, memory)
    encoder = read_stack(graph, other, "encoder", [s for s in sublayers if s.last.length == SOURCE], memory)
    decoder = read_stack(graph, other, "decoder", [s for s in sublayers if s.last.length == TARGET], last)
    return replace(_assembled((encoder, decoder), sublayers, output, returns), limits=_limits(graph))


def _limits(graph: Graph) -> list[str]:
    nodes = [node for node in graph.used if node.op in _LIMITS]
    unused = [
        node for node in nodes if _has_two(node) or any(_is_same(node.value, operand.value) for operand in node.inputs)
    ]
    return list(dict.fromkeys(f"{node.op}, {node.place}" for node in unused))


def _has_two(node: Node) -> bool:
    """Whether a limit has two ends, of which one may act as an activation."""
    return len([bound for bound in node.args[1:] if bound is not None]) > 1 or len(node.inputs) > 2


def _is_same(value: Tensor, other: Tensor) -> bool:
    return value.shape == other.shape and torch.equal(value, other)


def _fold_memory(cross: Sublayer, memory: Product) -> None:
    """Let a cross-attention read `memory`, the states that the first one reads.

    Each layer may have a norm of the encoder's states. They differ by a factor and a bias for each feature alone.

    Raises:
        NotCanonical: it reads other states.
    """
    assert cross.memory is not None
    if is_close(cross.memory.states, memory.states):
        return
    fit = affine(memory.states, cross.memory.states)
    if fit is None:
        raise NotCanonical("layers of the decoder read different states of the encoder", cross.place)
    for name in ("key", "value"):
        weight, bias = cross.weights[f"{name}.weight"].value, cross.weights[f"{name}.bias"].value
        cross.weights[f"{name}.weight"] = Scaled(weight * fit.factor)
        cross.weights[f"{name}.bias"] = Scaled(bias + weight @ fit.bias)


def _products_of(graph: Graph, attention: Sublayer) -> set[int]:
    """The indices of an attention's products: all that its input projections are."""
    ends: set[int] = {attention.last.index}
    mixed = graph.between(attention.last.origin, ("product", "lookup"))
    return ends | {end.index for end in mixed.ends}


def _output(graph: Graph) -> tuple[Product, dict[str, Scaled], str]:
    """The last product, the tensors of the output projection, and what the module returns."""
    recording = graph.recording
    values = recording.value.reshape(TARGET, -1)
    between = graph.between(recording.origin, ("product", "lookup"))
    if len(between.ends) != 1 or between.ends[0].kind != "product":
        raise NotCanonical(
            "the result is not computed from one last product", between.nodes[-1].place if between.nodes else ""
        )
    last = graph.products[between.ends[0].index]
    if last.length != TARGET or last.width != values.shape[1]:
        raise NotCanonical("the last product does not give logits for each token", last.node.place)
    weight, bias = Scaled(last.weight.T), torch.zeros(last.width) if last.bias is None else last.bias
    is_log = is_close(values.logsumexp(1), torch.zeros(TARGET))
    is_share = bool((values >= 0).all()) and is_close(values.sum(1), torch.ones(TARGET))
    returns = "log-probabilities" if is_log else "probabilities" if is_share else "logits"
    constants = constants_in(between.nodes)
    if returns == "logits":
        fit = affine(last.output, values, constants)
        if fit is None:
            raise NotCanonical("the logits are not the last product times a factor, plus a bias", last.node.place)
    else:
        logs = values if is_log else values.log()
        centred = [t - t.mean(1, keepdim=True) for t in (last.output, logs)]
        # A softmax hides what is added to all logits alike, so a bias is known up to its mean.
        fit = affine(centred[0], centred[1])
        if fit is not None and not bool((fit.bias == 0).all()):
            vectors = [constant for constant in constants if constant.numel() == last.width]
            own = [v.reshape(-1) for v in vectors if is_close(v.reshape(-1) - v.mean(), fit.bias, 1e-8)]
            fit = replace(fit, bias=own[0] if own else fit.bias)
        if fit is None:
            raise NotCanonical("the result is not a softmax of the last product", last.node.place)
    if fit.scalar is not None:
        weight = Scaled(weight.tensor, fit.scalar)
        bias = fit.bias if bool((bias == 0).all()) else bias * fit.scalar + fit.bias if not fit.is_identity else bias
    else:
        weight = Scaled(weight.tensor * fit.factor[:, None])
        bias = bias * fit.factor + fit.bias
    return last, {"output_weight": weight, "output_bias": Scaled(exact(bias, constants))}, returns


def _assembled(
    stacks: tuple[Stack, Stack],
    sublayers: Sequence[Sublayer],
    output: dict[str, Scaled],
    returns: str,
) -> Structure:
    """The config and the tensors of two stacks."""
    encoder, decoder = stacks
    norms = {f"{stack.side}.{name}": norm for stack in stacks for name, norm in _norms_of(stack).items()}
    kind, epsilons = _same_norms(norms)
    d_model = encoder.embedding.values.shape[1]
    if decoder.embedding.values.shape[1] != d_model:
        raise NotCanonical(f"states of {d_model} numbers in the encoder, of other width in the decoder")
    notes: list[str] = []
    tensors = {f"{stack.side}.{name}": tensor for stack in stacks for name, tensor in stack.tensors.items()}
    for name, norm in norms.items():
        # An unbiased deviation is larger than that of the population: the weight takes the factor.
        factor = ((d_model - 1) / d_model) ** 0.5 if kind == "std" else 1.0
        tensors[f"{name}.weight"] = Scaled(norm.weight, factor)
        if kind != "rms":
            tensors[f"{name}.bias"] = Scaled(norm.bias)
        elif bool((norm.bias != 0).any()):
            raise NotCanonical("an RMSNorm with a bias", norm.place)
    scale = decoder.embedding.scale
    for stack in stacks:
        factor = 1.0 if abs(stack.embedding.scale - scale) < 1e-9 * abs(scale) else stack.embedding.scale / scale
        tensors[f"{stack.side}.tokens.weight"] = Scaled(stack.embedding.table, factor)
    if scale < 0:
        raise NotCanonical(f"embeddings times {scale:g}", decoder.embedding.node.place)
    fields: dict[str, Any] = {
        "d_model": d_model,
        "n_encoder_layers": encoder.n_layers,
        "n_decoder_layers": decoder.n_layers,
        "src_vocab_size": len(encoder.embedding.table),
        "tgt_vocab_size": len(decoder.embedding.table),
        "norm_first": _agree("orders of norms", [(_ORDERS[stack.norm_first], "") for stack in stacks]) == _ORDERS[True],
        "norm": "rms" if kind == "rms" else "layer",
        **{name: eps**2 if kind.startswith("std") else eps for name, eps in epsilons.items()},
        "embedding_scale": scale,
    }
    for name in ("embedding_norm", "final_norm"):
        sides = [stack.side for stack in stacks if getattr(stack, name) is not None]
        fields |= {name: bool(sides), f"{name}_in": sides[0] if len(sides) == 1 else "both"}
    if output["output_weight"].tensor.shape[0] != fields["tgt_vocab_size"]:
        rows = output["output_weight"].tensor.shape[0]
        raise NotCanonical(f"{rows} logits for {fields['tgt_vocab_size']} embeddings of target tokens")
    fields |= _sizes(sublayers)
    for sublayer in sublayers:
        if any(name == "query.weight" and tensor.factor != 1.0 for name, tensor in sublayer.weights.items()):
            notes.append("the factor of attention scores is not 1 / sqrt(head size): folded into the queries")
            break
    if kind.startswith("std"):
        notes.append(
            f"norms divide by standard deviation + {epsilons['norm_eps']:g}: folded into a LayerNorm with eps "
            f"{fields['norm_eps']:g}, which differs from them by rounding of float32"
        )
    embeddings = {stack.side: stack.embedding for stack in stacks}
    return Structure(fields, tensors | output, embeddings, kind, returns, tuple(notes))


def _norms_of(stack: Stack) -> dict[str, Norm]:
    around = {"embedding_norm": stack.embedding_norm, "norm": stack.final_norm}
    return {**stack.norms, **{name: norm for name, norm in around.items() if norm is not None}}


_EPSILONS = {"norm": "final_norm_eps", "embedding_norm": "embedding_norm_eps"}
"""The fields of the epsilons of norms outside of layers, by the last part of their names."""


def _same_norms(norms: Mapping[str, Norm]) -> tuple[NormKind, dict[str, float]]:
    """The kind of all norms, and the fields of their epsilons."""
    first = next(iter(norms.values()))
    epsilons: dict[str, float] = {}
    for name, norm in norms.items():
        if norm.kind != first.kind:
            raise NotCanonical(f"norms of two kinds: {first.kind} and {norm.kind} ({name})", norm.place)
        eps = epsilons.setdefault(_EPSILONS.get(name.rpartition(".")[2], "norm_eps"), norm.eps)
        if not _is_same_eps(norm.eps, eps):
            raise NotCanonical(f"norms with two epsilons: {eps:g} and {norm.eps:g} ({name})", norm.place)
    others = {name: eps for name, eps in epsilons.items() if not _is_same_eps(eps, epsilons["norm_eps"])}
    return first.kind, {"norm_eps": epsilons["norm_eps"], **others}


def _is_same_eps(eps: float, other: float) -> bool:
    """Whether two epsilons are the same, up to the error of one that follows from a norm that is written out."""
    return abs(eps - other) <= 1e-3 * other


def _sizes(sublayers: Sequence[Sublayer]) -> dict[str, Any]:
    """Heads, sizes and activation of all sublayers."""
    attentions = [sublayer for sublayer in sublayers if sublayer.kind != "feed-forward"]
    forwards = [sublayer for sublayer in sublayers if sublayer.kind == "feed-forward"]
    inner = [(s, s.first.length == SOURCE and s.kind == "self") for s in attentions]
    heads = _agree("heads of the decoder", [(s.n_heads, s.place) for s, is_encoder in inner if not is_encoder])
    others = _agree("heads of the encoder", [(s.n_heads, s.place) for s, is_encoder in inner if is_encoder])
    width = _agree("sizes of all heads", [(s.n_heads * s.head_dim, s.place) for s in attentions])
    d_model = attentions[0].first.states.shape[1]
    fields = {
        "n_heads": heads,
        "d_head": 0 if width == d_model else width // heads,
        "d_ff": max(len(s.weights["hidden.bias"].tensor) for s in forwards),
        "activation": _agree("activations", [(s.activation, s.place) for s in forwards]),
        "gated": _agree("gates", [(s.gated, s.place) for s in forwards]),
    }
    return fields | ({} if others == heads else {"n_encoder_heads": others})


def _agree(what: str, values: Sequence[tuple[Any, str]]) -> Any:
    """The value that all have."""
    first = values[0][0]
    for value, place in values:
        if value != first:
            raise NotCanonical(f"layers with different {what}: {first} and {value}", place)
    return first
