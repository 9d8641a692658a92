"""The settings in a folder of the transformers library, each used, refused by name, or known to be without effect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfexport.errors import ConfigError

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
"""Settings of training, of other tasks or of the library itself, and second names of what is read under another."""

_SEARCH: dict[str, Any] = {
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
"""How its library searches, and its own defaults: options of `decode`, not of a model."""


class Settings:
    """The entries of config.json and generation_config.json, and which of them were read."""

    def __init__(self, path: Path, config: Mapping[str, Any], generation: Mapping[str, Any]):
        self.path = path
        self._config, self._generation = config, generation
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """A setting, of generation_config.json first, where the library too looks first."""
        self._read.add(name)
        found = self._generation.get(name)
        found = self._config.get(name) if found is None else found
        return default if found is None else found

    def number(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if type(value) is not int:
            raise ConfigError(f"{self.path / CONFIG} has {name} {value!r}, not a whole number. Correct it.")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if type(value) is not bool:
            raise ConfigError(f"{self.path / CONFIG} has {name} {value!r}, not true or false. Correct it.")
        return value

    def same(self, one: str, other: str) -> int:
        """A number that both stacks must share."""
        values = self.number(one), self.number(other)
        if values[0] != values[1]:
            raise ConfigError(
                f"{self.path / CONFIG} has {one} {values[0]} and {other} {values[1]}: models whose stacks differ in it are "
                "not supported."
            )
        return values[0]

    def token(self, name: str) -> int | None:
        """The id of a special token, if there is one."""
        value = self.get(name)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is None or type(value) is int:
            return value
        raise ConfigError(f"{self.path / CONFIG} has {name} {value!r}: only one id is supported.")

    def ids(self, name: str) -> list[int]:
        """A list of ids, each once."""
        value = self.get(name, [])
        if not isinstance(value, list) or not all(type(index) is int for index in value):
            raise ConfigError(f"{self.path / CONFIG} has {name} {value!r}, not a list of ids. Correct it.")
        return list(dict.fromkeys(value))

    def activation(self, name: str) -> str:
        """The activation that a setting names."""
        return self.known_activation(name, self.get(name))

    def known_activation(self, name: str, value: Any) -> str:
        if value not in _ACTIVATIONS:
            raise ConfigError(
                f"{self.path / CONFIG} has {name} {value!r}, which is not supported. There are {', '.join(_ACTIVATIONS)}."
            )
        return _ACTIVATIONS[value]

    def require(self, wanted: Mapping[str, Any]) -> None:
        """Settings that older versions of the library had: where they are told they must be what the kind has."""
        for name, value in wanted.items():
            if (found := self.get(name, value)) != value:
                raise ConfigError(f"{self.path / CONFIG} has {name} {found!r}, and only {value!r} is supported.")

    def search_settings(self) -> dict[str, Any]:
        """What its owner may want to give to `decode`."""
        told = {name: self.get(name) for name in _SEARCH}
        return {name: value for name, value in told.items() if value is not None and value != _SEARCH[name]}

    def unread(self) -> list[str]:
        """Entries that nothing asked for and that are not known to be harmless."""
        told = {**self._config, **self._generation}
        known = {*self._read, *_HARMLESS.split()}
        return sorted(name for name, value in told.items() if name not in known and value not in (None, False, {}, []))
