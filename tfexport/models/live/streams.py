"""Reads the two stacks of a recorded forward: embeddings, positions, residual sums and norms, in their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tfexport.config import Side
from tfexport.models.live.errors import NotCanonical
from tfexport.models.live.fits import Affine, Norm, affine, as_written, fit_norm, fused_norm, is_close
from tfexport.models.live.products import Graph, Product
from tfexport.models.live.recording import of_side
from tfexport.models.live.sublayers import Scaled, Sublayer
from tfexport.models.live.tape import Node, constants_in

_ORDER = {"encoder": ("self", "feed-forward"), "decoder": ("self", "cross", "feed-forward")}
_NAMES = {"self": "self_attention", "cross": "cross_attention", "feed-forward": "feed_forward"}


@dataclass(frozen=True)
class Embedding:
    """The input of a stack: `scale * table[ids] + positions`."""

    table: Tensor
    scale: float
    positions: Tensor
    """The position vectors [length, d_model] of the recorded forward; zeros if there are none."""
    constant: Tensor | None
    """The same as the forward has it, before a factor; None if it is computed together with other operations."""
    factor: float
    """The factor of `constant`."""
    node: Node
    """The operation whose result is the sum."""
    step: int
    """Its place among the operations that depend on the ids of its side alone."""
    values: Tensor


@dataclass
class Stack:
    """A stack, as its forward computes it."""

    side: Side
    embedding: Embedding
    norm_first: bool
    n_layers: int
    embedding_norm: Norm | None = None
    final_norm: Norm | None = None
    norms: dict[str, Norm] = field(default_factory=dict)
    """By their canonical names, such as `layers.0.norms.1`."""
    tensors: dict[str, Scaled] = field(default_factory=dict)
    """The weights of the sublayers, by their canonical names within the stack."""


def rows_of(value: Tensor, d_model: int) -> Tensor | None:
    """A state of batch size 1 as [length, d_model]; None for another shape."""
    if value.dim() == 0 or value.numel() % d_model:
        return None
    if value.shape[-1] == d_model:
        return value.reshape(-1, d_model)
    squeezed = value.squeeze()
    return squeezed.mT if squeezed.dim() == 2 and squeezed.shape[0] == d_model else None


def read_stack(graph: Graph, other: Graph, side: Side, sublayers: Sequence[Sublayer], tail: Product) -> Stack:
    """Read a stack.

    Args:
        other: the same forward with other ids.
        sublayers: those of the stack, in their order.
        tail: the product that reads the result of the stack.

    Raises:
        NotCanonical: the stack is not one of residual sums with norms.
    """
    order = _ORDER[side]
    kinds = [sublayer.kind for sublayer in sublayers]
    if not sublayers or kinds != [*order] * (len(kinds) // len(order)):
        names = ", ".join(kinds) or "none"
        place = sublayers[0].place if sublayers else ""
        raise NotCanonical(f"the sublayers of the {side} are {names}, not {', '.join(order)} in each layer", place)
    embedding = _embedding(graph, other, side, sublayers[0])
    stack = Stack(side, embedding, norm_first=False, n_layers=len(kinds) // len(order))
    reader = _Reader(graph, stack, embedding.values, embedding.node.index)
    for number, sublayer in enumerate(sublayers):
        layer, within = divmod(number, len(order))
        after = sublayers[number + 1].first if number + 1 < len(sublayers) else tail
        reader.read(sublayer, f"layers.{layer}.norms.{within}", after, is_first=number == 0, is_last=after is tail)
        for part, tensor in sublayer.weights.items():
            stack.tensors[f"layers.{layer}.{_NAMES[sublayer.kind]}.{part}"] = tensor
    reader.finish(tail)
    return stack


def embedding_projections(graph: Graph, sublayer: Sublayer) -> list[int]:
    """The products between the embeddings and a sublayer: a matrix that each embedding is multiplied by (Lan et al. 2020,
    section 3.1), or the one that one-hot vectors are multiplied by."""
    ends = [end for end in graph.between(sublayer.first.origin).ends if end.kind == "product"]
    return [
        end.index
        for end in ends
        if {before.kind for before in graph.between(graph.products[end.index].origin).ends} == {"lookup"}
    ]


def _embedding(graph: Graph, other: Graph, side: Side, first: Sublayer) -> Embedding:
    """The embedding of a side. Values that two forwards with different ids share are positions."""
    lookups = [node for node in graph.lookups if node.sides == {side}]
    if not lookups:
        raise NotCanonical(f"the ids of the {side} are looked up in no table as they are")
    lookup, d_model = lookups[0], first.first.states.shape[1]
    table, start = lookup.constants[0], lookup
    both = lookup, other.nodes[lookup.index]
    before, again = (node.value.reshape(-1, table.shape[1]) for node in both)
    for index in embedding_projections(graph, first):
        weight, start = graph.products[index].weight, graph.nodes[index]
        table = weight if lookup.op == "one_hot" else table @ weight  # the matrix itself follows the parameters
        before, again = before @ weight, again @ weight
    if table.shape[1] != d_model:
        raise NotCanonical(f"embeddings of {table.shape[1]} numbers in a model of {d_model}", lookup.place)
    moves, last = before - again, None
    nodes = graph.between(first.first.origin).nodes
    for node in (start, *nodes):
        values, others = rows_of(node.value, d_model), rows_of(other.nodes[node.index].value, d_model)
        if values is None or others is None or values.shape != before.shape:
            continue
        scale = float(((values - others) * moves).sum() / (moves * moves).sum())
        scale = as_written(scale)
        if abs(scale) > 1e-12 and is_close(values - others, scale * moves):
            last = node, scale, values
    if last is None:
        raise NotCanonical(f"the {side} does not read its embeddings", lookup.place)
    node, scale, values = last
    step = of_side(graph.nodes, side).index(node)
    positions = values - scale * before
    if is_close(positions + values, values, 1e-12):
        return Embedding(table, scale, torch.zeros_like(positions), None, 1.0, node, step, values)
    for constant in constants_in(step for step in nodes if step.index <= node.index):
        rows = rows_of(constant, d_model) if constant.numel() == positions.numel() else None
        if rows is None:
            continue
        factor = float((rows * positions).sum() / (rows * rows).sum())
        factor = 1.0 if abs(factor - 1) < 1e-12 else factor
        if is_close(rows * factor, positions, 1e-12):
            return Embedding(table, scale, positions, rows, factor, node, step, values)
    return Embedding(table, scale, positions, None, 1.0, node, step, values)


class _Reader:
    """Follows the residual stream of a stack."""

    def __init__(self, graph: Graph, stack: Stack, state: Tensor, index: int):
        self.graph, self.stack = graph, stack
        self.state, self.index = state, index
        """The value of the stream, and the operation that computed it."""
        self.d_model = state.shape[1]

    def read(self, sublayer: Sublayer, name: str, after: Product, *, is_first: bool, is_last: bool) -> None:
        """Follow the stream over a sublayer, and name its norm."""
        if is_first:
            self._begin(sublayer, after)
        norm = self._norm_before(sublayer)
        if is_first:
            self.stack.norm_first = norm is not None
        elif (norm is not None) != self.stack.norm_first:
            what = "after a norm, others read sums" if norm is not None else "without a norm"
            raise NotCanonical(f"a sublayer reads the residual stream {what}", sublayer.place)
        total = self._sum(sublayer, after)
        self.state, self.index = rows_of(total.value, self.d_model), total.index  # type: ignore[assignment]
        if self.stack.norm_first:
            assert norm is not None
            self.stack.norms[name] = norm
        else:
            self._norm_after(sublayer, name, after, is_last=is_last)

    def _norm_before(self, sublayer: Sublayer) -> Norm | None:
        """The norm between the stream and a sublayer; None if there is none.

        Raises:
            NotCanonical: the sublayer reads something else.
        """
        states = sublayer.first.states
        if is_close(self.state, states):
            return None
        nodes = list(self.graph.after(self.index, sublayer.first.index))
        norm = self._norm(self.state, states, nodes)
        if norm is None:
            what = "neither the residual stream nor a norm of it, such as in parallel sublayers"
            raise NotCanonical(f"a sublayer of the {self.stack.side} reads {what}", sublayer.first.node.place)
        return norm

    def _norm(self, states: Tensor, values: Tensor, nodes: Iterable[Node]) -> Norm | None:
        """The norm of `states` whose result is `values`, computed in these operations."""
        nodes = list(nodes)
        for node in nodes:
            rows = rows_of(node.value, self.d_model)
            if rows is not None and is_close(rows, values) and (norm := fused_norm(states, node)) is not None:
                return norm
        return fit_norm(states, values, constants_in(nodes), nodes[-1].place if nodes else "")

    def _begin(self, sublayer: Sublayer, after: Product) -> None:
        """Follow the stream over a norm of the embeddings, if the first sum adds to one."""
        for node, stream, _ in self._sums(sublayer, after):
            if is_close(stream, self.state):
                return
            nodes = list(self.graph.after(self.index, node.index))
            if (norm := self._norm(self.state, stream, nodes)) is None:
                continue
            shapes = ((step.index, rows_of(step.value, self.d_model)) for step in nodes)
            self.index = next(index for index, rows in shapes if rows is not None and is_close(rows, stream))
            self.state, self.stack.embedding_norm = stream, norm
            return

    def _sum(self, sublayer: Sublayer, after: Product) -> Node:
        """The operation that adds a sublayer's result to the stream."""
        for node, stream, fit in self._sums(sublayer, after):
            if is_close(stream, self.state):
                _scale(sublayer, fit)
                return node
            if (other := affine(self.state, stream)) is not None and other.scalar is not None:
                raise NotCanonical(f"the residual stream is multiplied by {other.scalar:g} (DeepNorm)", node.place)
        raise NotCanonical(
            f"the result of a sublayer of the {self.stack.side} is not added to what it read", sublayer.place
        )

    def _sums(self, sublayer: Sublayer, after: Product) -> Iterator[tuple[Node, Tensor, Affine]]:
        """The sums of a sublayer's result and a state, that state, and what happened to the result before."""
        for node in self.graph.after(sublayer.last.index, after.index):
            active = [rows_of(operand.value, self.d_model) for operand in node.active]
            if node.op != "add" or len(active) != 2:
                continue
            total = rows_of(node.value, self.d_model)
            for stream, branch in (active, active[::-1]):
                if stream is None or branch is None or total is None or stream.shape != branch.shape:
                    continue
                if is_close(stream + branch, total):
                    fit = affine(sublayer.output, branch, constants_in(self._from(sublayer, node)))
                    if fit is not None:
                        yield node, stream, fit

    def _from(self, sublayer: Sublayer, node: Node) -> list[Node]:
        return list(self.graph.after(sublayer.last.index, node.index + 1))

    def _norm_after(self, sublayer: Sublayer, name: str, after: Product, *, is_last: bool) -> None:
        """Follow the stream over the norm of a residual sum."""
        nodes = list(self.graph.after(self.index, after.index))
        chosen: tuple[Norm, Tensor, int] | None = None
        for node in nodes:
            rows = rows_of(node.value, self.d_model)
            if rows is None or rows.shape != self.state.shape:
                continue
            norm = fused_norm(self.state, node) or fit_norm(self.state, rows, constants_in(nodes), node.place)
            if norm is None or (chosen is not None and chosen[0].has_parameters and not norm.has_parameters):
                continue
            chosen = norm, rows, node.index
            if not is_last and is_close(rows, after.states):
                break
        if chosen is None:
            raise NotCanonical("a residual sum is not normalised, nor was what the sublayer read", sublayer.place)
        self.stack.norms[name], self.state, self.index = chosen

    def finish(self, tail: Product) -> None:
        """The end of the stack: the stream, or a norm of it."""
        if is_close(self.state, tail.states):
            return
        nodes = list(self.graph.after(self.index, tail.index))
        norm = self._norm(self.state, tail.states, nodes) or self._scaled_norm(tail, nodes)
        if norm is None:
            what = f"what the {self.stack.side} returns is neither its residual stream nor a norm of it"
            raise NotCanonical(what, tail.node.place)
        self.stack.final_norm = norm

    def _scaled_norm(self, tail: Product, nodes: Sequence[Node]) -> Norm | None:
        """The norm of the stream times a factor, as before a tied output projection (Raffel et al. 2020)."""
        for node in nodes:
            rows = rows_of(node.value, self.d_model)
            fit = None if rows is None else affine(rows, tail.states)
            if rows is None or fit is None or fit.scalar is None or bool((fit.bias != 0).any()):
                continue
            if (norm := self._norm(self.state, rows, nodes)) is not None:
                return replace(norm, weight=norm.weight * fit.scalar, bias=norm.bias * fit.scalar)
        return None


def _scale(sublayer: Sublayer, fit: Affine) -> None:
    """Move a factor of a sublayer's result (LayerScale, Touvron et al. 2021) into its last product."""
    if fit.is_identity:
        return
    weight, bias = sublayer.weights["output.weight"], sublayer.weights["output.bias"]
    if fit.scalar is not None and bool((fit.bias == 0).all()):
        factor = fit.scalar
        sublayer.weights["output.weight"] = Scaled(weight.tensor, weight.factor * factor)
        sublayer.weights["output.bias"] = Scaled(bias.tensor, bias.factor * factor)
        return
    sublayer.weights["output.weight"] = Scaled(weight.value * fit.factor[:, None])
    sublayer.weights["output.bias"] = Scaled(bias.value * fit.factor + fit.bias)
