"""How far a result may be from the exact one: as far as rounding takes PyTorch itself, a few times over.

An absolute limit fits one model. Logits of 100 round a hundred times as coarsely as logits of 1, and sharp attention turns
the last bit of a score into the third digit of a state. So a result is held against float64, and what is allowed follows
from the distance of PyTorch's own result in the same precision on the same input:

    |found - exact| <= FACTOR * |PyTorch - exact| + FLOOR * eps * |exact|

each |..| the largest of a tensor. The reasons for both numbers are in docs/decisions/rounding.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tfexport.contract import Precision

RULE = 2
"""The number of the rule that a certificate was made under; certificates of other rules are outdated."""

FACTOR = 8.0
"""How many times PyTorch's own rounding error is allowed."""

MEAN_FACTOR = 4.0
"""The same of the mean over all numbers of a tensor: a fault shifts many numbers a little, rounding few by much."""

MEAN_FLOOR = 0.5
FEWEST = 64
"""Numbers of which a mean says something."""

FLOOR = 4.0
"""So many units in the last place of the largest number are allowed in any case: where PyTorch happens to round nothing."""

SAMPLES = 8
"""How often PyTorch's rounding is measured again, at random, where one float32 computation does not explain an error. Where
attention is sharp, the error of a step is now and then ten times that of another computation of the same step."""

EPS: dict[Precision, float] = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The distance from 1 to the next number (machine epsilon). Quantized graphs compute in float32 between their products."""


@dataclass
class Rounding:
    """Distances from float64, over all numbers of one kind that were compared; NaN where a number is none."""

    error: float = 0.0
    """The largest of what was found."""
    own: float = 0.0
    """The largest of PyTorch's result in the same precision."""
    size: float = 0.0
    """The largest absolute value of the exact numbers."""
    count: int = 0
    """Numbers whose means are known."""
    mean_error: float = 0.0
    mean_own: float = 0.0
    mean_size: float = 0.0

    @classmethod
    def of(cls, errors: NDArray[np.float64], own: NDArray[np.float64], sizes: NDArray[np.float64]) -> Rounding:
        """Of all numbers of a tensor: absolute errors, PyTorch's own, and the absolute values of the exact numbers."""
        if not errors.size:
            return cls()
        own, sizes = (_finite(values) for values in (own, sizes))
        return cls(
            error=float(errors.max()),
            own=float(own.max()),
            size=float(sizes.max()),
            count=errors.size,
            mean_error=float(errors.mean()),
            mean_own=float(own.mean()),
            mean_size=float(sizes.mean()),
        )

    def merge(self, other: Rounding) -> None:
        """Take in the numbers of one more tensor."""
        self.add(other.error, other.own, other.size)
        if other.count:
            share = other.count / (self.count + other.count)
            self.mean_error += share * (other.mean_error - self.mean_error)
            self.mean_own = max(self.mean_own + share * (other.mean_own - self.mean_own), 0.0)
            self.mean_size += share * (other.mean_size - self.mean_size)
            self.count += other.count

    def measure_again(self, other: Rounding) -> None:
        """Take in PyTorch's own rounding of the same numbers, measured again."""
        self.own = max(self.own, other.own)
        self.mean_own = max(self.mean_own, other.mean_own)

    def add(self, error: float, own: float, size: float) -> None:
        """Take in one more tensor."""
        # max() would pass over NaN.
        self.error = error if math.isnan(error) or error > self.error else self.error
        # Where PyTorch's own result overflows there is nothing to measure by: then the floor alone is allowed.
        self.own = max(self.own, own) if math.isfinite(own) else self.own
        self.size = max(self.size, size) if math.isfinite(size) else self.size

    def allowed(self, precision: Precision) -> float:
        """The largest error that follows from rounding."""
        return FACTOR * self.own + FLOOR * EPS.get(precision, EPS["float32"]) * self.size

    def allowed_mean(self, precision: Precision) -> float:
        """The largest mean error that follows from rounding; infinite for few numbers."""
        if self.count < FEWEST:
            return math.inf
        return MEAN_FACTOR * self.mean_own + MEAN_FLOOR * EPS.get(precision, EPS["float32"]) * self.mean_size

    def holds(self, precision: Precision) -> bool:
        """Whether the error follows from rounding."""
        within = self.error <= self.allowed(precision)  # False for NaN
        return within and self.mean_error <= self.allowed_mean(precision)


def _finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """`values`, none below 0, with 0 in the place of those that are not finite."""
    return values if np.isfinite(values.max()) else np.nan_to_num(values, nan=0.0, posinf=0.0)
