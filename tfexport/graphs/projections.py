"""The linear layers of a model, and the layers that a graph computes as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tfexport.config import ModelConfig

STACKED, PARTS = "query_key_value", ("query", "key", "value")
"""The name of the joint projection of query, key and value, and the names of its parts."""


@dataclass(frozen=True)
class Projection:
    """A linear layer of a graph: one linear layer of the model, or several that are concatenated."""

    name: str
    weights: tuple[str, ...]
    biases: tuple[str, ...]
    """Names of the biases; empty if the layers have none."""

    @property
    def modules(self) -> list[str]:
        """The paths of the model's layers."""
        return [name.removesuffix(".weight") for name in self.weights]

    @classmethod
    def of_modules(cls, name: str, modules: Sequence[str], *, bias: bool) -> Projection:
        return cls(name, tuple(f"{m}.weight" for m in modules), tuple(f"{m}.bias" for m in modules) if bias else ())

    def split(self) -> Iterator[Projection]:
        """A projection for each of the model's layers."""
        if len(self.weights) == 1:
            yield self
            return
        for module in self.modules:
            yield Projection.of_modules(module, [module], bias=bool(self.biases))


def encoder_projections(config: ModelConfig) -> Iterator[Projection]:
    """The projections of the encoder, and one from its states to the cross keys and values of all decoder layers."""
    for i in range(config.n_encoder_layers):
        for part in ("query", "key", "value", "output"):
            path = f"encoder.layers.{i}.self_attention.{part}"
            yield Projection.of_modules(path, [path], bias=config.attention_bias)
        yield from _feed_forward(config, f"encoder.layers.{i}")
    if config.is_classifier:
        yield Projection.of_modules("head", ["head"], bias=True)
        return
    parts = [
        f"decoder.layers.{i}.cross_attention.{p}" for i in range(config.n_decoder_layers) for p in ("key", "value")
    ]
    yield Projection.of_modules("cross", parts, bias=config.attention_bias)


def decoder_projections(config: ModelConfig, *, own_output: bool = False) -> Iterator[Projection]:
    """The projections of a decoder step, one for query, key and value together.

    Args:
        own_output: the output projection has its own matrix, even if the model's is tied to embeddings.
    """
    for i in range(config.n_decoder_layers):
        own, cross = f"decoder.layers.{i}.self_attention", f"decoder.layers.{i}.cross_attention"
        modules = [f"{own}.{part}" for part in PARTS]
        yield Projection.of_modules(f"{own}.{STACKED}", modules, bias=config.attention_bias)
        for path in (f"{own}.output", f"{cross}.query", f"{cross}.output"):
            yield Projection.of_modules(path, [path], bias=config.attention_bias)
        yield from _feed_forward(config, f"decoder.layers.{i}")
    weight = "output_weight"
    if config.tie_output and not own_output:
        weight = "encoder.tokens.weight" if config.tie_source_target else "decoder.tokens.weight"
    if not config.is_classifier:
        yield Projection("output", (weight,), ("output_bias",) if config.output_bias else ())


def _feed_forward(config: ModelConfig, layer: str) -> Iterator[Projection]:
    for part in ("hidden", "gate", "output") if config.gated else ("hidden", "output"):
        path = f"{layer}.feed_forward.{part}"
        yield Projection.of_modules(path, [path], bias=config.feed_forward_bias)


def projections_of(config: ModelConfig) -> list[Projection]:
    """All linear layers of a model's graphs."""
    return [*encoder_projections(config), *decoder_projections(config)]
