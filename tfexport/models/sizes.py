"""The sizes of a model's matrices, computed from its config alone.

With d = d_model, a = heads * head_dim (`ModelConfig.d_attention`, which need not be d_model) and f = d_ff:

    attention       query, key, value and output, each d * a
    feed-forward    hidden and output, each d * f; a gate adds a third matrix

Vectors (biases, norms) are small and not counted. Embeddings and positions are not counted either.
"""

from __future__ import annotations

from tfexport.config import ModelConfig


def encoder_matrices(config: ModelConfig) -> int:
    """Number of elements of the matrices of all encoder layers."""
    return config.n_encoder_layers * (4 * _projection(config) + _feed_forward(config))


def cross_matrices(config: ModelConfig) -> int:
    """Number of elements of the matrices that project cross-attention keys and values, once per sentence."""
    return config.n_decoder_layers * 2 * _projection(config)


def decoder_step_matrices(config: ModelConfig) -> int:
    """Number of elements of the decoder layers' matrices that a step uses.

    Self-attention has four such matrices and cross-attention two; `cross_matrices` counts the other two.
    """
    return config.n_decoder_layers * (6 * _projection(config) + _feed_forward(config))


def output_matrix(config: ModelConfig) -> int:
    """Number of elements of the output projection."""
    return config.tgt_vocab_size * config.d_model


def _projection(config: ModelConfig) -> int:
    return config.d_model * config.d_attention


def _feed_forward(config: ModelConfig) -> int:
    return (3 if config.gated else 2) * config.d_model * config.d_ff
