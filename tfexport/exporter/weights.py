"""Writing of weights: a safetensors file for each precision, and the tensors that graphs need in addition."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from tfexport import contract
from tfexport.config import ModelConfig
from tfexport.contract import SCREENING_FILE, is_screened
from tfexport.errors import TfexportError
from tfexport.graphs.linear_quantized import Stored, quantize
from tfexport.graphs.projections import decoder_projections, projections_of
from tfexport.graphs.screening import screening_tensors
from tfexport.models.formats.files import save_weights
from tfexport.models.model import EncoderClassifier, Model
from tfexport.models.precision import in_precision
from tfexport.models.transformer import Transformer


def write_variant(
    model: Model, precision: contract.Precision, folder: Path, keep: Collection[str] = ()
) -> Stored | None:
    """Write the weights of a precision, except those of modules that stay in float32; returns quantized weights."""
    if precision in contract.QUANTIZED:
        return write_quantized(model, precision, folder, keep)
    write_weights(in_precision(model, precision, keep), precision, folder)
    return None


def write_weights(model: Model, precision: contract.Precision, folder: Path) -> None:
    """Write the weights of `model`, which is in this precision, and the tensors for screening."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    tensors = with_stacked(tensors, model.config, precision)
    save_weights(tensors, folder / contract.weights_file(precision), {"format": "pt"})
    if is_screened(model.config, precision):
        assert isinstance(model, Transformer)
        arrays = screening_tensors(model.output_matrix().detach().numpy())
        save_weights(
            {n: torch.from_numpy(array) for n, array in arrays.items()}, folder / SCREENING_FILE, {"format": "pt"}
        )


def with_stacked(
    tensors: Mapping[str, torch.Tensor], config: ModelConfig, precision: contract.Precision
) -> dict[str, torch.Tensor]:
    """`tensors` in the form of a weights file: half precision has the query, key and value of a decoder's self-attention in
    one tensor (`graphs/stored_weights.py`)."""
    stacked = dict(tensors)
    if precision in ("float16", "bfloat16") and not config.is_classifier:
        for projection in decoder_projections(config):
            if len(projection.weights) > 1:
                for kind, names in (("weight", projection.weights), ("bias", projection.biases)):
                    if names:
                        stacked[f"{projection.name}.{kind}"] = torch.cat([stacked.pop(name) for name in names])
    return stacked


def write_quantized(model: Model, precision: contract.Precision, folder: Path, keep: Collection[str] = ()) -> Stored:
    """Quantize and write the weights of `model`, which is in float32, and return them.

    The projections `keep` stay in float32.

    Raises:
        TfexportError: the model is a classifier, or a weight is not finite.
    """
    if isinstance(model, EncoderClassifier):
        raise TfexportError(
            "encoder classifiers are exported in fp32, fp16 and bf16 only. Leave the other precisions out."
        )
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    projections = [projection for projection in projections_of(model.config) if projection.name not in keep]
    arrays = quantize(weights, projections, precision)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    save_weights(tensors, folder / contract.weights_file(precision), {"format": "pt"})
    return arrays
