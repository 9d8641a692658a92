"""Reads the feed-forwards of a recorded forward, with their weights and activation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product as pairs_of

from torch import Tensor

from tfexport.config import Activation
from tfexport.models.layers import ACTIVATIONS
from tfexport.models.live.errors import NotCanonical
from tfexport.models.live.fits import is_close, other_activation
from tfexport.models.live.products import Graph, Product
from tfexport.models.live.sublayers import Head, Scaled, Sublayer, added_bias, columns_of, head_of, plus
from tfexport.models.live.tape import Node


def read_feed_forwards(graph: Graph, products: Sequence[Product]) -> list[Sublayer]:
    """The feed-forwards that these products make, in pairs, or in threes with a gate.

    Raises:
        NotCanonical: a product belongs to none.
    """
    left = {product.index: product for product in products}
    sublayers = []
    for product in products:
        if product.index not in left:
            continue
        ends = {end.index for end in graph.between(product.origin).ends}
        if ends and ends <= left.keys() - {product.index}:
            hidden = [left[index] for index in sorted(ends)]
            sublayers.append(_feed_forward(graph, product, hidden))
            for done in (product, *hidden):
                left.pop(done.index)
    if left:
        for product in left.values():
            if {end.kind for end in graph.between(product.origin).ends} == {"lookup"}:
                raise NotCanonical("embeddings that are multiplied by a matrix (ALBERT's factors)", product.node.place)
        place = next(iter(left.values())).node.place
        what = "a product with a weight that belongs to" if len(left) == 1 else f"{len(left)} products that belong to"
        raise NotCanonical(f"{what} no attention, feed-forward or output projection", place)
    return sublayers


def _feed_forward(graph: Graph, output: Product, hidden: Sequence[Product]) -> Sublayer:
    leaves = [head_of(graph, leaf) for leaf in graph.leaves(output.origin)]
    nodes = graph.between(output.origin).nodes
    place = nodes[-1].place if nodes else output.node.place
    if len(leaves) > 2:
        raise NotCanonical("a feed-forward of more than two projections and a gate", place)
    matched = _match(leaves, nodes, output.states)
    if matched is None:
        is_gated = len(leaves) == 2
        what = "a gate of another kind" if is_gated else other_activation(leaves[0].values, output.states)
        raise NotCanonical(f"the activation of a feed-forward is not supported: {what}", place)
    name, parts = matched
    result, output_bias = added_bias(graph, output)
    weights = {"output.weight": Scaled(output.weight.T), "output.bias": Scaled(output_bias)}
    for role, (features, bias) in parts.items():
        weights[f"{role}.weight"] = Scaled(columns_of(features.product.weight, features.columns).T)
        weights[f"{role}.bias"] = Scaled(bias)
    return Sublayer(
        kind="feed-forward",
        first=hidden[0],
        last=output,
        output=result,
        weights=weights,
        activation=name,
        gated="gate" in parts,
    )


def _match(
    leaves: Sequence[Head], nodes: Sequence[Node], states: Tensor
) -> tuple[Activation, dict[str, tuple[Head, Tensor]]] | None:
    """The activation with `states = activation(hidden) * gate`, and hidden and gate with their biases."""
    if len(leaves) == 1:
        for values, bias in _with_biases(leaves[0], nodes):
            if (name := _activation(values, states)) is not None:
                return name, {"hidden": (leaves[0], bias)}
        return None
    for hidden, gate in (leaves, leaves[::-1]):
        for (values, bias), (factor, gate_bias) in pairs_of(_with_biases(hidden, nodes), _with_biases(gate, nodes)):
            if (name := _activation(values, states, factor)) is not None:
                return name, {"hidden": (hidden, bias), "gate": (gate, gate_bias)}
    return None


def _activation(values: Tensor, states: Tensor, factor: Tensor | float = 1.0) -> Activation | None:
    return next((name for name, module in ACTIVATIONS.items() if is_close(module()(values) * factor, states)), None)


def _with_biases(features: Head, nodes: Sequence[Node]) -> list[tuple[Tensor, Tensor]]:
    """Values that an activation may read, with their bias: the features of the product, or these plus a bias after it."""
    pairs = [(features.values, features.bias)]
    for node in nodes:
        for vector in node.constants:
            if node.op == "add" and vector.numel() == features.product.width:
                added = vector.reshape(-1)[features.columns]
                pairs.append((features.values + added, plus(features.bias, added)))
    return pairs
