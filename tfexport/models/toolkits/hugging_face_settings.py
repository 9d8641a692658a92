"""The settings in a folder of the transformers library. Each is used, refused by name, or known to have no effect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfexport.errors import ConfigError
from tfexport.models.toolkits.arguments import Arguments

CONFIG = "config.json"

_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}

_HARMLESS = """
    architectures model_type transformers_version torch_dtype dtype _name_or_path name_or_path _attn_implementation
    _num_labels num_labels id2label label2id classif_dropout classifier_dropout problem_type task_specific_params
    finetuning_task dropout attention_dropout activation_dropout dropout_rate encoder_layerdrop decoder_layerdrop
    init_std initializer_factor gradient_checkpointing use_cache is_encoder_decoder is_decoder add_cross_attention
    output_past output_attentions output_hidden_states return_dict return_dict_in_generate output_scores
    chunk_size_feed_forward hidden_size extra_pos_embeddings num_hidden_layers num_attention_heads vocab_size tokenizer_class
    prefix num_decoder_layers share_encoder_decoder_embeddings decoder_vocab_size bos_token_id sep_token_id cls_token_id
    unk_token_id max_length save_step torchscript tf_legacy_loss use_bfloat16 pruned_heads cross_attention_hidden_size
    n_positions feed_forward_proj classifier_head force_bos_token_to_be_generated _from_model_config
    cache_implementation
"""
"""Settings of training, of other tasks or of the library itself, and second names of other settings."""

_SEARCH: dict[str, Any] = {
    "eos_token_id": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "min_new_tokens": None,
    "num_beams": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
    "min_length": 0,
    "max_length": 20,
    "max_new_tokens": None,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "repetition_penalty": 1.0,
    "diversity_penalty": 0.0,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
    "renormalize_logits": False,
    "remove_invalid_values": False,
    "forced_eos_token_id": None,
}
"""Search settings of the library with its defaults. They are options of `decode`, not of a model."""

_ALSO_OF_MODELS = ("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id")
"""Search settings that belong to the model in a bundle."""


class Settings(Arguments):
    """The entries of config.json and generation_config.json. The object records which of them were read."""

    def __init__(self, path: Path, config: Mapping[str, Any], generation: Mapping[str, Any]):
        super().__init__(str(path / CONFIG), config)
        self.path = path
        self._config, self._generation = config, generation

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a setting. As in the library, generation_config.json has priority."""
        value, generation = super().get(name, default), self._generation.get(name)
        return value if generation is None else generation

    def token(self, name: str) -> int | None:
        """The id of a special token, if there is one."""
        value = self.get(name)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is None or (type(value) is int and 0 <= value < 2**31):
            return value
        raise ConfigError(f"{self.path / CONFIG} has {name} {value!r}: only one id is supported.")

    def first_token(self, name: str) -> int | None:
        """The id of a special token that may have several: the one in config.json, or else the first."""
        value = self.get(name)
        if not isinstance(value, list) or len(value) < 2:
            return self.token(name)
        several = self.ids(name)
        own = self._config.get(name)
        return own if type(own) is int and own in several else several[0]

    def ids(self, name: str) -> list[int]:
        """A list of ids, each once."""
        value = self.get(name, [])
        if not isinstance(value, list) or not all(type(index) is int for index in value):
            raise ConfigError(f"{self.path / CONFIG} has {name} {value!r}, not a list of ids. Correct it.")
        return list(dict.fromkeys(value))

    def bad_words(self) -> list[list[int]]:
        """Sequences of ids that are never generated."""
        value = self.get("bad_words_ids", [])
        if not isinstance(value, list) or not all(
            isinstance(words, list) and words and all(type(index) is int for index in words) for words in value
        ):
            raise ConfigError(
                f"{self.path / CONFIG} has bad_words_ids {value!r}, not a list of lists of ids. Correct it."
            )
        return value

    def activation(self, name: str) -> str:
        """The activation of a setting."""
        return self.known_activation(name, self.get(name))

    def known_activation(self, name: str, value: Any) -> str:
        return self.known(name, value, _ACTIVATIONS)

    def search_settings(self) -> dict[str, Any]:
        """Search settings that the user may want to give to `decode`."""
        settings = {name: self.get(name) for name in _SEARCH}
        settings["eos_token_id"] = settings["eos_token_id"] if isinstance(settings["eos_token_id"], list) else None
        settings["bad_words_ids"] = [words for words in self.bad_words() if len(words) > 1] or None
        return {name: value for name, value in settings.items() if value is not None and value != _SEARCH[name]}

    def generation(self) -> dict[str, Any] | None:
        """The library's search settings for the bundle: generation_config.json, or config.json as in folders
        of earlier versions; None if there are none."""
        if self._generation:
            return dict(self._generation)
        names = [name for name in (*_SEARCH, *_ALSO_OF_MODELS) if self._config.get(name) is not None]
        return {name: self._config[name] for name in names} if set(names) - {"eos_token_id"} else None

    def unread(self) -> list[str]:
        """Entries that were not read and are not known to be harmless."""
        settings = {**self._given, **self._generation}
        known = {*self._read, *_HARMLESS.split()}
        return sorted(
            name for name, value in settings.items() if name not in known and value not in (None, False, {}, [])
        )
