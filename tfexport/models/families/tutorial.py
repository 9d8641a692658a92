"""Family `tutorial`: bentrevett/pytorch-seq2seq, tutorial 6, and the many notebooks that follow it.

Post-norm, learned positions, embeddings times sqrt(d_model), output layer not tied, `<sos> ... <eos>` on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tfexport.models.families.family import Family, count_indices


def _stack(side: str, norms: tuple[str, ...], attentions: Mapping[str, str]) -> dict[str, str]:
    layer = f"{side}.layers.{{i}}"
    projections = {"fc_q": "query", "fc_k": "key", "fc_v": "value", "fc_o": "output"}
    return {
        f"{side}.tok_embedding.weight": f"{side}.tokens.weight",
        f"{side}.pos_embedding.weight": f"{side}.positions.table",
        **{f"{layer}.{norm}.{{p}}": f"{layer}.norms.{k}.{{p}}" for k, norm in enumerate(norms)},
        **{
            f"{layer}.{module}.{name}.{{p}}": f"{layer}.{ours}.{projection}.{{p}}"
            for module, ours in attentions.items()
            for name, projection in projections.items()
        },
        f"{layer}.positionwise_feedforward.fc_1.{{p}}": f"{layer}.feed_forward.hidden.{{p}}",
        f"{layer}.positionwise_feedforward.fc_2.{{p}}": f"{layer}.feed_forward.output.{{p}}",
    }


_NORMS = {
    "encoder": ("self_attn_layer_norm", "ff_layer_norm"),
    "decoder": ("self_attn_layer_norm", "enc_attn_layer_norm", "ff_layer_norm"),
}
_FIRST_NORMS = {"encoder": ("layer_norm",), "decoder": ("layer_norm",)}
"""The tutorial's first version had one norm for all sublayers of a layer."""


def _encoder(norms: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    return _stack("encoder", norms["encoder"], {"self_attention": "self_attention"})


def _decoder(norms: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    attentions = {"self_attention": "self_attention", "encoder_attention": "cross_attention"}
    return _stack("decoder", norms["decoder"], attentions)


_USUAL = {"unk_id": 0, "pad_id": 1, "bos_id": 2, "eos_id": 3}


def _encoder_config(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    vocab, d_model = weights["encoder.tok_embedding.weight"].shape
    return {
        "d_model": d_model,
        "d_ff": weights["encoder.layers.0.positionwise_feedforward.fc_1.weight"].shape[0],
        "n_encoder_layers": count_indices(weights, "encoder.layers.{i}.self_attention.fc_q.weight"),
        "src_vocab_size": vocab,
        "max_source_length": weights["encoder.pos_embedding.weight"].shape[0],
        "source_bos": True,
        "source_eos": True,
        "shared_norm": "encoder.layers.0.layer_norm.weight" in weights,
        "positions": "learned",
        "embedding_scale": math.sqrt(d_model),
    }


def _read_config(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        **_encoder_config(weights),
        "n_decoder_layers": count_indices(weights, "decoder.layers.{i}.self_attention.fc_q.weight"),
        "tgt_vocab_size": weights["decoder.tok_embedding.weight"].shape[0],
        "max_target_length": weights["decoder.pos_embedding.weight"].shape[0],
        "output_bias": True,
    }


def _read_classifier_config(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        **_encoder_config(weights),
        "n_decoder_layers": 0,
        "tgt_vocab_size": 0,
        "max_target_length": 0,
        "n_classes": weights["fc_out.weight"].shape[0],
    }


_SIGNATURE = (
    "encoder.tok_embedding.weight",
    "encoder.pos_embedding.weight",
    "encoder.layers.0.positionwise_feedforward.fc_1.weight",
)

_FIRST_SIGNATURE = ("encoder.layers.0.layer_norm.weight",)


def _translator(norms: Mapping[str, tuple[str, ...]], signature: tuple[str, ...]) -> Family:
    output = {"decoder.fc_out.weight": "output_weight", "decoder.fc_out.bias": "output_bias"}
    return Family(
        name="tutorial",
        about="the sequence-to-sequence tutorial's Transformer (bentrevett/pytorch-seq2seq, tutorial 6)",
        renames={**_encoder(norms), **_decoder(norms), **output},
        signature=(*_SIGNATURE, "decoder.tok_embedding.weight", "decoder.pos_embedding.weight", *signature),
        read_config=_read_config,
        usual={"n_heads": 8, **_USUAL},
    )


def _classifier(norms: Mapping[str, tuple[str, ...]], signature: tuple[str, ...]) -> Family:
    return Family(
        name="tutorial-classifier",
        about="the tutorial's encoder with a linear head on the first token",
        renames={**_encoder(norms), "fc_out.{p}": "head.{p}"},
        signature=(*_SIGNATURE, "fc_out.weight", *signature),
        absent=("decoder.",),
        read_config=_read_classifier_config,
        usual={"n_heads": 8, **_USUAL},
    )


FAMILIES = (
    _translator(_FIRST_NORMS, _FIRST_SIGNATURE),
    _classifier(_FIRST_NORMS, _FIRST_SIGNATURE),
    _translator(_NORMS, ()),
    _classifier(_NORMS, ()),
)
"""Two versions of each. The first version has the longer signature, so it is tried first."""
