"""Finds the first layer in which the canonical model differs from the module that its weights were trained in.

The names of a family determine which modules have the same weights. Their inputs and outputs are recorded in both models
for one sentence, and compared in the order of the canonical model's computation:

    canonical   encoder.layers.0.norms.0   ──>  input, output
    theirs      enc.0.ln1                  ──>  input, output

Everything before the first difference is right, so the cause is the computation between the two. Both models compute in
float64 if the user's module can (`models/float64.py`), so that a wrong eps is larger than rounding.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tfexport.errors import TfexportError
from tfexport.models.families.family import Family
from tfexport.models.float64 import widened
from tfexport.verification.probe_pairs import Model, Pair, pairs_of

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Largest relative difference (see `relative_error`) that passes. Different orders of summation in float64 cause 1e-13; an
eps of 1e-6 instead of 1e-5 causes about 1e-6."""

Sentence = tuple[Sequence[int], Sequence[int]]
"""Source ids, and target ids that begin with bos; a classifier has no target ids."""


def relative_error(wanted: Tensor, got: Tensor) -> float:
    """The largest difference, divided by the root mean square of `wanted` or by 1 if that is larger; NaN if any is NaN."""
    return float((wanted - got).abs().max() / max(1.0, wanted.square().mean().sqrt().item()))


@dataclass(frozen=True)
class Value:
    """One tensor of both models."""

    ours: str
    """The name in the canonical model, such as `output of encoder.layers.0.norms.0`."""
    theirs: str
    """The name in the user's module."""
    error: float
    hint: str
    """The usual cause if this is the first value that differs."""


@dataclass(frozen=True)
class Narrow:
    """Code that computes in float32 or less although its module is in float64."""

    place: str
    """The first place that requests it, such as `my_model.py, line 42`; `the code` if unknown, as for a default type."""
    effect: float | None
    """The largest change of a logit (`relative_error`); None if the code cannot run with float64 weights."""


@dataclass(frozen=True)
class Layers:
    """The result of the comparison."""

    values: tuple[Value, ...]
    """The values in the order of the canonical model's computation; the logits are the last."""
    tolerance: float
    dtype: torch.dtype
    narrow: Narrow | None = None
    """The user's code that computes in less than `dtype`, if any."""

    @property
    def logits(self) -> float:
        return self.values[-1].error

    @property
    def first(self) -> Value | None:
        """The first value that differs; None if the logits agree, whatever the other values are."""
        if self.logits <= self.tolerance:
            return None
        return next(value for value in self.values if not value.error <= self.tolerance)


def compare_layers(
    model: Model,
    user_module: nn.Module,
    family: Family,
    names: Sequence[str],
    sentences: Sequence[Sentence],
    tolerance: float | None = None,
) -> Layers:
    """Run both models on each sentence alone, whole targets at once.

    Args:
        user_module: the module of `family.reference`, with the weights of `model`.
        names: the names of the weights in the family.

    Raises:
        TfexportError: the user's module fails, or its logits have another shape.
    """
    pairs = pairs_of(model, user_module, family, names)
    for dtype in (torch.float64, torch.float32):
        try:
            return _compare(
                copy.deepcopy(model).to(dtype), copy.deepcopy(user_module).to(dtype), pairs, sentences, dtype, tolerance
            )
        except TfexportError:
            if dtype == torch.float32:
                raise
    raise AssertionError


def run_ours(model: Model, source: Tensor, lengths: Tensor, target: Tensor | None) -> Tensor:
    """The canonical model's logits; see `run_theirs`."""
    return model(source, lengths) if target is None else model(source, lengths, target)


def run_theirs(user_module: nn.Module, source: Tensor, target: Tensor | None) -> Tensor:
    """The user's logits [batch, tgt, vocab] for `source` [batch, src] and `target` [batch, tgt]; for a classifier, which
    takes only the source, [batch, classes].

    A module in float64 computes in float64 even if its code requests less.

    Raises:
        TfexportError: the module fails, or returns something else.
    """
    if not _is_double(user_module):
        return _run_as_written(user_module, source, target)
    with widened():
        return _run_as_written(user_module, source, target)


def _is_double(module: nn.Module) -> bool:
    return any(tensor.dtype == torch.float64 for tensor in module.parameters())


def _narrow(user_module: nn.Module, source: Tensor, target: Tensor | None) -> Narrow | None:
    """The place where the user's code computes in less than float64, for a module in float64."""
    with widened() as mode:
        exact = _run_as_written(user_module, source, target)
    try:
        effect = relative_error(exact, _run_as_written(user_module, source, target))
    except TfexportError:
        effect = None
    return None if effect == 0 else Narrow(next(iter(mode.places), "the code"), effect)


def _run_as_written(user_module: nn.Module, source: Tensor, target: Tensor | None) -> Tensor:
    """The user's logits; see `run_theirs`.

    Raises:
        TfexportError: the module fails, or returns something else.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    inputs, wanted = ((source,), source.shape[:1]) if target is None else ((source, target), target.shape)
    names = dict(zip(("src_ids", "tgt_ids"), (list(ids.shape) for ids in inputs), strict=False))
    shapes = ", ".join(f"{name} {shape}" for name, shape in names.items())
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # the fast path does not call modules within a layer
        with torch.no_grad():
            logits = user_module(*inputs)
    except Exception as error:
        raise TfexportError(
            f"the reference of the family file fails on {shapes}: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''} Let its forward take "
            f"{'these two' if len(inputs) == 2 else 'this alone'}."
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    if not isinstance(logits, Tensor) or logits.shape[:-1] != wanted:
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        last = list(names)[-1]
        raise TfexportError(
            f"the reference of the family file gives {shape} of {last} {names[last]}. Let it give logits "
            f"{'[batch, classes]' if target is None else '[batch, tgt, vocab]'}."
        )
    return logits


def _compare(
    model: Model,
    user_module: nn.Module,
    pairs: Sequence[Pair],
    sentences: Sequence[Sentence],
    dtype: torch.dtype,
    tolerance: float | None,
) -> Layers:
    errors: dict[tuple[str, str], Value] = {}
    logits = 0.0
    for source, target in sentences:
        src_ids, tgt_ids = _tensors_of(source, target)
        with torch.no_grad(), _recorded(model, [pair.ours for pair in pairs]) as ours_seen:
            own_logits = run_ours(model, src_ids, torch.tensor([len(source)]), tgt_ids)
        with _recorded(user_module, [pair.theirs for pair in pairs]) as theirs_seen:
            wanted = run_theirs(user_module, src_ids, tgt_ids)
        for value in _values(pairs, ours_seen, theirs_seen):
            key = (value.ours, value.theirs)
            errors[key] = replace(value, error=_larger(errors.get(key, value).error, value.error))
        logits = _larger(
            logits, relative_error(wanted, own_logits) if wanted.shape == own_logits.shape else float("inf")
        )
    last = Value("logits", "logits", logits, "the output layer: tie_output, output_bias, or the final norm")
    chosen = TOLERANCE[dtype] if tolerance is None else tolerance
    longest = max(sentences, key=lambda sentence: len(sentence[1]))
    narrow = _narrow(user_module, *_tensors_of(*longest)) if dtype == torch.float64 else None
    return Layers((*errors.values(), last), chosen, dtype, narrow)


def _tensors_of(source: Sequence[int], target: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Ids as tensors [1, src] and [1, tgt]; a classifier has no target."""
    return torch.tensor([source]), torch.tensor([target]) if target else None


def _larger(left: float, right: float) -> float:
    """The larger of two errors; NaN counts as the largest."""
    return float(np.maximum(left, right))


Event = tuple[str, str, int, Tensor]
"""The path of a module, `input` or `output`, the number of the call, and the tensor [tokens, width]."""


@contextmanager
def _recorded(model: nn.Module, paths: Sequence[str]) -> Iterator[list[Event]]:
    """Record the inputs and outputs of modules, in the order of their computation."""
    events: list[Event] = []
    calls: dict[str, int] = defaultdict(int)

    def before(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            add(path, "input", (*inputs, *named.values()))

        return hook

    def after(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], made: Any) -> None:
            add(path, "output", made if isinstance(made, tuple | list) else (made,))
            calls[path] += 1

        return hook

    def add(path: str, side: str, values: Sequence[Any]) -> None:
        tensor = next((v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim() > 1), None)
        if tensor is not None:
            events.append((path, side, calls[path], tensor.flatten(0, -2)))

    handles = []
    for path in dict.fromkeys(paths):
        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True))
        handles.append(module.register_forward_hook(after(path), with_kwargs=True))
    try:
        yield events
    finally:
        for handle in handles:
            handle.remove()


def _values(pairs: Sequence[Pair], ours: Sequence[Event], events: Sequence[Event]) -> Iterator[Value]:
    by_path: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    for path, side, _, tensor in events:
        by_path[path, side].append(tensor)
    counts = {(path, side): call + 1 for path, side, call, _ in ours}
    called = {path for path, _ in by_path}
    of_ours = {pair.ours: pair for pair in pairs}
    seen_stacks: set[str] = set()
    for path, side, call, tensor in ours:
        pair = of_ours[path]
        if pair.whole and any(other.theirs in called for other in pairs if other.ours == f"{path}.output"):
            continue
        calls = by_path[pair.theirs, side]
        if len(calls) == counts[path, side]:
            calls = calls[
                call : call + 1
            ]  # otherwise the user's module is called more often, and the matching call is unknown
        candidates = [
            part for part in (_part(candidate, pair, side) for candidate in calls) if part.shape == tensor.shape
        ]
        if not candidates:
            continue
        error = min(relative_error(candidate, tensor) for candidate in candidates)
        stack = path.partition(".")[0]
        starts = side == "input" and stack not in seen_stacks and "cross_attention" not in path
        seen_stacks |= {stack} if starts else set()
        number = f", call {call + 1}" if counts[path, side] > 1 else ""
        part = f" (part {pair.part + 1} of {pair.parts})" if pair.parts > 1 and side == "output" else ""
        yield Value(
            f"{side} of {path}{number}",
            f"{side} of {pair.theirs}{part}{number}",
            error,
            _hint(path, side, starts, pair),
        )


def _part(tensor: Tensor, pair: Pair, side: str) -> Tensor:
    if side == "output" and pair.parts > 1 and tensor.shape[-1] % pair.parts == 0:
        return tensor.chunk(pair.parts, -1)[pair.part]
    return tensor


def _hint(path: str, side: str, starts: bool, pair: Pair) -> str:
    last = path.rpartition(".")[2]
    if starts:
        exchanged = ", or attentions exchanged" if path.startswith("decoder") else ""
        return f"the input of the first layer: embedding_scale, positions, position_offset; or norm_first{exchanged}"
    if (pair.whole and side == "output") or ("attention.output" in path and side == "input"):
        heads = "n_heads, n_encoder_heads" if path.startswith("encoder") else "n_heads"
        return f"the attention: {heads}, which of its matrices is query, key and value, or a mask"
    if "feed_forward.output" in path and side == "input":
        return "the feed-forward: activation, gated"
    if "norm" in path and side == "output":
        return "the norm: norm_eps, or another kind of norm"
    if "cross_attention" in path and side == "input" and last in ("key", "value"):
        return "the encoder's output: final_norm, final_norm_in"
    if side == "input":
        return "the computation before it: norm_first, norms in another order, or attentions exchanged"
    return "this weight: transposed, or that of another layer"
