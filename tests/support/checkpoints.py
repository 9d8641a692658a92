"""Tiny checkpoints of every family and what the tests of reading them share."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from makers.references.annotated import AnnotatedTransformer
from makers.references.per_head import PerHeadTransformer
from makers.references.tutorial import TutorialTransformer
from makers.tiny import (
    BOS,
    ENCODER,
    EOS,
    IDS,
    SRC_VOCAB,
    TGT_VOCAB,
    randomised,
    tiny_classifier,
    tiny_transformer,
)
from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.models.checkpoints.load import Checkpoint
from tfexport.models.transformer import Transformer

Weights = dict[str, Tensor]
VOCABS = {"src_vocab": SRC_VOCAB, "tgt_vocab": TGT_VOCAB}
QUERY = "encoder.layers.0.self_attention.fc_q.weight"


def weights_of(family: str) -> Weights:
    """A state_dict of a tiny random model; every call gives the same."""
    models: dict[str, Callable[[], nn.Module]] = {
        "tutorial": tiny_transformer,
        "tutorial-classifier": tiny_classifier,
        "annotated": lambda: randomised(AnnotatedTransformer(**VOCABS, **ENCODER, n_decoder_layers=1)),
        "per-head": lambda: randomised(PerHeadTransformer(**VOCABS, **ENCODER, n_decoder_layers=1)),
    }
    return dict(models[family]().state_dict())


def refused(load: Callable[..., Checkpoint], content: Any, *arguments: Any, **options: Any) -> str:
    """The message with which `load` refuses it, which is one line."""
    with pytest.raises(TfexportError) as caught:
        load(content, *arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_same_model(one: Checkpoint, other: Checkpoint) -> None:
    assert one.config == other.config
    assert one.weights.keys() == other.weights.keys()
    for name, tensor in one.weights.items():
        assert torch.equal(tensor, other.weights[name]), name


def naive_logits(model: TutorialTransformer) -> Tensor:
    src, tgt = torch.tensor([[BOS, 5, 6, 7, EOS], [BOS, 9, 4, 30, EOS]]), torch.tensor([[BOS, 4, 9], [BOS, 30, 7]])
    with torch.no_grad():
        return model(src, tgt)


def logits(checkpoint: Checkpoint) -> Tensor:
    model = checkpoint.build_model()
    src, tgt = torch.tensor([[BOS, 5, 6, 7, EOS], [BOS, 9, 4, 30, EOS]]), torch.tensor([[BOS, 4, 9], [BOS, 30, 7]])
    with torch.no_grad():
        return model(src, torch.tensor([5, 5]), tgt)


def saved(content: Any, *, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


NATIVE = ModelConfig(
    d_model=12,
    n_heads=3,
    d_ff=20,
    n_encoder_layers=1,
    n_decoder_layers=2,
    src_vocab_size=TGT_VOCAB,
    tgt_vocab_size=TGT_VOCAB,
    max_source_length=9,
    max_target_length=11,
    tie_source_target=True,
    activation="gelu",
    norm_eps=1e-6,
    dropout=0.1,
    **IDS,
)


def native_weights() -> Weights:
    torch.manual_seed(0)
    return dict(Transformer(NATIVE).state_dict())
