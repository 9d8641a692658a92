"""generation_config.json of Transformers as defaults of the search profile `hf`.

A bundle keeps the file of the folder that it was exported from. The profile `hf` has the same defaults from this file as
`generate`. Options of the user take precedence. Padding, the start token, a forced first token and suppressed tokens are
settings of the model, which the export has read (`models/toolkits/hugging_face_layouts.py`).

Source: `GenerationConfig` and `generate` of Transformers 5 (its defaults, and how lengths and processors follow from them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tfexport.bundle.reader import GENERATION_CONFIG as FILE
from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.option import checked
from tfexport.search.options import SearchOptions

DEFAULT_NEW_TOKENS = 20
"""The largest number of new tokens if the file has no limit."""
DEFAULT_TOP_K = 50
"""`top_k` of sampling if the file has none."""

_RENAMED = {
    "num_beams": "beam",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram",
    "encoder_no_repeat_ngram_size": "encoder_no_repeat_ngram",
    "sequence_bias": "sequence_bias",
}
"""Settings that are options, with the names of the options."""

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
"""Unsupported settings with the value that has no effect. For all others this value is null, false or empty."""

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
"""Settings that are read below or at the export, and settings that do not change outputs."""

_MOST_SHOWN = 60


@dataclass(frozen=True)
class GenerationDefaults:
    """The defaults of the search from a file."""

    options: Mapping[str, Any]
    """The options that the file sets and the user does not, by name."""
    unsupported: tuple[str, ...] = ()
    """The unsupported settings, with their values."""

    def notes(self) -> list[str]:
        """Notes for the user: the settings that are used, and those that are not."""
        lines = []
        if self.options:
            taken = ", ".join(f"{name} {_shown(value)}" for name, value in self.options.items())
            lines.append(f"{FILE} gives {taken}; options that you give take precedence")
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
    """`SearchOptions.of` the options that are `given`. With the profile `hf`, the file's defaults fill up the others.

    Args:
        content: the content of the file; None if the bundle has none.

    Raises:
        TfexportError: as `SearchOptions.of`, or a setting of the file cannot be read.
    """
    checked(SearchOptions, given)  # report an error of the user before one of the file
    if content is None or given.get("profile") != "hf":
        return SearchOptions.of(given, token_ids), NO_DEFAULTS
    defaults = generation_defaults(content, config, given)
    try:
        return SearchOptions.of({**defaults.options, **_said(given)}, token_ids), defaults
    except TfexportError as error:
        if str(error) == _fault(given, token_ids):
            raise  # the file is not the cause
        taken = ", ".join(f"{name} {_shown(value)}" for name, value in defaults.options.items())
        raise TfexportError(
            f"{error} {FILE} of this bundle gives {taken}: options that you give take precedence."
        ) from error


def _fault(given: Mapping[str, Any], token_ids: Callable[[str], tuple[int, ...]]) -> str | None:
    """The error of these options alone; None if they are valid."""
    try:
        SearchOptions.of(given, token_ids)
    except TfexportError as error:
        return str(error)
    return None


def generation_defaults(
    content: Mapping[str, Any], config: ModelConfig, given: Mapping[str, Any] | None = None
) -> GenerationDefaults:
    """The options of `SearchOptions` that a file sets and that are not `given`.

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
    """Length limits, with the start token. Limits of new tokens take precedence, as in the library."""
    limit = said.get("max_length", min(DEFAULT_NEW_TOKENS + 1, config.max_target_length))
    if "max_new_tokens" in said:
        limit = _number(said, "max_new_tokens") + 1
    least = said.get("min_length", 0)
    if "min_new_tokens" in said:
        least = _number(said, "min_new_tokens") + 1
    found = {"max_length": limit}
    if least:
        # A limit of the user holds even if the file requires longer outputs.
        most = mine.get("max_length", limit)
        found["min_length"] = min(least, most - 1) if isinstance(least, int) and isinstance(most, int) else least
    return found


def _tokens(said: Mapping[str, Any], config: ModelConfig, unsupported: list[str]) -> dict[str, Any]:
    """The tokens that end outputs, and the sequences that are never generated."""
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
    """Whether a bias has the form of the library: lists of ids, not text of tokens."""
    pairs = isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
    return pairs and all(isinstance(ids, list) and all(type(index) is int for index in ids) for ids, _ in value)


def _outputs(said: Mapping[str, Any], mine: Mapping[str, Any], unsupported: list[str]) -> dict[str, Any]:
    """The number of outputs, and whether they are sampled."""
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
    """The ids of a setting that is one id or a list of ids."""
    value = said.get(name, [])
    value = value if isinstance(value, list) else [value]
    if not all(type(index) is int for index in value):
        raise TfexportError(f"{FILE} of this bundle has {name} {_shown(value)}, not ids. Export again.")
    return list(value)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
