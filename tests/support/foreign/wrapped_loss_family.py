"""Checkpoints of `wrapped_loss.py`."""

from wrapped_loss import WrappedLoss

from tfexport import Family, count_indices


def side(theirs, ours, attentions):
    names = {
        f"net.{theirs}_tok.weight": f"{ours}.tokens.weight",
        f"net.{theirs}_pos.weight": f"{ours}.positions.table",
        f"net.{theirs}_ln.{{p}}": f"{ours}.embedding_norm.{{p}}",
    }
    layer, to = f"net.{theirs}_layers.{{i}}", f"{ours}.layers.{{i}}"
    norms = ("ln_a", "ln_b", "ln_c") if theirs == "tgt" else ("ln_a", "ln_c")
    names |= {f"{layer}.{norm}.{{p}}": f"{to}.norms.{k}.{{p}}" for k, norm in enumerate(norms)}
    names |= {f"{layer}.ff.up.{{p}}": f"{to}.feed_forward.hidden.{{p}}"}
    names |= {f"{layer}.ff.down.{{p}}": f"{to}.feed_forward.output.{{p}}"}
    for own, name in attentions.items():
        names[f"{layer}.{own}.out_proj.{{p}}"] = f"{to}.{name}.output.{{p}}"
        for p in ("weight", "bias"):
            names[f"{layer}.{own}.in_proj_{p}"] = tuple(f"{to}.{name}.{part}.{p}" for part in ("query", "key", "value"))
    return names


def read_config(weights):
    max_len, d_model = weights["net.src_pos.weight"].shape
    return {
        "d_model": d_model,
        "d_ff": len(weights["net.src_layers.0.ff.up.weight"]),
        "n_encoder_layers": count_indices(weights, "net.src_layers.{i}.ln_a.weight"),
        "n_decoder_layers": count_indices(weights, "net.tgt_layers.{i}.ln_a.weight"),
        "src_vocab_size": len(weights["net.src_tok.weight"]),
        "tgt_vocab_size": len(weights["net.tgt_tok.weight"]),
        "max_source_length": max_len - 1,
        "max_target_length": max_len - 1,
        "positions": "learned",
        "position_offset": 1,
        "embedding_norm": True,
        "activation": "gelu_tanh",
        "norm_first": False,
        "norm": "layer",
        "norm_eps": 1e-5,
        "embedding_scale": 1.0,
        "output_bias": True,
        "source_bos": False,
        "source_eos": True,
    }


FAMILY = Family(
    name="wrapped-loss",
    about="a model within the module that trains it",
    renames={
        "net.vocab.weight": "output_weight",
        "net.vocab.bias": "output_bias",
        **side("src", "encoder", {"mha": "self_attention"}),
        **side("tgt", "decoder", {"mha": "self_attention", "cross_mha": "cross_attention"}),
    },
    ignored=("crit.*",),
    signature=("net.src_tok.weight", "net.src_layers.0.mha.in_proj_weight"),
    read_config=read_config,
)


def reference(weights, config):
    model = WrappedLoss(
        src_vocab=config.src_vocab_size,
        tgt_vocab=config.tgt_vocab_size,
        d=config.d_model,
        heads=config.n_heads,
        layers=config.n_encoder_layers,
        max_len=config.max_source_length,
    )
    model.load_state_dict(weights)
    return model
