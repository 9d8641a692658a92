"""Finds the settings of a checkpoint that no file holds: those with which its model gives the owner's own outputs.

1. Try all combinations of the settings that are missing, with the others as given. If none gives all outputs, change one of
   the others.
2. If still none does, or if there are few lines, try all combinations of all settings.
3. Change each setting of what is left, one at a time. Values that also give all outputs cannot be told apart.

A combination is dropped at its first wrong sentence. The eps of norms hardly changes outputs, so it is only varied for
combinations that are right or nearly right.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tfexport.config import ModelConfig
from tfexport.verification.expected_outputs import ENOUGH, Examples
from tfexport.verification.settings_trials import COMPUTED, Difference, Trials, batches, differences

Origin = Literal["missing", "assumed", "given"]
"""Who says the value: nobody; the family's own code or a default; or the user."""

SEARCHED = (
    *("norm_first", "activation", "embedding_scale", "n_heads", "norm", "norm_eps"),
    *("positions", "position_offset", "source_bos", "source_eos"),
)
"""The fields that are tried."""
ASSUMED = ("norm_eps", "source_bos", "source_eos")
"""Those of a state_dict that nobody is asked for."""
_FRAMING = ("source_bos", "source_eos")
HARDLY_SEEN = ("norm_eps",)
"""Settings whose values often give the same outputs. The assumed value is taken, and it stays unconfirmed."""
_ALIKE = ("gelu", "gelu_tanh")
"""Activations that differ by at most 5e-4, which no file of ids may ever show. With enough lines the exact one is taken,
which PyTorch's own layers use, and it stays unconfirmed."""
_NEAREST = 16
"""The number of nearly right combinations for which eps is varied, and that are counted on all lines."""


@dataclass(frozen=True)
class Axis:
    """A setting that no file holds, and the values to try."""

    name: str
    """A field of `ModelConfig`."""
    values: tuple[Any, ...]
    """The likeliest first."""
    own: Any
    """The value that was given or is assumed. It may be one that the file of outputs excludes."""
    origin: Origin


Combination = tuple[Any, ...]
"""A value for each axis."""


def axes_of(
    config: ModelConfig,
    known: Mapping[str, Any],
    origins: Mapping[str, Origin],
    examples: Examples,
    norms: Iterable[str],
) -> list[Axis]:
    """The axes of a model.

    Args:
        config: its config; missing fields have any value.
        known: the values of the fields that are not missing.
        origins: who says the value of each field. Fields that a file holds are absent: they are not varied.
        norms: the kinds of norms that fit the weights.
    """
    root = math.sqrt(config.d_model)
    values: dict[str, Sequence[Any]] = {
        "norm_first": (False, True),
        "activation": ("relu", "gelu", "gelu_tanh", "silu"),
        "embedding_scale": (root, 1.0),
        "n_heads": _heads(config),
        "norm": tuple(norms),
        "norm_eps": (1e-5, 1e-6, 1e-12, 1e-3),
        "positions": tuple(COMPUTED),
        "position_offset": (0, 1, 2),
        "source_bos": (True, False),
        "source_eos": (True, False),
    }
    if examples.framing is not None:
        values |= {name: (shown,) for name, shown in zip(_FRAMING, examples.framing, strict=True)}
    axes = []
    for name, tried in values.items():
        if name not in origins:
            continue
        shown = examples.framing is not None and name in _FRAMING
        own = known[name] if name in known and origins[name] != "missing" else tried[0]
        others = [value for value in tried if not _is_same(value, own)]
        axes.append(Axis(name, tuple(tried) if shown else (own, *others), own, origins[name]))
    return axes


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other)
    return bool(value == other)


def _heads(config: ModelConfig) -> tuple[int, ...]:
    """The likely numbers of heads: divisors of d_model with heads of 8 to 128 columns, or all in a small model."""
    divisors = [heads for heads in range(1, config.d_model + 1) if config.d_model % heads == 0]
    if config.d_model > 128:
        divisors = [heads for heads in divisors if 8 <= config.d_model // heads <= 128]
    return tuple(sorted(divisors, key=lambda heads: (heads != 8, abs(config.d_model / heads - 64))))


@dataclass(frozen=True)
class Outcome:
    """What became of a combination."""

    right: bool
    """Whether it gives all outputs."""
    near: float
    """The share of tokens that it gives in the sentences that it was tried on."""
    first: Difference | None
    """A sentence that it does not give."""


@dataclass
class Search:
    """Tries combinations of settings on expected outputs."""

    trials: Trials
    axes: Sequence[Axis]
    examples: Examples
    framing: tuple[bool, bool]
    """Whether sources begin with bos and end with eos, where no axis says it."""
    outcomes: dict[Combination, Outcome] = field(default_factory=dict)

    @property
    def own(self) -> Combination:
        """The settings as they were given."""
        return tuple(axis.own for axis in self.axes)

    def settings(self, combination: Combination) -> dict[str, Any]:
        """The values by name."""
        return {axis.name: value for axis, value in zip(self.axes, combination, strict=True)}

    def run(self, say: Callable[[str], None] = lambda text: None) -> list[Combination]:
        """All combinations that give all outputs, as the steps of this module find them."""
        names = [axis.name for axis in self.axes]
        likely = [*self._product(lambda axis: axis.origin == "missing" or axis.own not in axis.values)]
        left = self._try(likely)
        every = [*self._product(lambda axis: axis.name not in HARDLY_SEEN)]
        if not left and len(alone := self._changed(likely, names)) < len(every):
            left = self._try(alone)
        if not left or len(self.examples) < ENOUGH:
            say(f"note: trying {len(every):,} combinations of settings on {self.examples.path.name}")
            left = self._try(every)
        if not left:
            left = self._try(self._changed(self.nearest(), HARDLY_SEEN))
        self._try(self._changed(left, names))
        return [combination for combination, outcome in self.outcomes.items() if outcome.right]

    def changed_alone(self) -> list[str]:
        """The settings that have another value with which all outputs are right, while the others are as given."""
        left = self._try(self._changed([self.own], [axis.name for axis in self.axes]))
        return [
            axis.name
            for place, axis in enumerate(self.axes)
            if any(combination[place] != axis.own for combination in left)
        ]

    def _product(self, is_free: Callable[[Axis], bool]) -> Iterator[Combination]:
        """The combinations of the values of some axes, with the others as given."""
        return itertools.product(*(axis.values if is_free(axis) else (axis.own,) for axis in self.axes))

    def _changed(self, combinations: Sequence[Combination], names: Sequence[str]) -> list[Combination]:
        """The combinations with another value for one of the named axes."""
        return [
            (*combination[:place], value, *combination[place + 1 :])
            for combination in combinations
            for place, axis in enumerate(self.axes)
            if axis.name in names
            for value in axis.values
            if value != combination[place]
        ]

    def nearest(self) -> list[Combination]:
        """The combinations that give most tokens, the best first."""
        return sorted(self.outcomes, key=lambda combination: -self.outcomes[combination].near)[:_NEAREST]

    def _try(self, combinations: Iterable[Combination]) -> list[Combination]:
        """Try combinations, and return those that give all outputs. Those with the same model share it."""
        wanted = list(dict.fromkeys(combinations))
        by_model: dict[tuple[Any, ...], list[Combination]] = {}
        for combination in wanted:
            if combination not in self.outcomes:
                by_model.setdefault(tuple(self._arithmetic(combination).items()), []).append(combination)
        for settings, together in by_model.items():
            model = self.trials.model(dict(settings))
            for combination in together:
                self.outcomes[combination] = (
                    Outcome(False, 0.0, None) if model is None else self._outcome(model, combination)
                )
        return [combination for combination in wanted if self.outcomes[combination].right]

    def _arithmetic(self, combination: Combination) -> dict[str, Any]:
        """The settings of the model itself."""
        return {name: value for name, value in self.settings(combination).items() if name not in _FRAMING}

    def _framing(self, combination: Combination) -> tuple[bool, bool]:
        values = self.settings(combination)
        begin, end = (values.get(name, default) for name, default in zip(_FRAMING, self.framing, strict=True))
        return begin, end

    def _outcome(self, model: Any, combination: Combination) -> Outcome:
        right, tokens = 0, 0
        for batch in batches(self.examples):
            results = differences(model, self.examples, batch, self._framing(combination))
            tokens += sum(row.goal for row in batch)
            right += sum(
                row.goal if result is None else result.right for row, result in zip(batch, results, strict=True)
            )
            if first := next((result for result in results if result is not None), None):
                return Outcome(False, right / tokens, first)
        return Outcome(True, 1.0, None)

    def count(self, combination: Combination) -> tuple[int, Difference | None]:
        """The number of outputs that a combination gives, and the first that it does not give."""
        model = self.trials.model(self._arithmetic(combination))
        if model is None:
            return 0, None
        results = [
            result
            for batch in batches(self.examples)
            for result in differences(model, self.examples, batch, self._framing(combination))
        ]
        wrong = sorted((result for result in results if result is not None), key=lambda result: result.example.line)
        return len(results) - len(wrong), wrong[0] if wrong else None

    def best(self) -> tuple[Combination, int, Difference | None]:
        """The combination that gives most outputs, their number, and the first that it does not give."""
        counted = [(combination, *self.count(combination)) for combination in self.nearest()]
        return max(counted, key=lambda entry: entry[1])


@dataclass(frozen=True)
class Verdict:
    """What the expected outputs say about the settings."""

    chosen: dict[str, Any] | None
    """The settings to read the checkpoint with; None if there are none or several."""
    unconfirmed: dict[str, Any]
    """The chosen settings for which other values give the same outputs."""
    wrong: dict[str, Any]
    """Settings that the user gave and that are wrong, with the right values."""
    open: dict[str, list[Any]]
    """Settings that the outputs leave open, with the values that are possible."""


def judge(search: Search, right: Sequence[Combination]) -> Verdict:
    """Choose among the combinations that give all outputs. Given values count more than assumed ones.

    Args:
        right: the combinations, at least one.
    """
    axes, own = search.axes, search.own

    def changes(combination: Combination, origin: Origin) -> int:
        return sum(
            axis.origin == origin and value != given for axis, value, given in zip(axes, combination, own, strict=True)
        )

    def fewest(combinations: Sequence[Combination], origin: Origin) -> list[Combination]:
        least = min(changes(combination, origin) for combination in combinations)
        return [combination for combination in combinations if changes(combination, origin) == least]

    left = fewest(fewest(right, "given"), "assumed")
    varied = {axis.name: _values(axis, place, left) for place, axis in enumerate(axes)}
    enough = len(search.examples) >= ENOUGH
    undecided = {
        name: values
        for name, values in varied.items()
        if len(values) > 1 and name not in HARDLY_SEEN and not (enough and {*values} <= {*_ALIKE})
    }
    first = min(left, key=lambda combination: [*map(_place_of, axes, combination)])
    chosen = search.settings(first)
    wrong = {axis.name: chosen[axis.name] for axis in axes if axis.origin == "given" and chosen[axis.name] != axis.own}
    same = {axis.name for place, axis in enumerate(axes) if len(_values(axis, place, right)) > 1}
    return Verdict(
        chosen=None if undecided else chosen,
        unconfirmed={name: chosen[name] for name in chosen if name in same},
        wrong=wrong,
        open=undecided,
    )


def _place_of(axis: Axis, value: Any) -> int:
    return axis.values.index(value)


def _values(axis: Axis, place: int, combinations: Sequence[Combination]) -> list[Any]:
    """The values of an axis in combinations, in the axis's order."""
    return [value for value in axis.values if any(combination[place] == value for combination in combinations)]
