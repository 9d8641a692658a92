"""How tfexport reads a classifier with `nn.TransformerEncoder`: `tfexport export ckpt.pt --family my_classifier_family.py`

Its module, which need not be here:

    class MyClassifier(nn.Module):
        def __init__(self, vocab, classes, d=32, heads=4, layers=2, max_len=64):
            super().__init__()
            self.embed, self.positions = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, heads, 4 * d, batch_first=True), layers)
            self.head = nn.Linear(d, classes)

        def forward(self, src):
            x = self.embed(src) + self.positions.weight[: src.shape[1]]
            return self.head(self.encoder(x, src_key_padding_mask=src == PAD)[:, 0])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tfexport import Family, count_indices

LAYER = "encoder.layers.{i}"


def read_config(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the shapes tell, and what our code does whatever they are. Heads are in no file: --heads gives them."""
    vocab, d_model = weights["embed.weight"].shape
    return {
        "d_model": d_model,
        "d_ff": len(weights["encoder.layers.0.linear1.weight"]),
        "n_encoder_layers": count_indices(weights, "encoder.layers.{i}.norm1.weight"),
        "n_decoder_layers": 0,
        "src_vocab_size": vocab,
        "tgt_vocab_size": 0,
        "n_classes": len(weights["head.weight"]),
        "max_source_length": len(weights["positions.weight"]),
        "max_target_length": 0,
        "positions": "learned",
        "embedding_scale": 1.0,
        "norm_first": False,
        "norm": "layer",
        "norm_eps": 1e-5,
        "activation": "relu",
        "source_bos": True,
        "source_eos": False,
    }


FAMILY = Family(
    name="my-classifier",
    about="nn.TransformerEncoder with a linear layer on its first token",
    renames={
        "embed.weight": "encoder.tokens.weight",
        "positions.weight": "encoder.positions.table",
        f"{LAYER}.self_attn.in_proj_{{p}}": tuple(
            f"{LAYER}.self_attention.{name}.{{p}}" for name in ("query", "key", "value")
        ),
        f"{LAYER}.self_attn.out_proj.{{p}}": f"{LAYER}.self_attention.output.{{p}}",
        f"{LAYER}.linear1.{{p}}": f"{LAYER}.feed_forward.hidden.{{p}}",
        f"{LAYER}.linear2.{{p}}": f"{LAYER}.feed_forward.output.{{p}}",
        f"{LAYER}.norm1.{{p}}": f"{LAYER}.norms.0.{{p}}",
        f"{LAYER}.norm2.{{p}}": f"{LAYER}.norms.1.{{p}}",
        "head.{p}": "head.{p}",
    },
    signature=("embed.weight", "positions.weight", "encoder.layers.0.self_attn.in_proj_weight", "head.weight"),
    read_config=read_config,
    usual={"n_heads": 4},
)
