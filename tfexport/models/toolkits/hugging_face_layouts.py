"""The layouts of the transformers library's models: two layouts of names, and the settings of each model's config.

Eight kinds of model share one layout (BART's) and differ in their config; each has a row of `KINDS`. T5 and mT5 have their
own layout. Each setting is used or refused by name: an ignored setting would give a wrong model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tfexport.errors import CheckpointError, ConfigError
from tfexport.models.families.family import Family
from tfexport.models.positions import sinusoids, tensor2tensor_sinusoids
from tfexport.models.toolkits.hugging_face_settings import CONFIG, Settings
from tfexport.models.toolkits.toolkit import LARGEST_TABLE, ToolkitCheckpoint, self_described, tie


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """The differences of a `model_type` from the others of BART's layout."""

    about: str
    positions: Callable[[int, int, int], Tensor] | None
    """Function that computes the table [positions, d_model] from its sizes and the padding id; None if it is learned."""
    offset: int = 2
    """Number of rows of a learned table before the first position."""
    required: Mapping[str, Any] = field(default_factory=dict)
    norm_first: bool = False
    embedding_norm: bool = False


def _sin_then_cos(n_positions: int, d_model: int, pad_id: int) -> Tensor:
    """The paper's sinusoids, with all sines before all cosines."""
    table = sinusoids(n_positions, d_model)
    return torch.cat([table[:, 0::2], table[:, 1::2]], dim=1)


KINDS = {
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
    "plbart": _Kind(about="PLBart", positions=None, embedding_norm=True),
    "mvp": _Kind(about="MVP", positions=None, embedding_norm=True, required={"use_prompt": False}),
    "blenderbot": _Kind(about="Blenderbot", positions=None, offset=0, norm_first=True),
    "m2m_100": _Kind(about="M2M-100, NLLB-200", positions=tensor2tensor_sinusoids, norm_first=True),
}


def bart_like(model_type: str, settings: Settings, weights: dict[str, Tensor]) -> ToolkitCheckpoint:
    kind = KINDS[model_type]
    is_computed = kind.positions is not None
    wanted = {"add_bias_logits": False, "is_encoder_decoder": True, "static_position_embeddings": is_computed}
    settings.require({**kind.required, **wanted})
    d_model, positions = settings.size("d_model"), settings.number("max_position_embeddings")
    pad_id = settings.token("pad_token_id")
    if is_computed and not (d_model >= 4 and positions >= 1 and d_model * positions <= LARGEST_TABLE):
        raise ConfigError(
            f"{settings.path / CONFIG} has d_model {d_model} and max_position_embeddings {positions}, which no such model "
            "has. Check that it was copied completely."
        )
    for side in ("encoder", "decoder"):
        if kind.positions is not None:
            # Some files have the table. It is computed in any case.
            weights.setdefault(f"{side}.embed_positions.weight", kind.positions(positions, d_model, pad_id or 0))
        for leftover in ("embed_positions.weights", "version"):  # from early versions
            weights.pop(f"{side}.{leftover}", None)
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
        "position_offset": kind.offset if kind.positions is None else 0,
        "output_bias": "final_logits_bias" in weights,
        "embedding_scale": math.sqrt(d_model) if settings.flag("scale_embedding", False) else 1.0,
        **embeddings,
        **_special_ids(settings),
    }
    return ToolkitCheckpoint(_family(model_type, kind.about, _BART_NAMES, settings), fields, weights)


NOT_SUPPORTED = {
    "blenderbot-small": "its decoder norms embeddings before it adds positions",
    "led": "its attention is local",
    "longt5": "its attention is local",
    "bigbird_pegasus": "its attention is sparse",
    "prophetnet": "it predicts several tokens at once",
    "fsmt": "convert the fairseq checkpoint that it was made from",
    "switch_transformers": "its feed-forward is a mixture of experts",
    "nllb-moe": "its feed-forward is a mixture of experts",
}
"""Encoder-decoder models of the library with other layouts, and the reason why they are not supported."""

T5 = {"t5": "T5, Flan-T5", "mt5": "mT5"}
_USUAL_LENGTH = 512
"""Default maximum length of a bundle with relative positions, which are unlimited. T5 was trained with this length."""


def t5(model_type: str, settings: Settings, weights: dict[str, Tensor]) -> ToolkitCheckpoint:
    """T5's layout: RMS norms, no biases and relative positions. Its scales are folded into the weights.

    T5 does not divide scores by sqrt(head_dim), so queries are multiplied by it. T5 divides a tied output by sqrt(d_model);
    here the norm before it is divided.
    """
    settings.require({"is_encoder_decoder": True})
    d_model, n_heads, d_head = (settings.size(name) for name in ("d_model", "num_heads", "d_kv"))
    if d_head < 1:
        raise ConfigError(f"{settings.path / CONFIG} has d_kv {d_head}. Check that it was copied completely.")
    layers = settings.number("num_layers")
    gate, dash, activation = str(settings.get("feed_forward_proj", "relu")).rpartition("-")
    if gate not in ("", "gated"):
        raise ConfigError(
            f"{settings.path / CONFIG} has feed_forward_proj {gate}{dash}{activation}, which is not supported."
        )
    # The library's gated-gelu is the approximation.
    activation = "gelu_new" if (gate, activation) == ("gated", "gelu") else activation
    settings.require({"dense_act_fn": activation, "is_gated_act": bool(gate)})
    max_distance = settings.number("relative_attention_max_distance", 128)
    length = settings.number("n_positions", _USUAL_LENGTH)
    # mT5 is never scaled, regardless of its config. T5 is scaled if its output is tied.
    scaled = model_type == "t5" and settings.flag("scale_decoder_outputs", settings.flag("tie_word_embeddings", True))
    for name in list(weights):
        if name.endswith("EncDecAttention.relative_attention_bias.weight"):
            del weights[name]  # from an early version, which never used it
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
    return ToolkitCheckpoint(_family(model_type, T5[model_type], _T5_NAMES, settings), fields, weights)


_FARTHEST = 1_000_000
"""Maximum distance that a number in config.json may request."""


def _by_distance(settings: Settings, buckets: Tensor, max_distance: int, *, both_ways: bool) -> Tensor:
    """Convert T5's table of buckets [buckets, heads] to an equivalent table of distances, as in `DistanceTable`.

    Half of the buckets are for single distances, the others for logarithmically growing ranges. If keys may come after their
    query, they have one half of all buckets (Raffel et al. 2020, section 2.1).
    """
    if len(buckets) != settings.number("relative_attention_num_buckets", 32):
        raise CheckpointError(
            f"a table of relative positions in {settings.path} has {len(buckets)} buckets. Check config.json."
        )
    n = len(buckets) // 2 if both_ways else len(buckets)
    exact = n // 2
    if not 0 < exact < max_distance <= _FARTHEST:
        raise ConfigError(
            f"{settings.path / CONFIG} has relative_attention_max_distance {max_distance}, which does not fit "
            f"{len(buckets)} buckets. Check that it was copied completely."
        )
    distance = torch.arange(-max_distance if both_ways else 0, max_distance + 1)  # of the query from the key
    far = distance.abs()
    # In float32, as in the model, so that the buckets have the same limits.
    growth = torch.log(far.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (n - exact)
    bucket = torch.where(far < exact, far, (exact + growth.long()).clamp(max=n - 1))
    return buckets[bucket + n * (distance < 0)]


def _embeddings(settings: Settings, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Keep each different matrix once in `weights`, under the name of its first use; returns sizes and ties."""
    shared = weights.pop("shared.weight", None)
    tied = settings.flag("tie_word_embeddings", True)
    source = weights.get("encoder.embed_tokens.weight", shared)
    target = weights.get("decoder.embed_tokens.weight", shared)
    if source is None or target is None:
        raise CheckpointError(f"the weights in {settings.path} have no embeddings. Check that they are complete.")
    # The library ties the output to the shared embedding, even if a file has another one for the decoder.
    output = weights.get("lm_head.weight", (target if shared is None else shared) if tied else None)
    if output is None:
        raise CheckpointError(
            f"the weights in {settings.path} have no lm_head.weight, which is not tied. Complete them."
        )
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    weights |= zip(names, (source, target, output), strict=True)
    return tie(weights, *names)


def _special_ids(settings: Settings) -> dict[str, Any]:
    """The special ids in the folder. Missing ids are asked for, as for any checkpoint."""
    ids = {
        "pad_id": settings.token("pad_token_id"),
        "bos_id": settings.token("decoder_start_token_id"),
        "eos_id": settings.first_token("eos_token_id"),
        "forced_first_id": settings.token("forced_bos_token_id"),
    }
    suppressed = settings.ids("suppress_tokens")
    suppressed += [words[0] for words in settings.bad_words() if len(words) == 1]
    return {
        **{name: value for name, value in ids.items() if value is not None},
        "suppressed_ids": tuple(dict.fromkeys(token for token in suppressed if token != ids["eos_id"])),
        "suppressed_first_ids": tuple(settings.ids("begin_suppress_tokens")),
    }


def bart_names(side: str, attentions: Mapping[str, str]) -> dict[str, str]:
    layer = f"{side}.layers.{{i}}"
    norms = (*(f"{module}_layer_norm" for module in attentions), "final_layer_norm")
    return {
        f"{side}.embed_tokens.weight": f"{side}.tokens.weight",
        f"{side}.embed_positions.weight": f"{side}.positions.table",
        f"{side}.layernorm_embedding.{{p}}": f"{side}.embedding_norm.{{p}}",
        f"{side}.layer_norm.{{p}}": f"{side}.norm.{{p}}",
        **{f"{layer}.{norm}.{{p}}": f"{layer}.norms.{k}.{{p}}" for k, norm in enumerate(norms)},
        **{
            f"{layer}.{module}.{part}_proj.{{p}}": f"{layer}.{ours}.{name}.{{p}}"
            for module, ours in attentions.items()
            for part, name in (("q", "query"), ("k", "key"), ("v", "value"), ("out", "output"))
        },
        f"{layer}.fc1.{{p}}": f"{layer}.feed_forward.hidden.{{p}}",
        f"{layer}.fc2.{{p}}": f"{layer}.feed_forward.output.{{p}}",
    }


_BART_NAMES = {
    **bart_names("encoder", {"self_attn": "self_attention"}),
    **bart_names("decoder", {"self_attn": "self_attention", "encoder_attn": "cross_attention"}),
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
            f"{block}.{k}.{module}.{part}.weight": f"{layer}.{ours}.{name}.weight"
            for k, (module, ours) in enumerate(attentions.items())
            for part, name in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output"))
        },
        **{
            f"{block}.{last}.DenseReluDense.{matrix}.weight": f"{layer}.feed_forward.{ours}.weight"
            for matrix, ours in (("wi", "hidden"), ("wi_0", "hidden"), ("wi_1", "gate"), ("wo", "output"))
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
        search_text = ", ".join(f"{name} {value}" for name, value in search.items())
        notes.append(
            f"its own library searches with {search_text}; `decode --search-profile hf` does the same where possible"
        )
    if unread := settings.unread():
        notes.append(f"its config has settings that were not read: {', '.join(unread)}")
    return self_described(
        name=name,
        about=f"{about} ({CONFIG} and weights of the transformers library)",
        renames=renames,
        notes=tuple(notes),
    )
