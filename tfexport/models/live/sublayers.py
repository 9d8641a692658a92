"""Parts that attentions and feed-forwards share: their results, their weights, and the features that they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tfexport.config import Activation
from tfexport.models.live.errors import NotCanonical
from tfexport.models.live.products import Graph, Product
from tfexport.models.live.tape import element_of, parents_of, values_of


@dataclass(frozen=True)
class Scaled:
    """A canonical tensor: `tensor * factor`. The tensor is exact where no arithmetic changes the user's numbers."""

    tensor: Tensor
    factor: float = 1.0

    @property
    def value(self) -> Tensor:
        return self.tensor if self.factor == 1.0 else self.tensor * self.factor


@dataclass(frozen=True, kw_only=True)
class Sublayer:
    """An attention or a feed-forward between two residual sums."""

    kind: Literal["self", "cross", "feed-forward"]
    first: Product
    """The first product that reads the sublayer's input."""
    last: Product
    """The product that computes its result."""
    output: Tensor
    """The result [length, d_model], with its bias."""
    weights: dict[str, Scaled]
    """By the name within the canonical sublayer, such as `query.weight`."""
    n_heads: int = 0
    head_dim: int = 0
    memory: Product | None = None
    """For an attention: the product that reads the states of the keys."""
    activation: Activation = "relu"
    gated: bool = False

    @property
    def place(self) -> str:
        return self.last.node.place


@dataclass(eq=False)
class Head:
    """Features of a product that a sublayer reads, such as the queries of a head."""

    product: Product
    columns: Tensor
    """The features [features] of the product's result."""
    values: Tensor
    """[length, features], as the sublayer reads them."""
    origin: Tensor

    @property
    def bias(self) -> Tensor:
        """The bias of the product for these features; zeros if it has none."""
        return torch.zeros(len(self.columns)) if self.product.bias is None else self.product.bias[self.columns]


def head_of(graph: Graph, origin: Tensor) -> Head:
    """The features of a product that elements with these origins [length, features] are.

    Raises:
        NotCanonical: they come from several products, or mix tokens.
    """
    elements = graph.back(origin, ("product",))
    parents = parents_of(elements)
    if len(parents) != 1:
        raise NotCanonical("the queries, keys or values of a head come from several projections")
    product = graph.products[parents.pop()]
    places = torch.empty(product.elements.numel(), dtype=torch.int64)
    places[element_of(product.elements).flatten()] = torch.arange(product.elements.numel())
    place = places[element_of(elements)]
    rows, columns = place // product.width, place % product.width
    tokens = torch.arange(len(rows))[:, None].expand_as(rows)
    if not torch.equal(rows, tokens) or bool((columns != columns[:1]).any()):
        raise NotCanonical("a sublayer mixes tokens or features before its arithmetic", product.node.place)
    return Head(product, columns[0], values_of(origin, graph.nodes), origin)


def added_bias(graph: Graph, product: Product) -> tuple[Tensor, Tensor]:
    """The result of a product and its bias, where the bias may be added in an operation of its own."""
    bias = torch.zeros(product.width) if product.bias is None else product.bias
    for node in graph.after(product.index, product.index + 4):
        vectors = [constant for constant in node.constants if constant.numel() == product.width]
        if node.op != "add" or len(vectors) != 1 or vectors[0].squeeze().dim() != 1 or len(node.active) != 1:
            continue
        origin = node.active[0].origin
        assert origin is not None
        if parents_of(origin) == {product.index}:
            own = vectors[0].reshape(-1)
            return product.output + own, own if product.bias is None else bias + own
    return product.output, bias


def plus(bias: Tensor, other: Tensor) -> Tensor:
    """A sum that keeps a vector exact if the other one is zero."""
    if bool((other == 0).all()):
        return bias
    return other if bool((bias == 0).all()) else bias + other


def columns_of(matrix: Tensor, columns: Tensor) -> Tensor:
    """Columns of a matrix; a view where they follow each other."""
    start = int(columns[0])
    if torch.equal(columns, torch.arange(start, start + len(columns))):
        return matrix[:, start : start + len(columns)]
    return matrix[:, columns]
