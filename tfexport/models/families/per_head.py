"""Family `per-head`: Huffon/pytorch-transformer-kor-eng, one Linear triple per head and a convolution feed-forward.

Pre-norm, one LayerNorm shared by all sublayers of a layer, and a frozen sinusoid table whose row 0 belongs to padding (token
t uses row t + 1). The output layer is the target embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tfexport.models.families.family import Family, count_indices


def _stack(side: str, attentions: Mapping[str, str]) -> dict[str, str]:
    prefix, ours = f"{side}.{side}_layers.{{i}}", f"{side}.layers.{{i}}"
    return {
        f"{side}.token_embedding.weight": f"{side}.tokens.weight",
        f"{side}.pos_embedding.weight": f"{side}.positions.table",
        f"{side}.layer_norm.{{p}}": f"{side}.norm.{{p}}",
        f"{prefix}.layer_norm.{{p}}": f"{ours}.norms.0.{{p}}",
        f"{prefix}.position_wise_ffn.conv1.{{p}}": f"{ours}.feed_forward.hidden.{{p}}",
        f"{prefix}.position_wise_ffn.conv2.{{p}}": f"{ours}.feed_forward.output.{{p}}",
        **{
            f"{prefix}.{name}.attentions.{{h}}.{part}_w.weight": f"{ours}.{attention}.{projection}.weight"
            for name, attention in attentions.items()
            for part, projection in (("q", "query"), ("k", "key"), ("v", "value"))
        },
        **{
            f"{prefix}.{name}.o_w.weight": f"{ours}.{attention}.output.weight" for name, attention in attentions.items()
        },
    }


def _read_config(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    src_vocab, d_model = weights["encoder.token_embedding.weight"].shape
    attention = "encoder.encoder_layers.0.self_attention.attentions.{h}.q_w.weight"
    return {
        "d_model": d_model,
        "n_heads": count_indices(weights, attention),
        "d_ff": weights["encoder.encoder_layers.0.position_wise_ffn.conv1.weight"].shape[0],
        "n_encoder_layers": count_indices(weights, "encoder.encoder_layers.{i}.self_attention.o_w.weight"),
        "n_decoder_layers": count_indices(weights, "decoder.decoder_layers.{i}.self_attention.o_w.weight"),
        "src_vocab_size": src_vocab,
        "tgt_vocab_size": weights["decoder.token_embedding.weight"].shape[0],
        "max_source_length": weights["encoder.pos_embedding.weight"].shape[0] - 1,
        "max_target_length": weights["decoder.pos_embedding.weight"].shape[0] - 1,
        "source_bos": False,
        "source_eos": False,
        "norm_first": True,
        "final_norm": True,
        "shared_norm": True,
        "norm_eps": 1e-6,
        "positions": "stored",
        "position_offset": 1,
        "feed_forward": "conv1d",
        "attention_bias": False,
        "tie_output": True,
        "embedding_scale": math.sqrt(d_model),
    }


FAMILY = Family(
    name="per-head",
    about="one Linear triple per head, Conv1d feed-forward (Huffon/pytorch-transformer-kor-eng)",
    renames={
        **_stack("encoder", {"self_attention": "self_attention"}),
        **_stack("decoder", {"self_attention": "self_attention", "encoder_attention": "cross_attention"}),
    },
    signature=(
        "encoder.token_embedding.weight",
        "encoder.pos_embedding.weight",
        "encoder.encoder_layers.0.position_wise_ffn.conv1.weight",
        "decoder.token_embedding.weight",
        "decoder.pos_embedding.weight",
    ),
    read_config=_read_config,
    usual={"unk_id": 0, "pad_id": 1, "bos_id": 2, "eos_id": 3},
)
