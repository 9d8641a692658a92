"""Checkpoints of `flat_list.py`."""

from flat_list import FlatList

from tfexport import Family, count_indices

PARTS = {"wq": "query", "wk": "key", "wv": "value", "wo": "output"}
FEED_FORWARD = {"0": "hidden", "2": "output"}


def side(theirs, ours, sublayers):
    renames = {}
    for k, sublayer in enumerate(sublayers):
        block = f"{theirs}.{{{len(sublayers)}i+{k}}}"
        renames[f"{block}.norm.{{p}}"] = f"{ours}.layers.{{i}}.norms.{k}.{{p}}"
        for part, name in (FEED_FORWARD if sublayer == "feed_forward" else PARTS).items():
            renames[f"{block}.inner.{part}.{{p}}"] = f"{ours}.layers.{{i}}.{sublayer}.{name}.{{p}}"
    return renames


def read_config(weights):
    max_len, d_model = weights["pos"].shape
    return {
        "d_model": d_model,
        "d_ff": len(weights["enc.1.inner.0.weight"]),
        "n_encoder_layers": count_indices(weights, "enc.{2i}.norm.weight"),
        "n_decoder_layers": count_indices(weights, "dec.{3i}.norm.weight"),
        "src_vocab_size": len(weights["emb.0.weight"]),
        "tgt_vocab_size": len(weights["emb.1.weight"]),
        "max_source_length": max_len,
        "max_target_length": max_len,
        "positions": "sinusoidal",
        "norm_first": False,
        "norm": "layer",
        "norm_eps": 1e-5,
        "activation": "relu",
        "embedding_scale": d_model**0.5,
        "output_bias": True,
        "source_bos": False,
        "source_eos": True,
    }


FAMILY = Family(
    name="flat-list",
    about="one list of residual blocks a side",
    renames={
        "emb.0.weight": "encoder.tokens.weight",
        "emb.1.weight": "decoder.tokens.weight",
        "head.weight": "output_weight",
        "head.bias": "output_bias",
        **side("enc", "encoder", ("self_attention", "feed_forward")),
        **side("dec", "decoder", ("self_attention", "cross_attention", "feed_forward")),
    },
    signature=("pos", "enc.0.inner.wq.weight"),
    ignored=("pos",),
    read_config=read_config,
)


def reference(weights, config):
    model = FlatList(
        src_vocab=config.src_vocab_size,
        tgt_vocab=config.tgt_vocab_size,
        d=config.d_model,
        heads=config.n_heads,
        layers=config.n_encoder_layers,
        max_len=config.max_source_length,
    )
    model.load_state_dict(weights)
    return model
