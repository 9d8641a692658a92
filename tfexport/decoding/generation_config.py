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
    options: Mapping[str, Any],
    content: Mapping[str, Any] | None,
    config: ModelConfig,
    token_ids: Callable[[str], tuple[int, ...]],
) -> tuple[SearchOptions, GenerationDefaults]:
    """The options of a search. With the profile `hf`, options that the user leaves out get the defaults of the file.

    Args:
        options: the options of the user.
        content: the content of the file; None if the bundle has none.
        token_ids: see `SearchOptions.of`.

    Raises:
        TfexportError: as `SearchOptions.of`, or a setting of the file cannot be read.
    """
    checked(SearchOptions, options)  # report an error of the user before one of the file
    if content is None or options.get("profile") != "hf":
        return SearchOptions.of(options, token_ids), NO_DEFAULTS
    defaults = generation_defaults(content, config, options)
    try:
        return SearchOptions.of({**defaults.options, **_without_nulls(options)}, token_ids), defaults
    except TfexportError as error:
        if str(error) == _fault(options, token_ids):
            raise  # the file is not the cause
        taken = ", ".join(f"{name} {_shown(value)}" for name, value in defaults.options.items())
        raise TfexportError(
            f"{error} {FILE} of this bundle gives {taken}: options that you give take precedence."
        ) from error


def _fault(options: Mapping[str, Any], token_ids: Callable[[str], tuple[int, ...]]) -> str | None:
    """The error of these options alone; None if they are valid."""
    try:
        SearchOptions.of(options, token_ids)
    except TfexportError as error:
        return str(error)
    return None


def generation_defaults(
    content: Mapping[str, Any], config: ModelConfig, options: Mapping[str, Any] | None = None
) -> GenerationDefaults:
    """The options of `SearchOptions` that a file sets and the user does not.

    Args:
        content: the content of the file.
        options: the options of the user.

    Raises:
        TfexportError: a setting has another type than in the library.
    """
    settings, user_options = _without_nulls(content), _without_nulls(options or {})
    defaults = {option: settings[name] for name, option in _RENAMED.items() if name in settings}
    unsupported = [name for name, value in settings.items() if _is_unknown(name, value)]
    defaults |= _lengths(settings, config, user_options)
    defaults |= _tokens(settings, config, unsupported)
    defaults |= _outputs(settings, user_options, unsupported)
    bias = defaults.get("sequence_bias")
    if "sequence_bias" in defaults and "sequence_bias" not in user_options and not _has_pairs(bias):
        raise TfexportError(
            f"{FILE} of this bundle has sequence_bias {_shown(bias)}, not a list of [ids, number]. "
            "Correct the file and export again, or give sequence_bias yourself."
        )
    try:
        others = {name: value for name, value in defaults.items() if name not in user_options}
        converted = checked(SearchOptions, others)
    except TfexportError as error:
        raise TfexportError(f"{FILE} of this bundle: {error}") from error
    return GenerationDefaults(converted, tuple(f"{name} {_shown(settings[name])}" for name in unsupported))


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _is_unknown(name: str, value: Any) -> bool:
    known = name in _RENAMED or name in _ELSEWHERE.split()
    return not (known or value in (False, "", [], {}) or value == _NEUTRAL.get(name))


def _lengths(settings: Mapping[str, Any], config: ModelConfig, user_options: Mapping[str, Any]) -> dict[str, Any]:
    """Length limits, with the start token. Limits of new tokens take precedence, as in the library."""
    limit = settings.get("max_length", min(DEFAULT_NEW_TOKENS + 1, config.max_target_length))
    if "max_new_tokens" in settings:
        limit = _number(settings, "max_new_tokens") + 1
    least = settings.get("min_length", 0)
    if "min_new_tokens" in settings:
        least = _number(settings, "min_new_tokens") + 1
    lengths = {"max_length": limit}
    if least:
        # A limit of the user holds even if the file requires longer outputs.
        most = user_options.get("max_length", limit)
        lengths["min_length"] = min(least, most - 1) if isinstance(least, int) and isinstance(most, int) else least
    return lengths


def _tokens(settings: Mapping[str, Any], config: ModelConfig, unsupported: list[str]) -> dict[str, Any]:
    """The tokens that end outputs, and the sequences that are never generated."""
    options: dict[str, Any] = {}
    ends = _ids(settings, "eos_token_id")
    if others := [index for index in ends if index != config.eos_id]:
        options["end_tokens"] = others
    if "forced_eos_token_id" in settings:
        if _ids(settings, "forced_eos_token_id") == [config.eos_id]:
            options["force_eos"] = True
        else:
            unsupported.append("forced_eos_token_id")
    words = settings.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(isinstance(ids, list) for ids in words):
        raise TfexportError(f"{FILE} of this bundle has bad_words_ids {_shown(words)}, not a list of lists of ids.")
    if several := [ids for ids in words if len(ids) > 1]:
        options["bad_words"] = several
    if "suppress_tokens" in settings and config.eos_id in _ids(settings, "suppress_tokens"):
        unsupported.append("suppress_tokens")
    return options


def _has_pairs(value: Any) -> bool:
    """Whether a bias has the form of the library: lists of ids, not text of tokens."""
    pairs = isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
    return pairs and all(isinstance(ids, list) and all(type(index) is int for index in ids) for ids, _ in value)


def _outputs(settings: Mapping[str, Any], user_options: Mapping[str, Any], unsupported: list[str]) -> dict[str, Any]:
    """The number of outputs, and whether they are sampled."""
    count, beam = settings.get("num_return_sequences", 1), user_options.get("beam", settings.get("num_beams", 1))
    options: dict[str, Any] = {}
    searches = user_options.get("nbest", 1) > 1 or user_options.get("alternatives", 0) > 0
    if settings.get("do_sample") is True and "samples" not in user_options and not searches:
        if beam == 1:
            options["samples"] = count
        elif "beam" not in user_options:
            unsupported.append("do_sample")
    if user_options.get("samples", options.get("samples", 0)):
        options["beam"] = 1
        return {**options, "top_k": DEFAULT_TOP_K, **{name: settings[name] for name in _DRAWING if name in settings}}
    if isinstance(count, int) and count > 1 and not user_options.get("alternatives"):
        if isinstance(beam, int) and beam >= count:
            options["nbest"] = count
        elif "beam" not in user_options:
            unsupported.append("num_return_sequences")
    return options


_DRAWING = ("temperature", "top_k", "top_p")


def _number(settings: Mapping[str, Any], name: str) -> int:
    value = settings[name]
    if type(value) is not int:
        raise TfexportError(f"{FILE} of this bundle has {name} {_shown(value)}, not a whole number. Export again.")
    return value


def _ids(settings: Mapping[str, Any], name: str) -> list[int]:
    """The ids of a setting that is one id or a list of ids."""
    value = settings.get(name, [])
    value = value if isinstance(value, list) else [value]
    if not all(type(index) is int for index in value):
        raise TfexportError(f"{FILE} of this bundle has {name} {_shown(value)}, not ids. Export again.")
    return list(value)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
