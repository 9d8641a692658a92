"""Finds the logits among what a user's module returns."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn


def logits_of_run(module: nn.Module, run: Callable[[], Any], shape: tuple[int, ...], vocab: int | None) -> Tensor:
    """The logits [*shape, vocab] among what `run` returns.

    A projection that did not run is applied, such as `generator` of The Annotated Transformer.

    Args:
        vocab: the number of logits, if it is known.

    Raises:
        ValueError: it returns no logits, or several tensors that may be the logits.
    """
    ran: set[int] = set()
    projected: list[Tensor] = []

    def note(part: nn.Module, inputs: Any, result: Any) -> None:
        ran.add(id(part))
        if isinstance(part, nn.Linear):
            projected[:] = [result]

    handles = [part.register_forward_hook(note) for part in module.modules()]
    with contextlib.ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        returned = run()
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    sizes = {part.num_embeddings for part in embeddings} if vocab is None else {vocab}
    result = _among(returned, shape, sizes)
    # States may be as wide as a vocabulary is large. Then logits are what the last Linear gave.
    may_be_states = result.shape[-1] in {part.embedding_dim for part in embeddings}
    if result.shape[-1] not in sizes or (may_be_states and not any(result is last for last in projected)):
        children = [child for child in module.children() if any(True for _ in child.parameters())]
        idle = [child for child in children if not any(id(part) in ran for part in child.modules())]
        # An embedding that did not run may be read by its matrix alone. Lists of parameters or modules never run.
        if len(idle) == 1 and type(idle[0]).forward is not nn.Module.forward and not isinstance(idle[0], nn.Embedding):
            with contextlib.suppress(Exception):  # a leftover layer, or a loss, does not take states
                result = idle[0](result)
    return result.view(*shape, -1) if result.dim() == 2 and len(result) == math.prod(shape) else result


def _among(result: Any, shape: tuple[int, ...], sizes: Collection[int]) -> Tensor:
    """The logits among what a module returns."""
    if isinstance(result, Tensor):
        return result
    named = result.get("logits") if isinstance(result, Mapping) else getattr(result, "logits", None)
    if isinstance(named, Tensor):
        return named
    values = list(result.values()) if isinstance(result, Mapping) else list(result)
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    rows = math.prod(shape)
    signs: tuple[Callable[[Tensor], bool], ...] = (
        lambda tensor: tensor.dim() in (2, 3),
        lambda tensor: tensor.shape[-1] in sizes,
        lambda tensor: tuple(tensor.shape[:-1]) == shape or (tensor.dim() == 2 and len(tensor) == rows),
    )
    for is_likely in signs:
        tensors = [tensor for tensor in tensors if is_likely(tensor)] or tensors
    if not tensors:
        raise ValueError(f"it returns {type(result).__name__} without logits")
    if len(tensors) > 1:
        raise ValueError(f"it returns {len(tensors)} tensors that may be the logits: let `call` return one")
    return tensors[0]
