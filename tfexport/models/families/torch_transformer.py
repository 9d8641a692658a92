"""Family `torch`: layers of `torch.nn.Transformer`, or of its encoder and decoder, in the user's own class.

Weights outside the layers have the user's names: `models/families/torch_parts.py` finds embeddings, output and positions,
or asks. A file does not contain the number of heads, pre- or post-norm, the activation or the scale of the embeddings. Norms
without biases may be LayerNorm or RMSNorm.
`batch_first` has no effect on the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tfexport.config import ModelConfig
from tfexport.errors import CheckpointError, ConfigError
from tfexport.models.families.family import SOURCE_ENDS, Family, count_indices
from tfexport.models.families.names import NameTemplate
from tfexport.models.families.torch_parts import NONE, Parts, find_parts
from tfexport.models.families.torch_reference import TorchReference
from tfexport.models.positions import COMPUTED

_SELF = re.compile(r"(.*?)\d+\.self_attn\.out_proj\.weight")
_CROSS = re.compile(r"(.*?)\d+\.multihead_attn\.out_proj\.weight")

_TUTORIAL = {"src_tok_emb.embedding.weight", "positional_encoding.pos_embedding", "generator.weight"}
_USUAL = {
    "n_heads": 8, "norm_first": False, "activation": "relu", "embedding_scale": "sqrt",
    "unk_id": 0, "pad_id": 1, "bos_id": 2, "eos_id": 3,
}  # fmt: skip
"""Values of the tutorial "Language Translation with nn.Transformer and torchtext" on pytorch.org."""


@dataclass(frozen=True, kw_only=True)
class TorchTransformer(Family):
    """The family, before it is fitted to the names of a file."""

    def lacking(self, weights: Mapping[str, Tensor]) -> list[str]:
        has_cross = any(_CROSS.fullmatch(name) for name in weights)
        return [] if has_cross else ["layers.0.multihead_attn.out_proj.weight"]

    def fit(self, weights: Mapping[str, Tensor], hints: Mapping[str, Any]) -> tuple[Family, dict[str, str]]:
        encoder, decoder = _stacks(weights)
        beside = {name: t for name, t in weights.items() if not name.startswith((encoder, decoder))}
        norms = _final_norms(beside, encoder, decoder)
        beside = {name: tensor for name, tensor in beside.items() if name not in norms}
        d_model = _d_model(weights, encoder)
        parts = find_parts({name: t for name, t in beside.items() if not _is_mask(name)}, d_model, hints)
        masks = [name for name in beside if _is_mask(name)]
        bare, biased = _norm_weights(weights, encoder, decoder, norms)
        if hints.get("norm") == "rms" and biased:
            raise ConfigError(_not_rms(biased, bare))

        def read_config(weights: Mapping[str, Tensor]) -> dict[str, Any]:
            fields = (
                _layer_fields(weights, encoder, decoder) | _norm_fields(norms) | ({} if bare else {"norm": "layer"})
            )
            return fields if parts.unclear else fields | _part_fields(weights, parts)

        def adjust(canonical: dict[str, Tensor]) -> dict[str, Tensor]:
            without = () if hints.get("norm") == "rms" else (to for name in bare for to in fitted.canonical_names(name))
            return _adjusted(canonical, without)

        def reference(weights: Mapping[str, Tensor], config: ModelConfig) -> nn.Module:
            return TorchReference(weights, config, (encoder, decoder), norms, parts)

        # PyTorch's layers have one matrix for query, key and value, and biases everywhere or nowhere.
        is_plain = not any(name.endswith("q_proj_weight") for name in weights) and (
            (f"{encoder}0.self_attn.out_proj.bias" in weights) == (f"{encoder}0.linear1.bias" in weights)
        )
        fitted = Family(
            name=self.name,
            about=self.about,
            renames={
                **_stack("encoder", encoder, {"self_attn": "self_attention"}),
                **_stack("decoder", decoder, {"self_attn": "self_attention", "multihead_attn": "cross_attention"}),
                **norms,
                **({} if parts.unclear else _part_names(parts)),
            },
            signature=(),
            read_config=read_config,
            ignored=tuple(masks),
            adjust=adjust,
            notes=() if parts.unclear else tuple(_notes(parts, masks, hints)),
            usual=_USUAL if weights.keys() >= _TUTORIAL else {},
            asked=(
                *self.asked,
                *(("max_source_length", "max_target_length") if parts.computed or parts.kind == NONE else ()),
                *(("norm",) if bare else ()),
                *(("norm_eps",) if hints.get("norm") == "rms" else ()),
            ),
            computed_positions=COMPUTED.get(parts.computed),
            told_by_user=self.told_by_user,
            reference=reference if is_plain else None,
            reference_as_told=True,
        )
        return fitted, parts.unclear


def _stacks(weights: Mapping[str, Tensor]) -> tuple[str, str]:
    """The prefixes of the encoder's and the decoder's layers, such as `transformer.encoder.layers.`"""
    every = {match[1]: None for match in map(_SELF.fullmatch, weights) if match}
    decoders = [
        prefix for prefix in every if any(name.startswith(prefix) and _CROSS.fullmatch(name) for name in weights)
    ]
    encoders = [prefix for prefix in every if prefix not in decoders]
    if len(encoders) != 1 or len(decoders) != 1 or "{" in encoders[0] + decoders[0]:
        raise CheckpointError(
            f"there are {len(encoders)} encoders ({', '.join(encoders)}) and {len(decoders)} decoders "
            f"({', '.join(decoders)}) of torch.nn.Transformer's layers, not one of each. Describe this model in a family "
            "file of your own, --family my_family.py."
        )
    return encoders[0], decoders[0]


def _stack(ours: str, prefix: str, attentions: Mapping[str, str]) -> dict[str, str | tuple[str, ...]]:
    layer, projections = f"{ours}.layers.{{i}}", ("query", "key", "value")
    names: dict[str, str | tuple[str, ...]] = {}
    for attention, canonical in attentions.items():
        to = f"{layer}.{canonical}"
        names[f"{prefix}{{i}}.{attention}.in_proj_{{p}}"] = tuple(f"{to}.{name}.{{p}}" for name in projections)
        for name in projections:  # if kdim or vdim were given
            names[f"{prefix}{{i}}.{attention}.{name[0]}_proj_weight"] = f"{to}.{name}.weight"
        names[f"{prefix}{{i}}.{attention}.out_proj.{{p}}"] = f"{to}.output.{{p}}"
    names[f"{prefix}{{i}}.linear1.{{p}}"] = f"{layer}.feed_forward.hidden.{{p}}"
    names[f"{prefix}{{i}}.linear2.{{p}}"] = f"{layer}.feed_forward.output.{{p}}"
    for norm in range(len(attentions) + 1):
        names[f"{prefix}{{i}}.norm{norm + 1}.{{p}}"] = f"{layer}.norms.{norm}.{{p}}"
    return names


def _final_norms(beside: Mapping[str, Tensor], encoder: str, decoder: str) -> dict[str, str]:
    """The norms after the last layers, next to `layers`. `nn.Transformer` has them; its stacks alone may lack them."""
    names = {}
    for side, prefix in (("encoder", encoder), ("decoder", decoder)):
        for part in ("weight", "bias"):
            if prefix.endswith("layers.") and (name := f"{prefix.removesuffix('layers.')}norm.{part}") in beside:
                names[name] = f"{side}.norm.{part}"
    return names


def _norm_fields(norms: Mapping[str, str]) -> dict[str, Any]:
    sides = {canonical.partition(".")[0] for canonical in norms.values()}
    return {"final_norm": bool(sides), "final_norm_in": sides.pop() if len(sides) == 1 else "both"}


def _norm_weights(
    weights: Mapping[str, Tensor], encoder: str, decoder: str, final: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """The weights of the norms that have no bias, and of those that have one.

    If the same norm of another layer has a bias, a missing one is a fault of the file. It is reported later.
    """
    kinds = [NameTemplate(f"{side}{{i}}.norm{k}.weight") for side in (encoder, decoder) for k in (1, 2, 3)]
    groups = [[name for name in weights if kind.match(name)] for kind in kinds]
    groups += [[name] for name in final if name.endswith(".weight")]
    bare: list[str] = []
    biased: list[str] = []
    for names in groups:
        has_bias = any(f"{name.removesuffix('weight')}bias" in weights for name in names)
        (biased if has_bias else bare).extend(names)
    return bare, biased


def _not_rms(biased: list[str], bare: list[str]) -> str:
    layer = biased[0].removesuffix(".weight")
    reason = f"--norm is rms, and {layer} has a bias, as LayerNorm has and RMSNorm has not"
    if not bare:
        return f"{reason}. Leave out --norm."
    return (
        f"{reason}, unlike {bare[0].removesuffix('.weight')}: a model with LayerNorm and RMSNorm is not computed. "
        "Give --norm layer if the norms without a bias are LayerNorm too."
    )


def _d_model(weights: Mapping[str, Tensor], encoder: str) -> int:
    hidden = weights.get(f"{encoder}0.linear1.weight")
    if hidden is None or hidden.dim() != 2:
        raise CheckpointError(
            f"{encoder}0.linear1.weight, from which the sizes are read, is missing or misshapen. Check that the file is "
            "complete."
        )
    return hidden.shape[1]


def _layer_fields(weights: Mapping[str, Tensor], encoder: str, decoder: str) -> dict[str, Any]:
    d_ff, d_model = weights[f"{encoder}0.linear1.weight"].shape
    return {
        "d_model": d_model,
        "d_ff": d_ff,
        "n_encoder_layers": count_indices(weights, f"{encoder}{{i}}.self_attn.out_proj.weight"),
        "n_decoder_layers": count_indices(weights, f"{decoder}{{i}}.self_attn.out_proj.weight"),
        "attention_bias": f"{encoder}0.self_attn.out_proj.bias" in weights,
        "feed_forward_bias": f"{encoder}0.linear1.bias" in weights,
    }


def _part_fields(weights: Mapping[str, Tensor], parts: Parts) -> dict[str, Any]:
    fields = {
        "src_vocab_size": len(weights[parts.source]),
        "tgt_vocab_size": len(weights[parts.target]),
        "tie_source_target": parts.source == parts.target,
        "tie_output": parts.output == parts.target,
        "output_bias": _bias(parts) in weights,
        "positions": parts.kind,
    }
    for name, table in zip(("max_source_length", "max_target_length"), parts.positions, strict=False):
        *rows, d_model = weights[table].shape
        fields[name] = max(rows) if d_model else 0
    return fields


def _bias(parts: Parts) -> str:
    return f"{parts.output.removesuffix('weight')}bias"


def _part_names(parts: Parts) -> dict[str, str | tuple[str, ...]]:
    names: dict[str, str | tuple[str, ...]] = {parts.source: "encoder.tokens.weight", _bias(parts): "output_bias"}
    if parts.target != parts.source:
        names[parts.target] = "decoder.tokens.weight"
    if parts.output != parts.target:
        names[parts.output] = "output_weight"
    for side, table in zip(("decoder", "encoder"), reversed(parts.positions), strict=False):
        names[table] = f"{side}.positions.table"  # a shared table becomes the encoder's; see `_adjusted`
    return names


def _adjusted(weights: dict[str, Tensor], without_bias: Iterable[str]) -> dict[str, Tensor]:
    for side in ("encoder", "decoder"):
        table = weights.get(f"{side}.positions.table")
        if table is not None and table.dim() == 3:
            weights[f"{side}.positions.table"] = table.reshape(-1, table.shape[-1])
    if "encoder.positions.table" in weights:  # a single table serves both sides
        weights.setdefault("decoder.positions.table", weights["encoder.positions.table"])
    for name in without_bias:  # a LayerNorm without a bias, as in `nn.Transformer(bias=False)`
        if name in weights:
            weights.setdefault(f"{name.removesuffix('weight')}bias", torch.zeros_like(weights[name]))
    return weights


def _is_mask(name: str) -> bool:
    return name.endswith("mask")


def _notes(parts: Parts, masks: list[str], hints: Mapping[str, Any]) -> list[str]:
    positions = ", ".join(dict.fromkeys(parts.positions)) or (
        f"computed, {parts.computed}" if parts.computed else "none"
    )
    embeddings = parts.source if parts.source == parts.target else f"{parts.source} (source), {parts.target} (target)"
    notes = [
        f"embeddings: {embeddings}; output layer: {parts.output}; positions: {positions}",
        *(
            ["not in the file: norm_eps, which is PyTorch's 1e-05 unless --norm-eps says otherwise"]
            * ("norm_eps" not in hints)
        ),
    ]
    return notes + [f"left out: {', '.join(masks)}: masks come from lengths"] * bool(masks)


FAMILY = TorchTransformer(
    name="torch",
    about="layers of torch.nn.Transformer in the user's own class",
    renames={},
    signature=(),
    read_config=lambda weights: {},
    asked=("norm_first", "activation", "embedding_scale", *SOURCE_ENDS),
    told_by_user=("src_embedding", "tgt_embedding", "output_layer", "positions"),
)
