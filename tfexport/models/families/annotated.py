"""Family `annotated`: harvardnlp/annotated-transformer.

Pre-norm with final norms, sinusoids stored in a buffer, embeddings times sqrt(d_model). Its LayerNorm divides by
`std + eps`, with the unbiased standard deviation and eps 1e-6 outside the root; see `_fold_norms`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tfexport.models.families.family import Family, count_indices

_LINEARS = ("query", "key", "value", "output")
_NORM = {"a_2": "weight", "b_2": "bias"}


def _stack(side: str, embedding: str, attentions: tuple[tuple[str, str], ...]) -> dict[str, str]:
    layer = f"{side}.layers.{{i}}"
    return {
        f"{embedding}.0.lut.weight": f"{side}.tokens.weight",
        f"{embedding}.1.pe": f"{side}.positions.table",
        **{
            f"{layer}.{module}.linears.{k}.{{p}}": f"{layer}.{ours}.{name}.{{p}}"
            for module, ours in attentions
            for k, name in enumerate(_LINEARS)
        },
        f"{layer}.feed_forward.w_1.{{p}}": f"{layer}.feed_forward.hidden.{{p}}",
        f"{layer}.feed_forward.w_2.{{p}}": f"{layer}.feed_forward.output.{{p}}",
        **{
            f"{layer}.sublayer.{k}.norm.{parameter}": f"{layer}.norms.{k}.{ours}"
            for k in range(len(attentions) + 1)
            for parameter, ours in _NORM.items()
        },
        **{f"{side}.norm.{parameter}": f"{side}.norm.{ours}" for parameter, ours in _NORM.items()},
    }


def _read_config(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    src_vocab, d_model = weights["src_embed.0.lut.weight"].shape
    return {
        "d_model": d_model,
        "d_ff": weights["encoder.layers.0.feed_forward.w_1.weight"].shape[0],
        "n_encoder_layers": count_indices(weights, "encoder.layers.{i}.self_attn.linears.0.weight"),
        "n_decoder_layers": count_indices(weights, "decoder.layers.{i}.self_attn.linears.0.weight"),
        "src_vocab_size": src_vocab,
        "tgt_vocab_size": weights["tgt_embed.0.lut.weight"].shape[0],
        "max_source_length": weights["src_embed.1.pe"].shape[-2],
        "max_target_length": weights["tgt_embed.1.pe"].shape[-2],
        "source_bos": True,
        "source_eos": True,
        "norm_first": True,
        "final_norm": True,
        "norm_eps": 1e-12,
        "positions": "stored",
        "output_bias": True,
        "embedding_scale": math.sqrt(d_model),
    }


def _adjust(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: _fold_norms(name, tensor) for name, tensor in weights.items()}


def _fold_norms(name: str, tensor: Tensor) -> Tensor:
    """Convert `a * (x - mean) / (std + eps)`, std over n - 1, to an `nn.LayerNorm`, whose variance is over n.

    std = sqrt(n / (n - 1)) * sqrt(var), so a is scaled by sqrt((n - 1) / n). LayerNorm's eps is inside the root. With eps^2
    there, the two agree for x that varies (relative difference eps / std, 1e-6 at std 1) and for constant x.
    """
    is_norm = ".norms." in name or ".norm." in name
    if is_norm and name.endswith(".weight") and tensor.dim() == 1 and len(tensor) > 1:
        n = len(tensor)
        return tensor * math.sqrt((n - 1) / n)
    if name.endswith("positions.table") and tensor.dim() == 3:
        return tensor.reshape(-1, tensor.shape[-1])  # the family's buffer is [1, length, d_model]
    return tensor


FAMILY = Family(
    name="annotated",
    about="The Annotated Transformer (harvardnlp/annotated-transformer)",
    renames={
        **_stack("encoder", "src_embed", (("self_attn", "self_attention"),)),
        **_stack("decoder", "tgt_embed", (("self_attn", "self_attention"), ("src_attn", "cross_attention"))),
        "generator.proj.weight": "output_weight",
        "generator.proj.bias": "output_bias",
    },
    signature=(
        "src_embed.0.lut.weight",
        "src_embed.1.pe",
        "tgt_embed.0.lut.weight",
        "tgt_embed.1.pe",
        "encoder.layers.0.feed_forward.w_1.weight",
    ),
    read_config=_read_config,
    adjust=_adjust,
    notes=(
        "its LayerNorm, (x - mean) / (std + 1e-6), is folded into the standard one: relative difference 1e-6 / std",
    ),
    usual={"n_heads": 8, "bos_id": 0, "eos_id": 1, "pad_id": 2, "unk_id": 3},
)
