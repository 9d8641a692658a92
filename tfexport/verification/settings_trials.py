"""Models with other settings and the same weights, and their outputs beside the expected ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tfexport.config import ModelConfig
from tfexport.errors import ConfigError
from tfexport.models.layers import ACTIVATIONS, Attention, FeedForward, Layer
from tfexport.models.model import build_model
from tfexport.models.positions import PositionTable, sinusoids, tensor2tensor_sinusoids
from tfexport.models.transformer import Transformer
from tfexport.verification.expected_outputs import Example, Examples

Settings = Mapping[str, Any]
"""Values of fields of `ModelConfig`; `positions` may also be a kind of `COMPUTED`."""

TIE = 1e-4
"""Logits that differ by less are equal: the owner's program may have rounded otherwise."""


def _halves(n_positions: int, d_model: int) -> Tensor:
    """The sinusoids of the paper, all sines before all cosines."""
    table = sinusoids(n_positions, d_model)
    return torch.cat([table[:, 0::2], table[:, 1::2]], dim=1)


COMPUTED: Mapping[str, Callable[[int, int], Tensor]] = {
    "sinusoidal": sinusoids,
    "sinusoidal in halves": _halves,
    "sinusoidal of tensor2tensor": lambda rows, d_model: tensor2tensor_sinusoids(rows, d_model, pad_id=-1),
}
"""Functions for the position tables [positions, d_model] that no file holds."""


@dataclass(frozen=True)
class Difference:
    """The first token of an output that a model does not give."""

    example: Example
    index: int
    expected: int
    given: int
    """The model's best token."""
    right: int
    """The number of tokens of the output that the model gives, each after the expected tokens before it."""


@dataclass
class Trials:
    """The weights of a checkpoint, and models of them with any settings."""

    config: ModelConfig
    """Its config; settings of a trial replace fields."""
    weights: Mapping[str, Mapping[str, Tensor]]
    """Canonical weights for each kind of norm that they fit."""
    _built: dict[str, Transformer] = field(default_factory=dict)
    """A model for each kind of norm. To build one takes longer than to run a small one, so its settings are changed."""

    def model(self, settings: Settings) -> Transformer | None:
        """The model with these settings, until the next call; None if the sizes do not allow them."""
        changes = dict(settings)
        norm = changes.get("norm", self.config.norm)
        if norm not in self._built:
            model = build_model(self.config.replace(norm=norm), self.weights[norm])
            assert isinstance(model, Transformer)
            self._built[norm] = model
        kind = changes.pop("positions", None)
        offset = changes.get("position_offset", self.config.position_offset)
        tables = {}
        for side, name in (("encoder", "max_source_length"), ("decoder", "max_target_length")):
            table, most = self.weights[norm].get(f"{side}.positions.table"), getattr(self.config, name)
            if kind is not None:
                table = COMPUTED[kind](most + offset, self.config.d_model)
            elif table is not None and self.config.positions != "relative":
                changes[name] = most = min(most, len(table) - offset)
                table = table[: most + offset]
            tables[side] = table
        try:
            config = self.config.replace(**changes)
        except ConfigError:
            return None
        _set(self._built[norm], config, tables)
        return self._built[norm]


def _set(model: Transformer, config: ModelConfig, tables: Mapping[str, Tensor | None]) -> None:
    """Change the settings and the position tables of a model in place. The rest of `config` must be the model's own."""
    model.config = config
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        stack.scale = config.embedding_scale
        table = tables[side]
        if isinstance(stack.positions, PositionTable) and table is not None:
            stack.positions.offset = config.position_offset
            is_learned = isinstance(stack.positions.table, nn.Parameter)
            stack.positions.table = nn.Parameter(table, requires_grad=False) if is_learned else table
    for module in model.modules():
        if isinstance(module, Layer):
            module.norm_first = config.norm_first
        elif isinstance(module, Attention):
            module.n_heads, module.head_dim = config.n_heads, config.head_dim
        elif isinstance(module, FeedForward):
            module.activation = ACTIVATIONS[config.activation]()
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.eps = config.norm_eps


def differences(
    model: Transformer, examples: Examples, rows: Sequence[Example], framing: tuple[bool, bool]
) -> list[Difference | None]:
    """The first difference of each row from the model's greedy outputs; None where there is none.

    Args:
        framing: whether the encoder's input begins with bos and ends with eos.
    """
    sources = [framed(row, model.config, framing) for row in rows]
    if not all(_fits(row, source, model.config) for row, source in zip(rows, sources, strict=True)):
        return [Difference(row, 0, (*row.output, model.config.eos_id)[0], -1, 0) for row in rows]
    with torch.inference_mode():
        logits = _forced(model, sources, rows)
        peak, best = logits.max(-1)
        result: list[Difference | None] = []
        for place, (row, source) in enumerate(zip(rows, sources, strict=True)):
            goal = torch.tensor([*row.output, model.config.eos_id][: row.goal])
            reached = logits[place, : len(goal)].gather(1, goal[:, None])[:, 0]
            wrong = reached < peak[place, : len(goal)] - TIE
            difference = None
            if bool(wrong.any()) or not bool(reached.isfinite().all()):
                index = int(wrong.int().argmax())
                given, right = int(best[place, index]), int((~wrong).sum())
                difference = Difference(row, index, int(goal[index]), given, right)
                if _may_be_spelt_otherwise(examples, difference) and _says(model, examples, source, row):
                    difference = None
            result.append(difference)
    return result


def framed(row: Example, config: ModelConfig, framing: tuple[bool, bool]) -> list[int]:
    """The encoder's input of an example."""
    return [config.bos_id] * framing[0] + [*row.source] + [config.eos_id] * framing[1]


def _fits(row: Example, source: Sequence[int], config: ModelConfig) -> bool:
    return 0 < len(source) <= config.max_source_length and row.goal <= config.max_target_length


def _forced(model: Transformer, sources: Sequence[Sequence[int]], rows: Sequence[Example]) -> Tensor:
    """Logits [rows, tgt, vocab] along the expected outputs."""
    config = model.config
    inputs = [[config.bos_id, *row.output][: max(row.goal, 1)] for row in rows]
    logits = model(_padded(sources, config), torch.tensor([*map(len, sources)]), _padded(inputs, config))
    return _allowed(logits, config)


def _allowed(logits: Tensor, config: ModelConfig) -> Tensor:
    """Logits [rows, tgt, vocab] of whole outputs, as a search sees them: without suppressed tokens, with forced ones."""
    if config.suppressed_ids:
        logits[..., list(config.suppressed_ids)] = -math.inf
    first = int(config.forced_first_id >= 0)
    if config.suppressed_first_ids and logits.shape[1] > first:
        logits[:, first, list(config.suppressed_first_ids)] = -math.inf
    if first:
        logits[:, 0] = -math.inf
        logits[:, 0, config.forced_first_id] = 0.0
    return logits


def _padded(rows: Sequence[Sequence[int]], config: ModelConfig) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[config.pad_id] * (longest - len(row))] for row in rows])


def _may_be_spelt_otherwise(examples: Examples, difference: Difference) -> bool:
    """Whether the model's token could begin another spelling of the same text."""
    row = difference.example
    if row.text is None or examples.target is None:
        return False
    begin = examples.said([*row.output[: difference.index], difference.given])
    return " ".join(row.text.split()).startswith(begin)


def _says(model: Transformer, examples: Examples, source: Sequence[int], row: Example) -> bool:
    """Whether the model's greedy output is the text of an example."""
    config, output = model.config, list[int]()
    src_ids, src_len = torch.tensor([source]), torch.tensor([len(source)])
    most = min(config.max_target_length, 2 * len(row.output) + 8)
    cross = model.encode(src_ids, src_len)
    while len(output) < most:
        tokens = torch.tensor([[config.bos_id, *output]])
        token = int(_allowed(model.forced(cross, src_len, tokens), config)[0, -1].argmax())
        if token == config.eos_id:
            break
        output.append(token)
    assert row.text is not None
    wanted, given = " ".join(row.text.split()), examples.said(output)
    return given == wanted or (not row.ends and given.startswith(wanted))


BATCH = 16
"""Sentences in a pass. Batches of a first check are smaller: most settings fail at the first sentence."""


def batches(examples: Examples) -> Iterator[Sequence[Example]]:
    """All examples: one, a few, then whole batches."""
    rows, start = examples.by_variety, 0
    for size in (1, 3):
        if rows[start : start + size]:
            yield rows[start : start + size]
        start += size
    for begin in range(start, len(rows), BATCH):
        yield rows[begin : begin + BATCH]
