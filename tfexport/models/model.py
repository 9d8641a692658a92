"""The models that can be exported: the Transformer of `transformer.py`, and an encoder with a linear head on the first
token's state. A model is made from its config and its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tfexport.config import ModelConfig
from tfexport.models.layers import ACTIVATIONS, Attention, FeedForward, Layer
from tfexport.models.transformer import Encoder, Transformer, initialise


class EncoderClassifier(nn.Module):
    """Classifies source sequences. The config has `n_classes` above 0 and no decoder."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.head = nn.Linear(config.d_model, config.n_classes)
        initialise(self)

    def forward(self, src_ids: Tensor, src_len: Tensor) -> Tensor:
        """Classify `src_ids` [batch, src] of lengths `src_len` [batch]; returns float32 logits [batch, n_classes]."""
        return self.head(self.encoder(src_ids, src_len)[:, 0].to(self.head.weight.dtype)).float()


Model = Transformer | EncoderClassifier
"""A model that can be exported."""


def build_model(config: ModelConfig, weights: Mapping[str, Tensor]) -> Model:
    """The canonical model with canonical `weights`, in evaluation mode."""
    model = empty_model(config)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
    return model.eval()


def change_settings(model: Transformer, config: ModelConfig) -> None:
    """Change in place the settings on which no weight depends: much faster than a new model.

    Args:
        config: the model's own, with other heads, activation, norm order, eps of norms or embedding scale.
    """
    model.config = config
    for stack, heads in ((model.encoder, config.encoder_heads), (model.decoder, config.n_heads)):
        stack.scale = config.embedding_scale
        for path, module in stack.named_modules():
            if isinstance(module, Layer):
                module.norm_first = config.norm_first
            elif isinstance(module, Attention):
                module.n_heads, module.head_dim = heads, config.d_attention // heads
            elif isinstance(module, FeedForward):
                module.activation = ACTIVATIONS[config.activation]()
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.eps = config.norm_eps_of(path)


def empty_model(config: ModelConfig) -> Model:
    """The model on the meta device, which saves the time to initialise weights that are replaced anyway."""
    with torch.device("meta"), _WithoutNumbers():
        return EncoderClassifier(config) if config.is_classifier else Transformer(config)


class _WithoutNumbers(TorchFunctionMode):
    """A mode in which modules do not initialise their weights. Meta tensors need no values, and PyTorch would import its
    compiler (a second)."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func in (nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_):
            return named["tensor"] if "tensor" in named else args[0]
        return func(*args, **named)
