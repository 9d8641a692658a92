"""The report of a comparison with PyTorch, and the limits that it must keep to pass."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.contract import Precision
from tfexport.graph_checks.rounding import Rounding, logit_size
from tfexport.runtimes.outputs import FloatArray
from tfexport.search.token_rules import log_softmax
from tfexport.verification.bleu_chrf import Quality

Exact = NDArray[np.float64]


@dataclass(frozen=True)
class Limits:
    """The limits on the outputs of a runtime. (`graph_checks/rounding.py` has the limits on its numbers in float32.)"""

    top1: float
    """Smallest share of steps with the reference's best token, or with another that is as good: within float32's rounding,
    or below float32 within `loss` nats, because an untrained model prefers no token. The share is of all text, and a
    comparison sees a sample; see `ParityReport.fewest_agreeing`."""
    loss: float
    """Largest mean of `Divergence.loss` over all sentences, including those with the reference's own output, in nats."""
    furthest: float
    """Largest `Divergence.loss` of a sentence, in nats."""
    kl: float = 0.0
    """Largest mean of KL(reference || runtime) over all steps, in nats; in float32 the limit follows from rounding."""
    error: float | None = None
    """Largest absolute difference of cross keys and values and of logits in float32, if the user gave one."""


LIMITS: dict[Precision, Limits] = {
    "float32": Limits(top1=1.0, loss=0.0, furthest=0.0),
    "float16": Limits(top1=0.99, loss=0.02, furthest=1.0, kl=0.001),
    "bfloat16": Limits(top1=0.95, loss=0.1, furthest=2.0, kl=0.01),
    "int8": Limits(top1=0.9, loss=0.1, furthest=2.0, kl=0.01),
    "int4": Limits(top1=0.5, loss=0.5, furthest=3.0, kl=0.5),
}
"""In float32 every output must equal the reference's, or be as good within rounding. Below float32, rounded weights and
activations change some outputs, and one changed token changes the rest of its sentence. So the limits are on the cost of
these changes. On a tutorial model and real text the best token is the same at 99.97 % of the steps in float16, 99.74 % in
bfloat16, 99.3 % in int8 and 96.4 % in int4. docs/decisions/rounding.md has the reasons for the losses."""


@dataclass
class Errors(Rounding):
    """Distances from float64, over all compared numbers of one kind."""

    total: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def compare(self, exact: Exact, own: FloatArray, computed: FloatArray) -> None:
        """Add numbers of one shape: in float64, PyTorch's own and the runtime's."""
        if not exact.size:
            return
        difference = np.abs(exact - computed)
        # Python's max() can ignore a NaN; a NaN on either side must fail.
        self.add(float(difference.max()), float(np.abs(exact - own).max()), float(np.abs(exact).max()))
        self.total += float(difference.sum())
        self.count += difference.size


@dataclass
class Position(Rounding):
    """The logits of all sentences at one position of their outputs."""

    steps: int = 0
    """The number of sentences that have this position."""
    divergence: float = 0.0
    """Sum over the sentences of KL(reference || runtime) of the next token's distribution, in nats."""
    behind: list[float] = field(default_factory=list)
    """For each sentence with another best token: by how much the reference prefers its own token, in logits."""

    def compare(self, exact: Exact, own_error: float, computed: FloatArray, error: float) -> None:
        """Add logits [sentences, vocab]. `own_error` and `error` are the largest distances of PyTorch's own logits and of
        the runtime's from the exact ones, by `rounding.logit_errors`."""
        self.add(error, own_error, logit_size(exact))
        self.steps += len(exact)
        self.divergence += float(kl_divergence(exact, computed).sum())
        best, others = exact.argmax(-1), computed.argmax(-1)
        rows = np.flatnonzero(best != others)
        self.behind += (exact[rows, best[rows]] - exact[rows, others[rows]]).tolist()


def kl_divergence(reference: FloatArray | Exact, computed: FloatArray) -> NDArray[np.float64]:
    """KL(reference || found) of each row of logits [rows, vocab], in nats, computed in float64."""
    expected, other = log_softmax(reference), log_softmax(computed)
    return (np.exp(expected) * (expected - other)).sum(axis=-1)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Divergence:
    """A sentence whose decoded tokens differ from the reference's."""

    sentence: int
    """Counted from 1."""
    step: int
    """The first token that differs, counted from 1."""
    wanted: int | None
    """The reference's token there; None if its output had ended."""
    found: int | None
    margin: float
    """By how much the reference prefers its own token or output. In greedy search this is the difference of the two
    tokens' log-probabilities, in beam search the difference of the two outputs' scores. Below 0 the other one is better,
    but the reference's search did not find it."""
    outputs: tuple[tuple[int, ...], tuple[int, ...]]
    """The reference's and the runtime's ids, including eos if it was generated."""
    errors: float
    """The number of logit errors that add up in the margin: two in greedy search, two per token in beam search."""
    loss: float = 0.0
    """By how much the reference prefers its own output, in nats per token. With beams, the output of a narrower beam counts
    as its own, too. See `compare.loss_per_token`."""
    beam: int | None = None
    """The width of the narrower beam whose output counts as the reference's; None if it is that of the search itself."""


@dataclass
class ParityReport:
    """The result of the comparison of one runtime."""

    runtime: str
    precision: Precision
    limits: Limits
    beam: int
    reference: str = "fp32"
    """The precision of PyTorch's computation: fp32 or fp64."""
    sentences: int = 0
    cross: dict[str, Errors] = field(default_factory=dict)
    """For each cross tensor, its errors over real source positions."""
    positions: list[Position] = field(default_factory=list)
    """The logits, by their position in the output."""
    identical: int = 0
    """The number of sentences whose freely decoded tokens equal the reference's."""
    divergences: list[Divergence] = field(default_factory=list)
    """The other sentences."""
    outputs: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """For each sentence the reference's ids and the runtime's, including eos if it was generated."""
    error: str | None = None
    """Why a batch could not be decoded, for example because of infinite logits. Its sentences count as different."""
    founded: list[tuple[int, float]] = field(default_factory=list)
    """Pairs of a sentence, counted from 1, and the smallest error of a logit with which its output follows from the
    runtime's own logits; see `unfounded`."""
    quality: tuple[Quality, Quality] | None = None
    """The quality of the reference's and of the runtime's outputs, if there are targets."""

    @property
    def steps(self) -> int:
        return sum(position.steps for position in self.positions)

    @property
    def logits(self) -> Rounding:
        """The largest distances of all steps."""
        rounding = Rounding()
        for position in self.positions:
            rounding.add(position.error, position.own, position.size)
        return rounding

    def allowed(self, rounding: Rounding) -> float:
        """The largest error that passes; infinite below float32, where the graphs are compared with their definition."""
        if self.precision != "float32":
            return math.inf
        return rounding.allowed(self.precision) if self.limits.error is None else self.limits.error

    @property
    def top1_agree(self) -> int:
        """The number of steps whose best token is the reference's, or one that is as good; see `Limits.top1`."""
        other, close = 0, 0.0 if self.precision == "float32" else self.limits.loss
        for position in self.positions:
            tie = max(close, 2 * self.tie_of(position))
            other += sum(not margin <= tie for margin in position.behind)
        return self.steps - other

    @property
    def same_best(self) -> int:
        """The number of steps whose best token is the reference's, not counting others that are as good."""
        return self.steps - sum(len(position.behind) for position in self.positions)

    @property
    def fewest_agreeing(self) -> int:
        """The number of steps whose best token must be the reference's: the limit's share minus three standard deviations of
        a sample of this size, so that a single step of a short text does not decide the result."""
        other = (1 - self.limits.top1) * self.steps
        return max(0, math.ceil(self.steps - other - 3 * math.sqrt(other)))

    def tie_of(self, rounding: Rounding) -> float:
        """The largest error of a logit that passes."""
        fixed = self.limits.error if self.precision == "float32" else None
        return rounding.allowed("float32") if fixed is None else fixed

    @property
    def divergence(self) -> float:
        """The mean over all steps of KL(reference || runtime) of the next token's distribution, in nats."""
        return sum(position.divergence for position in self.positions) / max(1, self.steps)

    def is_tie(self, divergence: Divergence) -> bool:
        """Whether the margin is within rounding: a tie that flipped, not a wrong number."""
        return abs(divergence.margin) <= divergence.errors * self.tie_of(self.logits)

    @property
    def allowed_divergence(self) -> float:
        """The largest mean KL divergence that passes, in nats.

        In float32 the error of a logit is at most `tie_of`. Then the divergence is at most half of its square (Hoeffding's
        lemma).
        """
        if self.precision != "float32":
            return self.limits.kl
        return self.tie_of(self.logits) ** 2 / 2 + 1e-12  # the sums of float64 are no more exact

    @property
    def ties(self) -> int:
        return sum(map(self.is_tie, self.divergences))

    @property
    def unfounded(self) -> list[int]:
        """Sentences, counted from 1, whose output does not follow from the runtime's own logits: a token is not the best
        one, or a score is not the sum of its tokens' log-probabilities."""
        tie = self.tie_of(self.logits)
        return [sentence for sentence, needed in self.founded if not needed <= tie]

    @property
    def cross_max(self) -> float:
        return float(np.max([0.0, *(errors.error for errors in self.cross.values())]))

    @property
    def loss(self) -> float:
        """The mean of `Divergence.loss` over all sentences, in nats per token."""
        return sum(divergence.loss for divergence in self.divergences) / max(1, self.sentences)

    @property
    def furthest(self) -> float:
        """The largest of these losses."""
        return float(np.max([0.0, *(divergence.loss for divergence in self.divergences)]))

    @property
    def narrower(self) -> int:
        """The number of sentences that are compared with the output of a narrower beam."""
        return sum(divergence.beam is not None for divergence in self.divergences)

    @property
    def most_narrower(self) -> int:
        """The largest of these numbers that passes: the share of steps that may have another best token, of the sentences,
        and three standard deviations of a sample of this size. A runtime whose beam is always too narrow has more."""
        share = (1 - self.limits.top1) * self.sentences
        return math.floor(share + 3 * math.sqrt(share))

    @property
    def passed(self) -> bool:
        """Whether everything is within the limits."""
        return not self.failures

    @property
    def failures(self) -> list[str]:
        """Messages for everything that is outside the limits."""
        limits, failures = self.limits, []
        if not self.sentences:
            failures.append("nothing was compared")
        if self.error is not None:
            failures.append(self.error)
        # The comparisons are written so that a NaN is a failure.
        for name, errors in self.cross.items():
            if not errors.error <= self.allowed(errors):
                failures.append(f"{name} is off by {errors.error:.1e}, {_explained(errors, self.allowed(errors))}")
        wrong = [step for step, p in enumerate(self.positions, 1) if not p.error <= self.allowed(p)]
        if wrong:
            first = self.positions[wrong[0] - 1]
            failures.append(
                f"logits of step {wrong[0]} are off by {first.error:.1e}, {_explained(first, self.allowed(first))}"
                + (f"; {len(wrong)} steps in all" if len(wrong) > 1 else "")
            )
        if not self.divergence <= self.allowed_divergence:
            failures.append(
                f"the mean KL divergence is {self.divergence:.1e}, {self.allowed_divergence:.1e} is allowed"
            )
        if not self.top1_agree >= self.fewest_agreeing:
            failures.append(
                f"the best token is the same at {self.top1_agree} of {self.steps} steps, {self.fewest_agreeing} are required"
            )
        if self.precision == "float32" and not self.identical + self.ties >= self.sentences:
            failures.append(
                f"{self.identical + self.ties} of {self.sentences} sentences have the same tokens or as good ones"
            )
        if self.precision != "float32" and not self.loss <= limits.loss:
            failures.append(
                f"the reference prefers its own outputs by {self.loss:.2g} nats per token, {limits.loss:g} is allowed"
            )
        if self.precision != "float32" and not self.furthest <= limits.furthest:
            failures.append(
                f"the reference prefers its own output of a sentence by {self.furthest:.2g} nats per token, "
                f"{limits.furthest:g} is allowed"
            )
        if self.narrower > self.most_narrower:
            failures.append(
                f"{self.narrower} of {self.sentences} outputs are those of a narrower beam than {self.beam}, "
                f"{self.most_narrower} are allowed"
            )
        if self.unfounded:
            failures.append(
                f"{len(self.unfounded)} outputs do not follow from the logits of the runtime, the first that of sentence "
                f"{self.unfounded[0]}"
            )
        return failures

    def summary(self) -> dict[str, Any]:
        """The numbers of a certificate, JSON-ready."""
        scores = {} if self.quality is None else {"quality": [asdict(quality) for quality in self.quality]}
        return {
            **scores,
            "beam": self.beam,
            "narrower": self.narrower,
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
        for record, divergence in zip(fields["divergences"], self.divergences, strict=True):
            record["is_tie"] = self.is_tie(divergence)
        fields["positions"] = [
            {"steps": p.steps, "max": p.error, "own": p.own, "allowed": _finite(self.allowed(p)), "kl": p.divergence}
            for p in self.positions
        ]
        fields["logits"] = {"max": self.logits.error, "own": self.logits.own}
        fields["cross"] = {
            name: {"max": e.error, "own": e.own, "allowed": _finite(self.allowed(e)), "mean": e.mean}
            for name, e in self.cross.items()
        }
        totals: dict[str, Any] = {
            "steps": self.steps,
            "top1_agree": self.top1_agree,
            "kl": self.divergence,
            "loss": self.loss,
        }
        totals["unfounded"] = self.unfounded
        return {**fields, **totals, "failures": self.failures, "passed": self.passed}


def _explained(rounding: Rounding, allowed: float) -> str:
    return f"{allowed:.1e} is allowed (PyTorch's own rounding is {rounding.own:.1e})"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
