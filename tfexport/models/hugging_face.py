"""Folders that the `transformers` library saves: config.json, weights and tokenizer files.

Five kinds of model share one layout of names (BART's) and differ in what their config says; a row of `_KINDS` each. T5 and
mT5 have their own (`_t5`). What a config says is read here, and used or refused by name: a setting that is passed over in
silence is a wrong model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfexport.bundle import file_sha256
from tfexport.errors import CheckpointError, ConfigError
from tfexport.models.family import Family
from tfexport.models.files import read_file
from tfexport.models.hugging_face_text import TextOptions, read_text
from tfexport.models.native import Tokenizers
from tfexport.models.transformer import sinusoids

CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")

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
    chunk_size_feed_forward hidden_size num_hidden_layers num_attention_heads vocab_size tokenizer_class prefix
    num_decoder_layers share_encoder_decoder_embeddings decoder_vocab_size bos_token_id sep_token_id cls_token_id
    unk_token_id max_length save_step torchscript tf_legacy_loss use_bfloat16 pruned_heads cross_attention_hidden_size
    n_positions feed_forward_proj classifier_head force_bos_token_to_be_generated _from_model_config
    cache_implementation
"""
"""Settings of training, of other tasks or of the library itself, and second names of what is read under another."""

_SEARCH = """
    num_beams length_penalty early_stopping min_length max_length max_new_tokens no_repeat_ngram_size
    encoder_no_repeat_ngram_size repetition_penalty diversity_penalty num_beam_groups num_return_sequences do_sample
    temperature top_k top_p typical_p renormalize_logits remove_invalid_values forced_eos_token_id
"""
"""How its library searches by default: options of `decode`, not of a model."""


@dataclass(frozen=True)
class Folder:
    """A folder read: a `Family` of its own, what its config tells, and the weights under the family's names."""

    family: Family
    fields: dict[str, Any]
    """Of `ModelConfig`."""
    weights: dict[str, Tensor]
    tokenizers: Tokenizers = field(default_factory=lambda: Tokenizers(None, None))
    given: dict[str, Any] = field(default_factory=dict)
    """Fields that the user's languages tell."""


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
        usual = {"num_beams": 1, "length_penalty": 1.0, "early_stopping": False, "min_length": 0, "do_sample": False}
        told = {name: self.get(name) for name in _SEARCH.split()}
        return {name: value for name, value in told.items() if value is not None and value != usual.get(name)}

    def unread(self) -> list[str]:
        """Entries that nothing asked for and that are not known to be harmless."""
        told = {**self._config, **self._generation}
        known = {*self._read, *_HARMLESS.split()}
        return sorted(name for name, value in told.items() if name not in known and value not in (None, False, {}, []))


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What sets a `model_type` apart from the others of BART's layout."""

    about: str
    positions: Callable[[int, int, int], Tensor] | None
    """Computes the table [positions, d_model] from its sizes and the padding id; None where it is learned."""
    required: Mapping[str, Any] = field(default_factory=dict)
    norm_first: bool = False
    embedding_norm: bool = False


def _sin_then_cos(n_positions: int, d_model: int, pad_id: int) -> Tensor:
    """The paper's sinusoids, all sines before all cosines."""
    table = sinusoids(n_positions, d_model)
    return torch.cat([table[:, 0::2], table[:, 1::2]], dim=1)


def _tensor2tensor(n_positions: int, d_model: int, pad_id: int) -> Tensor:
    """tensor2tensor's sinusoids, whose lowest frequency is 1 / 10000 exactly; the first rows belong to padding.

    In float32, as the models' own library has computed them: at position 1000 that is seen in the fourth decimal.
    """
    half = d_model // 2
    frequency = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(pad_id + 1, pad_id + 1 + n_positions).float()[:, None] * frequency
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.nn.functional.pad(table, (0, d_model % 2))


_KINDS = {
    "marian": _Kind(
        about="MarianMT, OPUS-MT",
        positions=_sin_then_cos,
        required={"normalize_before": False, "normalize_embedding": False, "add_final_layer_norm": False},
    ),
    "bart": _Kind(
        about="BART",
        positions=None,
        embedding_norm=True,
        required={"normalize_before": False, "normalize_embedding": True, "add_final_layer_norm": False},
    ),
    "mbart": _Kind(
        about="mBART, mBART-50",
        positions=None,
        norm_first=True,
        embedding_norm=True,
        required={"normalize_before": True, "normalize_embedding": True, "add_final_layer_norm": True},
    ),
    "pegasus": _Kind(
        about="Pegasus",
        positions=_sin_then_cos,
        norm_first=True,
        required={"normalize_before": True, "normalize_embedding": False, "add_final_layer_norm": True},
    ),
    "m2m_100": _Kind(about="M2M-100, NLLB-200", positions=_tensor2tensor, norm_first=True),
}


def read_folder(path: Path, options: TextOptions | None = None) -> Folder:
    """Read config, weights and tokenizers of a folder that `save_pretrained` wrote.

    Raises:
        CheckpointError: the folder lacks a file, or a file cannot be read.
        ConfigError: the model is of another kind, or a setting is not supported.
    """
    config = _json(path / CONFIG, "Give a folder that save_pretrained wrote, or the path of a checkpoint file.")
    generation_path = path / "generation_config.json"
    settings = Settings(path, config, _json(generation_path) if generation_path.is_file() else {})
    model_type = config.get("model_type")
    if model_type not in (*_KINDS, *_T5):
        raise ConfigError(
            f"{path / CONFIG} has model_type {model_type!r}, which is not supported. There are "
            f"{', '.join((*_KINDS, *_T5))}."
        )
    if config.get("quantization_config"):
        raise ConfigError(
            f"{path / CONFIG} has a quantization_config. Give the folder of the model before quantization."
        )
    weights = _read_weights(path)
    folder = (_t5 if model_type in _T5 else _bart_like)(model_type, settings, weights)
    text = read_text(path, model_type, folder.fields, options or TextOptions())
    given = {} if text.language is None else _spoken(folder.fields, text.language)
    return replace(
        folder,
        family=replace(folder.family, notes=(*folder.family.notes, *text.notes)),
        fields={**folder.fields, **text.fields, **given},
        tokenizers=text.tokenizers,
        given=given,
    )


def _spoken(fields: Mapping[str, Any], language: int) -> dict[str, Any]:
    """Where a model is told the target language: as the first token of the output, or of the decoder."""
    first = fields.get("bos_id")
    if "forced_first_id" in fields or (first is not None and first in (fields.get("eos_id"), fields.get("pad_id"))):
        return {"forced_first_id": language}
    return {"bos_id": language}


def sha256(path: Path) -> str:
    """The sha256 of what `read_folder` reads: of the files' own sums, in hexadecimal."""
    names = sorted({CONFIG, *_weight_files(path)})
    return hashlib.sha256("".join(file_sha256(path / name) for name in names).encode()).hexdigest()


def _json(path: Path, advice: str = "Check that it was copied completely.") -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}. {advice}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object. {advice}")
    return content


def _weight_files(path: Path) -> list[str]:
    for name in _WEIGHTS:
        if (path / name).is_file():
            return [name]
        index = path / f"{name}.index.json"
        if index.is_file():
            shards = _json(index).get("weight_map")
            if not isinstance(shards, dict) or not all(
                isinstance(shard, str) and shard == Path(shard).name for shard in shards.values()
            ):
                raise CheckpointError(f"{index} has no weight_map of file names. Check that it was copied completely.")
            return sorted(set(shards.values()))
    raise CheckpointError(f"{path} has no weights ({', '.join(_WEIGHTS)}). Check that it was copied completely.")


def _read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors by name, without the `model.` that stands before most."""
    weights: dict[str, Tensor] = {}
    for name in _weight_files(path):
        weights |= read_file(path / name, unwrap=False).weights
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def _bart_like(model_type: str, settings: Settings, weights: dict[str, Tensor]) -> Folder:
    kind = _KINDS[model_type]
    settings.require({**kind.required, "add_bias_logits": False, "is_encoder_decoder": True})
    d_model, positions = settings.number("d_model"), settings.number("max_position_embeddings")
    pad_id = settings.token("pad_token_id")
    if kind.positions is not None:
        table = kind.positions(positions, d_model, pad_id or 0)
        for side in ("encoder", "decoder"):
            # Some files have the table; all can do without.
            weights.setdefault(f"{side}.embed_positions.weight", table)
    weights.pop("encoder.embed_positions.weights", None)
    weights.pop("decoder.embed_positions.weights", None)
    embeddings = _embeddings(settings, weights)
    bias = weights.pop("final_logits_bias", None)
    if bias is not None and bias.any():
        weights["final_logits_bias"] = bias.reshape(-1)
    fields = {
        "d_model": d_model,
        "n_heads": settings.same("encoder_attention_heads", "decoder_attention_heads"),
        "d_ff": settings.same("encoder_ffn_dim", "decoder_ffn_dim"),
        "n_encoder_layers": settings.number("encoder_layers"),
        "n_decoder_layers": settings.number("decoder_layers"),
        "max_source_length": positions,
        "max_target_length": positions,
        "source_eos": True,
        "activation": settings.activation("activation_function"),
        "norm_first": kind.norm_first,
        "final_norm": kind.norm_first,
        "embedding_norm": kind.embedding_norm,
        "positions": "learned" if kind.positions is None else "stored",
        "position_offset": 2 if kind.positions is None else 0,
        "output_bias": "final_logits_bias" in weights,
        "embedding_scale": math.sqrt(d_model) if settings.flag("scale_embedding", False) else 1.0,
        **embeddings,
        **_special_ids(settings),
    }
    return Folder(_family(model_type, kind.about, _BART_NAMES, settings), fields, weights)


_T5 = {"t5": "T5, Flan-T5", "mt5": "mT5"}
_USUAL_LENGTH = 512
"""Relative positions have no end. This is what T5 was trained with, and a bundle has where nothing else is said."""


def _t5(model_type: str, settings: Settings, weights: dict[str, Tensor]) -> Folder:
    """T5's layout: RMS norms, no biases, relative positions, and no scales, which are folded into the weights.

    Its scores are not divided by sqrt(head_dim), so queries are multiplied by that; its tied output is divided by
    sqrt(d_model), and so is the norm before it.
    """
    settings.require({"is_encoder_decoder": True})
    d_model, n_heads, d_head = (settings.number(name) for name in ("d_model", "num_heads", "d_kv"))
    layers = settings.number("num_layers")
    gate, dash, activation = str(settings.get("feed_forward_proj", "relu")).rpartition("-")
    if gate not in ("", "gated"):
        raise ConfigError(
            f"{settings.path / CONFIG} has feed_forward_proj {gate}{dash}{activation}, which is not supported."
        )
    # What the library calls gated-gelu is the approximation.
    activation = "gelu_new" if (gate, activation) == ("gated", "gelu") else activation
    settings.require({"dense_act_fn": activation, "is_gated_act": bool(gate)})
    max_distance = settings.number("relative_attention_max_distance", 128)
    length = settings.number("n_positions", _USUAL_LENGTH)
    # mT5 is not scaled, whatever its config says; of T5, those whose output is tied.
    scaled = model_type == "t5" and settings.flag("scale_decoder_outputs", settings.flag("tie_word_embeddings", True))
    for name in list(weights):
        if name.endswith("EncDecAttention.relative_attention_bias.weight"):
            del weights[name]  # of an early version, which never used it
        elif name.endswith("relative_attention_bias.weight"):
            both_ways = name.startswith("encoder.")
            weights[name] = _by_distance(settings, weights[name], max_distance, both_ways=both_ways)
        elif name.endswith("Attention.q.weight"):
            weights[name] = weights[name].float() * math.sqrt(d_head)
        elif name == "decoder.final_layer_norm.weight" and scaled:
            weights[name] = weights[name].float() * d_model**-0.5
    fields = {
        "d_model": d_model,
        "n_heads": n_heads,
        "d_head": d_head if d_head * n_heads != d_model else 0,
        "d_ff": settings.number("d_ff"),
        "n_encoder_layers": layers,
        "n_decoder_layers": settings.number("num_decoder_layers", layers),
        "max_source_length": length,
        "max_target_length": length,
        "source_eos": True,
        "activation": settings.known_activation("feed_forward_proj", activation),
        "norm_first": True,
        "final_norm": True,
        "norm": "rms",
        "norm_eps": settings.get("layer_norm_epsilon", 1e-6),
        "positions": "relative",
        "max_distance": max_distance,
        "gated": bool(gate),
        "attention_bias": False,
        "feed_forward_bias": False,
        **_embeddings(settings, weights),
        **_special_ids(settings),
    }
    return Folder(_family(model_type, _T5[model_type], _T5_NAMES, settings), fields, weights)


def _by_distance(settings: Settings, buckets: Tensor, max_distance: int, *, both_ways: bool) -> Tensor:
    """T5's table of buckets [buckets, heads] as one of distances, as `DistanceTable` has it: it is the same, written out.

    Half of the buckets are for distances of their own, the others for ranges that grow as logarithms do; where a key may
    also come after its query, it has a half of the buckets for itself (Raffel et al. 2020, section 2.1).
    """
    if len(buckets) != settings.number("relative_attention_num_buckets", 32):
        raise CheckpointError(
            f"a table of relative positions in {settings.path} has {len(buckets)} buckets. Check config.json."
        )
    n = len(buckets) // 2 if both_ways else len(buckets)
    distance = torch.arange(-max_distance if both_ways else 0, max_distance + 1)  # of the query from the key
    far, exact = distance.abs(), n // 2
    # In float32, as the model has computed it: a bucket begins where that says.
    growth = torch.log(far.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (n - exact)
    bucket = torch.where(far < exact, far, (exact + growth.long()).clamp(max=n - 1))
    return buckets[bucket + n * (distance < 0)]


def _embeddings(settings: Settings, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Leave each different matrix once in `weights`, under the name of its first use; returns sizes and what is tied."""
    shared = weights.pop("shared.weight", None)
    tied = settings.flag("tie_word_embeddings", True)
    source = weights.get("encoder.embed_tokens.weight", shared)
    target = weights.get("decoder.embed_tokens.weight", shared)
    if source is None or target is None:
        raise CheckpointError(f"the weights in {settings.path} have no embeddings. Check that they are complete.")
    output = weights.get("lm_head.weight", target if tied else None)
    if output is None:
        raise CheckpointError(
            f"the weights in {settings.path} have no lm_head.weight, which is not tied. Complete them."
        )
    found = {"encoder.embed_tokens.weight": source, "decoder.embed_tokens.weight": target, "lm_head.weight": output}
    weights |= found
    same_sides, same_output = _equal(source, target), _equal(output, target)
    if same_sides:
        del weights["decoder.embed_tokens.weight"]
    if same_output:
        del weights["lm_head.weight"]
    return {
        "src_vocab_size": source.shape[0],
        "tgt_vocab_size": target.shape[0],
        "tie_source_target": same_sides,
        "tie_output": same_output,
    }


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and torch.equal(one, other))


def _special_ids(settings: Settings) -> dict[str, Any]:
    """The ids that the folder tells; what it does not tell is asked for as of any checkpoint."""
    ids = {
        "pad_id": settings.token("pad_token_id"),
        "bos_id": settings.token("decoder_start_token_id"),
        "eos_id": settings.token("eos_token_id"),
        "forced_first_id": settings.token("forced_bos_token_id"),
    }
    suppressed = list(settings.get("suppress_tokens", []))
    for words in settings.get("bad_words_ids", []):
        if len(words) > 1:
            raise ConfigError(f"{settings.path} has bad_words_ids of several tokens, {words}, which is not supported.")
        suppressed += words
    if settings.get("begin_suppress_tokens"):
        raise ConfigError(f"{settings.path} has begin_suppress_tokens, which is not supported.")
    return {
        **{name: value for name, value in ids.items() if value is not None},
        "suppressed_ids": tuple(dict.fromkeys(token for token in suppressed if token != ids["eos_id"])),
    }


def _bart_names(side: str, attentions: Mapping[str, str]) -> dict[str, str]:
    layer = f"{side}.layers.{{i}}"
    norms = (*(f"{theirs}_layer_norm" for theirs in attentions), "final_layer_norm")
    return {
        f"{side}.embed_tokens.weight": f"{side}.tokens.weight",
        f"{side}.embed_positions.weight": f"{side}.positions.table",
        f"{side}.layernorm_embedding.{{p}}": f"{side}.embedding_norm.{{p}}",
        f"{side}.layer_norm.{{p}}": f"{side}.norm.{{p}}",
        **{f"{layer}.{norm}.{{p}}": f"{layer}.norms.{k}.{{p}}" for k, norm in enumerate(norms)},
        **{
            f"{layer}.{theirs}.{part}_proj.{{p}}": f"{layer}.{ours}.{name}.{{p}}"
            for theirs, ours in attentions.items()
            for part, name in (("q", "query"), ("k", "key"), ("v", "value"), ("out", "output"))
        },
        f"{layer}.fc1.{{p}}": f"{layer}.feed_forward.hidden.{{p}}",
        f"{layer}.fc2.{{p}}": f"{layer}.feed_forward.output.{{p}}",
    }


_BART_NAMES = {
    **_bart_names("encoder", {"self_attn": "self_attention"}),
    **_bart_names("decoder", {"self_attn": "self_attention", "encoder_attn": "cross_attention"}),
    "lm_head.weight": "output_weight",
    "final_logits_bias": "output_bias",
}


def _t5_names(side: str, attentions: Mapping[str, str]) -> dict[str, str]:
    block, layer = f"{side}.block.{{i}}.layer", f"{side}.layers.{{i}}"
    last = len(attentions)
    return {
        f"{side}.embed_tokens.weight": f"{side}.tokens.weight",
        f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight": f"{side}.positions.table",
        f"{side}.final_layer_norm.weight": f"{side}.norm.weight",
        **{f"{block}.{k}.layer_norm.weight": f"{layer}.norms.{k}.weight" for k in range(last + 1)},
        **{
            f"{block}.{k}.{theirs}.{part}.weight": f"{layer}.{ours}.{name}.weight"
            for k, (theirs, ours) in enumerate(attentions.items())
            for part, name in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output"))
        },
        **{
            f"{block}.{last}.DenseReluDense.{theirs}.weight": f"{layer}.feed_forward.{ours}.weight"
            for theirs, ours in (("wi", "hidden"), ("wi_0", "hidden"), ("wi_1", "gate"), ("wo", "output"))
        },
    }


_T5_NAMES = {
    **_t5_names("encoder", {"SelfAttention": "self_attention"}),
    **_t5_names("decoder", {"SelfAttention": "self_attention", "EncDecAttention": "cross_attention"}),
    "lm_head.weight": "output_weight",
}


def _family(name: str, about: str, renames: Mapping[str, str], settings: Settings) -> Family:
    notes = []
    if search := settings.search_settings():
        told = ", ".join(f"{name} {value}" for name, value in search.items())
        notes.append(f"its own library searches with {told}; give `decode` what you want of that")
    if unread := settings.unread():
        notes.append(f"its config has settings that were not read: {', '.join(unread)}")
    return Family(
        name=name,
        about=f"{about} ({CONFIG} and weights of the transformers library)",
        renames=renames,
        signature=(),
        read_config=lambda weights: {},
        notes=tuple(notes),
    )
