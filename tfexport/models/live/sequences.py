"""Sequences that a module is compared with: several lengths in padded batches, each length, each id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tfexport.config import Side
from tfexport.models.live.call import WorkingCall
from tfexport.models.live.ids import Ids
from tfexport.models.transformer import Transformer

ROWS = 64
"""Number of sequences, or rows of logits, that are compared at once."""
_EFFORT = 5e10
"""Multiplications that each of two checks with many short sequences may take. A small model gets all lengths and ids."""
_MOST_ALONE = 512
"""Number of ids that are tried in a batch of their own."""
_CASES = [
    ([5], [4]),
    ([1], [1]),
    ([6, 3, 9, 1], [5, 7, 2, 1]),
    ([11, 2, 11, 4], [3, 8, 8, 1]),
    ([33], [2]),
    ([2], [31]),
]
"""Lengths of sources and targets, in a batch each."""


@dataclass(frozen=True)
class Pairs:
    """A batch of sources and targets."""

    src: Tensor
    """int64 [batch, src]"""
    tgt: Tensor
    """int64 [batch, tgt]"""
    src_lengths: Sequence[int]
    tgt_lengths: Sequence[int]

    @classmethod
    def unpadded(cls, src: Tensor, tgt: Tensor) -> Pairs:
        """Pairs whose sequences are as long as the batch."""
        return cls(src, tgt, [src.shape[1]] * len(src), [tgt.shape[1]] * len(tgt))

    @property
    def is_real(self) -> Tensor:
        """Whether each target token is no padding; bool [batch, tgt]."""
        return torch.arange(self.tgt.shape[1]) < torch.tensor(self.tgt_lengths)[:, None]


def of_several_lengths(model: Transformer, ids: Ids, call: WorkingCall) -> Iterator[Pairs]:
    """Few batches of random sequences, padded if the module masks padding."""
    for src_lengths, tgt_lengths in _CASES:
        yield random_pairs(model, ids, call, src_lengths, tgt_lengths)


def random_pairs(
    model: Transformer, ids: Ids, call: WorkingCall, src_lengths: Sequence[int], tgt_lengths: Sequence[int]
) -> Pairs:
    """Random sequences of these lengths, or of the largest that the model has."""
    src_len = [min(length, model.config.max_source_length) for length in src_lengths]
    tgt_len = [min(length, model.config.max_target_length) for length in tgt_lengths]
    src, tgt = _batch(ids, "encoder", src_len, call), _batch(ids, "decoder", tgt_len, call)
    return Pairs(src, tgt, src_len, tgt_len) if call.masks_padding else Pairs.unpadded(src, tgt)


def of_each_length(model: Transformer, ids: Ids, call: WorkingCall) -> Iterator[Pairs]:
    """A source and a target of each length up to 64, or as long as `_EFFORT` allows."""
    most = min(64, model.config.max_source_length, model.config.max_target_length)
    for length in range(1, 1 + min(most, int((2 * _EFFORT / _size(model)) ** 0.5))):
        # Equal lengths, and lengths that differ by one.
        yield random_pairs(model, ids, call, [length], [length if length % 2 else length - 1])
        if length % 2 == 0:
            yield random_pairs(model, ids, call, [length - 1], [length])
    generator = torch.Generator().manual_seed(2)
    for _ in range(16):
        src_length, tgt_length = torch.randint(1, 2 * most + 1, (2,), generator=generator).tolist()
        yield random_pairs(model, ids, call, [src_length], [tgt_length])


def of_each_id(model: Transformer, ids: Ids, *, alone: bool) -> Iterator[Pairs]:
    """Sources with each id in front, and targets with each id after bos, as in decoding; then few ids that repeat.

    Of a large model the lowest and the highest ids, where special ones are, as many as `_EFFORT` allows.

    Args:
        alone: each id in a batch of its own, for code that looks at the first sequence of a batch.
    """
    config, generator = model.config, torch.Generator().manual_seed(1)
    every: dict[Side, Tensor] = {"encoder": all_but_padding(ids, "encoder"), "decoder": all_but_padding(ids, "decoder")}
    half = max(16, int(_EFFORT / (16 * _size(model))))
    half = min(half, _MOST_ALONE // 2) if alone else half
    rows = 1 if alone else ROWS
    chosen = {
        side: torch.cat([all_ids[:half], all_ids[max(half, len(all_ids) - half) :]]) for side, all_ids in every.items()
    }

    def random(side: Side, rows: int, length: int, among: Tensor) -> Tensor:
        longest = config.max_source_length if side == "encoder" else config.max_target_length
        return among[torch.randint(len(among), (rows, min(length, longest)), generator=generator)]

    for start in range(0, max(map(len, chosen.values())), rows):
        src, tgt = (random(side, rows, 3, among) for side, among in every.items())
        places = torch.arange(start, start + rows)
        src[:, 0] = chosen["encoder"][places % len(chosen["encoder"])]
        tgt[:, 0] = config.bos_id
        tgt[:, 1:2] = chosen["decoder"][places % len(chosen["decoder"])][:, None]
        yield Pairs.unpadded(src, ids.with_start("decoder", tgt))
    few = {side: all_ids[torch.randperm(len(all_ids), generator=generator)[:3]] for side, all_ids in every.items()}
    src, tgt = (random(side, 8, 16, among) for side, among in few.items())
    yield Pairs.unpadded(src, ids.with_start("decoder", tgt))


def all_but_padding(ids: Ids, side: Side) -> Tensor:
    """All ids of a side but padding."""
    every = torch.arange(ids.sizes[side])
    return every[every != ids.pad]


def _size(model: Transformer) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _batch(ids: Ids, side: Side, lengths: Sequence[int], call: WorkingCall) -> Tensor:
    """Random ids of a whole vocabulary but padding, [batch, length], padded if the module masks padding."""
    generator = torch.Generator().manual_seed(sum(lengths) + (side == "encoder"))
    every = all_but_padding(ids, side)
    batch = every[torch.randint(len(every), (len(lengths), max(lengths)), generator=generator)]
    if call.masks_padding:
        batch = torch.where(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None], batch, ids.pad)
    return ids.with_start(side, batch)
