"""A model in another number format."""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch import Tensor, nn

from tfexport.contract import Precision
from tfexport.errors import TfexportError
from tfexport.models.classifier import EncoderClassifier
from tfexport.models.transformer import Transformer

TF32_BITS = 13
"""Fraction bits that float32 has more than TF32, the numbers that tensor cores multiply in the place of float32's."""


def to_tf32(tensor: Tensor) -> Tensor:
    """A float32 tensor with each number rounded to the nearest of TF32, to the even one of two as near.

    A tensor core takes such numbers as they are, whether it rounds others or cuts them off.
    """
    bits = tensor.contiguous().view(torch.int32)
    odd = (bits >> TF32_BITS) & 1
    rounded = ((bits + (1 << (TF32_BITS - 1)) - 1 + odd) >> TF32_BITS) << TF32_BITS
    return torch.where(tensor.isfinite(), rounded.view(torch.float32), tensor)


def in_precision(
    model: Transformer | EncoderClassifier, precision: Precision, keep: Collection[str] = ()
) -> Transformer | EncoderClassifier:
    """A copy of `model` with its weights in `precision`, but for the output projection. Its weights are numbers of TF32,
    in float32; logits are float32 in any case.

    Args:
        keep: modules whose weights nobody reads in this precision, so that they may be too large for it.

    Raises:
        TfexportError: a weight is too large for the format.
    """
    if precision == "float32":
        return model
    variant = copy.deepcopy(model).to(getattr(torch, precision))
    if isinstance(variant, EncoderClassifier):
        assert isinstance(model, EncoderClassifier)
        variant.head = copy.deepcopy(model.head)
    else:
        assert isinstance(model, Transformer)
        # Also where it is tied to the embeddings, which are halved: then the weights file holds it twice.
        variant.output_weight = nn.Parameter(to_tf32(model.output_matrix().detach()))
        if model.output_bias is not None:
            variant.output_bias = nn.Parameter(model.output_bias.detach().clone())
    read = {name: t for name, t in variant.state_dict().items() if name.rpartition(".")[0] not in keep}
    too_large = [name for name, tensor in read.items() if not tensor.isfinite().all()]
    if too_large:
        raise TfexportError(
            f"{', '.join(too_large[:3])} cannot be stored in {precision}: a number is larger than the format holds, or "
            "not finite. Export in fp32, or in bf16, which has float32's range."
        )
    return variant.eval()
