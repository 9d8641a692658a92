"""Classes around `torch.nn.Transformer` as people write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from makers.tiny import randomised
from tfexport.models.positions import sinusoids

SRC_VOCAB, TGT_VOCAB, D, HEADS, D_FF, LENGTH = 41, 37, 24, 3, 52, 30
ENCODER_LAYERS, DECODER_LAYERS = 3, 2
SIZES = (D, HEADS, ENCODER_LAYERS, DECODER_LAYERS, D_FF, 0.0)
IDS = {"unk_id": 0, "pad_id": 1, "bos_id": 2, "eos_id": 3}
PAD, EOS = 1, 3


def causal(length: int) -> Tensor:
    return torch.triu(torch.full((length, length), -math.inf), 1)


class _Token(nn.Module):
    def __init__(self, vocab: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab, D)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * math.sqrt(D)


class _Positional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pos_embedding", sinusoids(LENGTH, D)[:, None])

    def forward(self, embedded: Tensor) -> Tensor:
        return embedded + self.pos_embedding[: embedded.shape[0]]


class Tutorial(nn.Module):
    """Names and shapes of "Language Translation with nn.Transformer": time before batch, post-norm, ReLU."""

    hints: ClassVar = {"norm_first": False, "activation": "relu", "embedding_scale": "sqrt"}

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(*SIZES)
        self.generator = nn.Linear(D, TGT_VOCAB)
        self.src_tok_emb, self.tgt_tok_emb = _Token(SRC_VOCAB), _Token(TGT_VOCAB)
        self.positional_encoding = _Positional()

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        states = self.transformer(
            self.positional_encoding(self.src_tok_emb(src.T)),
            self.positional_encoding(self.tgt_tok_emb(tgt.T)),
            None,
            causal(tgt.shape[1]),
            src_key_padding_mask=src == PAD,
            memory_key_padding_mask=src == PAD,
        )
        return self.generator(states).transpose(0, 1)


class _Side(nn.Module):
    def __init__(self, vocab: int, stack: nn.Module):
        super().__init__()
        self.embedding, self.pos_embedding, self.stack = nn.Embedding(vocab, D), nn.Embedding(LENGTH, D), stack

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) + self.pos_embedding(torch.arange(ids.shape[1]))


class Stacks(nn.Module):
    """Encoder and decoder in classes of their own, batch first, pre-norm without a final norm, learned positions."""

    hints: ClassVar = {"norm_first": True, "activation": "gelu", "embedding_scale": 1.0}

    def __init__(self) -> None:
        super().__init__()
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        encoder = nn.TransformerEncoderLayer(D, HEADS, D_FF, **options)
        decoder = nn.TransformerDecoderLayer(D, HEADS, D_FF, **options)
        self.encoder = _Side(SRC_VOCAB, nn.TransformerEncoder(encoder, ENCODER_LAYERS, enable_nested_tensor=False))
        self.decoder = _Side(TGT_VOCAB, nn.TransformerDecoder(decoder, DECODER_LAYERS))
        self.fc_out = nn.Linear(D, TGT_VOCAB, bias=False)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        memory = self.encoder.stack(self.encoder.embed(src), src_key_padding_mask=src == PAD)
        states = self.decoder.stack(
            self.decoder.embed(tgt), memory, tgt_mask=causal(tgt.shape[1]), memory_key_padding_mask=src == PAD
        )
        return self.fc_out(states)


class Shared(nn.Module):
    """One embedding for both sides and the output, computed sinusoids, no biases, post-norm, GELU; a mask in a buffer."""

    hints: ClassVar = {
        "norm_first": False, "activation": "gelu", "embedding_scale": "sqrt", "positions": "sinusoidal", "norm": "layer",
        "max_source_length": LENGTH, "max_target_length": LENGTH,
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Transformer(*SIZES, activation="gelu", batch_first=True, bias=False)
        self.embedding = nn.Embedding(TGT_VOCAB, D)
        self.register_buffer("tgt_mask", causal(LENGTH) < 0)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        source, target = (
            self.embedding(ids) * math.sqrt(D) + sinusoids(LENGTH, D)[: ids.shape[1]].to(self.embedding.weight)
            for ids in (src, tgt)
        )
        mask = self.tgt_mask[: tgt.shape[1], : tgt.shape[1]].bool()
        hidden = src == PAD
        states = self.core(source, target, tgt_mask=mask, src_key_padding_mask=hidden, memory_key_padding_mask=hidden)
        return states @ self.embedding.weight.T


class Tied(nn.Module):
    """Pre-norm with final norms, one learned table [1, length, d] for both sides, an output tied to the target embedding."""

    hints: ClassVar = {"norm_first": True, "activation": "relu", "embedding_scale": 1.0}

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(*SIZES, norm_first=True)
        self.embed_src, self.embed_tgt = nn.Embedding(SRC_VOCAB, D), nn.Embedding(TGT_VOCAB, D)
        self.pos = nn.Parameter(torch.zeros(1, LENGTH, D))
        self.lm_head = nn.Linear(D, TGT_VOCAB)
        self.lm_head.weight = self.embed_tgt.weight

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        source, target = (
            self.embed_src(src) + self.pos[:, : src.shape[1]],
            self.embed_tgt(tgt) + self.pos[:, : tgt.shape[1]],
        )
        states = self.transformer(
            source.transpose(0, 1),
            target.transpose(0, 1),
            tgt_mask=causal(tgt.shape[1]),
            src_key_padding_mask=src == PAD,
            memory_key_padding_mask=src == PAD,
        )
        return self.lm_head(states.transpose(0, 1))


class Uneven(nn.Module):
    """More heads in the encoder than in the decoder, a final norm in the decoder alone, and no positions."""

    hints: ClassVar = {
        "norm_first": True, "activation": "relu", "embedding_scale": 1.0, "n_encoder_heads": 2 * HEADS,
        "positions": "none", "max_source_length": LENGTH, "max_target_length": LENGTH,
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        encoder = nn.TransformerEncoderLayer(D, 2 * HEADS, D_FF, **options)
        decoder = nn.TransformerDecoderLayer(D, HEADS, D_FF, **options)
        self.encoder = nn.TransformerEncoder(encoder, ENCODER_LAYERS, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, DECODER_LAYERS, nn.LayerNorm(D))
        self.src_embed, self.tgt_embed = nn.Embedding(SRC_VOCAB, D), nn.Embedding(TGT_VOCAB, D)
        self.generator = nn.Linear(D, TGT_VOCAB)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        memory = self.encoder(self.src_embed(src), src_key_padding_mask=src == PAD)
        mask = {"tgt_mask": causal(tgt.shape[1]), "memory_key_padding_mask": src == PAD}
        return self.generator(self.decoder(self.tgt_embed(tgt), memory, **mask))


MODELS: dict[str, type[nn.Module]] = {"tutorial": Tutorial, "stacks": Stacks, "shared": Shared, "tied": Tied}
SEEDS = {"tutorial": 5, "stacks": 9, "shared": 0, "tied": 2}
"""Of models that end some sentences."""
STRONGER = {
    "multihead_attn.out_proj.weight": 4.0,
    "self_attn.out_proj.weight": 3.0,
    "attn.in_proj_weight": 1.5,
    "pos": 2.0,
    "norm1.bias": 0.3,
    "norm2.bias": 0.3,
    "norm3.bias": 0.3,
}
"""Random layers change a token little, and the output then repeats it for ever, whatever the source is. (Not so without a
final norm, where larger weights only make rounding larger.)"""


def made(name: str, change: Callable[[Any], object] = lambda model: None) -> nn.Module:
    """A random model with random norms and biases, whose output depends on its source, and which never says pad.

    Args:
        change: changes its modules, before they become random.
    """
    torch.manual_seed(0)
    model = MODELS[name]()
    change(model)
    model = randomised(model, seed=SEEDS[name])
    output = {"tutorial": "generator", "stacks": "fc_out", "shared": "embedding", "tied": "lm_head"}[name]
    layer = model.get_submodule(output)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if name != "stacks":
                parameter *= next((by for end, by in STRONGER.items() if parameter_name.endswith(end)), 1.0)
        if getattr(layer, "bias", None) is None:
            layer.weight[PAD] = 0.0  # a logit of 0 is never the largest
            layer.weight[EOS] *= 1.5
        else:
            layer.bias[PAD], layer.bias[EOS] = -100.0, layer.bias[EOS] + 0.5
    return model
