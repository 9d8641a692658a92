"""Proves that the canonical model computes what the user's module computes, in float64, called as the user calls it.

A wrong reading cannot pass: random sequences of several lengths, in padded batches, must give the same logits up to rounding
of float64, every id of both vocabularies must have the same embedding and be hidden from no attention, and the largest
length must work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tfexport.config import ModelConfig
from tfexport.models.float64 import InFloat64
from tfexport.models.live.call import FoundCall, Ids
from tfexport.models.live.errors import NotCanonical
from tfexport.models.live.structure import Structure
from tfexport.models.live.tape import STACK_OF, Side, plain_operations, record_until
from tfexport.models.model import empty_model
from tfexport.models.transformer import Transformer

TOLERANCE = 1e-8
"""Largest difference of logits, relative to the largest. Rounding stays below 1e-11; a wrong epsilon changes 1e-6."""
_CHUNK = 4096
"""Number of ids whose embeddings are compared in one forward."""


@dataclass(frozen=True)
class Proof:
    """What was compared."""

    sequences: int
    ids: int
    longest: tuple[int, int]
    """The largest lengths of sources and targets."""
    error: float
    """The largest difference of logits, relative to the largest logit."""


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


def prove(call: FoundCall, model: Transformer, structure: Structure, ids: Ids, *, thorough: bool) -> Proof:
    """Compare the module with the canonical model.

    Args:
        ids: the special ids, and the sizes of both vocabularies.
        thorough: also compare every id and the largest lengths.

    Raises:
        Difference: they compute different values.
    """
    config, error, count = model.config, 0.0, 0
    for src_len, tgt_len in _lengths(config, longest=thorough):
        src, tgt = (_batch(ids, side, lengths, call) for side, lengths in (("source", src_len), ("target", tgt_len)))
        error = max(error, compare(call, model, structure.returns, src, src_len, tgt, tgt_len))
        count += len(src)
    if thorough:
        for side in ("src", "tgt"):
            _compare_ids(call, model, structure, ids, side)
    return Proof(count, ids.source + ids.target, (config.max_source_length, config.max_target_length), error)


def _lengths(config: ModelConfig, *, longest: bool) -> Iterator[tuple[list[int], list[int]]]:
    most_src, most_tgt = config.max_source_length, config.max_target_length
    cases = [
        ([5], [4]),
        ([1], [1]),
        ([6, 3, 9, 1], [5, 7, 2, 1]),
        ([11, 2, 11, 4], [3, 8, 8, 1]),
        ([33], [2]),
        ([2], [31]),
    ]
    if longest:
        cases += [([most_src], [most_tgt])]
    for src, tgt in cases:
        yield [min(n, most_src) for n in src], [min(n, most_tgt) for n in tgt]


def _batch(ids: Ids, side: str, lengths: Sequence[int], call: FoundCall) -> Tensor:
    """Random ids of a whole vocabulary but padding, [batch, length], padded if the module masks padding."""
    generator = torch.Generator().manual_seed(sum(lengths) + len(side))
    every = torch.tensor([i for i in range(getattr(ids, side)) if i != ids.pad])
    batch = every[torch.randint(len(every), (len(lengths), max(lengths)), generator=generator)]
    if call.masks_padding:
        batch = torch.where(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None], batch, ids.pad)
    return batch


@torch.no_grad()
def compare(
    call: FoundCall,
    model: Transformer,
    returns: str,
    src: Tensor,
    src_len: Sequence[int],
    tgt: Tensor,
    tgt_len: Sequence[int],
) -> float:
    """The largest relative difference of logits at real target tokens.

    Raises:
        Difference: it is above `TOLERANCE`.
    """
    if not call.masks_padding:
        src_len, tgt_len = [src.shape[1]] * len(src), [tgt.shape[1]] * len(tgt)
    with plain_operations():
        theirs = call.call(src, tgt)
    with InFloat64():
        ours = model(src, torch.tensor(src_len), tgt)
        if returns != "logits":
            ours = ours.log_softmax(-1) if returns.startswith("log") else ours.softmax(-1)
    real = torch.arange(tgt.shape[1]) < torch.tensor(tgt_len)[:, None]
    ours, theirs = ours[real].double(), theirs[real].double()
    size = float(theirs[theirs.isfinite()].abs().max())
    error = float((theirs - ours).abs().max()) / max(1.0, size)
    if not error <= TOLERANCE:
        about = f"sources of {', '.join(map(str, src_len))} and targets of {', '.join(map(str, tgt_len))} tokens"
        padded = "in a padded batch" if len(set(src_len)) > 1 else "in a batch" if len(src_len) > 1 else "alone"
        raise Difference(f"the logits differ by {error:.1e} of the largest one for {about}, {padded}")
    return error


@torch.no_grad()
def _compare_ids(call: FoundCall, model: Transformer, structure: Structure, ids: Ids, side: Side) -> None:
    """Compare the embedding of every id of a side, and check that the first attention hides none.

    The forward ends there, so that a large vocabulary takes seconds.
    """
    stack = getattr(model, STACK_OF[side])
    size, most = (
        (ids.source, model.config.max_source_length) if side == "src" else (ids.target, model.config.max_target_length)
    )
    every = torch.tensor([i for i in range(size) if i != ids.pad])
    length, node, softmax = min(most, 64), structure.embeddings[side].node.index, structure.softmaxes[side]
    table = model.encoder.tokens.weight if side == "src" else model._target_table()
    for part in torch.split(every, _CHUNK):
        rows = -(-len(part) // length)
        batch = part.repeat(-(-rows * length // len(part)))[: rows * length].view(rows, length)
        one = torch.full((rows, 1), int(every[-1] if side == "tgt" else ids.free("target")[0]))
        src, tgt = (batch, one) if side == "src" else (torch.full((rows, 1), int(ids.free("source")[0])), batch)
        nodes = record_until(call.call, src, tgt, softmax + 1)
        with InFloat64():
            ours = torch.nn.functional.embedding(batch, table) * stack.scale
            if model.config.positions != "none":
                ours = ours + stack.positions(torch.arange(length))
        value = nodes[node].value if len(nodes) > node else torch.empty(0)
        theirs = value if value.shape == ours.shape else value.transpose(0, 1) if value.dim() == 3 else value
        name = f"the {'source' if side == 'src' else 'target'}"
        if theirs.shape != ours.shape:
            raise Difference(f"the operations on {name}'s ids depend on the size of the batch")
        wrong = ((theirs - ours).abs() > TOLERANCE * (1 + theirs.abs().max())).any(-1)
        if bool(wrong.any()):
            raise Difference(f"the embedding of id {int(batch[wrong][0])} of {name} differs")
        weights = nodes[softmax].value
        weights = weights.reshape(-1, *weights.shape[-2:])
        is_read = weights > 0
        expected = torch.ones_like(is_read) if side == "src" else torch.ones_like(is_read).tril()
        if not torch.equal(is_read, expected):
            heads = len(weights) // rows
            row, column = (is_read != expected).nonzero()[0][[0, 2]].tolist()
            raise Difference(
                f"an attention hides id {int(batch[row // heads, column])} of {name}, or reads what it should not"
            )
