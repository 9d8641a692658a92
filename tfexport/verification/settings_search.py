"""Finds the settings of a checkpoint that no file holds: those with which its model gives the owner's own outputs.

All values of the settings that nobody gave are combined. The others stay as they are; if no combination gives all outputs,
one of them is changed; then all values of all settings are combined. At last each setting is changed alone: values that also
give all outputs cannot be told apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfexport.config import ModelConfig
from tfexport.errors import ConfigError, TfexportError
from tfexport.models.checkpoints.hints import is_same
from tfexport.models.checkpoints.load import Checkpoint
from tfexport.models.families.family import SOURCE_ENDS
from tfexport.models.model import change_settings
from tfexport.models.positions import COMPUTED
from tfexport.models.transformer import Transformer
from tfexport.runtimes.outputs import FloatArray
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import pad
from tfexport.verification.expected_decoding import decoded_differences
from tfexport.verification.expected_outputs import Difference, Example, Examples
from tfexport.verification.reference_outputs import as_inputs

_BATCHES = (1, 3, 16)
"""Sentences in a pass: most settings fail at the first one. The last size repeats."""
_TIE = 1e-4
"""Logits that differ by less are equal: the owner's program may have rounded otherwise."""
_INDISTINCT: Mapping[str, tuple[Any, ...]] = {
    "norm_eps": (1e-5, 1e-6, 1e-12, 1e-3),
    "activation": ("gelu", "gelu_tanh"),
}
"""Values that few outputs tell apart. The first that fits is taken, and the setting stays unconfirmed."""


@dataclass(frozen=True)
class Axis:
    """A setting that no file holds."""

    name: str
    """A field of `ModelConfig`."""
    values: tuple[Any, ...]
    """The values to try: the one that was given or is assumed, then the likeliest; or the only one that the file shows."""
    own: Any
    """The value that was given or is assumed; None if it is missing."""


Combination = tuple[Any, ...]
"""A value for each axis."""


STRUCTURE: Mapping[str, tuple[str, ...]] = {"positions": (*COMPUTED, "none"), "norm": ("layer", "rms")}
"""Settings on which weights depend, with their values. The checkpoint is read again for each."""


def axes_of(config: ModelConfig, known: Mapping[str, Any], missing: Collection[str], examples: Examples) -> list[Axis]:
    """The axes of a model.

    Args:
        config: its config, with any values for the missing fields.
        known: the fields that were given or are assumed. Fields that follow from the file are in neither.
        missing: the fields that nobody gave.
    """
    values: dict[str, Sequence[Any]] = {
        **STRUCTURE,
        "norm_first": (False, True),
        "activation": ("relu", "gelu", "gelu_tanh", "silu"),
        "embedding_scale": (math.sqrt(config.d_model), 1.0),
        "n_heads": _heads(config),
        "norm_eps": _INDISTINCT["norm_eps"],
        "source_bos": (True, False),
        "source_eos": (True, False),
    }
    shown = dict(zip(SOURCE_ENDS, examples.framing or (), strict=False))
    axes = []
    for name, tried in values.items():
        if name in shown:
            tried = (shown[name],)
        elif name in known:
            tried = (known[name], *(value for value in tried if not is_same(value, known[name])))
        if name in known or name in missing:
            axes.append(Axis(name, tuple(tried), known.get(name)))
    return axes


def _heads(config: ModelConfig) -> tuple[int, ...]:
    """The likely numbers of heads: divisors of d_model with heads of 8 to 128 columns, or all in a small model."""
    divisors = [heads for heads in range(1, config.d_model + 1) if config.d_model % heads == 0]
    if config.d_model > 128:
        divisors = [heads for heads in divisors if 8 <= config.d_model // heads <= 128]
    return tuple(sorted(divisors, key=lambda heads: (heads != 8, abs(config.d_model / heads - 64))))


@dataclass
class Search:
    """Tries combinations of settings on expected outputs."""

    config: ModelConfig
    """The checkpoint's, with any values for what is searched."""
    read: Callable[[Mapping[str, Any]], Checkpoint]
    """Reads the checkpoint with values for `STRUCTURE`; raises TfexportError if its weights do not fit."""
    axes: Sequence[Axis]
    examples: Examples
    scores: dict[Combination, int] = field(default_factory=dict)
    """The tokens that a combination gives before its first wrong one, in the sentences that it was tried on."""
    _models: dict[tuple[Any, ...], Transformer | None] = field(default_factory=dict)
    """A model for each value of `STRUCTURE`. Other settings are changed in place."""

    def settings(self, combination: Combination) -> dict[str, Any]:
        """The values by name."""
        return {axis.name: value for axis, value in zip(self.axes, combination, strict=True)}

    def run(self) -> list[Combination]:
        """The combinations that give all outputs with the fewest changes, the likeliest first; empty if there are none."""
        missing = [axis.name for axis in self.axes if axis.own is None]
        known = [axis.name for axis in self.axes if axis.own is not None]
        every = [axis.name for axis in self.axes if axis.name != "norm_eps"]
        for stage in ([missing], [[*missing, name] for name in known], [every]):
            if right := self._right(combination for free in stage for combination in self._product(free)):
                return right
        return []

    def alternatives(self, right: Sequence[Combination]) -> dict[str, list[Any]]:
        """The settings that have several values in these combinations, or in others that give all outputs too."""
        return self.varied(
            [*right, *self._right(other for combination in right for other in self._others(combination))]
        )

    def varied(self, combinations: Collection[Combination]) -> dict[str, list[Any]]:
        """The settings in which combinations differ, with their values in the order of the axes."""
        return {
            axis.name: [value for value in axis.values if value in column]
            for axis, *column in zip(self.axes, *combinations, strict=True)
            if len(set(column)) > 1
        }

    def differences(self, combination: Combination) -> Iterator[Difference]:
        """The outputs that a combination does not give, in the order of the file."""
        model, rows, size = self._model(combination), self.examples.rows, _BATCHES[-1]
        assert model is not None
        for start in range(0, len(rows), size):
            yield from filter(None, differences(model, self.examples, rows[start : start + size]))

    def nearest(self) -> Combination:
        """The combination that gives most tokens."""
        return max(self.scores, key=lambda combination: self.scores[combination])

    def _product(self, free: Collection[str]) -> Iterator[Combination]:
        """The combinations of all values of some settings, with the first value of the others."""
        return itertools.product(*(axis.values if axis.name in free else axis.values[:1] for axis in self.axes))

    def _others(self, combination: Combination) -> Iterator[Combination]:
        """The combinations with another value of one setting."""
        for place, axis in enumerate(self.axes):
            for value in axis.values:
                if value != combination[place]:
                    yield (*combination[:place], value, *combination[place + 1 :])

    def _right(self, combinations: Iterable[Combination]) -> list[Combination]:
        """The combinations that give all outputs."""
        total = sum(len(row.tokens(self.config.eos_id)) for row in self.examples.rows)
        right = []
        for combination in combinations:
            if combination not in self.scores:
                self.scores[combination] = self._score(combination)
            if self.scores[combination] == total:
                right.append(combination)
        return right

    def _model(self, combination: Combination) -> Transformer | None:
        """The model of a combination, until the next call; None if the weights or the encoder's heads do not allow it."""
        settings = self.settings(combination)
        model = self._built({name: settings.pop(name) for name in STRUCTURE if name in settings})
        with suppress(ConfigError):
            if model is not None:
                change_settings(model, model.config.replace(**settings))
                return model
        return None

    def _built(self, structure: Mapping[str, Any]) -> Transformer | None:
        key = tuple(structure.values())
        if key not in self._models:
            self._models[key] = None
            with suppress(TfexportError):
                model = self.read(structure).build_model()
                assert isinstance(model, Transformer)
                self._models[key] = model
        return self._models[key]

    def _score(self, combination: Combination) -> int:
        model, eos_id, score = self._model(combination), self.config.eos_id, 0
        if model is None:
            return -1
        # Those with most different tokens first: a wrong setting shows in them soonest.
        rows = sorted(self.examples.rows, key=lambda row: -len(set(row.output)))
        sizes = itertools.chain(_BATCHES, itertools.repeat(_BATCHES[-1]))
        while rows:
            batch, rows = rows[: (size := next(sizes))], rows[size:]
            results = differences(model, self.examples, batch)
            score += sum(
                len(row.tokens(eos_id)) if result is None else result.index
                for row, result in zip(batch, results, strict=True)
            )
            if any(results):
                break
        return score


def is_open(name: str, values: Collection[Any]) -> bool:
    """Whether several values of a setting leave a question."""
    return not set(values) <= set(_INDISTINCT.get(name, ()))


def differences(model: Transformer, examples: Examples, rows: Sequence[Example]) -> list[Difference | None]:
    """The first difference of each row from the model's greedy outputs; None where there is none.

    A search gives an output exactly if each of its tokens is the best one after the tokens before it. So one pass over the
    output is the same test, and much faster.
    """
    runtime, config = TorchRuntime(model), model.config
    sources, expected = examples.inputs(rows, config), [row.tokens(config.eos_id) for row in rows]
    if max(map(len, sources)) > config.max_source_length:  # with the bos or eos of this model
        return [row.difference([], config.eos_id) for row in rows]
    tokens, _ = pad(expected, config.pad_id)
    tgt_ids, _ = as_inputs(config, expected)
    logits = _allowed(runtime.teacher_forced(*pad(sources, config.pad_id), tgt_ids), config)
    reached = np.take_along_axis(logits, tokens[:, :, None], axis=2)[:, :, 0]
    best = np.where(reached >= logits.max(axis=2) - _TIE, tokens, logits.argmax(axis=2))
    results = []
    for row, ids in zip(rows, best.tolist(), strict=True):
        difference = row.difference(ids, config.eos_id)
        if difference is not None and examples.is_spelt(row, ids[: difference.index + 1], begin=True):
            (difference,) = decoded_differences(runtime, examples, [row])
        results.append(difference)
    return results


def _allowed(logits: FloatArray, config: ModelConfig) -> FloatArray:
    """Logits [rows, tgt, vocab] of whole outputs, as a search sees them: without suppressed tokens, with forced ones."""
    allowed, first = logits.copy(), int(config.forced_first_id >= 0)
    allowed[:, :, list(config.suppressed_ids)] = -np.inf
    allowed[:, first : first + 1, list(config.suppressed_first_ids)] = -np.inf
    if first:
        allowed[:, 0] = -np.inf
        allowed[:, 0, config.forced_first_id] = 0.0
    return allowed
