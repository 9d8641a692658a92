"""How tfexport reads checkpoints of `my_model.py`: `tfexport export ckpt.pt --family my_family.py --heads 4 ...`"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from my_model import MyModel
from torch import Tensor

from tfexport import Family, ModelConfig, count_indices

QKV = ("query", "key", "value")


def stack(side: str, embedding: str, positions: str, attentions: Mapping[str, str]) -> dict[str, str | tuple[str, ...]]:
    """Our names to tfexport's. {i} stands for the layer, {p} for weight or bias; a tensor that is several is cut."""
    ours, theirs = f"{side}.{{i}}", f"{side}.layers.{{i}}"
    norms = ("ln1", "ln2", "ln3") if "cross" in attentions else ("ln1", "ln3")
    return {
        f"{embedding}.weight": f"{side}.tokens.weight",
        f"{positions}.weight": f"{side}.positions.table",
        **{f"{ours}.{norm}.{{p}}": f"{theirs}.norms.{k}.{{p}}" for k, norm in enumerate(norms)},
        **{f"{ours}.{a}.qkv.{{p}}": tuple(f"{theirs}.{to}.{x}.{{p}}" for x in QKV) for a, to in attentions.items()},
        **{f"{ours}.{a}.out.{{p}}": f"{theirs}.{to}.output.{{p}}" for a, to in attentions.items()},
        f"{ours}.mlp.0.{{p}}": f"{theirs}.feed_forward.hidden.{{p}}",
        f"{ours}.mlp.2.{{p}}": f"{theirs}.feed_forward.output.{{p}}",
        f"{side}_embed_ln.{{p}}": f"{side}.embedding_norm.{{p}}",
        f"{side}_ln.{{p}}": f"{side}.norm.{{p}}",
    }


def read_config(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the shapes tell, and what our code does whatever they are. Heads are in no file: --heads gives them."""
    src_vocab, d_model = weights["src_embed.weight"].shape
    return {
        "d_model": d_model,
        "d_ff": len(weights["encoder.0.mlp.0.weight"]),
        "n_encoder_layers": count_indices(weights, "encoder.{i}.ln1.weight"),
        "n_decoder_layers": count_indices(weights, "decoder.{i}.ln1.weight"),
        "src_vocab_size": src_vocab,
        "tgt_vocab_size": len(weights["tgt_embed.weight"]),
        "max_source_length": len(weights["src_pos.weight"]),
        "max_target_length": len(weights["tgt_pos.weight"]),
        "positions": "learned",
        "embedding_scale": 1.0,
        "embedding_norm": True,
        "norm_first": True,
        "final_norm": True,
        "norm": "layer",
        "norm_eps": 1e-6,
        "activation": "gelu",
        "tie_output": True,
        "source_bos": False,
        "source_eos": True,
    }


FAMILY = Family(
    name="my-model",
    about="the model of examples/my_model.py",
    renames={
        **stack("encoder", "src_embed", "src_pos", {"attn": "self_attention"}),
        **stack("decoder", "tgt_embed", "tgt_pos", {"attn": "self_attention", "cross": "cross_attention"}),
    },
    signature=("src_embed.weight", "src_pos.weight", "encoder.0.attn.qkv.weight", "decoder.0.cross.qkv.weight"),
    read_config=read_config,
    usual={"n_heads": 4, "pad_id": 0, "bos_id": 1, "eos_id": 2},
)


def reference(weights: Mapping[str, Tensor], config: ModelConfig) -> MyModel:
    """Our own module with these weights, for `tfexport probe`: forward(src, tgt) to logits [batch, tgt, vocab]."""
    model = MyModel(
        src_vocab=config.src_vocab_size,
        tgt_vocab=config.tgt_vocab_size,
        d=config.d_model,
        heads=4,  # as we trained it, not as --heads says: then `probe` finds the difference
        layers=config.n_encoder_layers,
        max_len=config.max_source_length,
    )
    model.load_state_dict(dict(weights))
    return model.eval()
