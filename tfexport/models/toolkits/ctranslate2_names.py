"""Names of the variables in a CTranslate2 model.bin, and descriptions of unsupported variables.

Source: `specs/transformer_spec.py` and `specs/attention_spec.py` of CTranslate2 4.8.
"""

from __future__ import annotations

SIDES = ("encoder", "decoder")
SOURCE, TARGET, OUTPUT = "encoder/embeddings/weight", "decoder/embeddings/weight", "decoder/projection/weight"
BIAS = "decoder/projection/bias"
TABLES = tuple(f"{side}/position_encodings/encodings" for side in SIDES)
DISTANCES = "relative_attention_bias"

MEANINGS = {
    "rotary": "rotary positions",
    "relative_position_keys": "relative position representations",
    "relative_position_values": "relative position representations",
    "relative_asymmetric": "asymmetric relative positions",
    "alibi": "ALiBi positions",
    "multi_query": "one key head for several heads",
    "num_heads_kv": "fewer key heads than heads",
    "sliding_window": "attention to a window",
    "embeddings_1": "several source features",
    "shared_layer_norm": "parallel residuals",
    "input_layer_norm": "norms before and after sublayers, or parallel residuals",
    "pre_feedforward_layer_norm": "norms before and after sublayers",
    "post_feedforward_layer_norm": "norms before and after sublayers",
    "q_norm": "norms of queries and keys",
    "project_in": "embeddings of another width than the layers",
    "final_logit_softcapping": "capped logits",
    "weight_zero": "weights of 4 bits (AWQ)",
}
"""Descriptions of unsupported variables, by a part of their name."""

_FIRST_NAMES = (
    *(("transformer/", ""), (":0", ""), ("w_embs", "embeddings/weight"), ("kernel", "weight")),
    *(("LayerNorm", "layer_norm"), ("dense", "projection"), ("conv1d_", "linear_"), ("conv1d", "linear_0")),
)
"""Names of revision 1, which came from OpenNMT-tf. Each is replaced once, in this order (`models/transformer.cc`)."""


def variables() -> dict[str, str | tuple[str, ...]]:
    """Canonical name, or names, of each variable. Some variables join several matrices, such as query, key and value."""
    names: dict[str, str | tuple[str, ...]] = {OUTPUT: "output_weight", BIAS: "output_bias"}
    norm = (("gamma", "weight"), ("beta", "bias"))
    for side in SIDES:
        prefix, ours = f"{side}/layer_{{i}}", f"{side}.layers.{{i}}"
        own, cross = f"{ours}.self_attention", f"{ours}.cross_attention"
        names |= {
            f"{side}/embeddings/weight": f"{side}.tokens.weight",
            f"{side}/position_encodings/encodings": f"{side}.positions.table",
            f"{side}/layer_0/self_attention/{DISTANCES}": f"{side}.positions.table",
            f"{prefix}/self_attention/linear_0/{{p}}": (f"{own}.query.{{p}}", f"{own}.key.{{p}}", f"{own}.value.{{p}}"),
            f"{prefix}/self_attention/linear_1/{{p}}": f"{own}.output.{{p}}",
            f"{prefix}/ffn/linear_0/{{p}}": f"{ours}.feed_forward.hidden.{{p}}",
            f"{prefix}/ffn/linear_0_noact/{{p}}": f"{ours}.feed_forward.gate.{{p}}",
            f"{prefix}/ffn/linear_1/{{p}}": f"{ours}.feed_forward.output.{{p}}",
        }
        sublayers = ["self_attention", "ffn"]
        if side == "decoder":
            sublayers.insert(1, "attention")
            names |= {
                f"{prefix}/attention/linear_0/{{p}}": f"{cross}.query.{{p}}",
                f"{prefix}/attention/linear_1/{{p}}": (f"{cross}.key.{{p}}", f"{cross}.value.{{p}}"),
                f"{prefix}/attention/linear_2/{{p}}": f"{cross}.output.{{p}}",
            }
        for g, p in norm:
            names |= {
                f"{side}/layernorm_embedding/{g}": f"{side}.embedding_norm.{p}",
                f"{side}/layer_norm/{g}": f"{side}.norm.{p}",
                **{f"{prefix}/{name}/layer_norm/{g}": f"{ours}.norms.{k}.{p}" for k, name in enumerate(sublayers)},
            }
    return names


def renamed(name: str) -> str:
    """The name in revision 2 for a name of revision 1."""
    attention = (("multi_head", "self_attention"),)
    if "encoder" not in name:
        attention = (("masked_multi_head", "self_attention"), ("multi_head", "attention"))  # type: ignore[assignment]
    for old, new in (*_FIRST_NAMES, *attention):
        name = name.replace(old, new, 1)
    return name
