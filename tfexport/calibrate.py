"""The ranges of a model's states, measured, for the 8-bit scales that are fixed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from tfexport.models.transformer import PointwiseConv, Transformer

SENTENCES, LENGTH, STEPS = 64, 24, 32
"""Of random sources, where no text is given, and the most tokens that each is decoded to."""

BATCH = 32

LINEAR = (nn.Linear, PointwiseConv)


def input_ranges(model: Transformer, sources: Sequence[Sequence[int]] = ()) -> dict[str, float]:
    """The largest magnitude that goes into each linear layer, by path, while `sources` (encoder ids) are decoded greedily.

    Random ids are taken where there are no sources. For states that the model itself bounds they show about the same:
    on a tutorial checkpoint the ranges of normalised states were 4.4 to 7.9 for random ids and 4.3 to 9.6 for real text.
    """
    ranges: dict[str, float] = {}

    def note(path: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        ranges[path] = max(ranges.get(path, 0.0), float(inputs[0].abs().max()))

    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, LINEAR)]
    handles = [module.register_forward_pre_hook(partial(note, path)) for path, module in layers]
    try:
        with torch.inference_mode():
            given = [torch.tensor(source) for source in sources if len(source)] or _random_sources(model)
            for start in range(0, len(given), BATCH):
                _decode(model, given[start : start + BATCH])
    finally:
        for handle in handles:
            handle.remove()
    return ranges


def _random_sources(model: Transformer) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    length = min(LENGTH, model.config.max_source_length)
    return list(torch.randint(model.config.src_vocab_size, (SENTENCES, length), generator=random))


def _decode(model: Transformer, sources: list[Tensor]) -> None:
    """Greedy decoding; sentences that are done go on, which only widens what is seen."""
    src_len = torch.tensor([len(source) for source in sources])
    src_ids = nn.utils.rnn.pad_sequence(sources, batch_first=True, padding_value=model.config.pad_id)
    cross = model.encode(src_ids, src_len)
    steps = min(STEPS, model.config.max_target_length)
    cache = model.empty_cache(len(sources), steps)
    tokens = torch.full((len(sources),), model.config.bos_id)
    for position in range(steps):
        logits, cache = model.step(tokens, torch.full_like(tokens, position), src_len, cache, cross)
        tokens = logits.argmax(-1)
