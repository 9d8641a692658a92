"""Conversion of a model to another number format."""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch import Tensor, nn

from tfexport.contract import Precision
from tfexport.errors import TfexportError
from tfexport.models.model import EncoderClassifier, Model
from tfexport.models.transformer import Transformer

TF32_BITS = 13
"""Number of fraction bits that TF32, the format of tensor cores for float32 products, lacks compared with float32."""


def to_tf32(tensor: Tensor) -> Tensor:
    """Round a float32 tensor to TF32, to nearest even.

    Tensor cores do not change such numbers, whether they round or truncate other numbers.
    """
    bits = tensor.contiguous().view(torch.int32)
    odd = (bits >> TF32_BITS) & 1
    rounded = ((bits + (1 << (TF32_BITS - 1)) - 1 + odd) >> TF32_BITS) << TF32_BITS
    return torch.where(tensor.isfinite(), rounded.view(torch.float32), tensor)


def in_precision(model: Model, precision: Precision, keep: Collection[str] = ()) -> Model:
    """A copy of `model` with its weights in `precision`, except the output projection. Its weights are float32, rounded to
    TF32. Logits are always float32.

    Args:
        keep: modules whose weights are not used in this precision, so they may be too large for it.

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
        # A tied projection also stays in float32. The embeddings are halved, so the weights file has the matrix twice.
        variant.output_weight = nn.Parameter(to_tf32(model.output_matrix().detach()))
        if model.output_bias is not None:
            variant.output_bias = nn.Parameter(model.output_bias.detach().clone())
    read = {name: t for name, t in variant.state_dict().items() if name.rpartition(".")[0] not in keep}
    too_large = [name for name, tensor in read.items() if not tensor.isfinite().all()]
    if too_large:
        raise TfexportError(
            f"{', '.join(too_large[:3])} cannot be stored in {precision}: a number exceeds the range of the format, or "
            "not finite. Export in fp32, or in bf16, which has float32's range."
        )
    return variant.eval()
