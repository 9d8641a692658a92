"""Checkpoints of `transposed.py`."""

from transposed import Transposed, positions

from tfexport import Family, count_indices

MAX_LENGTH = 40
P = {"w": "weight", "b": "bias"}
LINEAR = ("attention", "feed_forward", "output")


def side(theirs, ours, attentions):
    layer, to = f"h_{theirs}.{{i}}", f"{ours}.layers.{{i}}"
    names = {f"{layer}.norm.{{p}}": f"{to}.norms.0.{{p}}"}
    for own, p in P.items():
        names[f"{layer}.c_fc.{own}"] = f"{to}.feed_forward.hidden.{p}"
        names[f"{layer}.c_out.{own}"] = f"{to}.feed_forward.output.{p}"
        for a, name in attentions.items():
            names[f"{layer}.{a}.c_proj.{own}"] = f"{to}.{name}.output.{p}"
            names[f"{layer}.{a}.c_attn.{own}"] = f"{to}.{name}.query.{p}"
    return names


def adjust(weights):
    """Matrices as [out, in], and query, key and value apart."""
    made = {}
    for name, tensor in weights.items():
        turned = tensor.T if tensor.dim() == 2 and any(part in name for part in LINEAR) else tensor
        parts = ("query", "key", "value") if ".query." in name else ("query",)
        made |= {name.replace("query", part): t for part, t in zip(parts, turned.chunk(len(parts)), strict=True)}
    table = positions(MAX_LENGTH, len(weights["encoder.layers.0.norms.0.weight"])) if made else None
    return made | {f"{ours}.positions.table": table for ours in ("encoder", "decoder") if made}


def read_config(weights):
    return {
        "d_model": weights["wte.weight"].shape[1],
        "d_ff": len(weights["h_enc.0.c_fc.b"]),
        "n_encoder_layers": count_indices(weights, "h_enc.{i}.c_fc.b"),
        "n_decoder_layers": count_indices(weights, "h_dec.{i}.c_fc.b"),
        "src_vocab_size": len(weights["wte.weight"]),
        "tgt_vocab_size": len(weights["wte_out.weight"]),
        "max_source_length": MAX_LENGTH,
        "max_target_length": MAX_LENGTH,
        "positions": "stored",
        "norm_first": False,
        "norm": "layer",
        "norm_eps": 1e-5,
        "activation": "relu",
        "embedding_scale": 1.0,
        "shared_norm": True,
        "output_bias": True,
        "source_bos": False,
        "source_eos": True,
    }


FAMILY = Family(
    name="transposed",
    about="matrices [in, out]",
    renames={
        "wte.weight": "encoder.tokens.weight",
        "wte_out.weight": "decoder.tokens.weight",
        **{f"lm.{own}": f"output_{p}" for own, p in P.items()},
        **side("enc", "encoder", {"attn": "self_attention"}),
        **side("dec", "decoder", {"attn": "self_attention", "cross": "cross_attention"}),
    },
    signature=("wte_out.weight", "h_enc.0.attn.c_attn.w"),
    read_config=read_config,
    adjust=adjust,
)


def reference(weights, config):
    model = Transposed(
        src_vocab=config.src_vocab_size,
        tgt_vocab=config.tgt_vocab_size,
        d=config.d_model,
        heads=config.n_heads,
        layers=config.n_encoder_layers,
    )
    model.load_state_dict(weights)
    return model
