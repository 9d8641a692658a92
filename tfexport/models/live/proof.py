"""Compares the canonical model with the user's module, in float64, called as the user calls it.

Random sequences of several lengths, in padded batches, must give the same logits up to rounding of float64. Every id of both
vocabularies must have the same embedding and be hidden from no first attention. The largest length must work. A module that
deviates at none of these inputs passes: it is a test, though a hard one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, permutations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfexport.config import ModelConfig, Side
from tfexport.models.float64 import InFloat64
from tfexport.models.live.call import WorkingCall
from tfexport.models.live.errors import NotCanonical
from tfexport.models.live.ids import Ids
from tfexport.models.live.products import SOFTMAXES
from tfexport.models.live.recording import plain_operations, record_steps, record_until
from tfexport.models.live.sequences import (
    ROWS,
    Pairs,
    all_but_padding,
    of_each_id,
    of_each_length,
    of_several_lengths,
    random_pairs,
)
from tfexport.models.live.structure import Structure
from tfexport.models.live.tape import Node
from tfexport.models.model import empty_model
from tfexport.models.positions import PositionTable
from tfexport.models.transformer import Transformer

TOLERANCE = 1e-8
"""Largest difference of a logit; see `largest_difference`. Rounding stays below 1e-11; a wrong epsilon changes 1e-6."""
_LEAST_SHARE = 1e-30
"""Smallest probability that is compared."""
_SAMPLE = 512
"""Number of logits of a row that its spread is taken from."""
_CHUNK = 512
"""Number of ids whose embeddings are compared in one forward."""
_TOGETHER = 8
"""Number of batches that the canonical model computes in one padded batch. The module computes each by itself."""
_SHORT = 8
"""Number of ids up to which a message shows a sequence."""


@dataclass(frozen=True)
class Proof:
    """The result of a comparison."""

    sequences: int
    ids: int
    longest: tuple[int, int]
    """The largest lengths of sources and targets."""
    error: float
    """The largest difference of a logit; see `largest_difference`."""


class Difference(NotCanonical):
    """The canonical model computes something else than the module."""


def canonical_model(config: ModelConfig, weights: Mapping[str, Tensor], structure: Structure) -> Transformer:
    """The canonical model whose norms are those of the module: a folded norm differs by more than rounding of float64."""
    model = empty_model(config)
    assert isinstance(model, Transformer)
    model.load_state_dict(dict(weights), assign=True)
    if structure.norm_kind.startswith("std"):
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.LayerNorm):
                    setattr(parent, name, _DeviationNorm(child, structure.norm_kind == "std"))
    return model.eval()


class _DeviationNorm(nn.Module):
    """A norm that divides by standard deviation + eps. `LayerNorm` has its eps squared, and for the unbiased deviation its
    weight is already multiplied by sqrt((n - 1) / n)."""

    def __init__(self, folded: nn.LayerNorm, is_unbiased: bool):
        super().__init__()
        self.folded, self.is_unbiased = folded, is_unbiased

    def forward(self, states: Tensor) -> Tensor:
        size = states.shape[-1]
        factor = math.sqrt(size / (size - 1)) if self.is_unbiased else 1.0
        deviation = states.std(-1, keepdim=True, correction=int(self.is_unbiased))
        normed = (states - states.mean(-1, keepdim=True)) / (deviation + math.sqrt(self.folded.eps))
        return self.folded.weight * factor * normed + self.folded.bias


def prove(
    call: WorkingCall,
    model: Transformer,
    structure: Structure,
    ids: Ids,
    *,
    has_random_parameters: bool,
    reads_tokens: bool = False,
) -> Proof:
    """Compare the module with the canonical model.

    Args:
        has_random_parameters: whether the module has random parameters. Then masks are compared too: sharp attention of
            trained ones may underflow to 0, as a mask does. Otherwise the largest lengths are compared.
        reads_tokens: whether Python code of the module reads tokens, perhaps of the first sequence of a batch alone.

    Raises:
        Difference: they compute different values.
    """
    longest: dict[Side, int] = {"encoder": model.config.max_source_length, "decoder": model.config.max_target_length}
    cases, returns = list(of_several_lengths(model, ids, call)), structure.returns
    error = _compare(call, model, returns, cases)
    if not has_random_parameters:
        cases.append(random_pairs(model, ids, call, [longest["encoder"]], [longest["decoder"]]))
        error = max(error, _compare(call, model, returns, cases[-1:]))  # alone: others would be padded to its length
    for side, length in longest.items():
        _compare_ids(call, model, structure, ids, side, length=min(length, 64), masks=has_random_parameters)
    if has_random_parameters:
        _compare(call, model, returns, of_each_length(model, ids, call))
        _compare(call, model, returns, of_each_id(model, ids, alone=reads_tokens))
    sequences = sum(len(pairs.src) for pairs in cases)
    return Proof(sequences, sum(ids.sizes.values()), (longest["encoder"], longest["decoder"]), error)


def logits_of(model: Transformer, returns: str, pairs: Pairs) -> Tensor:
    """The result of the canonical model for pairs, in the form of the module's result; [batch, tgt, vocab]."""
    return _in_form(model(pairs.src, torch.tensor(pairs.src_lengths), pairs.tgt), returns)


def _in_form(logits: Tensor, returns: str) -> Tensor:
    """Logits in the form in which results are compared: probabilities by their logarithms."""
    return logits if returns == "logits" else logits.log_softmax(-1)


def largest_difference(
    reference: Tensor, ours: Callable[[Tensor], Tensor], pairs: Pairs, returns: str
) -> tuple[float, int]:
    """The largest difference of logits at real target tokens, and its row in [batch * tgt].

    It is relative to the size of the logit plus the spread of its row, the median distance from the median: a huge logit, as
    of an id that may not come, must not hide a difference of the others.

    Args:
        reference: [batch, tgt, vocab]
        ours: gives the rows [rows, vocab] with these indices in [batch * tgt].
    """
    error, place = 0.0, 0
    rows = pairs.is_real.flatten().nonzero()[:, 0]
    for part in torch.split(rows, ROWS):  # type: ignore[no-untyped-call]  # copies of all logits need much memory
        expected, actual = reference.flatten(0, 1)[part].double(), ours(part)
        if returns == "probabilities":  # very small ones underflow in float32
            expected, actual = expected.clamp(min=_LEAST_SHARE).log(), actual.clamp(min=math.log(_LEAST_SHARE))
        some = expected[:, :: max(1, expected.shape[1] // _SAMPLE)]
        spread = (some - some.median(1, keepdim=True).values).abs().median(1, keepdim=True).values
        spread = torch.where(spread.isfinite() & (spread > 0), spread, 1.0)
        difference = ((expected - actual).abs() / (spread + expected.abs())).amax(1).nan_to_num(math.inf)
        if difference.max() > error:
            error, place = float(difference.max()), int(part[difference.argmax()])
    return error, place


@torch.no_grad()
def _compare(call: WorkingCall, model: Transformer, returns: str, batches: Iterable[Pairs]) -> float:
    """The largest difference of logits in any of the batches.

    Raises:
        Difference: it is above `TOLERANCE`.
    """
    largest, remaining = 0.0, iter(batches)
    while group := list(islice(remaining, _TOGETHER)):
        for pairs, states in zip(group, _states(model, group), strict=True):
            with plain_operations():
                reference = call.call(pairs.src, pairs.tgt)
            error, place = largest_difference(reference, _logits(model, returns, states), pairs, returns)
            if error > TOLERANCE:
                raise Difference(f"the logits differ by {error:.1e} for {_described(pairs, place)}")
            largest = max(largest, error)
    return largest


def _states(model: Transformer, group: Sequence[Pairs]) -> Iterator[Tensor]:
    """The states [batch * tgt, d_model] of each batch, before logits, in float64; computed in one padded batch."""
    src, tgt = (
        torch.cat([F.pad(batch, (0, max(each.shape[1] for each in side) - batch.shape[1])) for batch in side])
        for side in ([pairs.src for pairs in group], [pairs.tgt for pairs in group])
    )
    lengths = torch.tensor([length for pairs in group for length in pairs.src_lengths])
    with InFloat64():
        states = model.states(src, lengths, tgt)
    for pairs, part in zip(group, torch.split(states, [len(pairs.src) for pairs in group]), strict=True):
        yield part[:, : pairs.tgt.shape[1]].flatten(0, 1)


def _logits(model: Transformer, returns: str, states: Tensor) -> Callable[[Tensor], Tensor]:
    """Gives the canonical model's logits of rows of `states`, in the form of the module's result."""

    def logits_of_rows(rows: Tensor) -> Tensor:
        with InFloat64():
            return _in_form(model.logits(states[rows]), returns)

    return logits_of_rows


def _described(pairs: Pairs, place: int) -> str:
    """The sequences at a row of logits in [batch * tgt], in words."""
    row = place // pairs.tgt.shape[1]
    source, target = pairs.src[row, : pairs.src_lengths[row]], pairs.tgt[row, : pairs.tgt_lengths[row]]
    is_padded = len(set(pairs.src_lengths)) > 1
    where = "in a padded batch" if is_padded else "in a batch" if len(pairs.src) > 1 else "alone"
    return f"{_named('source', source)} and {_named('target', target)}, {where}"


def _named(side: str, ids: Tensor) -> str:
    """A sequence in words."""
    return f"a {side} of {len(ids)} tokens" if len(ids) > _SHORT else f"the {side} {' '.join(map(str, ids.tolist()))}"


@torch.no_grad()
def _compare_ids(
    call: WorkingCall, model: Transformer, structure: Structure, ids: Ids, side: Side, *, length: int, masks: bool
) -> None:
    """Compare the embedding of every id of a side; with `masks`, also check that the first attention hides none.

    The forward ends there, so that a large vocabulary takes seconds.
    """
    step = structure.embeddings[side].step
    for part in torch.split(all_but_padding(ids, side), length if call.one_at_a_time else _CHUNK):  # type: ignore[no-untyped-call]
        batch = _in_rows(ids, side, part, length)
        pair = ids.with_other_side(side, batch)
        if masks:
            steps = record_until(call.call, *pair, side, lambda node: node.op in SOFTMAXES)
        else:
            steps = record_steps(call.call, *pair, side, step + 1)
        if len(steps) <= step:
            raise Difference(f"{batch.shape[1]} ids of the {side} are not looked up as fewer are")
        if masks:
            _check_masks(steps[-1], batch, side)
        ours, value = _embedded(model, side, batch), steps[step].value
        orders = [value.permute(order) for order in permutations(range(value.dim()))]
        references = [states for states in orders if states.shape == ours.shape]
        if not references:
            raise Difference(f"the operations on the ids of the {side} depend on the size of the batch")
        differences = ((states - ours).abs() > TOLERANCE * (1 + states.abs()) for states in references)
        wrong = min(differences, key=lambda difference: int(difference.sum())).any(-1)
        if bool(wrong.any()):
            raise Difference(f"the embedding of id {int(batch[wrong][0])} of the {side} differs")


def _in_rows(ids: Ids, side: Side, part: Tensor, length: int) -> Tensor:
    """All ids of `part` in rows [rows, length], some twice; after the first id of targets, if forward fixes it."""
    is_fixed = side == "decoder" and ids.start is not None
    width = length - 1 if is_fixed else length
    rows = -(-len(part) // width)
    batch = part.repeat(-(-rows * width // len(part)))[: rows * width].view(rows, width)
    return ids.with_start(side, F.pad(batch, (1, 0))) if is_fixed else batch


def _embedded(model: Transformer, side: Side, batch: Tensor) -> Tensor:
    """The sum of embeddings and positions, before any norm of it, in float64."""
    stack = model.encoder if side == "encoder" else model.decoder
    table = model.encoder.tokens.weight if side == "encoder" else model.target_table()
    with InFloat64():
        states = F.embedding(batch, table) * stack.scale
        if isinstance(stack.positions, PositionTable):
            states = states + stack.positions(torch.arange(batch.shape[1]))
        return states


def _check_masks(softmax: Node, batch: Tensor, side: Side) -> None:
    """Raise Difference if attention weights hide an id of a batch [rows, length], or do not hide later targets."""
    rows, length = batch.shape
    weights = softmax.value.movedim(softmax.args[1], -1)  # keys; heads, sequences and queries have any order
    axes = [axis for axis in reversed(range(weights.dim() - 1)) if weights.shape[axis] == length]
    orders = [weights.movedim(axis, -2).reshape(-1, length, length) > 0 for axis in axes]
    expected = torch.ones(length, length, dtype=torch.bool)
    if side == "decoder":
        expected = expected.tril()
    if any(bool((is_read == expected).all()) for is_read in orders):
        return
    hides = "an attention hides a token"
    if orders and len(orders[0]) % rows == 0:
        first, _, key = (orders[0] != expected).nonzero()[0].tolist()
        hides = f"an attention hides id {int(batch[first // (len(orders[0]) // rows), key])}"
    raise Difference(f"{hides} of the {side}, or reads what it should not")
