"""A model with the weights that the tensors of a quantized weights file stand for: what its graphs are held against."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tfexport.models.transformer import Transformer
from tfexport.projections import decoder_projections, encoder_projections
from tfexport.quantize import restored


def rounded(model: Transformer, stored: Mapping[str, NDArray[np.generic]]) -> Transformer:
    """A copy of the float32 `model` with the matrices that the quantized tensors of a weights file stand for, in float32."""
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    projections = (*encoder_projections(model.config), *decoder_projections(model.config))
    matrices = {name: torch.from_numpy(matrix) for name, matrix in restored(stored, weights, projections).items()}
    variant = copy.deepcopy(model)
    if variant.output_weight is None:  # the embeddings that it is tied to stay as they are
        variant.output_weight = nn.Parameter(variant.output_matrix().detach().clone())
    output = matrices.pop(projections[-1].weights[0], None)
    if output is not None:
        variant.output_weight.data = output
    variant.load_state_dict(matrices, strict=False)
    return variant.eval()
