"""Reading of a checkpoint whose settings the owner's own outputs confirm, or tell where they are missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tfexport.config import ModelConfig
from tfexport.confirmation import Confirmation
from tfexport.errors import CheckpointError, TfexportError
from tfexport.models.checkpoints.hints import as_flag, complete
from tfexport.models.checkpoints.load import STAND_INS, Checkpoint, Reading, read_checkpoint
from tfexport.models.checkpoints.options import CheckpointOptions, ExportedCheckpointOptions
from tfexport.models.checkpoints.reading import (
    chosen_family,
    hints_of,
    open_checkpoint,
    read_vocabularies,
    read_with_text,
    with_codes,
)
from tfexport.models.checkpoints.recognise import Chosen
from tfexport.models.toolkits.toolkit import TextOptions
from tfexport.verification.expected_outputs import ENOUGH, Examples, encoded, read_lines
from tfexport.verification.settings_search import STRUCTURE, Combination, Search, axes_of, is_open

Say = Callable[[str], None]


@dataclass(frozen=True)
class Confirmed:
    """The hints about a checkpoint, completed by its expected outputs."""

    hints: dict[str, Any]
    confirmation: Confirmation = field(default_factory=Confirmation)


def open_confirmed(checkpoint: Path, options: ExportedCheckpointOptions, say: Say) -> Checkpoint:
    """`open_checkpoint`, which also reads the expected outputs of `options.expect`.

    Raises:
        TfexportError: as `open_checkpoint`; or a line of the file cannot be read, or the settings do not give its outputs.
    """
    if options.expect is None:
        return open_checkpoint(checkpoint, options, say)
    if options.module is not None:
        return confirm_by_outputs(open_checkpoint(checkpoint, options, say), options, say)
    family = chosen_family(options)
    confirmed = confirmed_hints(checkpoint, options, family, say)
    loaded = read_with_text(checkpoint, confirmed.hints, family, text=options)
    return replace(loaded, confirmation=confirmed.confirmation)


def confirm_by_outputs(loaded: Checkpoint, options: ExportedCheckpointOptions, say: Say) -> Checkpoint:
    """A checkpoint that was read with the user's module, confirmed by the expected outputs too, if there are any.

    Raises:
        TfexportError: it does not give all of them, or a line cannot be read.
    """
    expect = options.expect
    if expect is None:
        return loaded
    examples = encoded(expect, read_lines(expect), loaded.config, with_codes(loaded.tokenizers, options))
    examples.check_lengths(loaded.config)
    count = len(examples)
    # Flags about the ends of sources are the user's word, which the outputs must confirm too.
    has_flags = options.source_bos is not None or options.source_eos is not None
    ways = [examples] if has_flags else examples.completions(loaded.config)
    searches = [Search(loaded.config, lambda structure: loaded, [], completed) for completed in ways]
    if different := min(([*search.differences(())] for search in searches), key=len):
        raise TfexportError(
            f"{loaded.path} was read as your module computes, and gives {count - len(different)} of {count} expected "
            f"outputs of {expect}: {different[0]}. Check --bos, --eos, and what no weight shows: arguments of your "
            "module such as the number of heads, and whether sources have bos and eos. The outputs must be of greedy search."
        )
    about = f"{loaded.confirmation.about}; {count} of {count} expected outputs of {expect.name}"
    unconfirmed = _without_end(examples, loaded.config)
    _say_what_is_missing(examples, unconfirmed, say)
    return replace(loaded, confirmation=replace(loaded.confirmation, about=about, unconfirmed=unconfirmed))


def _without_end(examples: Examples, config: ModelConfig) -> dict[str, Any]:
    """The id of eos, if no output shows it."""
    return {} if any(row.ends for row in examples.rows) else {"eos_id": config.eos_id}


def _say_what_is_missing(examples: Examples, unconfirmed: Mapping[str, Any], say: Say) -> None:
    """Notes about what more lines or longer ones would confirm."""
    name, count = examples.path.name, len(examples)
    if "eos_id" in unconfirmed:
        say(f"note: your limit on the length may have cut all outputs of {name}: raise it to confirm eos")
    if count < ENOUGH:
        say(f"note: {name} has {count} lines. Give {ENOUGH} or more: wrong settings give many outputs right.")


def confirmed_hints(checkpoint: Path, options: CheckpointOptions, family: Chosen, say: Say) -> Confirmed:
    """The user's hints, with the settings that the expected outputs tell.

    Raises:
        TfexportError: as `open_confirmed`.
    """
    hints = hints_of(options, checkpoint, say)
    if options.expect is None:
        return Confirmed(hints)
    search = _search(checkpoint, hints, family, options, options.expect)
    config, name, count = search.config, options.expect.name, len(search.examples)
    right = search.run()
    chosen = _chosen(search, right, hints)
    answers = {axis.name: chosen[axis.name] for axis in search.axes if chosen[axis.name] != axis.own}
    unconfirmed = {field: chosen[field] for field in search.alternatives(right)} | _without_end(search.examples, config)
    about = f"{count} of {count} expected outputs of {name}"
    say(f"note: {about}{' tell the settings ' if answers else ''}{_flags(answers, config)}")
    if unconfirmed:
        say(f"note: {name} does not confirm {_flags(unconfirmed, config)}: other values give the same outputs")
    _say_what_is_missing(search.examples, unconfirmed, say)
    return Confirmed(
        {**hints, **{field: _hint(field, value, config) for field, value in answers.items()}},
        Confirmation(by="outputs", about=about, unconfirmed=unconfirmed),
    )


def _search(path: Path, hints: Mapping[str, Any], family: Chosen, options: CheckpointOptions, expect: Path) -> Search:
    """The search for the settings of a checkpoint, which is read with any value for each missing one."""
    lines, vocabularies = read_lines(expect), read_vocabularies(options, hints.get("unk_id"))
    text = TextOptions(options.src_lang, options.tgt_lang, options.prefix)

    def read(structure: Mapping[str, Any]) -> tuple[Reading, set[str], Checkpoint]:
        reading = read_checkpoint(path, {**hints, **structure}, family, text)
        if reading.fields.get("n_decoder_layers") == 0:
            raise TfexportError(f"{path} is a classifier, which has no outputs to expect. Leave out --expect.")
        if "positions" in reading.unclear:
            with suppress(CheckpointError):  # the file has a table of another name: it is asked for
                computed, missing, loaded = read({**structure, "positions": "sinusoidal"})
                return computed, missing | {"positions"}, loaded
        _, asked = complete(reading.family, reading.fields, reading.hints, reading.telling(vocabularies))
        # Outputs hardly show the eps of norms: it is asked for where the owner's code has to say it.
        missing = {name for name in STAND_INS if name in asked and (name != "norm_eps" or "norm" in structure)}
        with_any = replace(reading, hints={**reading.hints, **{name: STAND_INS[name] for name in missing}})
        return reading, missing, with_any.checkpoint(vocabularies)

    reading, missing, loaded = read({})
    config = loaded.config
    examples = encoded(expect, lines, config, with_codes(loaded.tokenizers, options))
    examples.check_lengths(config)
    if reading.family is None or reading.describes_text:  # a file that describes itself
        return Search(config, lambda structure: loaded, [], examples)
    known = {name: getattr(config, name) for name in STAND_INS if name not in missing and name not in STRUCTURE}
    known |= {name: hints[name] for name in STRUCTURE if hints.get(name) in STRUCTURE[name]}
    if "n_heads" in reading.fields or config.d_head > 0 or config.positions == "relative":
        known.pop("n_heads", None)
    return Search(config, lambda structure: read(structure)[2], axes_of(config, known, missing, examples), examples)


def _chosen(search: Search, right: Sequence[Combination], hints: Mapping[str, Any]) -> dict[str, Any]:
    """The settings to take among the `right` combinations.

    Raises:
        TfexportError: there are none, several are left, or the user gave others.
    """
    config, path, count = search.config, search.examples.path, len(search.examples)
    if not right:
        raise TfexportError(_nothing(search, hints))
    if undecided := {name: values for name, values in search.varied(right).items() if is_open(name, values)}:
        several = "; ".join(
            " or ".join(_flags({name: value}, config) for value in values) for name, values in undecided.items()
        )
        raise TfexportError(
            f"several settings give all {count} expected outputs of {path}: {several}. Give more lines, {ENOUGH} or more, "
            "with longer outputs; or give the flag, if you know it."
        )
    chosen = search.settings(right[0])
    wrong = {axis.name: axis.own for axis in search.axes if axis.name in hints and axis.own != chosen[axis.name]}
    if wrong:
        better = _flags({name: chosen[name] for name in wrong}, config)
        raise TfexportError(
            f"{_flags(wrong, config)} does not give all {count} expected outputs of {path}. Give {better}, which does."
        )
    return chosen


def _nothing(search: Search, hints: Mapping[str, Any]) -> str:
    """The message if no settings give all outputs."""
    nearest, count = search.nearest(), len(search.examples)
    differences = [*search.differences(nearest)]
    said = {
        axis.name: value
        for axis, value in zip(search.axes, nearest, strict=True)
        if axis.name in hints or value != axis.own
    }
    settings = _flags(said, search.config) or "what the file says"
    return (
        f"no settings that tfexport tries give all {count} expected outputs of {search.examples.path}. Nearest is "
        f"{settings}: {count - len(differences)} of {count}; {differences[0]}. Check --pad, --bos, --eos and that the "
        "outputs are of greedy search with these weights. If they are, the "
        "model computes something else: give your own code with --module my_code.py:build."
    )


def _flags(settings: Mapping[str, Any], config: ModelConfig) -> str:
    return " ".join(as_flag(name, _hint(name, value, config)) for name, value in settings.items())


def _hint(name: str, value: Any, config: ModelConfig) -> Any:
    """A value as the user gives it."""
    return "sqrt" if name == "embedding_scale" and math.isclose(value, math.sqrt(config.d_model)) else value
