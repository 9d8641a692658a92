"""Checkpoints of `shared_layers.py`."""

from shared_layers import STEPS, SharedLayers

from tfexport import Family

ATTENTIONS = {"attn": "self_attention", "cross": "cross_attention"}


def side(theirs, ours, norms):
    layer = f"{ours}.layers.0"
    return {
        f"{theirs}.pre.{{p}}": f"{layer}.norms.0.{{p}}",
        f"{theirs}.pre_ff.{{p}}": f"{layer}.norms.{norms - 1}.{{p}}",
        f"{theirs}.up.{{p}}": f"{layer}.feed_forward.hidden.{{p}}",
        f"{theirs}.down.{{p}}": f"{layer}.feed_forward.output.{{p}}",
        **{f"{theirs}.{a}.q.{{p}}": f"{layer}.{to}.query.{{p}}" for a, to in ATTENTIONS.items()},
        **{
            f"{theirs}.{a}.kv.{{p}}": (f"{layer}.{to}.key.{{p}}", f"{layer}.{to}.value.{{p}}")
            for a, to in ATTENTIONS.items()
        },
        **{f"{theirs}.{a}.proj.{{p}}": f"{layer}.{to}.output.{{p}}" for a, to in ATTENTIONS.items()},
    }


def shared():
    names = {"decoder.positions.table": "encoder.positions.table", "decoder.norm.{p}": "encoder.norm.{p}"}
    names["decoder.layers.{i}.norms.1.{p}"] = "decoder.layers.0.norms.0.{p}"
    for ours, attentions, norms in (("encoder", ["self_attention"], 2), ("decoder", ATTENTIONS.values(), 3)):
        parts = [f"{a}.{part}" for a in attentions for part in ("query", "key", "value", "output")]
        parts += ["feed_forward.hidden", "feed_forward.output", "norms.0", f"norms.{norms - 1}"]
        names |= {f"{ours}.layers.{{i}}.{part}.{{p}}": f"{ours}.layers.0.{part}.{{p}}" for part in parts}
    return names


def read_config(weights):
    vocab, d_model = weights["words.weight"].shape
    return {
        "d_model": d_model,
        "d_ff": len(weights["enc.up.weight"]),
        "n_encoder_layers": STEPS,
        "n_decoder_layers": STEPS,
        "src_vocab_size": vocab,
        "tgt_vocab_size": vocab,
        "max_source_length": len(weights["places.weight"]),
        "max_target_length": len(weights["places.weight"]),
        "positions": "learned",
        "norm_first": True,
        "final_norm": True,
        "activation": "gelu",
        "norm": "layer",
        "norm_eps": 1e-5,
        "embedding_scale": 1.0,
        "tie_source_target": True,
        "tie_output": True,
        "source_bos": False,
        "source_eos": True,
    }


FAMILY = Family(
    name="shared-layers",
    about="one layer a side, run several times",
    renames={
        "words.weight": "encoder.tokens.weight",
        "places.weight": "encoder.positions.table",
        "last.{p}": "encoder.norm.{p}",
        **side("enc", "encoder", 2),
        **side("dec", "decoder", 3),
    },
    shared=shared(),
    signature=("places.weight", "enc.attn.kv.weight"),
    read_config=read_config,
)


def reference(weights, config):
    model = SharedLayers(
        vocab=config.src_vocab_size, d=config.d_model, heads=config.n_heads, max_len=config.max_source_length
    )
    model.load_state_dict(weights)
    return model
