"""The allowed error of a result: a multiple of PyTorch's own rounding error.

An absolute limit fits only one model. Logits of 100 have a hundred times the rounding error of logits of 1, and sharp
attention turns the last bit of a score into the third digit of a state. So a result is compared with float64, and the
allowed error follows from the distance of PyTorch's own result in the same precision on the same input:

    |found - exact| <= FACTOR * |PyTorch - exact| + FLOOR * eps * |exact|

Each |..| is the largest value of a tensor, for logits without hopeless words. docs/decisions/rounding.md has the reasons
for both numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.contract import Precision

RULE = 3
"""The number of this rule. Certificates of other rules are outdated."""

FACTOR = 8.0
"""The allowed multiple of PyTorch's own rounding error."""

MEAN_FACTOR = 4.0
"""The allowed multiple for the mean over all numbers of a tensor: a fault shifts many numbers a little, rounding shifts
few numbers by much."""

MEAN_FLOOR = 0.5

CHAIN = 1 / 6
"""If a runtime adds the n squares of a row one by one, its mean error may be larger by CHAIN * sqrt(n) units in the last
place of float32. A sum of n positive numbers has a relative error of so many, and all numbers of the row share it. PyTorch
adds in blocks."""

FEWEST = 64
"""The smallest count of numbers for which the mean is compared."""

FLOOR = 4.0
"""The error that is always allowed, in units in the last place of the largest number, because PyTorch may happen to have
no rounding error."""

SAMPLES = 8
"""The number of further random measurements of PyTorch's rounding, if one float32 computation does not explain an error.
With sharp attention, the error of a step is sometimes ten times that of another computation of the same step."""

EPS: dict[Precision, float] = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Machine epsilon: the distance from 1 to the next number. Quantized graphs compute in float32 between their products."""

OUT_OF_REACH = 1000.0
"""A word whose logit is so far below the largest one of its row is hopeless: float32 has no probability below e^-104. A
bias of -1e9, a usual way to mask a word, has a rounding error that no other logit may have."""

HOPELESS_SHARE = 1 / 16
"""A hopeless logit may move by so much of its distance from the largest one: eight roundings of bfloat16, the coarsest
precision. So it stays hopeless."""


@dataclass
class Rounding:
    """Distances from float64, over all compared numbers of one kind; NaN if a number is NaN."""

    error: float = 0.0
    """The largest distance of the compared result."""
    own: float = 0.0
    """The largest distance of PyTorch's result in the same precision."""
    size: float = 0.0
    """The largest absolute value of the exact numbers."""
    count: int = 0
    """The count of numbers with known means."""
    chain: int = 0
    """The count of squares of a row that the runtime adds one by one; 0 if it adds in blocks."""
    mean_error: float = 0.0
    mean_own: float = 0.0
    mean_size: float = 0.0

    @classmethod
    def of(cls, errors: NDArray[np.float64], own: NDArray[np.float64], sizes: NDArray[np.float64]) -> Rounding:
        """The distances of a tensor, from its absolute errors, PyTorch's own, and the absolute exact values."""
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
        """Add the numbers of another tensor."""
        self.add(other.error, other.own, other.size)
        if other.count:
            share = other.count / (self.count + other.count)
            self.mean_error += share * (other.mean_error - self.mean_error)
            self.mean_own = max(self.mean_own + share * (other.mean_own - self.mean_own), 0.0)
            self.mean_size += share * (other.mean_size - self.mean_size)
            self.count += other.count

    def measure_again(self, other: Rounding) -> None:
        """Add another measurement of PyTorch's own rounding of the same numbers."""
        self.own = max(self.own, other.own)
        self.mean_own = max(self.mean_own, other.mean_own)

    def add(self, error: float, own: float, size: float) -> None:
        """Add another tensor."""
        # Python's max() can ignore NaN.
        self.error = error if math.isnan(error) or error > self.error else self.error
        # If PyTorch's own result overflows, only the floor is allowed.
        self.own = max(self.own, own) if math.isfinite(own) else self.own
        self.size = max(self.size, size) if math.isfinite(size) else self.size

    def allowed(self, precision: Precision) -> float:
        """The largest error that follows from rounding."""
        return FACTOR * self.own + FLOOR * EPS.get(precision, EPS["float32"]) * self.size

    def allowed_mean(self, precision: Precision) -> float:
        """The largest mean error that follows from rounding; infinite for few numbers."""
        if self.count < FEWEST:
            return math.inf
        floor = MEAN_FLOOR * EPS.get(precision, EPS["float32"]) + CHAIN * math.sqrt(self.chain) * EPS["float32"]
        return MEAN_FACTOR * self.mean_own + floor * self.mean_size

    def holds(self, precision: Precision) -> bool:
        """Whether the error follows from rounding."""
        within = self.error <= self.allowed(precision)  # False for NaN
        return within and self.mean_error <= self.allowed_mean(precision)


def _finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Non-negative `values`, with 0 for those that are not finite."""
    return values if np.isfinite(values.max()) else np.nan_to_num(values, nan=0.0, posinf=0.0)


def slack_of_hopeless(exact: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """The allowed distance of each hopeless word in rows of logits [..., vocab], and 0 for other words; None if no word is
    hopeless. An infinite logit is not hopeless: only the same infinity equals it."""
    with np.errstate(invalid="ignore"):  # the difference of two infinities
        best = exact.max(axis=-1, keepdims=True)
        if not (best - exact.min(axis=-1, keepdims=True) > OUT_OF_REACH).any():  # saves memory
            return None
        behind = best - exact
        return np.where((behind > OUT_OF_REACH) & np.isfinite(behind), behind * HOPELESS_SHARE, 0.0)


def logit_errors(exact: NDArray[np.float64], computed: NDArray[Any]) -> NDArray[np.float64]:
    """The largest distance of a logit in each row of logits [..., vocab], without the slack of hopeless words."""
    difference, slack = exact - computed, slack_of_hopeless(exact)
    if slack is None:
        return np.maximum(difference.max(axis=-1), -difference.min(axis=-1))
    return np.maximum(np.abs(difference) - slack, 0.0).max(axis=-1)


def logit_size(exact: NDArray[np.float64]) -> float:
    """The largest absolute value of the logits [..., vocab], without hopeless words."""
    slack = slack_of_hopeless(exact)
    return float(max(exact.max(), -exact.min()) if slack is None else np.abs(exact[slack == 0]).max())
