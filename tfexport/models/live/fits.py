"""Identifies arithmetic by its values: factors, biases, norms and activations between two known tensors.

All values are float64. Random weights without pattern make wrong fits impossible: a fit must hold for every element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from tfexport.models.live.errors import NotCanonical
from tfexport.models.live.tape import Node

CLOSE = 1e-9
"""Largest difference of equal values, relative to the largest element. Rounding is below 1e-13."""

LEAST_READ = 1e-40
"""Smallest attention weight of a key that is read. Masks add numbers below -100, and sharp attention stays above this."""

_LEAST_EPS = 1e-13
"""Smallest epsilon that values tell from none."""

NormKind = Literal["layer", "rms", "std", "std-biased"]
"""`std` divides by standard deviation + eps, as in The Annotated Transformer; `std-biased` by that of the population."""


def is_close(values: Tensor, others: Tensor, tolerance: float = CLOSE) -> bool:
    """Whether two tensors are equal up to rounding."""
    if values.shape != others.shape:
        return False
    return bool(((values - others).abs() <= tolerance * (1 + others.abs().max())).all())


@dataclass(frozen=True)
class Affine:
    """`factor * x + bias`, for each feature. Exactly 1 and 0 where there is no factor or bias."""

    factor: Tensor
    bias: Tensor

    @property
    def is_identity(self) -> bool:
        return bool((self.factor == 1).all() and (self.bias == 0).all())

    @property
    def scalar(self) -> float | None:
        """The factor, if it is the same for all features."""
        first = float(self.factor[0])
        return first if is_close(self.factor, torch.full_like(self.factor, first)) else None


def affine(states: Tensor, values: Tensor, constants: Sequence[Tensor] = ()) -> Affine | None:
    """The factor and bias with `values = factor * states + bias` [length, features]; None if there are none.

    Args:
        constants: tensors among which factor and bias are looked up, so that they are exact.
    """
    if states.shape != values.shape:
        return None
    if torch.equal(states, values):  # also where a feature is the same for all tokens
        width = states.shape[1]
        return Affine(torch.ones(width, dtype=states.dtype), torch.zeros(width, dtype=states.dtype))
    # One factor for all features is known more exactly than that of a feature that is nearly the same for all tokens.
    ratio = float((values * states).sum() / (states * states).sum())
    if is_close(ratio * states, values, 1e-12):
        none = torch.zeros(states.shape[1], dtype=states.dtype)
        return Affine(none + (1.0 if abs(ratio - 1) < 1e-12 else ratio), none)
    moves, others = states - states[:1], values - values[:1]
    furthest = moves.abs().argmax(0, keepdim=True)
    factor = (others.gather(0, furthest) / moves.gather(0, furthest))[0]
    bias = values[0] - factor * states[0]
    if not bool(factor.isfinite().all()) or not is_close(factor * states + bias, values, 1e-8):
        return None
    factor = torch.where((factor - 1).abs() < 1e-10, 1.0, factor)
    bias = torch.where(bias.abs() < 1e-10 * (1 + values.abs().max()), 0.0, bias)
    return Affine(exact(factor, constants), exact(bias, constants))


def exact(vector: Tensor, constants: Sequence[Tensor]) -> Tensor:
    """The constant that a computed vector equals up to rounding; else the vector itself."""
    for constant in constants:
        if constant.numel() == vector.numel() and is_close(constant.reshape(-1), vector, 1e-8):
            return constant.reshape(-1)
    return vector


_OTHERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "no activation": lambda states: states,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "ELU": F.elu,
    "LeakyReLU": F.leaky_relu,
    "ReLU squared": lambda states: torch.relu(states) ** 2,
    "ReLU6": F.relu6,
    "SELU": torch.selu,
    "Mish": F.mish,
    "softplus": F.softplus,
    "QuickGELU": lambda states: states * torch.sigmoid(1.702 * states),
}


def other_activation(before: Tensor, after: Tensor) -> str:
    """The name of an activation that the canonical model does not have, in words."""
    names = (name for name, function in _OTHERS.items() if is_close(function(before), after))
    return next(names, "another activation")


@dataclass(frozen=True)
class Norm:
    """A norm: `(x - mean) / size * weight + bias`."""

    kind: NormKind
    eps: float
    weight: Tensor
    bias: Tensor
    place: str = ""

    @property
    def has_parameters(self) -> bool:
        return bool((self.weight != 1).any() or (self.bias != 0).any())


_FUSED: Mapping[str, NormKind] = {"native_layer_norm": "layer", "_fused_rms_norm": "rms"}


def fused_norm(states: Tensor, node: Node) -> Norm | None:
    """The norm of an operation that computes all of one, if it normalises `states` [length, d_model] by rows."""
    kind, d_model = _FUSED.get(node.op), states.shape[1]
    if kind is None or not is_close(node.inputs[0].value.reshape(-1, d_model), states):
        return None
    if list(node.args[1]) != [d_model]:
        return None
    weight, bias = torch.ones(d_model), torch.zeros(d_model)
    if len(node.inputs) > 1:
        weight = node.inputs[1].value.reshape(-1)
    if len(node.inputs) > 2:
        bias = node.inputs[2].value.reshape(-1)
    if not isinstance(node.args[-1], float):
        raise NotCanonical("a norm whose epsilon depends on the type of its states: give it one", node.place)
    return Norm(kind, node.args[-1], weight, bias, node.place)


def fit_norm(states: Tensor, values: Tensor, constants: Sequence[Tensor], place: str = "") -> Norm | None:
    """The norm with `values = norm(states)` [length, d_model]; weight and bias are among the constants, or absent."""
    d_model = states.shape[1]
    if values.shape != states.shape:
        return None
    # One number may be the weight or the bias of all features.
    vectors = [constant.reshape(-1).expand(d_model) for constant in constants if constant.numel() in (1, d_model)]
    centred = states - states.mean(1, keepdim=True)
    variance, squares = (centred**2).mean(1), (states**2).mean(1)
    for weight in (*vectors, torch.ones(d_model)):
        for bias in (*vectors, torch.zeros(d_model)):
            normed = (values - bias) / weight
            for kind, numerator, size in (("layer", centred, variance), ("rms", states, squares)):
                divisor = (numerator * normed).sum(1) / (normed * normed).sum(1)
                if not is_close(divisor[:, None] * normed, numerator):
                    continue
                for named, eps in (
                    (kind, divisor**2 - size),
                    ("std", divisor - (size * d_model / (d_model - 1)).sqrt()),
                    ("std-biased", divisor - size.sqrt()),
                ):
                    spread = (eps - eps.mean()).abs().max()
                    if spread < 1e-11 * (1 + size.max()) and (kind == "layer" or named == kind):
                        number = _rounded(float(eps.mean()))
                        if number < _LEAST_EPS:
                            raise NotCanonical(
                                "a norm without an epsilon, or with one of its states' type: give it one", place
                            )
                        return Norm(named, number, weight, bias, place)  # type: ignore[arg-type]
    return None


def _rounded(eps: float) -> float:
    """An epsilon as people write it, or that of a type, if it is one up to rounding; 0 if there is none."""
    if eps < _LEAST_EPS:
        return 0.0
    types = (torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16, torch.float16))
    # Values give an epsilon with an error of the last bits of a variance near 1.
    near = (number for number in (float(f"{eps:.1e}"), *types) if abs(number - eps) <= 1e-14 + 1e-6 * eps)
    return next(near, eps)


def score_factor(weights: Tensor, products: Tensor) -> float | None:
    """The factor with `softmax(factor * products + mask) = weights` [.., queries, keys]; None if there is none.

    The mask may only hide keys. Log-odds of the keys that a query reads do not depend on it.
    """
    is_read = weights > LEAST_READ
    logs = torch.where(is_read, weights.clamp(min=1e-300).log(), 0.0)
    first = is_read.to(torch.int64).argmax(-1, keepdim=True)
    odds = torch.where(is_read, logs - logs.gather(-1, first), 0.0)
    gaps = torch.where(is_read, products - products.gather(-1, first), 0.0)
    factor = float((odds * gaps).sum() / (gaps * gaps).sum())
    return factor if is_close(odds, factor * gaps, 1e-7) else None


def as_written(number: float) -> float:
    """A factor as people write it, if it is one up to rounding: the root of an integer, or a number of few digits."""
    for near in (math.sqrt(round(number**2)), float(f"{number:.6g}")):
        if near and math.isclose(near, number, rel_tol=1e-12):
            return near
    return number
