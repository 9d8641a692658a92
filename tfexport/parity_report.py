"""What a comparison with PyTorch found, and what it must keep to pass."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.contract import Precision
from tfexport.next_tokens import log_softmax
from tfexport.quality import Quality
from tfexport.runtimes.base import FloatArray


@dataclass(frozen=True)
class Limits:
    """What a comparison must keep to pass."""

    error: float
    """Largest absolute difference of cross keys and values and of logits."""
    top1: float
    """Smallest share of steps with the reference's best token."""
    identical: float
    """Smallest share of sentences with the reference's tokens, or with others that are as good: see `Divergence.is_tie`."""


LIMITS: dict[Precision, Limits] = {
    "float32": Limits(error=1e-4, top1=1.0, identical=1.0),
    "float16": Limits(error=0.1, top1=0.999, identical=0.0),
    "bfloat16": Limits(error=1.0, top1=0.99, identical=0.0),
    "int8": Limits(error=2.0, top1=0.985, identical=0.0),
    "int4": Limits(error=8.0, top1=0.9, identical=0.0),
}
"""In float32 different orders of summation stay well below 1e-4. In half precision the numbers are rounded: on a tutorial
model and real text the largest difference of logits was 0.026 in float16 and 0.16 in bfloat16, with the best token the
same at 99.97 % and 99.74 % of the steps; 0.56 and 99.30 % in int8, 2.3 and 96.4 % in int4. One other token
changes the rest of its sentence: sentences are only reported."""


@dataclass
class Errors:
    """Absolute differences over all compared numbers of one kind."""

    max: float = 0.0
    total: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def add(self, reference: FloatArray, found: FloatArray) -> None:
        if not reference.size:
            return
        difference = np.abs(reference - found)
        # max() would pass over NaN; a NaN on either side must fail.
        self.max = float(np.maximum(self.max, difference.max()))
        self.total += float(difference.sum(dtype=np.float64))
        self.count += difference.size


@dataclass
class Position:
    """The logits of all sentences at one position of their outputs."""

    steps: int = 0
    """Sentences that are so long."""
    max: float = 0.0
    """Largest difference of a logit."""
    divergence: float = 0.0
    """Sum over the sentences of KL(reference || runtime) of the next token's distribution, in nats."""
    agree: int = 0
    """Sentences whose best token is the reference's."""

    def add(self, reference: FloatArray, found: FloatArray) -> None:
        """Logits [sentences, vocab] of both."""
        self.steps += len(reference)
        self.max = float(np.maximum(self.max, np.abs(reference - found).max()))
        self.divergence += float(kl_divergence(reference, found).sum())
        self.agree += int((reference.argmax(-1) == found.argmax(-1)).sum())


def kl_divergence(reference: FloatArray, found: FloatArray) -> NDArray[np.float64]:
    """KL(reference || found) of each row of logits [rows, vocab], in nats, computed in float64."""
    expected, other = log_softmax(reference), log_softmax(found)
    return (np.exp(expected) * (expected - other)).sum(axis=-1)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Divergence:
    """A sentence whose decoded tokens are not the reference's."""

    sentence: int
    """Counted from 1."""
    step: int
    """The first token that differs, counted from 1."""
    wanted: int | None
    """The reference's token there; None where its output had ended."""
    found: int | None
    margin: float
    """By how much the reference prefers its own: the log-probability of its token over that of the other one in greedy
    search, the score of its output over that of the other one in beam search. Below 0 the other one is better, but its
    search did not find it."""
    outputs: tuple[tuple[int, ...], tuple[int, ...]]
    """The reference's and the runtime's ids, with eos where it came."""
    is_tie: bool
    """Whether the margin is within what the allowed error of logits (`Limits.error`) moves. Each of two logits, and each
    score, may move by that much, towards the other: a tie that flipped, not a wrong number."""


@dataclass
class ParityReport:
    """What the comparison of one runtime found."""

    runtime: str
    precision: Precision
    limits: Limits
    beam: int
    reference: str = "fp32"
    """What PyTorch computed in: fp32 or fp64."""
    sentences: int = 0
    cross: dict[str, Errors] = field(default_factory=dict)
    """For each cross tensor its errors over real source positions."""
    logits: Errors = field(default_factory=Errors)
    positions: list[Position] = field(default_factory=list)
    """The logits again, by their position in the output."""
    identical: int = 0
    """Sentences whose freely decoded tokens are the reference's."""
    divergences: list[Divergence] = field(default_factory=list)
    """The other sentences."""
    outputs: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """For each sentence the reference's ids and the runtime's, with eos where it came."""
    error: str | None = None
    """Why a batch could not be decoded, such as logits that are not finite; its sentences count as different."""
    quality: tuple[Quality, Quality] | None = None
    """The reference's and the runtime's, where there are targets."""

    @property
    def steps(self) -> int:
        return sum(position.steps for position in self.positions)

    @property
    def top1_agree(self) -> int:
        """Steps whose best token is the reference's."""
        return sum(position.agree for position in self.positions)

    @property
    def divergence(self) -> float:
        """The mean over all steps of KL(reference || runtime) of the next token's distribution, in nats."""
        return sum(position.divergence for position in self.positions) / max(1, self.steps)

    @property
    def ties(self) -> int:
        return sum(divergence.is_tie for divergence in self.divergences)

    @property
    def cross_max(self) -> float:
        return float(np.max([0.0, *(errors.max for errors in self.cross.values())]))

    @property
    def passed(self) -> bool:
        """Everything within the limits."""
        return not self.failures

    @property
    def failures(self) -> list[str]:
        """What is not within the limits."""
        limits = self.limits
        # Written so that a NaN is a failure.
        kept = {
            "nothing was compared": self.sentences > 0,
            self.error or "": self.error is None,
            f"cross keys and values are off by {self.cross_max:.1e}, {limits.error:.0e} is allowed": self.cross_max
            <= limits.error,
            f"logits are off by {self.logits.max:.1e}, {limits.error:.0e} is allowed": self.logits.max <= limits.error,
            f"the best token is the same at {self.top1_agree} of {self.steps} steps": self.top1_agree
            >= limits.top1 * self.steps,
            f"{self.identical + self.ties} of {self.sentences} sentences have the same tokens or as good ones": (
                self.identical + self.ties >= limits.identical * self.sentences
            ),
        }
        return [problem for problem, holds in kept.items() if not holds]

    def summary(self) -> dict[str, Any]:
        """The numbers of a certificate, JSON-ready."""
        scores = {} if self.quality is None else {"quality": [asdict(quality) for quality in self.quality]}
        return {
            **scores,
            "beam": self.beam,
            "sentences": self.sentences,
            "steps": self.steps,
            "cross_max": self.cross_max,
            "logits_max": self.logits.max,
            "logits_mean": self.logits.mean,
            "kl": self.divergence,
            "top1_agree": self.top1_agree,
            "identical": self.identical,
            "ties": self.ties,
            "limits": asdict(self.limits),
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        fields = asdict(replace(self, outputs=[]))
        del fields["outputs"]
        fields["logits"] = {"max": self.logits.max, "mean": self.logits.mean}
        fields["cross"] = {name: {"max": errors.max, "mean": errors.mean} for name, errors in self.cross.items()}
        found = {"steps": self.steps, "top1_agree": self.top1_agree, "kl": self.divergence, "passed": self.passed}
        return {**fields, **found}
