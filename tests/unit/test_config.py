"""The configuration: every problem is named, and what a person writes is read or refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from makers.ort_bundles import CONFIG, ONE_CHANGE, random_model
from tests.support.checkpoints import (
    NATIVE,
)
from tfexport.config import ModelConfig
from tfexport.errors import ConfigError
from tfexport.models.model import EncoderClassifier


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({"d_model": 13}, ["d_model 13 is not a multiple of n_heads 3"]),
        ({"d_model": 0, "n_heads": -1}, ["d_model is 0, not above 0", "n_heads is -1, not above 0"]),
        ({"n_decoder_layers": 0, "tgt_vocab_size": 0}, ["n_decoder_layers is 0", "tgt_vocab_size is 0"]),
        ({"pad_id": -1, "bos_id": 99}, ["pad_id -1 is not in the target", "bos_id 99 is not in the target"]),
        ({"src_vocab_size": 3}, ["eos_id 3 is not in the source vocabulary", "of one size, not 3 and 37"]),
        ({"unk_id": 40}, ["unk_id 40 is not in the source vocabulary"]),
        ({"unk_id": -7}, ["unk_id"]),
        ({"norm_eps": math.nan, "dropout": 1.0}, ["norm_eps is nan", "dropout is 1.0"]),
        ({"embedding_scale": math.inf, "position_offset": -1}, ["embedding_scale", "position_offset is -1"]),
        ({"embedding_scale": 10**400}, ["embedding_scale"]),
        ({"n_classes": 2}, ["n_decoder_layers 0", "no embeddings to tie"]),
        ({"d_model": "12", "norm_first": 1, "dropout": "0"}, ["d_model is '12', not int", "norm_first is 1, not bool"]),
        ({"n_heads": True, "d_ff": 20.0, "norm_eps": None}, ["n_heads is True", "d_ff is 20.0", "norm_eps is None"]),
        ({"d_model": 2**31 - 2, "n_heads": 1}, ["d_model is 2147483646, above 65536"]),
        ({"max_target_length": 2**31 - 2, "d_ff": 2**31}, ["max_target_length is 2147483646", "d_ff is 2147483648"]),
        ({"n_encoder_heads": -1}, ["n_encoder_heads is -1, below 0"]),
        ({"n_encoder_heads": 5}, ["the 12 numbers of all heads together are not a multiple of n_encoder_heads 5"]),
        ({"d_head": 5, "n_encoder_heads": 2}, ["the 15 numbers of all heads together"]),
        ({"n_heads": 5, "n_encoder_heads": 7}, ["d_model 12 is not a multiple of n_heads 5"]),
        ({"positions": "none", "position_offset": 2}, ["position_offset is 2, and positions are none"]),
        ({"positions": "none", "max_distance": 4}, ["max_distance is 4, and positions are none"]),
        ({"final_norm": False, "final_norm_in": "decoder"}, ["final_norm_in is decoder, and final_norm is false"]),
        ({"embedding_norm_in": "encoder"}, ["embedding_norm_in is encoder, and embedding_norm is false"]),
        ({"embedding_norm_eps": 1e-6}, ["embedding_norm_eps is 1e-06, and embedding_norm is false"]),
        ({"final_norm": True, "final_norm_eps": 1.0}, ["final_norm_eps is 1.0, not in [0, 1)"]),
        ({"final_norm_in": "nowhere"}, ["final_norm_in is 'nowhere', not one of both, encoder, decoder"]),
        (
            {"n_classes": 2, "n_encoder_heads": 2, "final_norm": True, "final_norm_in": "decoder"},
            ["a classifier has no n_encoder_heads", "final_norm_in is decoder, and a classifier has one stack"],
        ),
        ({"activation": "tanh", "positions": []}, ["activation is 'tanh', not one of relu, gelu", "positions is []"]),
    ],
)
def test_every_problem_of_a_configuration_is_named(changes: dict[str, Any], problems: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict({**NATIVE.to_dict(), **changes})
    for problem in problems:
        assert problem in str(caught.value)


def test_configuration_round_trip() -> None:
    assert ModelConfig.from_dict(json.loads(json.dumps(NATIVE.to_dict()))) == NATIVE


def test_unknown_and_missing_fields_are_named_together() -> None:
    fields = NATIVE.to_dict()
    del fields["d_ff"], fields["eos_id"]
    with pytest.raises(ConfigError, match=r"here .*unknown: colour, heads; missing: d_ff, eos_id"):
        ModelConfig.from_dict({**fields, "heads": 3, "colour": "red"}, where="here")


def test_a_model_has_at_least_the_parameters_that_its_sizes_say() -> None:
    """Of every kind of model, so that no bundle is refused for want of weights."""
    for changes in ({}, *ONE_CHANGE, {"positions": "relative", "max_distance": 4}, {"d_head": 16}, {"gated": True}):
        config = CONFIG.replace(**changes)
        least = config.least_parameters
        n_parameters = sum(tensor.numel() for tensor in random_model(config).state_dict().values())
        assert 0.5 * n_parameters < least <= n_parameters, changes
    config = CONFIG.replace(n_classes=5, n_decoder_layers=0, tgt_vocab_size=0)
    assert config.least_parameters <= sum(tensor.numel() for tensor in EncoderClassifier(config).state_dict().values())
