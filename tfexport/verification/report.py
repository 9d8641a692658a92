"""What a comparison with PyTorch found, and what it must keep to pass."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.contract import Precision
from tfexport.decoding.token_rules import log_softmax
from tfexport.graph_checks.rounding import Rounding
from tfexport.runtimes.base import FloatArray
from tfexport.verification.bleu_chrf import Quality

Exact = NDArray[np.float64]


@dataclass(frozen=True)
class Limits:
    """What the outputs of a runtime must keep to pass, beside its numbers in float32 (see `graph_checks/rounding.py`)."""

    top1: float
    """Smallest share of steps with the reference's best token, or with another that is as good: within float32's rounding,
    or below float32 within `loss` nats, as a model that is not trained prefers no token. Of all text, of which a comparison
    sees a sample; see `ParityReport.fewest_agreeing`."""
    loss: float
    """Largest mean of `Divergence.loss` over all sentences, those with the reference's own output included, in nats."""
    furthest: float
    """Largest `Divergence.loss` of a sentence, in nats."""
    kl: float = 0.0
    """Largest mean of KL(reference || runtime) over all steps, in nats; in float32 it follows from rounding."""
    error: float | None = None
    """Largest absolute difference of cross keys and values and of logits in float32, where the user gave one."""


LIMITS: dict[Precision, Limits] = {
    "float32": Limits(top1=1.0, loss=0.0, furthest=0.0),
    "float16": Limits(top1=0.99, loss=0.02, furthest=1.0, kl=0.001),
    "bfloat16": Limits(top1=0.95, loss=0.1, furthest=2.0, kl=0.01),
    "int8": Limits(top1=0.9, loss=0.1, furthest=2.0, kl=0.01),
    "int4": Limits(top1=0.5, loss=0.5, furthest=3.0, kl=0.5),
}
"""In float32 every output is the reference's, or one that is as good within rounding. Below float32 rounded weights and
activations change some outputs, and one other token changes the rest of its sentence. Then the limits are on what that
costs: on a tutorial model and real text the best token is the same at 99.97 % of the steps in float16, 99.74 % in bfloat16,
99.3 % in int8 and 96.4 % in int4. The reasons for the losses are in docs/decisions/rounding.md."""


@dataclass
class Errors(Rounding):
    """Distances from float64 of all compared numbers of one kind."""

    total: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def compare(self, exact: Exact, own: FloatArray, found: FloatArray) -> None:
        """Take in numbers of one shape: in float64, PyTorch's own and the runtime's."""
        if not exact.size:
            return
        difference = np.abs(exact - found)
        # max() would pass over NaN; a NaN on either side must fail.
        self.add(float(difference.max()), float(np.abs(exact - own).max()), float(np.abs(exact).max()))
        self.total += float(difference.sum())
        self.count += difference.size


@dataclass
class Position(Rounding):
    """The logits of all sentences at one position of their outputs."""

    steps: int = 0
    """Sentences that are so long."""
    divergence: float = 0.0
    """Sum over the sentences of KL(reference || runtime) of the next token's distribution, in nats."""
    behind: list[float] = field(default_factory=list)
    """For each sentence with another best token, by how much the reference prefers its own, in logits."""

    def compare(self, exact: Exact, own_error: float, found: FloatArray, error: float) -> None:
        """Take in logits [sentences, vocab]. `own_error` and `error` are the largest distances of PyTorch's own and of those
        that were found from the exact ones."""
        self.add(error, own_error, float(max(exact.max(), -exact.min())))
        self.steps += len(exact)
        self.divergence += float(kl_divergence(exact, found).sum())
        best, others = exact.argmax(-1), found.argmax(-1)
        rows = np.flatnonzero(best != others)
        self.behind += (exact[rows, best[rows]] - exact[rows, others[rows]]).tolist()


def kl_divergence(reference: FloatArray | Exact, found: FloatArray) -> NDArray[np.float64]:
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
    errors: float
    """How many errors of a logit add up in the margin: two in greedy search, two for each token of a score with beams."""
    loss: float = 0.0
    """By how much the reference prefers its own output, in nats a token; see `compare.loss_per_token`."""


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
    positions: list[Position] = field(default_factory=list)
    """The logits, by their position in the output."""
    identical: int = 0
    """Sentences whose freely decoded tokens are the reference's."""
    divergences: list[Divergence] = field(default_factory=list)
    """The other sentences."""
    outputs: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """For each sentence the reference's ids and the runtime's, with eos where it came."""
    error: str | None = None
    """Why a batch could not be decoded, such as logits that are not finite; its sentences count as different."""
    founded: list[tuple[int, float]] = field(default_factory=list)
    """Sentences, counted from 1, and by how much a logit of the graph that decoded must be off, so that the output follows
    from the runtime's own logits; see `unfounded`."""
    quality: tuple[Quality, Quality] | None = None
    """The reference's and the runtime's, where there are targets."""

    @property
    def steps(self) -> int:
        return sum(position.steps for position in self.positions)

    @property
    def logits(self) -> Rounding:
        """The largest distances of all steps."""
        found = Rounding()
        for position in self.positions:
            found.add(position.error, position.own, position.size)
        return found

    def allowed(self, rounding: Rounding) -> float:
        """The largest error of some numbers that passes; infinite below float32, where the graphs are held against their
        definition instead."""
        if self.precision != "float32":
            return math.inf
        return rounding.allowed(self.precision) if self.limits.error is None else self.limits.error

    @property
    def top1_agree(self) -> int:
        """Steps whose best token is the reference's, or one that is as good; see `Limits.top1`."""
        other, close = 0, 0.0 if self.precision == "float32" else self.limits.loss
        for position in self.positions:
            tie = max(close, 2 * self.tie_of(position))
            other += sum(not margin <= tie for margin in position.behind)
        return self.steps - other

    @property
    def fewest_agreeing(self) -> int:
        """Steps whose best token must be the reference's: the limit's share less three standard deviations of a sample of so
        many steps, so that one step more or less in a short text decides nothing."""
        other = (1 - self.limits.top1) * self.steps
        return max(0, math.ceil(self.steps - other - 3 * math.sqrt(other)))

    def tie_of(self, rounding: Rounding) -> float:
        """By how much a logit may be off without being wrong."""
        fixed = self.limits.error if self.precision == "float32" else None
        return rounding.allowed("float32") if fixed is None else fixed

    @property
    def divergence(self) -> float:
        """The mean over all steps of KL(reference || runtime) of the next token's distribution, in nats."""
        return sum(position.divergence for position in self.positions) / max(1, self.steps)

    def is_tie(self, divergence: Divergence) -> bool:
        """Whether its margin is within rounding: a tie that flipped, not a wrong number."""
        return abs(divergence.margin) <= divergence.errors * self.tie_of(self.logits)

    @property
    def allowed_divergence(self) -> float:
        """The largest mean KL divergence that passes, in nats.

        In float32 logits are off by `tie_of` at most, and then it is half of the square of that at most (Hoeffding's lemma).
        """
        if self.precision != "float32":
            return self.limits.kl
        return self.tie_of(self.logits) ** 2 / 2 + 1e-12  # the sums of float64 are no more exact

    @property
    def ties(self) -> int:
        return sum(map(self.is_tie, self.divergences))

    @property
    def unfounded(self) -> list[int]:
        """Sentences, counted from 1, whose output does not follow from the runtime's own logits: a token that is not the
        best one, or a score that is not the sum of its tokens' log-probabilities."""
        tie = self.tie_of(self.logits)
        return [sentence for sentence, needed in self.founded if not needed <= tie]

    @property
    def cross_max(self) -> float:
        return float(np.max([0.0, *(errors.error for errors in self.cross.values())]))

    @property
    def loss(self) -> float:
        """The mean over all sentences of what the reference prefers its own output by, in nats a token."""
        return sum(divergence.loss for divergence in self.divergences) / max(1, self.sentences)

    @property
    def furthest(self) -> float:
        """The largest of these losses."""
        return float(np.max([0.0, *(divergence.loss for divergence in self.divergences)]))

    @property
    def passed(self) -> bool:
        """Everything within the limits."""
        return not self.failures

    @property
    def failures(self) -> list[str]:
        """What is not within the limits."""
        limits, found = self.limits, []
        if not self.sentences:
            found.append("nothing was compared")
        if self.error is not None:
            found.append(self.error)
        # Written so that a NaN is a failure.
        for name, errors in self.cross.items():
            if not errors.error <= self.allowed(errors):
                found.append(f"{name} is off by {errors.error:.1e}, {_explained(errors, self.allowed(errors))}")
        wrong = [step for step, p in enumerate(self.positions, 1) if not p.error <= self.allowed(p)]
        if wrong:
            first = self.positions[wrong[0] - 1]
            found.append(
                f"logits of step {wrong[0]} are off by {first.error:.1e}, {_explained(first, self.allowed(first))}"
                + (f"; {len(wrong)} steps in all" if len(wrong) > 1 else "")
            )
        if not self.divergence <= self.allowed_divergence:
            found.append(f"the mean KL divergence is {self.divergence:.1e}, {self.allowed_divergence:.1e} is allowed")
        if not self.top1_agree >= self.fewest_agreeing:
            found.append(
                f"the best token is the same at {self.top1_agree} of {self.steps} steps, not at {self.fewest_agreeing}"
            )
        if self.precision == "float32" and not self.identical + self.ties >= self.sentences:
            found.append(
                f"{self.identical + self.ties} of {self.sentences} sentences have the same tokens or as good ones"
            )
        if self.precision != "float32" and not self.loss <= limits.loss:
            found.append(
                f"the reference prefers its own outputs by {self.loss:.2g} nats a token, {limits.loss:g} is allowed"
            )
        if self.precision != "float32" and not self.furthest <= limits.furthest:
            found.append(
                f"the reference prefers its own output of a sentence by {self.furthest:.2g} nats a token, "
                f"{limits.furthest:g} is allowed"
            )
        if self.unfounded:
            found.append(
                f"{len(self.unfounded)} outputs do not follow from the logits of the runtime, the first that of sentence "
                f"{self.unfounded[0]}"
            )
        return found

    def summary(self) -> dict[str, Any]:
        """The numbers of a certificate, JSON-ready."""
        scores = {} if self.quality is None else {"quality": [asdict(quality) for quality in self.quality]}
        return {
            **scores,
            "beam": self.beam,
            "sentences": self.sentences,
            "steps": self.steps,
            "longest": len(self.positions),
            "cross_max": self.cross_max,
            "logits_max": self.logits.error,
            "logits_own": self.logits.own,
            "kl": self.divergence,
            "top1_agree": self.top1_agree,
            "identical": self.identical,
            "ties": self.ties,
            "loss": self.loss,
            "limits": asdict(self.limits),
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        fields = asdict(replace(self, outputs=[], founded=[]))
        del fields["outputs"], fields["founded"]
        for told, divergence in zip(fields["divergences"], self.divergences, strict=True):
            told["is_tie"] = self.is_tie(divergence)
        fields["positions"] = [
            {"steps": p.steps, "max": p.error, "own": p.own, "allowed": _finite(self.allowed(p)), "kl": p.divergence}
            for p in self.positions
        ]
        fields["logits"] = {"max": self.logits.error, "own": self.logits.own}
        fields["cross"] = {
            name: {"max": e.error, "own": e.own, "allowed": _finite(self.allowed(e)), "mean": e.mean}
            for name, e in self.cross.items()
        }
        found: dict[str, Any] = {
            "steps": self.steps,
            "top1_agree": self.top1_agree,
            "kl": self.divergence,
            "loss": self.loss,
        }
        found["unfounded"] = self.unfounded
        return {**fields, **found, "failures": self.failures, "passed": self.passed}


def _explained(rounding: Rounding, allowed: float) -> str:
    return f"{allowed:.1e} is allowed (PyTorch's own rounding is {rounding.own:.1e})"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
