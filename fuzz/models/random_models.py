"""Small models of any kind that the package knows, drawn at random."""

from __future__ import annotations

import random
from typing import get_args

import torch

from tfexport.config import Activation, ModelConfig, Positions
from tfexport.models.transformer import Transformer


def random_config(chosen: random.Random) -> ModelConfig:
    """A model of any kind that the package knows, small."""
    heads = chosen.choice((1, 2, 3, 4, 5))
    # At least 6 in all: a LayerNorm of two numbers is a step, which the last bit of a float decides.
    head_dim = chosen.choice((2 if heads > 2 else 6, 4 if heads > 1 else 6, 8, 8, 12, 16, 16))
    has_own_heads = chosen.random() < 0.2  # d_model need not be what the heads are together
    d_model = chosen.randint(6, 64) if has_own_heads else heads * head_dim
    has_final_norm, has_embedding_norm = chosen.random() < 0.5, chosen.random() < 0.3
    positions = chosen.choice(get_args(Positions))
    is_gated, has_table = chosen.random() < 0.3, positions not in ("relative", "none")
    tied = chosen.random() < 0.3
    words, others = (chosen.randint(*chosen.choice(((6, 60), (6, 60), (1024, 1300)))) for _ in range(2))  # or screened
    return ModelConfig(
        d_model=d_model,
        n_heads=heads,
        n_encoder_heads=other_heads(chosen, heads * head_dim),
        d_head=head_dim if has_own_heads else 0,
        d_ff=chosen.randint(1, 70),
        n_encoder_layers=chosen.randint(1, 4),
        n_decoder_layers=chosen.randint(1, 4),
        src_vocab_size=words,
        tgt_vocab_size=words if tied else others,
        max_source_length=chosen.choice((1, 7, 40)),
        max_target_length=chosen.choice((1, 9, 40, 70)),
        unk_id=0,
        pad_id=1,
        bos_id=2,
        eos_id=3,
        norm_first=chosen.random() < 0.5,
        final_norm=has_final_norm,
        final_norm_in=chosen.choice(("both", "encoder", "decoder")) if has_final_norm else "both",
        shared_norm=chosen.random() < 0.3,
        norm=chosen.choice(("layer", "layer", "rms")),
        norm_eps=chosen.choice((1e-5, 1e-6, 1e-3)),
        final_norm_eps=chosen.choice((0.0, 1e-4)) if has_final_norm else 0.0,
        embedding_norm_eps=chosen.choice((0.0, 1e-4)) if has_embedding_norm else 0.0,
        embedding_norm=has_embedding_norm,
        embedding_norm_in=chosen.choice(("both", "encoder", "decoder")) if has_embedding_norm else "both",
        activation=chosen.choice(get_args(Activation)),
        feed_forward="linear" if is_gated else chosen.choice(("linear", "conv1d")),
        gated=is_gated,
        positions=positions,
        position_offset=chosen.choice((0, 0, 2)) if has_table else 0,
        max_distance=chosen.choice((1, 5, 20)) if positions == "relative" else 0,
        embedding_scale=chosen.choice((1.0, d_model**0.5)),
        attention_bias=chosen.random() < 0.8,
        feed_forward_bias=chosen.random() < 0.8,
        output_bias=chosen.random() < 0.5,
        tie_source_target=tied,
        tie_output=chosen.random() < 0.5,
    )


def other_heads(chosen: random.Random, width: int) -> int:
    """A number of heads for the encoder alone, which together have so many numbers; 0 for most models."""
    return chosen.choice([n for n in range(1, 17) if width % n == 0]) if chosen.random() < 0.4 else 0


def random_model(config: ModelConfig, seed: int) -> Transformer:
    """Random norms, biases and stored positions too, and an end that comes in some sentences and not in others."""
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(config)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_matrix, is_scale = parameter.dim() > 1, bool((parameter == 1).all())
        parameter.data = noise * parameter.shape[1] ** -0.5 if is_matrix else is_scale + 0.3 * noise
    for table in model.buffers() if config.positions == "stored" else ():
        table.copy_(torch.randn(table.shape, generator=generator))
    if model.output_bias is not None:
        model.output_bias.data[config.eos_id] += 0.5
    return model.eval()
