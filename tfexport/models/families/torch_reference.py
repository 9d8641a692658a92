"""A `torch` checkpoint in PyTorch's own layers, under the names of its file: the reference of `tfexport probe`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfexport.config import Activation, ModelConfig
from tfexport.models.families.torch_parts import NONE, Parts
from tfexport.models.positions import COMPUTED

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class TorchReference(nn.Module):
    """`nn.TransformerEncoderLayer`s and `nn.TransformerDecoderLayer`s with embeddings, norms and the output layer."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        config: ModelConfig,
        stacks: tuple[str, str],
        norms: Mapping[str, str],
        parts: Parts,
    ):
        super().__init__()
        self.config, self.parts, self.stacks = config, parts, stacks
        self.norm_paths = {canonical.partition(".")[0]: name.rpartition(".")[0] for name, canonical in norms.items()}
        encoder, decoder = (nn.ModuleList(layers) for layers in self._layers())
        _place(self, stacks[0][:-1], encoder)
        _place(self, stacks[1][:-1], decoder)
        for path in self.norm_paths.values():
            _place(self, path, self._norm(f"{path}.bias" in weights))
        for prefix, layers in ((stacks[0], encoder), (stacks[1], decoder)):
            for number, layer in enumerate(layers):
                for name in [name for name, part in layer.named_children() if isinstance(part, nn.LayerNorm)]:
                    setattr(layer, name, self._norm(f"{prefix}{number}.{name}.bias" in weights))
        bias = f"{parts.output.removesuffix('weight')}bias"
        for name in {parts.source, parts.target, parts.output, *parts.positions, *({bias} & weights.keys())}:
            _place(self, name, nn.Parameter(torch.empty_like(weights[name], dtype=torch.float32)))
        self.bias = bias if bias in weights else None
        longest = max(config.max_source_length, config.max_target_length) + config.position_offset
        self.sinusoids = COMPUTED[parts.computed](longest, config.d_model) if parts.computed else None
        self.load_state_dict(dict(weights), strict=False)

    def _norm(self, has_bias: bool) -> nn.Module:
        config = self.config
        if config.norm == "rms":
            return nn.RMSNorm(config.d_model, config.norm_eps)
        return nn.LayerNorm(config.d_model, config.norm_eps, bias=has_bias)

    def _layers(self) -> tuple[list[nn.Module], list[nn.Module]]:
        config = self.config

        def layer(kind: Callable[..., nn.Module], heads: int) -> nn.Module:
            return kind(
                config.d_model,
                heads,
                config.d_ff,
                0.0,
                _ACTIVATIONS[config.activation],
                config.norm_eps,
                batch_first=True,
                norm_first=config.norm_first,
                bias=config.attention_bias,
            )

        return (
            [layer(nn.TransformerEncoderLayer, config.encoder_heads) for _ in range(config.n_encoder_layers)],
            [layer(nn.TransformerDecoderLayer, config.n_heads) for _ in range(config.n_decoder_layers)],
        )

    def forward(self, src_ids: Tensor, tgt_ids: Tensor) -> Tensor:
        """Logits [batch, tgt, vocab] for `src_ids` [batch, src] and `tgt_ids` [batch, tgt], padded with `pad_id`."""
        encoder, decoder = (self.get_submodule(prefix[:-1]) for prefix in self.stacks)
        hidden = src_ids == self.config.pad_id
        states = self._embedded(src_ids, self.parts.source, 0)
        for layer in encoder.children():
            states = layer(states, src_key_padding_mask=hidden)
        memory, states = self._normed("encoder", states), self._embedded(tgt_ids, self.parts.target, 1)
        future = torch.ones(tgt_ids.shape[1], tgt_ids.shape[1], dtype=torch.bool).triu(1)
        for layer in decoder.children():
            states = layer(states, memory, tgt_mask=future, memory_key_padding_mask=hidden)
        bias = self.get_parameter(self.bias) if self.bias else None
        return F.linear(self._normed("decoder", states), self.get_parameter(self.parts.output), bias)

    def _embedded(self, ids: Tensor, name: str, side: int) -> Tensor:
        config, table = self.config, self.get_parameter(name)
        states = F.embedding(ids, table) * config.embedding_scale
        if self.parts.kind == NONE:
            return states
        positions = self.sinusoids
        if positions is None:
            positions = self.get_parameter(self.parts.positions[side]).reshape(-1, config.d_model)
        rows = positions.to(table)[config.position_offset : config.position_offset + ids.shape[1]]
        return states + rows

    def _normed(self, side: str, states: Tensor) -> Tensor:
        return self.get_submodule(self.norm_paths[side])(states) if side in self.norm_paths else states


def _place(root: nn.Module, path: str, what: nn.Module | nn.Parameter) -> None:
    """Put a module or parameter at a path; missing modules on the path become empty modules."""
    *way, last = path.split(".")
    for name in way:
        if not hasattr(root, name):
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    if isinstance(what, nn.Module):
        root.add_module(last, what)
    else:
        root.register_parameter(last, what)
