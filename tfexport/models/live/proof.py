"""Compares the canonical model with the user's module, in float64, called as the user calls it.

Random sequences of several lengths, in padded batches, must give the same logits up to rounding of float64. Every id of both
vocabularies must have the same embedding and be hidden from no first attention. The largest length must work. A module that
deviates at none of these inputs passes: it is a test, though a hard one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

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
from tfexport.models.live.structure import Structure
from tfexport.models.live.tape import Node
from tfexport.models.model import empty_model
from tfexport.models.positions import PositionTable
from tfexport.models.transformer import Transformer

TOLERANCE = 1e-8
"""Largest difference of a logit, relative to 1 + its size. Rounding stays below 1e-11; a wrong epsilon changes 1e-6."""
_ROWS = 64
"""Number of rows of logits that are compared at once."""
_CHUNK = 512
"""Number of ids whose embeddings are compared in one forward."""
_SHORT = 8
"""Number of ids up to which a message shows a sequence."""
_EFFORT = 2e11
"""Multiplications that each of two checks with many short sequences may take. A small model gets all lengths and ids."""


@dataclass(frozen=True)
class Proof:
    """What was compared."""

    sequences: int
    ids: int
    longest: tuple[int, int]
    """The largest lengths of sources and targets."""
    error: float
    """The largest difference of a logit, relative to 1 + its size."""


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
    call: WorkingCall, model: Transformer, structure: Structure, ids: Ids, *, has_random_parameters: bool
) -> Proof:
    """Compare the module with the canonical model.

    Args:
        has_random_parameters: whether the module has random parameters. Then masks are compared too: sharp attention of
            trained ones may underflow to 0, as a mask does. Otherwise the largest lengths are compared.

    Raises:
        Difference: they compute different values.
    """
    longest = {"encoder": model.config.max_source_length, "decoder": model.config.max_target_length}
    cases = _CASES if has_random_parameters else [*_CASES, ([longest["encoder"]], [longest["decoder"]])]
    error, sequences = 0.0, 0
    for source_lengths, target_lengths in cases:
        src_len = [min(length, longest["encoder"]) for length in source_lengths]
        tgt_len = [min(length, longest["decoder"]) for length in target_lengths]
        src, tgt = _batch(ids, "encoder", src_len, call), _batch(ids, "decoder", tgt_len, call)
        error = max(error, _compare(call, model, structure.returns, (src, src_len), (tgt, tgt_len)))
        sequences += len(src)
    for side in ("encoder", "decoder"):
        _compare_ids(call, model, structure, ids, side, length=min(longest[side], 64), masks=has_random_parameters)  # type: ignore[arg-type]
    if has_random_parameters:
        for src, tgt in (*_of_each_length(model, ids, call), *_of_each_id(model, ids)):
            ends = [src.shape[1]] * len(src), [tgt.shape[1]] * len(tgt)
            _compare(call, model, structure.returns, (src, ends[0]), (tgt, ends[1]))
    return Proof(sequences, sum(ids.sizes.values()), (longest["encoder"], longest["decoder"]), error)


def _of_each_length(model: Transformer, ids: Ids, call: WorkingCall) -> Iterator[tuple[Tensor, Tensor]]:
    """A source and a target of each length up to 64, or as long as `_EFFORT` allows."""
    most = min(64, model.config.max_source_length, model.config.max_target_length)
    for length in range(1, 1 + min(most, int((2 * _EFFORT / _size(model)) ** 0.5))):
        yield _batch(ids, "encoder", [length], call), _batch(ids, "decoder", [length], call)


def _of_each_id(model: Transformer, ids: Ids) -> Iterator[tuple[Tensor, Tensor]]:
    """Sources with each id in front, and targets with each id after bos, as in decoding; then few ids that repeat.

    Of a large model the lowest and the highest ids, where special ones are, as many as `_EFFORT` allows.
    """
    config, generator = model.config, torch.Generator().manual_seed(1)
    every: dict[Side, Tensor] = {
        "encoder": _all_but_padding(ids, "encoder"),
        "decoder": _all_but_padding(ids, "decoder"),
    }
    half = max(16, int(_EFFORT / (16 * _size(model))))
    chosen = {
        side: torch.cat([all_ids[:half], all_ids[max(half, len(all_ids) - half) :]]) for side, all_ids in every.items()
    }

    def random(side: Side, rows: int, length: int, among: Tensor) -> Tensor:
        longest = config.max_source_length if side == "encoder" else config.max_target_length
        return among[torch.randint(len(among), (rows, min(length, longest)), generator=generator)]

    for start in range(0, max(map(len, chosen.values())), _ROWS):
        src, tgt = (random(side, _ROWS, 3, among) for side, among in every.items())
        places = torch.arange(start, start + _ROWS)
        src[:, 0] = chosen["encoder"][places % len(chosen["encoder"])]
        tgt[:, 0] = config.bos_id
        tgt[:, 1:2] = chosen["decoder"][places % len(chosen["decoder"])][:, None]
        yield src, ids.with_start("decoder", tgt)
    few = {side: all_ids[torch.randperm(len(all_ids), generator=generator)[:3]] for side, all_ids in every.items()}
    yield random("encoder", 8, 16, few["encoder"]), ids.with_start("decoder", random("decoder", 8, 16, few["decoder"]))


def _size(model: Transformer) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


_CASES = [
    ([5], [4]),
    ([1], [1]),
    ([6, 3, 9, 1], [5, 7, 2, 1]),
    ([11, 2, 11, 4], [3, 8, 8, 1]),
    ([33], [2]),
    ([2], [31]),
]
"""Lengths of sources and targets, in a batch each."""


def _batch(ids: Ids, side: Side, lengths: Sequence[int], call: WorkingCall) -> Tensor:
    """Random ids of a whole vocabulary but padding, [batch, length], padded if the module masks padding."""
    generator = torch.Generator().manual_seed(sum(lengths) + (side == "encoder"))
    every = _all_but_padding(ids, side)
    batch = every[torch.randint(len(every), (len(lengths), max(lengths)), generator=generator)]
    if call.masks_padding:
        batch = torch.where(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None], batch, ids.pad)
    return ids.with_start(side, batch)


def _all_but_padding(ids: Ids, side: Side) -> Tensor:
    every = torch.arange(ids.sizes[side])
    return every[every != ids.pad]


@torch.no_grad()
def _compare(
    call: WorkingCall,
    model: Transformer,
    returns: str,
    sources: tuple[Tensor, Sequence[int]],
    targets: tuple[Tensor, Sequence[int]],
) -> float:
    """The largest difference of logits at real target tokens, relative to 1 + their size.

    Args:
        sources, targets: ids [batch, length] and their lengths.

    Raises:
        Difference: it is above `TOLERANCE`.
    """
    (src, src_len), (tgt, tgt_len) = sources, targets
    if not call.masks_padding:
        src_len, tgt_len = [src.shape[1]] * len(src), [tgt.shape[1]] * len(tgt)
    with plain_operations():
        theirs = call.call(src, tgt)
    with InFloat64():
        ours = model(src, torch.tensor(src_len), tgt)
        if returns != "logits":
            ours = ours.log_softmax(-1) if returns.startswith("log") else ours.softmax(-1)
    real = torch.arange(tgt.shape[1]) < torch.tensor(tgt_len)[:, None]
    error, place = 0.0, 0
    rows = real.flatten().nonzero()[:, 0]
    for part in torch.split(rows, _ROWS):  # type: ignore[no-untyped-call]  # copies of all logits need much memory
        expected, given = theirs.flatten(0, 1)[part].double(), ours.flatten(0, 1)[part]
        # For each logit alone: a huge one, as of an id that may not come, must not hide a difference of the others.
        difference = ((expected - given).abs() / (1 + expected.abs())).amax(1).nan_to_num(math.inf)
        if difference.max() > error:
            error, place = float(difference.max()), int(part[difference.argmax()])
    if error > TOLERANCE:
        row = place // tgt.shape[1]
        pair = (("source", src[row, : src_len[row]]), ("target", tgt[row, : tgt_len[row]]))
        about = " and ".join(_named(side, ids) for side, ids in pair)
        padded = "in a padded batch" if len(set(src_len)) > 1 else "in a batch" if len(src_len) > 1 else "alone"
        raise Difference(f"the logits differ by {error:.1e} for {about}, {padded}")
    return error


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
    for part in torch.split(_all_but_padding(ids, side), length if call.one_at_a_time else _CHUNK):  # type: ignore[no-untyped-call]
        batch = _in_rows(ids, side, part, length)
        pair = ids.with_other_side(side, batch)
        if masks:
            steps = record_until(call.call, *pair, side, lambda node: node.op in SOFTMAXES)
            _check_masks(steps[-1], batch, side)
        else:
            steps = record_steps(call.call, *pair, side, step + 1)
        ours, value = _embedded(model, side, batch), steps[step].value
        orders = [value.permute(order) for order in permutations(range(value.dim()))]
        theirs = [states for states in orders if states.shape == ours.shape]
        if not theirs:
            raise Difference(f"the operations on the ids of the {side} depend on the size of the batch")
        differences = ((states - ours).abs() > TOLERANCE * (1 + states.abs()) for states in theirs)
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
