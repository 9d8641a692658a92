"""The standard graphs as PyTorch modules, and inputs for their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tfexport import contract
from tfexport.config import ModelConfig
from tfexport.models.layers import KeyValue, best_tokens
from tfexport.models.model import EncoderClassifier, Model
from tfexport.models.transformer import Transformer

Arrays = dict[str, NDArray[Any]]
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """Inputs of a graph, and a function that computes a model's outputs for them."""

    inputs: Arrays
    outputs: Callable[[Model], Outputs]
    """Computes the graph's outputs with a model, by name. It may return further values; the logits from which the best
    tokens are taken are always among them."""


class _Encoder(nn.Module):
    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, src_ids: Tensor, src_len: Tensor) -> list[Tensor]:
        return [tensor for memory in self.model.encode(src_ids, src_len) for tensor in memory]


class _DecoderStep(nn.Module):
    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, position: Tensor, src_len: Tensor, past: list[Tensor], cross: list[Tensor]
    ) -> list[Tensor]:
        logits, present = self.model.step(tokens, position, src_len, _paired(past), _paired(cross))
        best = best_tokens(logits, min(contract.BEST_TOKENS, logits.shape[-1]))
        return [logits, *best, *(tensor for cache in present for tensor in cache)]


class _DecoderStepAttention(_DecoderStep):
    def forward(
        self, tokens: Tensor, position: Tensor, src_len: Tensor, past: list[Tensor], cross: list[Tensor]
    ) -> list[Tensor]:
        logits, present, attention = self.model.step_with_attention(
            tokens, position, src_len, _paired(past), _paired(cross)
        )
        best = best_tokens(logits, min(contract.BEST_TOKENS, logits.shape[-1]))
        return [logits, *best, *(tensor for cache in present for tensor in cache), attention]


class _SelectRows(nn.Module):
    def forward(self, tensors: Tensor, index: Tensor) -> list[Tensor]:
        return [tensors.index_select(1, index)]


class _Classifier(nn.Module):
    def __init__(self, model: EncoderClassifier):
        super().__init__()
        self.model = model

    def forward(self, src_ids: Tensor, src_len: Tensor) -> list[Tensor]:
        return [self.model(src_ids, src_len)]


def _paired(tensors: list[Tensor]) -> list[KeyValue]:
    return [KeyValue(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]


def module_of(model: Model, role: contract.Role) -> nn.Module:
    """The module whose arguments, flattened, are the inputs of the graph, in the contract's order."""
    if isinstance(model, EncoderClassifier):
        return _Classifier(model)
    if role == "select_rows":
        return _SelectRows()
    if role == "decoder_step_attention":
        return _DecoderStepAttention(model)
    return _Encoder(model) if role == "encoder" else _DecoderStep(model)


def case(model: Model, graph: contract.GraphSpec, sizes: Mapping[str, int], random: np.random.Generator) -> Case:
    """A random case of a standard graph."""
    inputs = random_inputs(graph, model.config, sizes, random)

    def outputs(model: Model) -> Outputs:
        width = model.encoder.tokens.weight.dtype
        tensors = [torch.from_numpy(inputs[tensor.name]) for tensor in graph.inputs]
        tensors = [tensor.to(width) if tensor.is_floating_point() else tensor for tensor in tensors]
        results = module_of(model, graph.role)(*grouped(tensors, graph, model.config))
        return dict(zip((tensor.name for tensor in graph.outputs), results, strict=True))

    return Case(inputs, outputs)


def grouped(values: list[Any], graph: contract.GraphSpec, config: ModelConfig) -> tuple[Any, ...]:
    """The flat inputs as arguments of the module: past and cross become lists."""
    layers = 2 * config.n_decoder_layers
    if graph.step != "decoder_step":
        return tuple(values)
    return (*values[: -2 * layers], values[-2 * layers : -layers], values[-layers:])


def random_inputs(
    graph: contract.GraphSpec, config: ModelConfig, sizes: Mapping[str, int], random: np.random.Generator
) -> dict[str, np.ndarray]:
    """Inputs of a graph that its model accepts. `sizes` are reduced to the model's lengths."""
    sizes = {**sizes, "src": min(sizes["src"], config.max_source_length)}
    sizes["cache"] = min(sizes["cache"], max(config.max_target_length, 1))
    limits = {
        "src_ids": (0, config.src_vocab_size),
        "src_len": (1, sizes["src"] + 1),
        "tokens": (0, config.tgt_vocab_size),
        "position": (min(sizes.get("least", 0), sizes["cache"] - 1), sizes["cache"]),
        "index": (0, sizes["from"]),
    }
    inputs: dict[str, np.ndarray] = {}
    for tensor in graph.inputs:
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in contract.shape(tensor, config)]
        if tensor.dtype == "int64":
            inputs[tensor.name] = random.integers(*limits[tensor.name], shape)
            if tensor.name == "src_len" and "least" in sizes:
                inputs[tensor.name][0] = sizes["src"]
        else:
            # Numbers with few bits, so that every precision represents them exactly. (NumPy has no bfloat16.)
            numbers = random.standard_normal(shape, dtype=np.float32)
            inputs[tensor.name] = (numbers.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return inputs
