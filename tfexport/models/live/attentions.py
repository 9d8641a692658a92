"""Reads the attentions of a recorded forward, with their weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tfexport.models.live.errors import NotCanonical
from tfexport.models.live.fits import affine, is_close, score_factor
from tfexport.models.live.products import Graph, Product
from tfexport.models.live.sublayers import Head, Scaled, Sublayer, added_bias, columns_of, head_of, plus
from tfexport.models.live.tape import Input, Node, constants_in, element_of, parents_of, values_of

LEAST_MASK = 1000.0
"""Scores that are so far below the largest are masked. Additive masks are -10000 or lower, and random scores above -500."""


def read_attentions(graph: Graph, last: Product) -> list[Sublayer]:
    """The attentions before the product `last`.

    Raises:
        NotCanonical: a softmax does not belong to a plain scaled dot-product attention.
    """
    if not graph.softmaxes:
        raise NotCanonical("attention without PyTorch's softmax: use torch.softmax in place of exp, sum and a division")
    readers = _readers(graph)
    outputs = _outputs(graph)
    groups: dict[Product, list[tuple[Node, Node]]] = defaultdict(list)
    for softmax in graph.softmaxes:
        if softmax.index > last.index:
            continue
        mixing = readers.get(softmax.index)
        if mixing is None:
            raise NotCanonical("a softmax whose result multiplies no values", softmax.place)
        if mixing.index not in outputs:
            raise NotCanonical("an attention whose result no sum and no product reads", mixing.place)
        groups[outputs[mixing.index]].append((softmax, mixing))
    return [_attention(graph, output, pairs) for output, pairs in groups.items()]


def _readers(graph: Graph) -> dict[int, Node]:
    """The product of weights and values that reads each softmax."""
    readers: dict[int, Node] = {}
    for node in graph.matmuls:
        for operand in node.active:
            assert operand.origin is not None
            try:
                origin = graph.back(operand.origin, ("softmax",))
            except NotCanonical:
                continue
            for index in parents_of(origin):
                readers[index] = node
    return readers


def _outputs(graph: Graph) -> dict[int, Product]:
    """The output projection that reads each product of weights and values; without one, the identity."""
    outputs: dict[int, Product] = {}
    for node in graph.nodes:
        product = graph.products.get(node.index)
        read = [] if product is None else [product]
        if node.kind == "elementwise" and node.op == "add":  # the residual sum, if no projection was before
            read = [_identity(operand, node) for operand in node.active if operand.value.shape == node.value.shape]
        for reader in read:
            for end in graph.between(reader.origin).ends:
                if end.kind == "matmul" and end.index not in outputs and _is_of_heads(graph, reader):
                    outputs[end.index] = reader
    return outputs


def _is_of_heads(graph: Graph, reader: Product) -> bool:
    """Whether each element that a product reads is computed from one of the heads."""
    try:
        graph.back(reader.origin, ("matmul",))
    except NotCanonical:
        return False
    return True


def _identity(states: Input, node: Node) -> Product:
    """The input of an operation [.., d_model], as the result of a product with the identity."""
    assert states.origin is not None
    origin, values = (t.reshape(-1, t.shape[-1]) for t in (states.origin, states.value))
    before = replace(node, index=max(parents_of(origin), default=0))
    return Product(before, origin, values, torch.eye(values.shape[1], dtype=values.dtype), None, values, origin)


def _attention(graph: Graph, output: Product, pairs: Sequence[tuple[Node, Node]]) -> Sublayer:
    heads: dict[str, list[Head]] = {"query": [], "key": [], "value": []}
    factors, mixed = [], []
    for softmax, mixing in pairs:
        weights = _scores(graph, softmax)
        queries, keys = _heads(graph, weights.left), _heads(graph, weights.right)
        values, sums = _mixing(graph, softmax, mixing, weights)
        heads["query"] += queries
        heads["key"] += keys
        heads["value"] += values
        if not len(queries) == len(keys) == len(values) == len(weights.values):
            raise NotCanonical("an attention whose queries and keys have other numbers of heads", softmax.place)
        for weight, hidden, query, key in zip(weights.values, weights.hidden, queries, keys, strict=True):
            _check_hidden(hidden, softmax)
            factor = score_factor(weight, query.values @ key.values.T)
            if factor is None:
                raise NotCanonical(
                    "attention scores are not a constant times the products of queries and keys: a number for each "
                    "distance is added (ALiBi or relative positions), or scores are clipped",
                    softmax.place,
                )
            factors.append(factor)
        mixed += [*sums]
    if max(factors) - min(factors) > 1e-9 * abs(factors[0]):
        raise NotCanonical("heads with different factors of their scores", pairs[0][0].place)
    n_heads, head_dim = len(factors), heads["query"][0].values.shape[1]
    if any(head.values.shape[1] != side[0].values.shape[1] for side in heads.values() for head in side):
        raise NotCanonical("heads of different sizes", pairs[0][0].place)
    value_dim = heads["value"][0].values.shape[1]
    widest = max(head_dim, value_dim)
    parts = {name: _projection(graph, name, side) for name, side in heads.items()}
    scale = factors[0] * math.prod(part[1] for name, part in parts.items() if name != "value") * math.sqrt(widest)
    scale = 1.0 if abs(scale - 1) < 1e-9 else scale
    tensors: dict[str, Scaled] = {}
    for name, (weight, taken, bias) in parts.items():
        factor = {"query": scale, "key": 1.0}.get(name, taken)
        size = value_dim if name == "value" else head_dim
        tensors[f"{name}.weight"] = Scaled(_widened_heads(weight, size, widest), factor)
        # The bias of keys and queries was divided by the factor that went into the scale.
        tensors[f"{name}.bias"] = Scaled(_widened_heads(bias, size, widest), factor)
    result, bias = added_bias(graph, output)
    matrix, extra = _mixed(graph, output, mixed)
    tensors["output.weight"] = Scaled(_widened_heads(matrix, value_dim, widest).T)
    tensors["output.bias"] = Scaled(bias if extra is None else bias + extra)
    first, memory = heads["query"][0].product, heads["key"][0].product
    for side, states in (("query", first), ("key", memory), ("value", memory)):
        for head in heads[side]:
            # By value: user code may compute the same norm again for queries, keys and values.
            if not is_close(head.product.states, states.states):
                raise NotCanonical("the projections of an attention read different states", head.product.node.place)
    is_self = first.length == memory.length and is_close(first.states, memory.states)
    return Sublayer(
        kind="self" if is_self else "cross",
        first=first,
        last=output,
        output=result,
        weights=tensors,
        n_heads=n_heads,
        head_dim=widest,
        memory=memory,
    )


def _widened_heads(rows: Tensor, size: int, wanted: int) -> Tensor:
    """Rows of heads of a size, with zeros up to the size that is wanted: they change neither scores nor sums."""
    if size == wanted:
        return rows
    heads = rows.reshape(-1, size, *rows.shape[1:])
    zeros = torch.zeros(len(heads), wanted - size, *rows.shape[1:], dtype=rows.dtype)
    return torch.cat([heads, zeros], 1).flatten(0, 1)


@dataclass(frozen=True)
class _Weights:
    """The weights of an attention, in the order of the product of its queries and keys."""

    values: Tensor
    """[heads, queries, keys]"""
    hidden: Tensor
    """Whether a mask hides a key, [heads, queries, keys]."""
    left: Tensor
    """Origins of the queries [heads, queries, head_dim]."""
    right: Tensor
    """Origins of the keys [heads, keys, head_dim]."""


def _scores(graph: Graph, softmax: Node) -> _Weights:
    """The weights of a softmax. Its axes may have any order, as in `einsum("ibhd,jbhd->ijbh")`."""
    (scores_operand,) = softmax.active
    assert scores_operand.origin is not None
    origin = graph.back(scores_operand.origin, ("matmul",))
    parents = parents_of(origin)
    if len(parents) != 1:
        raise NotCanonical("scores of several products are joined before their softmax", softmax.place)
    node = graph.nodes[parents.pop()]
    left, right = (operand.origin.reshape(-1, *operand.origin.shape[-2:]) for operand in node.active)  # type: ignore[union-attr]
    places = element_of(origin).flatten()
    if len(places) != node.value.numel() or not torch.equal(places.sort().values, torch.arange(len(places))):
        raise NotCanonical("scores are left out or repeated before their softmax", softmax.place)
    shape = len(left), left.shape[1], right.shape[2]

    def in_order(tensor: Tensor) -> Tensor:
        ordered = torch.empty(len(places), dtype=tensor.dtype)
        ordered[places] = tensor.flatten()
        return ordered.view(shape)

    values, scores = in_order(softmax.value), in_order(scores_operand.value)
    queries, keys = left, right.mT
    if not is_close(values.sum(-1), torch.ones(shape[:2])):  # the product has keys in its rows
        values, scores = values.mT, scores.mT
        queries, keys = keys, queries
    if not is_close(values.sum(-1), torch.ones(values.shape[:2])):
        raise NotCanonical("a softmax over another axis than that of the keys", softmax.place)
    hidden = scores < scores.amax(-1, keepdim=True) - LEAST_MASK
    return _Weights(values, hidden, queries, keys)


def _mixing(graph: Graph, softmax: Node, mixing: Node, weights: _Weights) -> tuple[list[Head], Tensor]:
    """The values that the weights of a softmax multiply, and the origins of the sums, for each head in their order."""
    sums = mixing.origin.reshape(-1, *mixing.value.shape[-2:])
    left, right = mixing.active
    if not _comes_from(graph, left, softmax):  # the transposed product, unless the weights were changed
        left, right, sums = _transposed(right), _transposed(left), sums.mT
    assert right.origin is not None
    is_plain = _comes_from(graph, left, softmax) and left.value.numel() == weights.values.numel()
    if not is_plain or not is_close(left.value.reshape(weights.values.shape), weights.values):
        raise NotCanonical("attention weights are changed or moved after their softmax", mixing.place)
    return _heads(graph, right.origin.reshape(-1, *right.origin.shape[-2:])), sums


def _comes_from(graph: Graph, operand: Input, softmax: Node) -> bool:
    """Whether an operand is the result of a softmax."""
    assert operand.origin is not None
    try:
        return parents_of(graph.back(operand.origin, ("softmax",))) == {softmax.index}
    except NotCanonical:
        return False


def _transposed(operand: Input) -> Input:
    assert operand.origin is not None
    return replace(operand, value=operand.value.mT, origin=operand.origin.mT)


def _heads(graph: Graph, origins: Tensor) -> list[Head]:
    """The features that each head reads; `origins` are [heads, length, head_dim]."""
    return [head_of(graph, origin) for origin in origins]


def _check_hidden(hidden: Tensor, softmax: Node) -> None:
    """Every query reads all keys, or all keys up to itself."""
    expected = torch.zeros_like(hidden)
    if bool(hidden.any()) and hidden.shape[0] == hidden.shape[1]:
        expected = torch.ones_like(hidden).triu(1)
    if not torch.equal(hidden, expected):
        raise NotCanonical(
            "an attention that does not read all earlier tokens, such as one over a window", softmax.place
        )


def _projection(graph: Graph, name: str, heads: Sequence[Head]) -> tuple[Tensor, float, Tensor]:
    """The matrix [heads * head_dim, d_model], the factor that multiplies its result, and the bias before that factor."""
    groups: list[list[Head]] = []
    for head in heads:
        if groups and groups[-1][0].product is head.product:
            groups[-1].append(head)
        else:
            groups.append([head])
    matrices, biases, fits = [], [], []
    for group in groups:
        product, columns = group[0].product, torch.cat([head.columns for head in group])
        nodes = graph.between(torch.stack([head.origin for head in group])).nodes
        fit = affine(product.output[:, columns], torch.cat([head.values for head in group], 1), constants_in(nodes))
        if fit is None:
            place = nodes[-1].place if nodes else product.node.place
            what = "are multiplied by numbers that differ between positions: rotary positions (RoPE)"
            raise NotCanonical(f"the {name} projections {what}, or are normalised", place)
        matrices.append(columns_of(product.weight, columns))
        biases.append((torch.cat([head.bias for head in group]), fit))
        fits.append(fit)
    scalars = {fit.scalar for fit in fits}
    factor = scalars.pop() if len(scalars) == 1 else None
    rows, vectors = [], []
    for matrix, (own, fit) in zip(matrices, biases, strict=True):
        rest = fit.factor if factor is None else torch.ones_like(fit.factor)
        rows.append(matrix.T if bool((rest == 1).all()) else matrix.T * rest[:, None])
        vectors.append(plus(own if bool((rest == 1).all()) else own * rest, fit.bias / (factor or 1.0)))
    joined = rows[0] if len(rows) == 1 else torch.cat(rows)
    return joined, 1.0 if factor is None else factor, vectors[0] if len(vectors) == 1 else torch.cat(vectors)


def _mixed(graph: Graph, output: Product, mixed: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """The matrix [heads * head_dim, d_model] of an output projection, for heads side by side, and a bias of their values."""
    origin = graph.back(output.origin, ("matmul",))
    places = {int(element): place for place, element in enumerate(origin[0].tolist())}
    rows = [places.get(int(element)) for head in mixed for element in head[0].tolist()]
    if None in rows or len(rows) != output.states.shape[1]:
        raise NotCanonical("an output projection that does not read all heads", output.node.place)
    fit = affine(values_of(origin, graph.nodes), output.states)
    if fit is None:
        raise NotCanonical("the heads of an attention are changed before its output projection", output.node.place)
    matrix = output.weight if fit.is_identity else output.weight * fit.factor[:, None]
    extra = None if bool((fit.bias == 0).all()) else fit.bias @ output.weight
    return columns_of(matrix.T, torch.tensor(rows)).T, extra
