"""The linear layers of a model, and which of them a graph computes as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tfexport.config import ModelConfig


@dataclass(frozen=True)
class Projection:
    """A linear layer of a graph, made of one or more of the model's, one under the other."""

    name: str
    weights: tuple[str, ...]
    biases: tuple[str, ...]
    """Empty where the model has no biases here."""

    @property
    def modules(self) -> list[str]:
        """The paths of the modules that it is made of."""
        return [name.removesuffix(".weight") for name in self.weights]

    @classmethod
    def of(cls, name: str, modules: Sequence[str], *, bias: bool) -> Projection:
        return cls(name, tuple(f"{m}.weight" for m in modules), tuple(f"{m}.bias" for m in modules) if bias else ())

    def apart(self) -> Iterator[Projection]:
        """The model's own layers, each by itself."""
        if len(self.weights) == 1:
            yield self
            return
        for module in self.modules:
            yield Projection.of(module, [module], bias=bool(self.biases))


def encoder_projections(config: ModelConfig) -> Iterator[Projection]:
    """The projections of the encoder, and of its states to all cross keys and values of the decoder as one."""
    for i in range(config.n_encoder_layers):
        for part in ("query", "key", "value", "output"):
            path = f"encoder.layers.{i}.self_attention.{part}"
            yield Projection.of(path, [path], bias=config.attention_bias)
        yield from _feed_forward(config, f"encoder.layers.{i}")
    if config.is_classifier:
        yield Projection.of("head", ["head"], bias=True)
        return
    parts = [
        f"decoder.layers.{i}.cross_attention.{p}" for i in range(config.n_decoder_layers) for p in ("key", "value")
    ]
    yield Projection.of("cross", parts, bias=config.attention_bias)


def decoder_projections(config: ModelConfig, *, own_output: bool = False) -> Iterator[Projection]:
    """The projections of a decoder step; those of query, key and value are one.

    Args:
        own_output: the output projection has a matrix of its own also where the model's is tied to embeddings.
    """
    for i in range(config.n_decoder_layers):
        own, cross = f"decoder.layers.{i}.self_attention", f"decoder.layers.{i}.cross_attention"
        modules = [f"{own}.{part}" for part in ("query", "key", "value")]
        yield Projection.of(f"{own}.query_key_value", modules, bias=config.attention_bias)
        for path in (f"{own}.output", f"{cross}.query", f"{cross}.output"):
            yield Projection.of(path, [path], bias=config.attention_bias)
        yield from _feed_forward(config, f"decoder.layers.{i}")
    weight = "output_weight"
    if config.tie_output and not own_output:
        weight = "encoder.tokens.weight" if config.tie_source_target else "decoder.tokens.weight"
    if not config.is_classifier:
        yield Projection("output", (weight,), ("output_bias",) if config.output_bias else ())


def _feed_forward(config: ModelConfig, layer: str) -> Iterator[Projection]:
    for part in ("hidden", "gate", "output") if config.gated else ("hidden", "output"):
        path = f"{layer}.feed_forward.{part}"
        yield Projection.of(path, [path], bias=config.feed_forward_bias)
