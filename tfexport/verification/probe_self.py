"""Compares the canonical model with itself: steps with a cache, padding, batches, beams, the longest output."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tfexport.config import ModelConfig
from tfexport.models.layers import KeyValue, write_in_place
from tfexport.models.model import EncoderClassifier
from tfexport.models.transformer import Transformer
from tfexport.search.search import pad
from tfexport.verification.probe_layers import TOLERANCE, Sentence, relative_error

_STEPS = 24
_MOST_POSITIONS, _MOST_LOGITS = 1024, 2**26
"""Limits of the long output: its attention is quadratic, and its logits are kept in memory."""

_FLOAT16 = 65504.0


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    passed: bool | None
    """Whether the check passed; None for information only."""
    about: str
    error: float | None = None
    """The largest relative difference, if numbers were compared."""


def own_checks(model: Transformer, sentences: Sequence[Sentence], tolerance: float | None = None) -> Iterator[Check]:
    """The checks that need no other module. `tolerance` replaces `TOLERANCE`."""
    config = model.config
    sources, targets = [list(source) for source, _ in sentences], [list(target) for _, target in sentences]
    (src_ids, src_len), (tgt_ids, tgt_len) = padded_batch(sources, config), padded_batch(targets, config)
    real = torch.arange(tgt_ids.shape[1]) < tgt_len[:, None]
    with torch.inference_mode(), _largest(model) as sizes:
        model(src_ids, src_len, tgt_ids)
    single, model = model, copy.deepcopy(model).double()  # in float64 a difference is not rounding
    with torch.inference_mode():
        whole = model(src_ids, src_len, tgt_ids)
        stepped = run_steps(model, src_ids, src_len, tgt_ids)
        alone = torch.cat([_alone(model, source, target)[0] for source, target in sentences])
        noisy = torch.where(
            torch.arange(src_ids.shape[1]) < src_len[:, None], src_ids, config.src_vocab_size - 1 - src_ids
        )
        garbage = model(noisy, src_len, tgt_ids)
        beams = _beams(model, src_ids, src_len, tgt_ids)
    held = partial(compared, tolerance=tolerance)
    steps = f"{int(real.sum())} steps with a cache against whole targets at once"
    yield held("cached step", whole[real], stepped[real], steps)
    yield _longest(model, sentences, tolerance)
    yield held("padding", whole, garbage, "other ids behind the sources")
    yield held("batch", alone, whole[real], f"{len(sentences)} sentences each alone against all in one batch")
    yield held("beams", *beams, "4 hypotheses over one set of cross keys and values against one for each")
    yield _half_precision(single, sizes)


def classifier_checks(
    model: EncoderClassifier, sentences: Sequence[Sentence], tolerance: float | None = None
) -> Iterator[Check]:
    """`own_checks` of an encoder classifier: it has no cache and no beams."""
    held = partial(compared, tolerance=tolerance)
    config, sources = model.config, [list(source) for source, _ in sentences]
    src_ids, src_len = padded_batch(sources, config)
    most = min(config.max_source_length, _MOST_POSITIONS)
    longest = (max(sources, key=len) * most)[:most]
    both_ids, both_len = padded_batch([longest, sources[0]], config)
    with torch.inference_mode(), _largest(model) as sizes:
        model(src_ids, src_len)
    single, model = model, copy.deepcopy(model).double()
    with torch.inference_mode():
        whole = model(src_ids, src_len)
        alone = torch.cat([model(torch.tensor([source]), torch.tensor([len(source)])) for source in sources])
        noisy = torch.where(
            torch.arange(src_ids.shape[1]) < src_len[:, None], src_ids, config.src_vocab_size - 1 - src_ids
        )
        garbage = model(noisy, src_len)
        beside = model(both_ids, both_len)
        apart = torch.cat(
            [model(torch.tensor([source]), torch.tensor([len(source)])) for source in (longest, sources[0])]
        )
    yield held("longest", apart, beside, f"a source of {most} ids with one of {len(sources[0])}")
    yield held("padding", whole, garbage, "other ids behind the sources")
    yield held("batch", alone, whole, f"{len(sentences)} sentences each alone against all in one batch")
    yield _half_precision(single, sizes)


def compared(name: str, wanted: Tensor, computed: Tensor, about: str, tolerance: float | None = None) -> Check:
    """A check that numbers agree within `tolerance`, by default that of their dtype."""
    error = relative_error(wanted, computed)
    return Check(name, error <= (TOLERANCE[wanted.dtype] if tolerance is None else tolerance), about, error)


def padded_batch(ids: list[list[int]], config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Ids [batch, longest] and lengths [batch], int64."""
    padded, lengths = pad(ids, config.pad_id)
    return torch.from_numpy(padded), torch.from_numpy(lengths)


def _alone(model: Transformer, source: Sequence[int], target: Sequence[int]) -> Tensor:
    return model(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([target]))


def run_steps(model: Transformer, src_ids: Tensor, src_len: Tensor, tgt_ids: Tensor) -> Tensor:
    """Logits [batch, tgt, vocab] of targets [batch, tgt], token by token with a cache."""
    cross = model.encode(src_ids, src_len)
    past, logits = model.empty_cache(*tgt_ids.shape), []
    for position, tokens in enumerate(tgt_ids.T):
        places = torch.full_like(tokens, position)
        step_logits, past = model.step(tokens, places, src_len, past, cross, write_in_place)
        logits.append(step_logits)
    return torch.stack(logits, 1)


def _longest(model: Transformer, sentences: Sequence[Sentence], tolerance: float | None) -> Check:
    """Check the longest source and an output that uses all positions: some steps in between, and the last one.

    The cache comes from the whole target at once, so that thousands of positions take only seconds.
    """
    config = model.config
    most = max(1, min(_MOST_POSITIONS, _MOST_LOGITS // config.tgt_vocab_size))
    n_source, n_target = min(config.max_source_length, most), min(config.max_target_length, most)
    source = max(([*source] for source, _ in sentences), key=len)
    target = max(([*target] for _, target in sentences), key=len)
    source, target = (source * n_source)[:n_source], (target * n_target)[:n_target]
    places = sorted({*np.linspace(0, n_target - 1, _STEPS).astype(int).tolist()})
    src_len = torch.tensor([n_source])
    with torch.inference_mode(), _self_attended(model) as past:
        whole = _alone(model, source, target)[:, places]
    with torch.inference_mode():
        cross = model.encode(torch.tensor([source]), src_len)
        steps = [
            model.step(torch.tensor([target[place]]), torch.tensor([place]), src_len, past, cross)[0]
            for place in places
        ]
    cut = f" (of {config.max_source_length} and {config.max_target_length})"
    is_cut = (n_source, n_target) != (config.max_source_length, config.max_target_length)
    about = (
        f"a source of {n_source} ids; {len(places)} steps throughout {n_target} tokens, the last one too{cut * is_cut}"
    )
    return compared("longest", whole, torch.stack(steps, 1), about, tolerance)


@contextmanager
def _self_attended(model: Transformer) -> Iterator[list[KeyValue]]:
    """A context that collects the keys and values of the decoder's self-attentions, [1, heads, tgt, head_dim] per layer."""
    past: list[KeyValue] = []
    made: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, states: Tensor) -> None:
        made.append(states.reshape(*states.shape[:2], model.config.n_heads, -1).transpose(1, 2))
        if len(made) % 2 == 0:
            past.append(KeyValue(made[-2], made[-1]))

    attentions = [layer.self_attention for layer in model.decoder.layers]
    handles = [layer.register_forward_hook(keep) for each in attentions for layer in (each.key, each.value)]
    try:
        yield past
    finally:
        for handle in handles:
            handle.remove()


def _beams(model: Transformer, src_ids: Tensor, src_len: Tensor, tgt_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of a second token, with separate cross keys and values for each hypothesis, and with shared ones."""
    beam, rows = 4, 4 * len(src_ids)
    first = torch.full((rows,), model.config.bos_id)
    second = torch.arange(rows) % model.config.tgt_vocab_size
    cross = model.encode(src_ids, src_len)
    repeated = [KeyValue(*(tensor.repeat_interleave(beam, 0) for tensor in memory)) for memory in cross]
    results = []
    for lengths, memory in ((src_len.repeat_interleave(beam), repeated), (src_len, cross)):
        past = model.empty_cache(rows, 2)
        for position, tokens in enumerate((first, second)):
            logits, past = model.step(tokens, torch.full((rows,), position), lengths, past, memory)
        results.append(logits)
    return results[0], results[1]


@contextmanager
def _largest(model: nn.Module) -> Iterator[dict[str, float]]:
    """A context that collects the largest output of each module of a model, by its path."""
    sizes: dict[str, float] = {}

    def note(path: str, module: nn.Module, inputs: Any, made: Any) -> None:
        if isinstance(made, Tensor) and made.numel():
            sizes[path] = float(np.maximum(sizes.get(path, 0.0), float(made.abs().max())))

    handles = [module.register_forward_hook(partial(note, path)) for path, module in model.named_modules() if path]
    try:
        yield sizes
    finally:
        for handle in handles:
            handle.remove()


def _half_precision(model: nn.Module, sizes: Mapping[str, float]) -> Check:
    weights = {name: float(tensor.detach().abs().max()) for name, tensor in model.named_parameters() if tensor.numel()}
    large = [name for name, size in {**weights, **sizes}.items() if not size <= _FLOAT16]
    if large:
        return Check(
            "float16", None, f"overflows in {', '.join(large[:3])}: export in fp32 or bf16, or --precision auto-fp16"
        )
    worst = max(sizes, key=lambda path: sizes[path])
    return Check("float16", None, f"the largest state is {sizes[worst]:.4g} ({worst}): fits, to {_FLOAT16:.0f}")
