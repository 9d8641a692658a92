"""Runs a module's forward under a tape, to its end or to an operation."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from tfexport.config import Side
from tfexport.models.float64 import widened
from tfexport.models.live.errors import NotCanonical
from tfexport.models.live.tape import Node, Reached, Tape

Call = Callable[[Tensor, Tensor], Tensor]
"""Calls the user's module with `src_ids` [batch, src] and `tgt_ids` [batch, tgt]; returns logits, log-probabilities or
probabilities [batch, tgt, vocab]."""


@dataclass(frozen=True)
class Recording:
    """A recorded forward."""

    nodes: Sequence[Node]
    value: Tensor
    """The result."""
    origin: Tensor
    """The origins of the result."""


class _Float32Epsilon(TorchFunctionMode):
    """A mode in which an RMSNorm without eps has float32's, as in the user's program, and not float64's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.rms_norm, F.rms_norm):
            named = dict(zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)) | (kwargs or {})
            eps = torch.finfo(torch.float32).eps if named.get("eps") is None else named["eps"]
            return torch.rms_norm(named["input"], named["normalized_shape"], named.get("weight"), eps)
        return func(*args, **(kwargs or {}))


def eagerly() -> contextlib.AbstractContextManager[object]:
    """A context in which `torch.compile` compiles nothing. Only code that uses it has imported the compiler."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


@contextlib.contextmanager
def plain_operations() -> Iterator[None]:
    """A context in which attention is computed in separate operations, in float64. Compiled functions run uncompiled."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), eagerly(), sdpa_kernel(SDPBackend.MATH), widened(), _Float32Epsilon():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def record(call: Call, src_ids: Tensor, tgt_ids: Tensor) -> Recording:
    """Run the module once and record it.

    Raises:
        NotCanonical: the result does not depend on the tokens, or an operation cannot be followed.
    """
    try:
        with plain_operations(), Tape(src_ids, tgt_ids) as tape:
            value = call(src_ids, tgt_ids).detach()
    except NotCanonical:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        about = f"its forward fails for {src_ids.shape[1]} source and {tgt_ids.shape[1]} target tokens"
        raise NotCanonical(f"{about} ({' '.join(str(error).split())[:150]})") from error
    origin = tape.origin_of(value)
    if origin is None or not any(node.kind == "lookup" for node in tape.nodes):
        if tape.moved_lookup:
            raise NotCanonical(
                "the ids are packed, padded or moved before they are looked up in embeddings", tape.moved_lookup
            )
        raise NotCanonical("the result does not come from a lookup of the ids in embeddings")
    return Recording(tape.nodes, value, origin)


def record_until(
    call: Call, src_ids: Tensor, tgt_ids: Tensor, side: Side, until: Callable[[Node], bool]
) -> Sequence[Node]:
    """The operations that depend on the ids of one side alone, up to the first for which `until` is true.

    The forward ends there. Operations have no inputs that may be read.
    """
    with (
        plain_operations(),
        Tape(src_ids, tgt_ids, until=lambda node: node.sides == {side} and until(node)) as tape,
    ):
        try:
            call(src_ids, tgt_ids)
        except (Exception, SystemExit, Reached):
            if not tape.is_reached:  # else the user's code may have caught `Reached`, and ended in its own way
                raise
    return of_side(tape.nodes, side)


def record_steps(call: Call, src_ids: Tensor, tgt_ids: Tensor, side: Side, count: int) -> Sequence[Node]:
    """The first `count` operations that depend on the ids of one side alone; see `record_until`."""
    steps = itertools.count(1)
    return record_until(call, src_ids, tgt_ids, side, lambda node: next(steps) == count)


def of_side(nodes: Sequence[Node], side: Side) -> list[Node]:
    """The operations that depend on the ids of one side alone."""
    return [node for node in nodes if node.sides == {side}]
