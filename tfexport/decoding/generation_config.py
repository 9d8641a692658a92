"""generation_config.json of Transformers as defaults of the search profile `hf`.

A bundle keeps the file of the folder that it was exported from. What `generate` takes from it when nothing else is said, the
profile takes too; what the user gives comes first. Padding, the start token, a forced first token, and tokens that never
come are settings of the model: the export has read them (`models/toolkits/hugging_face_layouts.py`).

Source: `GenerationConfig` and `generate` of Transformers 5 (its defaults, and how lengths and processors follow from them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tfexport.bundle.reader import GENERATION_CONFIG as FILE
from tfexport.config import ModelConfig
from tfexport.decoding.options import SearchOptions
from tfexport.errors import TfexportError
from tfexport.option import checked

DEFAULT_NEW_TOKENS = 20
"""Generated where the file has no limit."""
DEFAULT_TOP_K = 50
"""Of sampling where the file has none."""

_RENAMED = {
    "num_beams": "beam",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram",
    "encoder_no_repeat_ngram_size": "encoder_no_repeat_ngram",
    "sequence_bias": "sequence_bias",
}
"""Settings that are options under another name, or under the same."""

_NEUTRAL: dict[str, Any] = {
    "diversity_penalty": 0.0,
    "num_beam_groups": 1,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "penalty_alpha": 0.0,
}
"""Settings that are not supported, with the value without effect; of all others this is null, false or empty."""

_ELSEWHERE = """
    max_length max_new_tokens min_length min_new_tokens bad_words_ids forced_eos_token_id eos_token_id num_return_sequences
    do_sample temperature top_k top_p
    suppress_tokens begin_suppress_tokens forced_bos_token_id pad_token_id bos_token_id decoder_start_token_id
    transformers_version _from_model_config _commit_hash use_cache cache_implementation cache_config max_cache_len
    output_attentions output_hidden_states output_scores output_logits return_dict_in_generate remove_invalid_values
    is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind
    target_lookbehind assistant_ensemble_weight max_matching_ngram_size speculation_type compile_config disable_compile
    prefill_chunk_size low_memory
"""
"""Settings that are read below or were at the export, and those that change no output."""

_MOST_SHOWN = 60


@dataclass(frozen=True)
class GenerationDefaults:
    """What a file says of the search."""

    options: Mapping[str, Any]
    """The options that it gives and the user does not, by name."""
    unsupported: tuple[str, ...] = ()
    """The settings that have no effect here, with their values."""

    def notes(self) -> list[str]:
        """Lines for the user: what was taken, and what was not."""
        lines = []
        if self.options:
            taken = ", ".join(f"{name} {_shown(value)}" for name, value in self.options.items())
            lines.append(f"{FILE} gives {taken}; options that you give come first")
        if self.unsupported:
            lines.append(f"{FILE} has settings that are not supported: {', '.join(self.unsupported)}")
        return lines


NO_DEFAULTS = GenerationDefaults({})


def options_with_defaults(
    given: Mapping[str, Any],
    content: Mapping[str, Any] | None,
    config: ModelConfig,
    token_ids: Callable[[str], tuple[int, ...]],
) -> tuple[SearchOptions, GenerationDefaults]:
    """`SearchOptions.of` what is `given`, over the defaults of a file where the profile is `hf`.

    Args:
        content: of the file; None where the bundle has none.

    Raises:
        TfexportError: as `SearchOptions.of`, or a setting of the file cannot be read.
    """
    checked(SearchOptions, given)  # a fault of the user is told before one of the file
    if content is None or given.get("profile") != "hf":
        return SearchOptions.of(given, token_ids), NO_DEFAULTS
    defaults = generation_defaults(content, config, given)
    try:
        return SearchOptions.of({**defaults.options, **_said(given)}, token_ids), defaults
    except TfexportError as error:
        if str(error) == _fault(given, token_ids):
            raise  # the file has no part in it
        taken = ", ".join(f"{name} {_shown(value)}" for name, value in defaults.options.items())
        raise TfexportError(
            f"{error} Of these, {FILE} of this bundle gives {taken}: what you give yourself comes first."
        ) from error


def _fault(given: Mapping[str, Any], token_ids: Callable[[str], tuple[int, ...]]) -> str | None:
    """What is wrong with options alone."""
    try:
        SearchOptions.of(given, token_ids)
    except TfexportError as error:
        return str(error)
    return None


def generation_defaults(
    content: Mapping[str, Any], config: ModelConfig, given: Mapping[str, Any] | None = None
) -> GenerationDefaults:
    """The options of `SearchOptions` that a file gives beside those that are `given`.

    Raises:
        TfexportError: a setting has another type than the library's.
    """
    said = {name: value for name, value in content.items() if value is not None}
    mine = _said(given or {})
    found = {option: said[name] for name, option in _RENAMED.items() if name in said}
    unsupported = [name for name, value in said.items() if _is_unknown(name, value)]
    found |= _lengths(said, config, mine)
    found |= _tokens(said, config, unsupported)
    found |= _outputs(said, mine, unsupported)
    if "sequence_bias" in found and "sequence_bias" not in mine and not _has_pairs(found["sequence_bias"]):
        raise TfexportError(
            f"{FILE} of this bundle has sequence_bias {_shown(found['sequence_bias'])}, not a list of [ids, number]. "
            "Correct the file and export again, or give sequence_bias yourself."
        )
    try:
        converted = checked(SearchOptions, {name: value for name, value in found.items() if name not in mine})
    except TfexportError as error:
        raise TfexportError(f"{FILE} of this bundle: {error}") from error
    return GenerationDefaults(converted, tuple(f"{name} {_shown(said[name])}" for name in unsupported))


def _said(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _is_unknown(name: str, value: Any) -> bool:
    known = name in _RENAMED or name in _ELSEWHERE.split()
    return not (known or value in (False, "", [], {}) or value == _NEUTRAL.get(name))


def _lengths(said: Mapping[str, Any], config: ModelConfig, mine: Mapping[str, Any]) -> dict[str, Any]:
    """Limits, with the start token; those of new tokens come first in the library too."""
    limit = said.get("max_length", min(DEFAULT_NEW_TOKENS + 1, config.max_target_length))
    if "max_new_tokens" in said:
        limit = _number(said, "max_new_tokens") + 1
    least = said.get("min_length", 0)
    if "min_new_tokens" in said:
        least = _number(said, "min_new_tokens") + 1
    found = {"max_length": limit}
    if least:
        # A limit that the user gives holds, also where the file wants longer outputs.
        most = mine.get("max_length", limit)
        found["min_length"] = min(least, most - 1) if isinstance(least, int) and isinstance(most, int) else least
    return found


def _tokens(said: Mapping[str, Any], config: ModelConfig, unsupported: list[str]) -> dict[str, Any]:
    """What ends outputs, and sequences that never come."""
    found: dict[str, Any] = {}
    ends = _ids(said, "eos_token_id")
    if others := [index for index in ends if index != config.eos_id]:
        found["end_tokens"] = others
    if "forced_eos_token_id" in said:
        if _ids(said, "forced_eos_token_id") == [config.eos_id]:
            found["force_eos"] = True
        else:
            unsupported.append("forced_eos_token_id")
    words = said.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(isinstance(one, list) for one in words):
        raise TfexportError(f"{FILE} of this bundle has bad_words_ids {_shown(words)}, not a list of lists of ids.")
    if several := [one for one in words if len(one) > 1]:
        found["bad_words"] = several
    if "suppress_tokens" in said and config.eos_id in _ids(said, "suppress_tokens"):
        unsupported.append("suppress_tokens")
    return found


def _has_pairs(value: Any) -> bool:
    """Whether a bias is written as the library writes it: the file names no tokens by their text."""
    pairs = isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
    return pairs and all(isinstance(ids, list) and all(type(index) is int for index in ids) for ids, _ in value)


def _outputs(said: Mapping[str, Any], mine: Mapping[str, Any], unsupported: list[str]) -> dict[str, Any]:
    """How many outputs there are, and whether they are drawn."""
    count, beam = said.get("num_return_sequences", 1), mine.get("beam", said.get("num_beams", 1))
    found: dict[str, Any] = {}
    searches = mine.get("nbest", 1) > 1 or mine.get("alternatives", 0) > 0
    if said.get("do_sample") is True and "samples" not in mine and not searches:
        if beam == 1:
            found["samples"] = count
        elif "beam" not in mine:
            unsupported.append("do_sample")
    if mine.get("samples", found.get("samples", 0)):
        found["beam"] = 1
        return {**found, "top_k": DEFAULT_TOP_K, **{name: said[name] for name in _DRAWING if name in said}}
    if isinstance(count, int) and count > 1 and not mine.get("alternatives"):
        if isinstance(beam, int) and beam >= count:
            found["nbest"] = count
        elif "beam" not in mine:
            unsupported.append("num_return_sequences")
    return found


_DRAWING = ("temperature", "top_k", "top_p")


def _number(said: Mapping[str, Any], name: str) -> int:
    value = said[name]
    if type(value) is not int:
        raise TfexportError(f"{FILE} of this bundle has {name} {_shown(value)}, not a whole number. Export again.")
    return value


def _ids(said: Mapping[str, Any], name: str) -> list[int]:
    """A setting that is one id or several."""
    value = said.get(name, [])
    value = value if isinstance(value, list) else [value]
    if not all(type(index) is int for index in value):
        raise TfexportError(f"{FILE} of this bundle has {name} {_shown(value)}, not ids. Export again.")
    return list(value)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
