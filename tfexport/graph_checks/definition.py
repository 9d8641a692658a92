"""The definition of the graphs of a precision: PyTorch models that the graphs are compared with.

In half precision the definition is the model with rounded weights. In 8 and 4 bits it is the model with the weights that
the stored integers represent, and with activations rounded before each product as in the graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tfexport.contract import QUANTIZED, Precision
from tfexport.graph_checks.cases_ort import Steps
from tfexport.graph_checks.rounding import EPS
from tfexport.graphs.linear_quantized import INT4_BLOCK, Stored, dequantize
from tfexport.graphs.projections import projections_of
from tfexport.models.model import Model
from tfexport.models.precision import in_precision
from tfexport.models.transformer import Transformer


@dataclass(frozen=True)
class Definition:
    """The model that the graphs of a precision must compute."""

    precision: Precision
    model: Model
    """The model with the weights of the graphs."""
    own: Model
    """The same model computed by PyTorch in this precision, which shows the effect of rounding."""
    activations: Mapping[str, _Activations] = field(default_factory=dict)
    """The rounding of the input of each quantized linear layer, by the layer's path."""
    steps: Steps = field(default_factory=dict)
    """The random cases of decoder steps, shared by the graphs of several dialects."""

    @classmethod
    def of(
        cls, model: Model, precision: Precision, stored: Stored | None = None, keep: Collection[str] = ()
    ) -> Definition:
        """The definition of the graphs of a float32 `model` in `precision`.

        Args:
            stored: the weights file of a quantized precision.
            keep: the modules of half-precision graphs that stay in float32.

        Raises:
            TfexportError: a weight is too large for the precision.
        """
        if precision == "float32":
            return cls(precision, model, model)
        if precision not in QUANTIZED:
            own = in_precision(model, precision, keep)
            return cls(precision, _with_float32(own, model, keep) if keep else own, own)
        assert isinstance(model, Transformer)
        assert stored is not None
        variant = rounded(model, stored)
        projections = [p for p in projections_of(model.config) if f"{p.name}.scale" in stored]
        activations = {
            path: _Activations.of(variant, path, precision)
            for projection in projections
            for path in projection.modules
            if projection.name != "output"
        }
        if any(projection.name == "output" for projection in projections):
            activations["decoder.norm"] = _Activations(variant.output_matrix(), precision, rectified=False)
        return cls(precision, variant, variant, activations)

    @contextmanager
    def rounding(self) -> Iterator[Mapping[str, Tensor]]:
        """A context in which the models round activations. It yields, by the path of a layer, the possible error of its
        outputs [rows, 1] from numbers that are between two rounding steps.

        The input of the output projection is rounded after `decoder.norm`, and has its path.
        """
        slack: dict[str, Tensor] = {}

        def enter(path: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            states, slack[path] = self.activations[path].rounded(inputs[0])
            return (states,)

        def leave(path: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            states, slack[path] = self.activations[path].rounded(output)
            return states

        handles = []
        for path in self.activations:
            module = self.model.get_submodule(path)
            if path == "decoder.norm":
                handles.append(module.register_forward_hook(partial(leave, path)))
            else:
                handles.append(module.register_forward_pre_hook(partial(enter, path)))
        try:
            yield slack
        finally:
            for handle in handles:
                handle.remove()


BETWEEN = 1e-4
"""A number this close to the middle of two steps, in steps, may be rounded to either: float32 has an error of about
1e-5."""

ZERO_POINT_ROUNDING = 8.0
"""In 4 bits ONNX Runtime multiplies several rows by numbers from 0 to 15, and subtracts 8 times the sum of a block's
activations. The rounding of these two large numbers remains. It was at most 4.6 eps of the subtracted number (random
matrices, 64 to 2,048 inputs, after a ReLU, where activations do not cancel)."""


@dataclass(frozen=True)
class _Activations:
    """The rounding of the input of a quantized linear layer: to -127 .. 127 with a scale for each row, or in 4 bits for each
    32 numbers of a row; to 0 .. 255 if the input comes from a ReLU."""

    weight: Tensor
    """[out, in]"""
    precision: Precision
    rectified: bool

    @classmethod
    def of(cls, model: Transformer, path: str, precision: Precision) -> _Activations:
        config = model.config
        after_relu = path.endswith("feed_forward.output") and config.activation == "relu" and not config.gated
        weight: Any = model.get_submodule(path).weight
        return cls(weight, precision, rectified=after_relu and precision == "int8")

    def rounded(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Rounded `states` [.., in], and for each row the possible error of the product [.., 1] from numbers that are
        between two rounding steps."""
        n_in = states.shape[-1]
        block = INT4_BLOCK if self.precision == "int4" else n_in
        parts = nn.functional.pad(states, (0, -n_in % block)).reshape(*states.shape[:-1], -1, block)
        scale = parts.abs().amax(-1, keepdim=True) / (255 if self.rectified else 127)
        steps = parts / torch.where(scale > 0, scale, 1.0)
        numbers = steps.round()
        is_between = ((steps - steps.floor()) - 0.5).abs() < BETWEEN
        widest = self.weight.reshape(len(self.weight), -1).abs().amax(0).to(states.dtype)
        unsure = (is_between * scale).flatten(-2)[..., :n_in] @ widest
        rounded = numbers * scale
        if self.precision == "int4":
            sums = rounded.sum(-1).abs()
            of_blocks = nn.functional.pad(widest, (0, -n_in % block)).reshape(-1, block).amax(-1)
            unsure = unsure + ZERO_POINT_ROUNDING * EPS["float32"] * (sums @ of_blocks)
        return rounded.flatten(-2)[..., :n_in], unsure[..., None]


def rounded(model: Transformer, stored: Stored) -> Transformer:
    """A copy of the float32 `model` with the matrices that the quantized tensors of a weights file represent, in float32."""
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    projections = projections_of(model.config)
    matrices = {name: torch.from_numpy(matrix) for name, matrix in dequantize(stored, weights, projections).items()}
    variant = copy.deepcopy(model)
    if variant.output_weight is None:  # the embeddings that it is tied to do not change
        variant.output_weight = nn.Parameter(variant.output_matrix().detach().clone())
    output = matrices.pop(projections[-1].weights[0], None)
    if output is not None:
        variant.output_weight.data = output
    variant.load_state_dict(matrices, strict=False)
    return variant.eval()


def _with_float32(half: Model, model: Model, keep: Collection[str]) -> Model:
    """`half` with the weights of `model` in the modules `keep`."""
    variant = copy.deepcopy(half)
    exact = model.state_dict()
    for name, parameter in (*variant.named_parameters(), *variant.named_buffers()):
        if name.rpartition(".")[0] in keep and name in exact:
            parameter.data = exact[name]
    return variant
