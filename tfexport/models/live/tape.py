"""Records what a module's forward computes, and where each element of each tensor comes from.

`Tape` is a dispatch mode, so it sees every ATen operation, whatever Python code, hooks or functional calls led to it.
A tensor that depends on the tokens has an *origin*: for each of its elements, an int64 that names the operation and the
element of the result that it was copied from. Views, transposes, splits, concatenations and copies only move elements, so
they are done to the origins too and need no other treatment. All other tensors are constants: only their values matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tfexport.config import Side
from tfexport.models.dispatch import DispatchMode, line_of_user
from tfexport.models.live.errors import NotCanonical

Kind = Literal["elementwise", "lookup", "product", "matmul", "softmax"]

ELEMENT_BITS = 40
"""An origin is `node << ELEMENT_BITS | element`, with the index of the operation and of the element of its result."""
CONSTANT = -1
"""The origin of an element that does not depend on the tokens."""

MOVES = frozenset(
    [
        "cat",
        "clone",
        "copy_",
        "flip",
        "gather",
        "index",
        "index_put",
        "index_put_",
        "index_select",
        "repeat",
        "roll",
        "select_scatter",
        "slice_scatter",
        "stack",
        "take",
    ]
)
"""Operations that only move elements to new memory. Views share memory with their input and need no entry."""
_DATA = dict.fromkeys(("gather", "index", "index_select", "take"), (0,)) | dict.fromkeys(
    ("index_put", "index_put_"), (0, 2)
)
"""The arguments that these operations move; their other tensors are indices."""
MADE = frozenset(
    [
        "arange",
        "empty_like",
        "full_like",
        "new_empty",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones_like",
        "zeros_like",
        "_local_scalar_dense",
    ]
)
"""Operations whose result does not depend on the values of their inputs."""
_SCATTERS = frozenset(("scatter", "scatter_"))
_MOST_ONE_HOT = 8192
"""Largest vocabulary of one-hot vectors: the identity has the square of it."""
LOOKUPS = frozenset(("embedding", "index_select", "index"))


@dataclass(frozen=True)
class Input:
    """A tensor that an operation reads."""

    value: Tensor
    origin: Tensor | None
    """Origins of the elements, of the same shape; None for a constant."""

    @property
    def is_constant(self) -> bool:
        return self.origin is None


@dataclass(eq=False)
class Node:
    """An operation on tensors that depend on the tokens."""

    index: int
    op: str
    """The name of the ATen operation, such as `addmm`."""
    inputs: Sequence[Input]
    """The tensors that it reads, in the order of its arguments."""
    args: Sequence[Any]
    """All positional arguments, with None in place of tensors."""
    value: Tensor
    """The result."""
    place: str
    """The line of the user's code, such as `my_code.py, line 41`."""
    parents: set[int]
    """The indices of the operations that it reads."""
    sides: frozenset[Side]
    """The sides whose ids the result depends on. An operation keeps its place among those of one side alone up to the first
    product, for all sizes; its index does not, because PyTorch chooses the operations of products by sizes."""
    kind: Kind = "elementwise"

    @property
    def origin(self) -> Tensor:
        """The origins of the result's own elements."""
        return (torch.arange(self.value.numel()) | self.index << ELEMENT_BITS).view(self.value.shape)

    @property
    def active(self) -> list[Input]:
        """The inputs that depend on the tokens."""
        return [operand for operand in self.inputs if operand.origin is not None]

    @property
    def constants(self) -> list[Tensor]:
        """The floating-point inputs that do not depend on the tokens."""
        return [operand.value for operand in self.inputs if operand.is_constant and operand.value.is_floating_point()]


def parents_of(origin: Tensor) -> set[int]:
    """The indices of the operations that elements with these origins come from."""
    indices = (origin >> ELEMENT_BITS).flatten()
    if bool((indices == indices[:1]).all()):  # most tensors come from one operation, and `unique` sorts
        indices = indices[:1]
    return {index for index in torch.unique(indices).tolist() if index >= 0}


def element_of(origin: Tensor) -> Tensor:
    """The element within the result of the operation that an origin names."""
    return origin & ((1 << ELEMENT_BITS) - 1)


class Reached(BaseException):
    """Ends a forward that has computed everything that was wanted."""


@dataclass
class _Memory:
    """The origins of a storage, and a tensor that keeps its address from being used again."""

    origins: Tensor
    kept: Tensor = field(repr=False)


class Tape(DispatchMode):
    """Records a forward of batch size 1; see the module's docstring."""

    def __init__(self, src_ids: Tensor, tgt_ids: Tensor, *, until: Callable[[Node], bool] | None = None):
        """
        Args:
            src_ids, tgt_ids: int64 [batch, length]. The forward must get these tensors or views of them.
            until: end the forward after the first operation for which it is true.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: list[Node] = []
        self.until = until
        self.is_reached = False
        """Whether the last operation that was wanted is recorded."""
        self.moved_lookup = ""
        """The line that looks up ids in another order or number than that of the call."""
        self._memory: dict[int, _Memory] = {}
        self._one_hot: dict[int, Input] = {}
        """The ids of one-hot vectors, by their storage."""
        self._id_sizes: dict[Side, int] = {"encoder": src_ids.numel(), "decoder": tgt_ids.numel()}
        # Ids have origins as if they were results of two operations before all others: -2 and -3.
        for mark, ids in ((_SRC, src_ids), (_TGT, tgt_ids)):
            self._write(ids, (torch.arange(ids.numel()) | mark << ELEMENT_BITS).view(ids.shape))

    def origin_of(self, tensor: Tensor) -> Tensor | None:
        """The origins of the elements of a tensor; None if it is a constant."""
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        if memory is None:
            return None
        origins = memory.origins.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        if origins.numel() and bool(origins[(0,) * origins.dim()] != CONSTANT):  # saves reading all of a large tensor
            return origins
        return origins if bool((origins != CONSTANT).any()) else None

    def _write(self, tensor: Tensor, origins: Tensor | int) -> None:
        """Set the origins of the elements of a tensor."""
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None:
            size = storage.nbytes() // tensor.element_size()
            memory = self._memory[storage._cdata] = _Memory(torch.full((size,), CONSTANT), tensor)
        view = memory.origins.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        view.copy_(torch.as_tensor(origins))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        origins = {id(tensor): self.origin_of(tensor) for tensor in tensors}
        if all(origin is None for origin in origins.values()):
            return func(*args, **named)
        name, is_written = func._schema.name.split("::")[1], func._schema.is_mutable
        # Inputs are compared only in a whole forward; a long one that ends early has no memory for them.
        inputs = [_input(tensor, origins[id(tensor)], copied=self.until is None) for tensor in tensors]
        plain = [None if isinstance(leaf, Tensor) else leaf for leaf in args]
        result = func(*args, **named)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(tensor.is_complex() for tensor in results):
            raise NotCanonical("complex numbers, as in rotary positions (RoPE)", line_of_user())
        if not results or name in MADE:
            return result
        if not is_written and all(tensor.untyped_storage()._cdata in self._memory for tensor in results):
            return result  # a view
        floats = [operand for operand in inputs if operand.value.is_floating_point()]
        if name in LOOKUPS and results[0].is_floating_point() and all(operand.is_constant for operand in floats):
            self._look_up(name, inputs, plain, results[0])
        elif name.startswith("index_put") and origins[id(args[2])] is None:  # a mask: scores[hidden] = -inf
            self._node(name, inputs, plain, results[0])
        elif name in _SCATTERS and len(args) == 4 and args[3] == 1 and inputs[0].is_constant:
            self._one_hot[results[0].untyped_storage()._cdata] = inputs[-1]
            self._write(results[0], inputs[-1].origin.expand(results[0].shape))  # type: ignore[union-attr]
            self._look_up_one_hot(results[0], results[0])
        elif name in MOVES:
            self._move(func, name, args, named, results, origins)
        elif name == "_to_copy" and tensors[0].untyped_storage()._cdata in self._one_hot:
            self._look_up_one_hot(tensors[0], results[0])
        elif name == "_to_copy":
            if results[0].is_floating_point() or not tensors[0].is_floating_point():
                self._write(results[0], origins[id(tensors[0])])  # type: ignore[arg-type]
        elif name == "constant_pad_nd":
            moved = torch.ops.aten.constant_pad_nd.default(origins[id(tensors[0])], args[1], CONSTANT)
            self._write(results[0], moved)
        elif name in ("zero_", "fill_"):
            self._write(results[0], CONSTANT)
        elif any(not operand.is_constant for operand in floats):
            for number, tensor in enumerate(results):
                if tensor.is_floating_point():
                    self._node(f"{name}:{number}" if number else name, inputs, plain, tensor)
        return result

    def _node(
        self, op: str, inputs: Sequence[Input], args: Sequence[Any], result: Tensor, side: Side | None = None
    ) -> None:
        parents = set().union(*(parents_of(operand.origin) for operand in inputs if operand.origin is not None))
        sides = frozenset({side}) if side else frozenset().union(*(self.nodes[index].sides for index in parents))
        name, value, kind = op.removesuffix("_"), result.detach().clone(), "lookup" if side else "elementwise"
        if name == "div" and (scores := self._scores_of(inputs)) is not None:
            name, (inputs, args) = "_softmax", scores
        node = Node(len(self.nodes), name, inputs, args, value, line_of_user(), parents, sides, kind)  # type: ignore[arg-type]
        self.nodes.append(node)
        self._write(result, node.origin)
        if self.until is not None and self.until(node):
            self.is_reached = True
            raise Reached

    def _scores_of(self, inputs: Sequence[Input]) -> tuple[Sequence[Input], Sequence[Any]] | None:
        """The scores of a softmax that is written out as exp(scores) / sum(exp(scores)), and the arguments of a softmax."""
        if len(inputs) != 2:
            return None
        exp, total = self._whole(inputs[0]), self._whole(inputs[1])
        if exp is None or total is None or (exp.op, total.op) != ("exp", "sum") or len(total.args) < 2:
            return None
        if self._whole(total.inputs[0]) is not exp or len(total.args[1]) != 1:
            return None
        scores = exp.inputs[0]
        shifted = self._whole(scores)
        if shifted is not None and shifted.op == "sub":  # the largest score is subtracted, which changes nothing
            largest = self._whole(shifted.inputs[-1])
            if largest is not None and largest.op in ("amax", "max") and _is_same(largest.inputs[0], shifted.inputs[0]):
                scores = shifted.inputs[0]
        return [scores], [None, *total.args[1]]

    def _whole(self, operand: Input) -> Node | None:
        """The operation whose result, all of it in its order, an operand is; None if it is something else."""
        if operand.origin is None:
            return None
        parents = parents_of(operand.origin)
        node = self.nodes[parents.pop()] if len(parents) == 1 else None
        return node if node is not None and torch.equal(node.origin.flatten(), operand.origin.flatten()) else None

    def _look_up(self, op: str, inputs: Sequence[Input], args: Sequence[Any], result: Tensor) -> None:
        """A row of a constant table for each id."""
        ids = next(operand for operand in inputs if operand.origin is not None)
        assert ids.origin is not None
        sides: dict[int, Side] = {_SRC: "encoder", _TGT: "decoder"}
        # Forward may fix some, as the first one of targets. The proof finds any other that differs from the call's.
        marks = torch.unique(ids.origin[ids.origin != CONSTANT] >> ELEMENT_BITS).tolist()
        side = sides.get(marks[0]) if len(marks) == 1 else None
        if side is None or ids.value.numel() != self._id_sizes[side]:
            self.moved_lookup = line_of_user()
            return
        self._node(op, inputs, args, result, side)

    def _look_up_one_hot(self, vectors: Tensor, result: Tensor) -> None:
        """One-hot vectors of ids, as numbers: rows of the identity."""
        if result.is_floating_point() and result.shape[-1] <= _MOST_ONE_HOT:
            table = Input(torch.eye(result.shape[-1], dtype=result.dtype), None)
            ids = self._one_hot[vectors.untyped_storage()._cdata]
            self._look_up("one_hot", [table, ids], (), result)

    def _move(
        self, func: Any, name: str, args: Any, named: Any, results: Sequence[Tensor], origins: dict[int, Tensor | None]
    ) -> None:
        """Do to the origins what an operation did to the elements."""
        data = [args[place] for place in _DATA[name]] if name in _DATA else tree_leaves((args, named))
        moving = {id(leaf) for leaf in data if isinstance(leaf, Tensor)}

        def moved(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or id(leaf) not in moving:
                return leaf
            origin = origins[id(leaf)]
            return torch.full(leaf.shape, CONSTANT) if origin is None else origin.clone()

        new = func(*tree_map(moved, args), **tree_map(moved, named))
        for tensor, origin in zip(
            results, [leaf for leaf in tree_leaves(new) if isinstance(leaf, Tensor)], strict=True
        ):
            self._write(tensor, origin)


_SRC, _TGT = -2, -3


def _is_same(left: Input, right: Input) -> bool:
    return left.origin is not None and right.origin is not None and torch.equal(left.origin, right.origin)


def _input(value: Tensor, origin: Tensor | None, *, copied: bool) -> Input:
    if origin is None or not copied:
        return Input(value.detach(), origin)
    return Input(value.detach().clone(), origin.clone())  # either may be written over


def values_of(origin: Tensor, nodes: Sequence[Node]) -> Tensor:
    """The values of elements with these origins, as the operations computed them."""
    values = torch.zeros(origin.shape, dtype=torch.float64)
    for index in parents_of(origin):
        mask = origin >> ELEMENT_BITS == index
        values[mask] = nodes[index].value.flatten()[element_of(origin[mask])]
    return values


def constants_in(nodes: Iterable[Node]) -> list[Tensor]:
    """The constants that operations read, each once."""
    unique = {id(tensor): tensor for node in nodes for tensor in node.constants}
    return list(unique.values())
