"""The anchors of a recorded forward: products with weights, products of two states, and softmaxes.

Between anchors there is only elementwise arithmetic, which `fits.py` identifies by its values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tfexport.models.live.errors import NotCanonical
from tfexport.models.live.recording import Recording
from tfexport.models.live.tape import ELEMENT_BITS, Input, Node, element_of, parents_of

_PRODUCTS = frozenset(("mm", "bmm", "matmul", "linear", "addmm", "baddbmm", "convolution", "mv"))
SOFTMAXES = frozenset(("_softmax", "_safe_softmax", "softmax"))


@dataclass(eq=False)
class Product:
    """`states @ weight + bias`, where only the states depend on the tokens."""

    node: Node
    origin: Tensor
    """Origins of the states [length, in]."""
    states: Tensor
    """Values of the states [length, in]."""
    weight: Tensor
    """The constant matrix [in, out]."""
    bias: Tensor | None
    """The constant vector [out] that the same operation adds."""
    output: Tensor
    """The result [length, out]."""
    elements: Tensor
    """The origins of the result's own elements [length, out]."""

    @property
    def index(self) -> int:
        return self.node.index

    @property
    def length(self) -> int:
        return len(self.states)

    @property
    def width(self) -> int:
        return self.weight.shape[1]


class Graph:
    """A recorded forward with its anchors."""

    def __init__(self, recording: Recording):
        self.recording = recording
        self.nodes = recording.nodes
        self.products: dict[int, Product] = {}
        """By the index of their operation."""
        self.matmuls: list[Node] = []
        self.softmaxes: list[Node] = []
        used = self._used()
        self.used = [self.nodes[index] for index in sorted(used)]
        """The operations that the result is computed from, in order."""
        self.lookups = [node for node in self.used if node.kind == "lookup"]
        for node in self.used:
            if node.op in _PRODUCTS:
                self._lift(node)
            elif node.op in SOFTMAXES:
                node.kind = "softmax"
                self.softmaxes.append(node)

    def _used(self) -> set[int]:
        """The indices of the operations that the result is computed from."""
        todo, used = [*parents_of(self.recording.origin)], set[int]()
        while todo:
            index = todo.pop()
            if index not in used:
                used.add(index)
                todo += self.nodes[index].parents
        return used

    def _lift(self, node: Node) -> None:
        operands, bias = [*node.inputs], None
        if node.op in ("addmm", "baddbmm"):
            bias, *operands = operands
            if not bias.is_constant and not all(operand.is_constant for operand in operands):
                raise NotCanonical("a product that is added to states in one operation", node.place)
        elif node.op in ("linear", "convolution") and len(operands) > 2:
            *operands, bias = operands
        states, weight = operands
        if states.is_constant == weight.is_constant:
            node.kind = "matmul"
            self.matmuls.append(node)
            return
        product = _convolution(node, states, weight) if node.op == "convolution" else _matrix(node, states, weight)
        if product is None:
            return  # a table that differs between tokens, such as that of rotary positions
        if bias is not None:
            if bias.value.numel() != product.width:
                raise NotCanonical("a product plus a matrix, in one operation", node.place)
            product.bias = bias.value.reshape(-1)
        node.kind = "product"
        self.products[node.index] = self._of_whole_states(product)

    def _of_whole_states(self, product: Product) -> Product:
        """A product of parts of states with one matrix, as of heads that share it, as a product of the whole states."""
        parents, places = parents_of(product.origin), element_of(product.origin)
        if len(parents) != 1:
            return product
        width = self.nodes[parents.pop()].value.shape[-1]
        tokens, starts = places // width, places[:, 0] % width
        order = (tokens[:, 0] * width + starts).argsort()
        parts = product.length // len(set(tokens[:, 0].tolist()))
        if parts == 1 or product.length % parts or bool((tokens != tokens[:, :1]).any()):
            return product

        def joined(rows: Tensor) -> Tensor:
            return rows[order].reshape(product.length // parts, -1)

        return replace(
            product,
            origin=joined(product.origin),
            states=joined(product.states),
            weight=torch.kron(torch.eye(parts, dtype=product.weight.dtype), product.weight.contiguous()),
            bias=None if product.bias is None else product.bias.repeat(parts),
            output=joined(product.output),
            elements=joined(product.elements),
        )

    def between(self, origin: Tensor, stop: Collection[str] = ("product", "matmul", "softmax", "lookup")) -> Between:
        """The elementwise operations between elements with these origins and the anchors before them."""
        todo, seen, ends = [*parents_of(origin)], set(), set()
        while todo:
            index = todo.pop()
            node = self.nodes[index]
            if node.kind in stop:
                ends.add(index)
            elif index not in seen:
                seen.add(index)
                todo += node.parents
        return Between([self.nodes[i] for i in sorted(seen)], [self.nodes[i] for i in sorted(ends)])

    def back(self, origin: Tensor, kinds: Collection[str]) -> Tensor:
        """The origins, in operations of these kinds, that elements are computed from, each from one.

        Raises:
            NotCanonical: an element is computed from several elements.
        """
        while True:
            parents = parents_of(origin)
            if bool((origin < 0).any()):
                raise NotCanonical("constants are joined to states", self._place(parents))
            if all(self.nodes[index].kind in kinds for index in parents):
                return origin
            before = origin.clone()
            for index in parents:
                node = self.nodes[index]
                if node.kind in kinds:
                    continue
                active = node.active
                if node.kind != "elementwise" or len(active) != 1 or active[0].value.shape != node.value.shape:
                    raise NotCanonical(self._several(node), node.place)
                mask = origin >> ELEMENT_BITS == index
                assert active[0].origin is not None
                before[mask] = active[0].origin.flatten()[element_of(origin[mask])]
            origin = before

    def leaves(self, origin: Tensor, stop: Collection[str] = ("product",)) -> list[Tensor]:
        """All origins in operations of these kinds that elements are computed from, where several may meet in one.

        Raises:
            NotCanonical: an operation mixes elements.
        """
        parents = parents_of(origin)
        if len(parents) != 1 or bool((origin < 0).any()):
            raise NotCanonical("states of several operations are joined", self._place(parents))
        node = self.nodes[parents.pop()]
        if node.kind in stop:
            return [origin]
        if node.kind != "elementwise":
            raise NotCanonical(f"{node.op} where elementwise arithmetic was expected", node.place)
        unique: list[Tensor] = []
        for operand in node.active:
            assert operand.origin is not None
            try:
                wide = operand.origin.expand(node.value.shape)
            except RuntimeError:
                raise NotCanonical(f"{node.op} mixes the elements of a state", node.place) from None
            for leaf in self.leaves(wide.flatten()[element_of(origin)], stop):
                if not any(torch.equal(leaf, other) for other in unique):
                    unique.append(leaf)
        return unique

    def _several(self, node: Node) -> str:
        """The description of an operation that reads several states where one was expected."""
        active = node.active
        if node.kind != "elementwise":
            return f"{node.op} where elementwise arithmetic was expected"
        if len(active) == 2:
            ends = [[end.index for end in self.between(operand.origin).ends] for operand in active]  # type: ignore[arg-type]
            if ends[0] and ends[0] == ends[1]:
                if node.op in ("add", "sub") and all(operand.value.shape == node.value.shape for operand in active):
                    return "queries or keys are turned by their positions: rotary positions (RoPE)"
                return "queries or keys are divided by their own size: QK-norm"
        if "norm" in node.op:
            return "queries or keys are normalised: QK-norm"
        return f"{node.op} of {len(active)} states where one factor for each element was expected"

    def _place(self, parents: Collection[int]) -> str:
        return self.nodes[max(parents)].place if parents else ""

    def after(self, start: int, end: int | None = None) -> Iterator[Node]:
        """The elementwise operations after `start`, before `end`."""
        return (node for node in self.nodes[start + 1 : end] if node.kind == "elementwise")


@dataclass(frozen=True)
class Between:
    """The operations between anchors."""

    nodes: Sequence[Node]
    ends: Sequence[Node]
    """The anchors before them."""


def _matrix(node: Node, states: Input, weight: Input) -> Product | None:
    """A product of matrices, or of a stack of matrices with one state, as of heads."""
    is_left = not states.is_constant  # states @ weight, not weight @ states
    if node.op == "linear":
        weight = Input(weight.value.T, weight.origin)
    active, constant = (states, weight) if is_left else (weight, states)
    assert active.origin is not None
    origin, values, matrix, output, elements = active.origin, active.value, constant.value, node.value, node.origin
    if not is_left:
        origin, values, matrix, output, elements = (t.mT for t in (origin, values, matrix, output, elements))
    if values.dim() == 3 and len(values) > 1:
        if matrix.dim() == 2 or bool((matrix == matrix[:1]).all()):
            origin, values, output, elements = (t.flatten(0, 1) for t in (origin, values, output, elements))
            matrix = matrix if matrix.dim() == 2 else matrix[0]
        elif bool((origin == origin[:1]).all()):
            origin, values = origin[0], values[0]
            matrix, output, elements = (t.transpose(0, 1).flatten(1) for t in (matrix, output, elements))
        else:
            return None
    sizes = [t.reshape(t.shape[-2:]) if t.numel() == t.shape[-2:].numel() else None for t in (origin, values, matrix)]
    if any(t is None for t in sizes) or output.dim() < 2:
        return None
    origin, values, matrix = sizes  # type: ignore[assignment]
    return Product(
        node, origin, values, matrix, None, output.reshape(output.shape[-2:]), elements.reshape(elements.shape[-2:])
    )


def _convolution(node: Node, states: Input, weight: Input) -> Product:
    if weight.value.shape[2:].numel() != 1 or states.is_constant or states.value.shape[0] != 1:
        raise NotCanonical(f"a convolution over {weight.value.shape[-1]} tokens", node.place)
    if weight.value.shape[1] != states.value.shape[1]:
        raise NotCanonical("a convolution in groups", node.place)
    assert states.origin is not None
    origin, values, output, elements = (
        t[0].flatten(1).T for t in (states.origin, states.value, node.value, node.origin)
    )
    return Product(node, origin, values, weight.value.flatten(1).T, None, output, elements)
