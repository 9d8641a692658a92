"""Reading of a checkpoint whose settings the owner's own outputs confirm, or tell where they are missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tfexport.errors import CheckpointError, ConfigError, TfexportError
from tfexport.models.checkpoints.confirmation import Confirmation
from tfexport.models.checkpoints.hints import asking, complete
from tfexport.models.checkpoints.load import Checkpoint, Reading, read_checkpoint
from tfexport.models.checkpoints.options import USAGE, CheckpointOptions
from tfexport.models.checkpoints.reading import (
    chosen_family,
    hints_of,
    read_vocabularies,
    read_with_text,
    with_codes,
)
from tfexport.models.checkpoints.recognise import Chosen
from tfexport.models.formats.native import Tokenizers
from tfexport.models.toolkits.toolkit import TextOptions
from tfexport.verification.expected_outputs import ENOUGH, encoded, read_lines
from tfexport.verification.settings_search import HARDLY_SEEN, SEARCHED, Origin, Search, Verdict, axes_of, judge
from tfexport.verification.settings_trials import Difference, Trials

Say = Callable[[str], None]

_SINUSOIDAL = "sinusoidal"


@dataclass(frozen=True)
class Confirmed:
    """The hints about a checkpoint, completed by its expected outputs."""

    hints: dict[str, Any]
    confirmation: Confirmation = field(default_factory=Confirmation)


def open_confirmed(checkpoint: Path, options: CheckpointOptions, say: Say) -> Checkpoint:
    """`open_checkpoint`, which also reads the expected outputs of `options.expect`.

    Raises:
        TfexportError: as `open_checkpoint`; or a line of the file cannot be read, or a setting does not give its outputs.
    """
    family = chosen_family(options)
    confirmed = confirmed_hints(checkpoint, options, family, say)
    loaded = read_with_text(checkpoint, confirmed.hints, family, text=options)
    return loaded if options.expect is None else replace(loaded, confirmation=confirmed.confirmation)


def confirmed_hints(checkpoint: Path, options: CheckpointOptions, family: Chosen, say: Say) -> Confirmed:
    """The user's hints, with the settings that the expected outputs tell.

    Raises:
        TfexportError: as `open_confirmed`.
    """
    hints = hints_of(options, checkpoint, say)
    if options.expect is None:
        return Confirmed(hints)
    return _Case.of(checkpoint, hints, family, options, options.expect, say).confirmed()


@dataclass(frozen=True)
class _Case:
    """A checkpoint, read with any value for each missing setting, and the search for them."""

    path: Path
    hints: Mapping[str, Any]
    search: Search
    missing: Mapping[str, str]
    say: Say

    @classmethod
    def of(
        cls,
        path: Path,
        hints: Mapping[str, Any],
        family: Chosen,
        options: CheckpointOptions,
        expect: Path,
        say: Say,
    ) -> _Case:
        """Read a checkpoint and its expected outputs."""
        lines = read_lines(expect)
        given = read_vocabularies(options, hints.get("unk_id"))
        text = TextOptions(options.src_lang, options.tgt_lang, options.prefix)
        reading, missing = _readable(path, hints, family, text, given)
        if reading.fields.get("n_decoder_layers") == 0:
            raise TfexportError(f"{path} is a classifier, which has no outputs to expect. Leave out --expect.")
        if asked := {name: flag for name, flag in missing.items() if name not in SEARCHED}:
            raise ConfigError(asking(path, asked, reading.family))
        loaded = _with_any(reading, missing, given)
        tokenizers = with_codes(loaded.tokenizers, options)
        examples = encoded(expect, lines, loaded.config, tokenizers)
        examples.check_lengths(loaded.config)
        weights = _weights_by_norm(reading, missing, given, loaded)
        config = loaded.config
        known = {name: getattr(config, name) for name in SEARCHED if name not in missing}
        origins = _origins(reading, missing, hints, loaded, weights)
        search = Search(
            Trials(config, weights),
            axes_of(config, known, origins, examples, weights),
            examples,
            examples.framing or (config.source_bos, config.source_eos),
        )
        return cls(path, hints, search, missing, say)

    def confirmed(self) -> Confirmed:
        """The hints that give all outputs.

        Raises:
            TfexportError: there are none, the user gave others, or several are left.
        """
        right = self.search.run(self.say)
        if not right:
            raise TfexportError(self._nothing())
        verdict = judge(self.search, right)
        if verdict.wrong:
            raise TfexportError(self._wrong(verdict))
        if verdict.chosen is None:
            raise TfexportError(self._undecided(verdict))
        filled = self._filled(verdict.chosen)
        confirmation = self._confirmation(verdict)
        total, name = len(self.search.examples), self.search.examples.path.name
        if filled:
            self.say(f"note: {name} tells the settings {self._flags(filled)}: {total} of {total} expected outputs")
        else:
            self.say(f"note: {total} of {total} expected outputs of {name}")
        if verdict.unconfirmed:
            self.say(
                f"note: {name} does not confirm {self._flags(verdict.unconfirmed)}: other values give the same outputs"
            )
        if total < ENOUGH:
            self.say(f"note: {name} has {total} lines. Give {ENOUGH} or more: wrong settings give many outputs right.")
        return Confirmed({**self.hints, **self._as_hints(filled)}, confirmation)

    def _filled(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that the user did not give: the missing ones, and assumed ones that are wrong."""
        return {
            axis.name: chosen[axis.name]
            for axis in self.search.axes
            if axis.origin == "missing" or (axis.origin == "assumed" and chosen[axis.name] != axis.own)
        }

    def _as_hints(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings as hints, which read the checkpoint again with the same result.

        Raises:
            TfexportError: no hint says the kind of positions.
        """
        hints = dict(settings)
        if hints.get("positions", _SINUSOIDAL) != _SINUSOIDAL:
            raise TfexportError(
                f"the positions of {self.path} are {hints['positions']}, which no flag says. Save their table with the "
                "weights: self.register_buffer('positions', table)."
            )
        if "embedding_scale" in hints and self._is_root(hints["embedding_scale"]):
            hints["embedding_scale"] = "sqrt"
        return hints

    def _confirmation(self, verdict: Verdict) -> Confirmation:
        examples = self.search.examples
        if len(examples) < ENOUGH and not verdict.unconfirmed.keys() <= set(HARDLY_SEEN):
            return Confirmation()
        total = len(examples)
        about = f"{total} of {total} expected outputs of {examples.path.name}"
        return Confirmation(by="outputs", about=about, unconfirmed=verdict.unconfirmed)

    def _nothing(self) -> str:
        """The message if no settings give all outputs."""
        examples = self.search.examples
        best, count, first = self.search.best()
        shown = {
            axis.name: value
            for axis, value in zip(self.search.axes, best, strict=True)
            if axis.origin != "assumed" or value != axis.own
        }
        settings = self._flags(shown) or "what the file says"
        how = "no settings that tfexport tries give" if self.search.axes else "the model of the file does not give"
        return (
            f"{how} all {len(examples)} expected outputs of {examples.path}. Nearest is {settings}: {count} of "
            f"{len(examples)}{'' if first is None else f'; {self._difference(first)}'}. Check --pad, --bos, --eos and that "
            "the outputs are of greedy search with these weights. If they are, the model computes something else: give "
            "your own code with --module my_code.py:build."
        )

    def _difference(self, first: Difference) -> str:
        eos = self.search.trials.config.eos_id

        def token(index: int) -> str:
            return "the end (eos)" if index == eos else str(index)

        return (
            f"in line {first.example.line}, token {first.index + 1} should be {token(first.expected)}, and the model gives "
            f"{token(first.given)}"
        )

    def _wrong(self, verdict: Verdict) -> str:
        """The message if given settings are wrong."""
        search, wrong = self.search, verdict.wrong
        total, path = len(search.examples), search.examples.path
        given = {axis.name: axis.own for axis in search.axes if axis.name in wrong}
        right = verdict.chosen or {axis.name: (verdict.open | wrong).get(axis.name, axis.own) for axis in search.axes}
        if verdict.chosen is None:
            still = "; ".join(self._values(name, values) for name, values in verdict.open.items())
            return (
                f"{self._flags(given)} does not give all {total} expected outputs of {path}; other settings do: {still}. "
                f"Give more lines, {ENOUGH} or more, to tell which."
            )
        before = tuple(axis.own if axis.name in wrong else right[axis.name] for axis in search.axes)
        count = search.count(before)[0]
        return (
            f"{self._flags(given)} gives {count} of {total} expected outputs of {path}; {self._flags(wrong)} gives {total} "
            f"of {total}. Give {self._flags(wrong)}."
        )

    def _undecided(self, verdict: Verdict) -> str:
        """The message if several combinations give all outputs."""
        examples = self.search.examples
        values = "; ".join(self._values(name, values) for name, values in verdict.open.items())
        return (
            f"several settings give all {len(examples)} expected outputs of {examples.path}: {values}. Give more lines, "
            f"{ENOUGH} or more, with longer outputs; or give the flag, if you know it."
        )

    def _values(self, name: str, values: Sequence[Any]) -> str:
        return " or ".join(self._flag(name, value) for value in values)

    def _flags(self, settings: Mapping[str, Any]) -> str:
        return " ".join(self._flag(name, value) for name, value in settings.items())

    def _flag(self, name: str, value: Any) -> str:
        """A setting as a flag of the command line."""
        usage = USAGE.get(name, _FLAGS.get(name))
        if usage is None:
            return f"{name} {value} (with --config)"
        flag = usage.split()[0]
        if isinstance(value, bool):
            return flag if value else flag.replace("--", "--no-", 1)
        if name == "embedding_scale":
            value = "sqrt" if self._is_root(value) else f"{value:g}"
        if isinstance(value, float):
            value = f"{value:g}"
        return f"{flag} {value}"

    def _is_root(self, scale: float) -> bool:
        return math.isclose(scale, math.sqrt(self.search.trials.config.d_model))


_FLAGS = {
    "norm": "--norm",
    "norm_eps": "--norm-eps",
    "source_bos": "--source-bos",
    "source_eos": "--source-eos",
}
"""Flags of settings that `USAGE` lacks."""


def _readable(
    path: Path, hints: Mapping[str, Any], family: Chosen, text: TextOptions, given: Tokenizers | None
) -> tuple[Reading, dict[str, str]]:
    """The reading of a checkpoint and its missing settings, each with its flag. Unclear positions are taken as computed, if
    the file has no weight that could be their table."""

    def read(hints: Mapping[str, Any]) -> tuple[Reading, dict[str, str]]:
        reading = read_checkpoint(path, hints, family, text)
        _, missing = complete(reading.family, reading.fields, reading.hints, reading.telling(given))
        return reading, reading.unclear | missing

    reading, missing = read(hints)
    if reading.unclear.keys() != {"positions"}:
        return reading, missing
    computed, others = read({**hints, "positions": _SINUSOIDAL})
    if others.keys() - set(SEARCHED):
        return computed, others
    try:
        _with_any(computed, others, given)
    except CheckpointError:  # a table is left over
        return reading, missing
    return computed, {"positions": missing["positions"], **others}


def _with_any(reading: Reading, missing: Mapping[str, str], given: Tokenizers | None) -> Checkpoint:
    """The checkpoint with any value for each missing setting."""
    values = {"n_heads": 1, "embedding_scale": 1.0, "activation": "relu", "norm_first": False, "norm": "layer"}
    stood_in = {name: values[name] for name in missing if name in values}
    return replace(reading, hints={**reading.hints, **stood_in}).checkpoint(given)


def _weights_by_norm(
    reading: Reading, missing: Mapping[str, str], given: Tokenizers | None, loaded: Checkpoint
) -> dict[str, dict[str, Tensor]]:
    """Canonical weights for each kind of norm. Norms with biases are LayerNorm."""
    own, weights = loaded.config.norm, loaded.weights
    biases = [tensor for name, tensor in weights.items() if ".norm" in name and name.endswith("bias")]
    by_norm: dict[str, dict[str, Tensor]] = {own: weights}
    if not _is_searched(reading) or any(bool(tensor.any()) for tensor in biases):
        return by_norm
    other = "rms" if own == "layer" else "layer"
    with suppress(TfexportError):  # the family has norms of one kind
        by_norm[other] = _with_any(replace(reading, hints={**reading.hints, "norm": other}), missing, given).weights
    return by_norm


def _is_searched(reading: Reading) -> bool:
    """Whether the file leaves settings open. Those of toolkits and of tfexport itself do not."""
    return reading.family is not None and not reading.describes_text


def _origins(
    reading: Reading,
    missing: Mapping[str, str],
    hints: Mapping[str, Any],
    loaded: Checkpoint,
    norms: Mapping[str, object],
) -> dict[str, Origin]:
    """Who says the value of each setting that is tried."""
    if not _is_searched(reading):
        return {}
    family, config = reading.family, loaded.config
    assert family is not None
    fixed = {"n_heads"} if "n_heads" in reading.fields or config.d_head or config.positions == "relative" else set()
    has_table = any("encoder.positions.table" in family.canonical_names(name) for name in reading.weights)
    fixed |= {"positions"} if has_table or config.positions != _SINUSOIDAL else set()
    fixed |= {"position_offset"} if config.positions == "relative" else set()
    fixed |= {"norm"} if len(norms) == 1 else set()
    return {
        name: "missing" if name in missing else "given" if name in hints else "assumed"
        for name in SEARCHED
        if name not in fixed
    }
