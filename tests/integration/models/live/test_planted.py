"""Wrong readings, planted in the model that was read: the comparison with the module refuses each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from makers.tiny import randomised
from tests.integration.models.live.test_read import read
from tfexport.config import ModelConfig
from tfexport.models.live import proof
from tfexport.models.live import read as reading
from tfexport.models.transformer import Transformer

Weights = dict[str, Tensor]
Fields = dict[str, Any]
Fault = Callable[[Fields, Weights], None]

SIZES = {
    "src_vocab_size": 24, "tgt_vocab_size": 24, "d_model": 16, "n_heads": 2, "d_ff": 16, "n_encoder_layers": 2,
    "n_decoder_layers": 2, "max_source_length": 12, "max_target_length": 12, "unk_id": 0, "pad_id": 1, "bos_id": 2,
    "eos_id": 3, "embedding_scale": 4.0, "positions": "learned",
}  # fmt: skip
POST_NORM = {"activation": "relu", "attention_bias": True, "feed_forward_bias": True, "output_bias": True}
PRE_NORM = {
    "activation": "gelu", "norm_first": True, "final_norm": True, "embedding_norm": True, "gated": True, "norm": "rms",
    "norm_eps": 1e-6, "attention_bias": False, "feed_forward_bias": False,
}  # fmt: skip
SELF, CROSS = "encoder.layers.0.self_attention", "decoder.layers.1.cross_attention"
FORWARD = "encoder.layers.1.feed_forward"


def said(**fields: Any) -> Fault:
    """Other fields of the config."""
    return lambda config, weights: config.update(fields)


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Fault:
    """Another tensor."""

    def fault(config: Fields, weights: Weights) -> None:
        weights[name] = change(weights[name]).contiguous()

    return fault


def exchanged(one: str, other: str) -> Fault:
    """Two tensors, or the tensors of two modules, exchanged."""

    def fault(config: Fields, weights: Weights) -> None:
        before = dict(weights)
        for name in before:
            if name.startswith(one):
                twin = other + name.removeprefix(one)
                weights[name], weights[twin] = before[twin], before[name]

    return fault


def without(part: str, **fields: Any) -> Fault:
    """All tensors whose names contain `part` are left out."""

    def fault(config: Fields, weights: Weights) -> None:
        config.update(fields)
        for name in [name for name in weights if part in name]:
            del weights[name]

    return fault


def copied(source: str, target: str) -> Fault:
    """The tensors of one module in place of those of another."""

    def fault(config: Fields, weights: Weights) -> None:
        for name in [name for name in weights if name.startswith(target)]:
            weights[name] = weights[source + name.removeprefix(target)]

    return fault


def row_exchanged(table: Tensor) -> Tensor:
    other = table.clone()
    other[[7, 9]] = table[[9, 7]]
    return other


def last_row_changed(table: Tensor) -> Tensor:
    return torch.cat([table[:-1], table[-1:] * 1.01])


def halves(table: Tensor) -> Tensor:
    """Columns that alternate between sines and cosines, in two halves."""
    return torch.cat([table[:, 0::2], table[:, 1::2]], dim=1)


def across_heads(weight: Tensor) -> Tensor:
    """Rows of two heads, taken in turns."""
    return weight.view(2, -1, weight.shape[1]).transpose(0, 1).reshape(weight.shape)


BOTH: dict[str, Fault] = {
    "other heads": said(n_heads=4),
    "other heads in the encoder": said(n_encoder_heads=4),
    "GELU by tanh": said(activation="gelu_tanh"),
    "SiLU": said(activation="silu"),
    "no embedding scale": said(embedding_scale=1.0),
    "an embedding scale that is nearly right": said(embedding_scale=4.0 * (1 + 1e-6)),
    "another epsilon": said(norm_eps=1.01e-5),
    "queries and keys": exchanged(f"{SELF}.query.", f"{SELF}.key."),
    "keys and values": exchanged(f"{CROSS}.key.", f"{CROSS}.value."),
    "self- and cross-attention": exchanged("decoder.layers.0.self_attention", "decoder.layers.0.cross_attention"),
    "layers in another order": exchanged("decoder.layers.0.", "decoder.layers.1."),
    "one layer twice": copied("encoder.layers.0.", "encoder.layers.1."),
    "norms in another order": exchanged("decoder.layers.0.norms.0.", "decoder.layers.0.norms.1."),
    "a transposed weight": changed(f"{SELF}.output.weight", lambda weight: weight.T),
    "a permuted feed-forward": changed(f"{FORWARD}.hidden.weight", lambda weight: weight.flip(0)),
    "heads that alternate": changed(f"{CROSS}.query.weight", across_heads),
    "another factor of scores": changed(f"{CROSS}.query.weight", lambda weight: weight * (1 + 1e-5)),
    "two words of the source": changed("encoder.tokens.weight", row_exchanged),
    "two words of the target": changed("decoder.tokens.weight", row_exchanged),
    "two logits": changed("output_weight", row_exchanged),
    "embeddings of the other side": copied("encoder.tokens.weight", "decoder.tokens.weight"),
    "a tie that is none": copied("decoder.tokens.weight", "output_weight"),
    "positions from 1": changed("encoder.positions.table", lambda table: table.roll(-1, 0)),
    "positions of the other side": copied("encoder.positions.table", "decoder.positions.table"),
    "columns of positions in another order": changed("decoder.positions.table", halves),
    "the last position": changed("decoder.positions.table", last_row_changed),
    "no positions": without("positions.table", positions="none"),
    "norms without weights": changed("decoder.layers.1.norms.2.weight", torch.ones_like),
    "one layer less": without("decoder.layers.1.", n_decoder_layers=1),
}
PLANTED: dict[str, tuple[Fields, dict[str, Fault]]] = {
    "post-norm": (
        POST_NORM,
        {
            **BOTH,
            "pre-norm": said(norm_first=True),
            "RMSNorm": lambda config, weights: without_norm_biases(config, weights),
            "norms without biases": changed("encoder.layers.0.norms.0.bias", torch.zeros_like),
            "attention without biases": lambda config, weights: without_attention_biases(config, weights),
            "a bias of another projection": exchanged(f"{SELF}.value.bias", f"{SELF}.output.bias"),
            "no bias of logits": changed("output_bias", torch.zeros_like),
        },
    ),
    "pre-norm": (
        PRE_NORM,
        {
            **BOTH,
            "post-norm": said(norm_first=False),
            "another epsilon of the final norm": said(final_norm_eps=1e-5),
            "another epsilon of the norm of embeddings": said(embedding_norm_eps=1e-5),
            "no final norm": without("coder.norm.", final_norm=False),
            "a final norm of one stack": without("encoder.norm.", final_norm_in="decoder"),
            "no norm of embeddings": without("embedding_norm", embedding_norm=False),
            "a norm of one stack's embeddings": without("encoder.embedding_norm", embedding_norm_in="decoder"),
            "gates for hidden states": exchanged(f"{FORWARD}.gate.", f"{FORWARD}.hidden."),
            "no gates": without(".gate.", gated=False),
        },
    ),
}


def without_norm_biases(config: Fields, weights: Weights) -> None:
    config["norm"] = "rms"
    for name in [name for name in weights if "norm" in name and name.endswith("bias")]:
        del weights[name]


def without_attention_biases(config: Fields, weights: Weights) -> None:
    config["attention_bias"] = False
    for name in [name for name in weights if "attention." in name and name.endswith("bias")]:
        del weights[name]


class Own(nn.Module):
    """A module that computes a config, as its owner would call it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.model = Transformer(config)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        logits: Tensor = self.model(src, (src != 1).sum(1), tgt)
        return logits


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("kind", "every"), [("post-norm", 3), ("post-norm", 1), ("pre-norm", 1)])
def test_every_wrong_reading_is_refused(kind: str, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a third of them it is seen sooner."""
    fields, faults = PLANTED[kind][0], dict([*PLANTED[kind][1].items()][::every])
    accepted: dict[bool, set[str]] = {}

    def planted(
        call: Any, model: Any, structure: Any, ids: Any, *, has_random_parameters: bool, reads_tokens: bool
    ) -> proof.Proof:
        options = {"has_random_parameters": has_random_parameters, "reads_tokens": reads_tokens}
        result = proof.prove(call, model, structure, ids, **options)
        arguments = call, model, structure, ids
        accepted[has_random_parameters] = {
            name for name, fault in faults.items() if is_accepted(name, fault, arguments, has_random_parameters)
        }
        return result

    monkeypatch.setattr(reading, "prove", planted)
    read(randomised(Own(ModelConfig(**SIZES, **fields))))
    assert accepted.keys() == {True, False}
    assert accepted[True] & accepted[False] == set()  # either comparison prevents an export


def is_accepted(
    name: str, fault: Fault, arguments: tuple[Any, Transformer, Any, Any], has_random_parameters: bool
) -> bool:
    """Whether the comparison accepts a model with a fault."""
    call, model, structure, ids = arguments
    config, weights = model.config.to_dict(), dict(model.state_dict())
    fault(config, weights)
    before = model.state_dict()
    assert (
        config != model.config.to_dict()
        or before.keys() != weights.keys()
        or any(not torch.equal(before[key], weights[key]) for key in before)
    ), f"{name} changes nothing"
    wrong = proof.canonical_model(ModelConfig.from_dict(config), weights, structure)
    try:
        proof.prove(call, wrong, structure, ids, has_random_parameters=has_random_parameters)
    except proof.Difference:
        return False
    return True
