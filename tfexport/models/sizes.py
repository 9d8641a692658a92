"""How many numbers the matrices of a model have, known from its config alone.

With d = d_model, a = heads * head_dim (`ModelConfig.d_attention`, which need not be d_model) and f = d_ff:

    attention       query, key, value and output, each d * a
    feed-forward    hidden and output, each d * f; with a gate three such matrices

Vectors (biases, norms) count for little and are left out, and so are embeddings and positions.
"""

from __future__ import annotations

from tfexport.config import ModelConfig


def encoder_matrices(config: ModelConfig) -> int:
    """Numbers in the matrices of all encoder layers."""
    return config.n_encoder_layers * (4 * _projection(config) + _feed_forward(config))


def cross_matrices(config: ModelConfig) -> int:
    """Numbers in the matrices that give the decoder layers their cross-attention keys and values, once a sentence."""
    return config.n_decoder_layers * 2 * _projection(config)


def decoder_step_matrices(config: ModelConfig) -> int:
    """Numbers in the matrices of all decoder layers that a step multiplies with.

    Four of self-attention and two of cross-attention; see `cross_matrices` for the other two.
    """
    return config.n_decoder_layers * (6 * _projection(config) + _feed_forward(config))


def output_matrix(config: ModelConfig) -> int:
    """Numbers in the output projection."""
    return config.tgt_vocab_size * config.d_model


def _projection(config: ModelConfig) -> int:
    return config.d_model * config.d_attention


def _feed_forward(config: ModelConfig) -> int:
    return (3 if config.gated else 2) * config.d_model * config.d_ff
