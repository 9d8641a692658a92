"""Checkpoints of `einsum_heads.py`."""

from einsum_heads import EinsumHeads

from tfexport import Family, count_indices

QKV = {"w_q": "query", "w_k": "key", "w_v": "value"}


def side(theirs, ours, sublayers):
    names = {f"{theirs}_norm.weight": f"{ours}.norm.weight"}
    layer, to = f"{theirs}.{{i}}", f"{ours}.layers.{{i}}"
    for k in range(len(sublayers) + 1):
        names[f"{layer}.norms.{k}.weight"] = f"{to}.norms.{k}.weight"
    for own, name in sublayers.items():
        names |= {f"{layer}.{own}.{w}": f"{to}.{name}.{part}.weight" for w, part in {**QKV, "w_o": "output"}.items()}
    for own, name in {"w1": "hidden", "w3": "gate", "w2": "output"}.items():
        names[f"{layer}.mlp.{own}.weight"] = f"{to}.feed_forward.{name}.weight"
    return names


def adjust(weights):
    """Ours are [out, in]; theirs [in, heads, size] or, of the output, [heads, size, out]."""
    weights = dict(weights)
    for name, tensor in weights.items():
        if name.endswith("positions.table"):
            weights[name] = tensor.squeeze(0)
        elif "attention.output" in name:
            weights[name] = tensor.flatten(0, 1).T
        elif "attention" in name:
            weights[name] = tensor.flatten(1).T
    return weights


def read_config(weights):
    return {
        "d_model": weights["src.weight"].shape[1],
        "n_heads": weights["enc.0.attention.w_q"].shape[1],
        "d_ff": len(weights["enc.0.mlp.w1.weight"]),
        "n_encoder_layers": count_indices(weights, "enc.{i}.mlp.w1.weight"),
        "n_decoder_layers": count_indices(weights, "dec.{i}.mlp.w1.weight"),
        "src_vocab_size": len(weights["src.weight"]),
        "tgt_vocab_size": len(weights["tgt.weight"]),
        "max_source_length": weights["src_pos"].shape[1],
        "max_target_length": weights["tgt_pos"].shape[1],
        "positions": "learned",
        "norm": "rms",
        "norm_eps": 1e-6,
        "norm_first": True,
        "final_norm": True,
        "activation": "silu",
        "embedding_scale": 1.0,
        "gated": True,
        "attention_bias": False,
        "feed_forward_bias": False,
        "tie_output": True,
        "source_bos": False,
        "source_eos": True,
    }


FAMILY = Family(
    name="einsum-heads",
    about="attention by einsum, RMS norms, a gated feed-forward",
    renames={
        "src.weight": "encoder.tokens.weight",
        "tgt.weight": "decoder.tokens.weight",
        "src_pos": "encoder.positions.table",
        "tgt_pos": "decoder.positions.table",
        **side("enc", "encoder", {"attention": "self_attention"}),
        **side("dec", "decoder", {"attention": "self_attention", "cross": "cross_attention"}),
    },
    signature=("src_pos", "enc.0.attention.w_q"),
    read_config=read_config,
    adjust=adjust,
)


def reference(weights, config):
    model = EinsumHeads(
        src_vocab=config.src_vocab_size,
        tgt_vocab=config.tgt_vocab_size,
        d=config.d_model,
        heads=config.n_heads,
        layers=config.n_encoder_layers,
        max_len=config.max_source_length,
    )
    model.load_state_dict(weights)
    return model
