"""What is asked of a search, and what it finds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, get_args

import numpy as np

from tfexport.config import ModelConfig
from tfexport.decoding.alignments import SourceTokens
from tfexport.decoding.attention_trace import coverage
from tfexport.decoding.profiles import PROFILES, EarlyStopping, ProfileName
from tfexport.decoding.profiles import SearchProfile as Profile
from tfexport.errors import TfexportError
from tfexport.runtimes.base import FloatArray, IntArray, Needs


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How to search. Lengths count generated tokens, eos included.

    Raises:
        TfexportError: an option is out of range.
    """

    beam: int = 1
    nbest: int = 1
    length_penalty: float = 0.6
    """The exponent A of ((5 + length) / 6) ** A, by which log-probabilities are divided (Wu et al. 2016, section 7;
    beam 4 and 0.6 are the paper's own); 0 compares plain log-probabilities. Greedy search has nothing to compare. Other
    profiles, but for joeynmt, divide by length ** A."""
    min_length: int = 0
    """Fewest tokens before eos may come."""
    max_length: int = 256
    """Most tokens; the model's own limit holds beside it."""
    max_length_ratio: float | None = None
    """Most tokens for each source id, rounded up."""
    scores: bool = True
    """Tell scores. Greedy search without them has NaN in their place, and can be much faster: it asks which token is best,
    not how likely it is. Beams need them to compare."""
    token_scores: bool = False
    """Tell the log-probability of each token too."""
    attention: bool = False
    """Tell what each token attended to; see `Hypothesis.attention`."""
    alignment_layer: int = -1
    """The decoder layer whose cross-attention that is, from 0; negative ones count from the last."""
    coverage_penalty: float = 0.0
    """The factor of `attended.coverage` in scores (beta of Wu et al. 2016, section 7); their own is 0.2."""
    profile: ProfileName = "tfexport"
    """Whose search it is; see `decoding/profiles.py`. `for_profile` has its own values for what is not said."""
    early_stopping: EarlyStopping = "false"
    """Of the profile `hf` alone."""
    force_eos: bool = False
    """Of the profile `hf` alone: the last token that the length limit leaves is eos, at no cost (`forced_eos_token_id`)."""

    repetition_penalty: float = 1.0
    """Above 1 makes tokens that came before less likely (Keskar et al. 2019, section 4.1, as Transformers has it): their
    logits, in beam search their log-probabilities, are divided by it where positive and multiplied where negative."""
    no_repeat_ngram: int = 0
    """No n tokens, bos among them, come twice in an output (Paulus et al. 2018, section 2.5); 0 for no such rule."""
    suppress: tuple[int, ...] = ()
    """Ids that are never generated."""
    suppress_first: tuple[int, ...] = ()
    """Ids that are not generated first, or, where the model begins every output with one token, after it."""

    alternatives: int = 0
    """Tell so many outputs that differ in the token after the forced beginning, each the best with its own; see
    `decoding/alternatives.py`. 0 for an ordinary search."""
    min_alternative_prob: float = 0.0
    """Of alternatives: the least probability of such a token; the most likely one is always told."""

    samples: int = 0
    """Draw so many outputs of each source, token by token, instead of searching for the best; they come in the order in
    which they are drawn, so that more of them change none (in int8 hardly any: one runs another graph than several do)."""
    temperature: float = 1.0
    """Of sampling: what logits are divided by."""
    top_k: int = 0
    """Of sampling: draw among so many best tokens (Fan et al. 2018, section 5.4); 0 for all."""
    top_p: float = 1.0
    """Of sampling: draw among the fewest best tokens that have this probability together (Holtzman et al. 2020, 3.1)."""
    seed: int = 0
    """Of sampling. With a line's number it decides what is drawn for that line, whatever else is decoded with it."""

    def __post_init__(self) -> None:
        problems = {
            f"beam is {self.beam}, below 1": self.beam < 1,
            f"nbest {self.nbest} is not between 1 and the beam's {self.beam}": not 1 <= self.nbest <= self.beam,
            f"max_length is {self.max_length}, below 1": self.max_length < 1,
            f"min_length is {self.min_length}, below 0": self.min_length < 0,
            f"min_length {self.min_length} is not below max_length {self.max_length}": self.min_length
            >= self.max_length,
            f"max_length_ratio is {self.max_length_ratio}, not above 0": self.max_length_ratio is not None
            and not self.max_length_ratio > 0,
            f"length_penalty is {self.length_penalty}, not between -10 and 10": not -10 <= self.length_penalty <= 10,
            f"early_stopping is {self.early_stopping}, which only the profile hf has": self.early_stopping != "false"
            and self.profile != "hf",
            "force_eos is of the profile hf alone": self.force_eos and self.profile != "hf",
            "token_scores are asked for without scores": self.token_scores and not self.scores,
            f"coverage_penalty is {self.coverage_penalty}, not 0 or above": not 0 <= self.coverage_penalty < math.inf,
            f"repetition_penalty is {self.repetition_penalty}, not above 0": not 0 < self.repetition_penalty < math.inf,
            f"no_repeat_ngram is {self.no_repeat_ngram}, below 0": self.no_repeat_ngram < 0,
            f"alternatives is {self.alternatives}, below 0": self.alternatives < 0,
            f"min_alternative_prob is {self.min_alternative_prob}, not between 0 and 1": not 0
            <= self.min_alternative_prob
            <= 1,
            "min_alternative_prob is of alternatives, and there are none": self.min_alternative_prob != 0
            and self.alternatives == 0,
            "the profile opennmt has no coverage_penalty for alternatives": self.alternatives > 0
            and self.coverage_penalty != 0
            and self.rules.scores_continuation,
            "alternatives are told instead of nbest or samples": self.alternatives > 0
            and (self.nbest > 1 or self.samples > 0),
            f"samples is {self.samples}, below 0": self.samples < 0,
            f"temperature is {self.temperature}, not above 0": not 0 < self.temperature < math.inf,
            f"top_k is {self.top_k}, below 0": self.top_k < 0,
            f"top_p is {self.top_p}, not above 0 and at most 1": not 0 < self.top_p <= 1,
            f"seed is {self.seed}, not between 0 and 2 ** 64 - 1": not 0 <= self.seed < 2**64,
            f"samples are drawn without a beam, and beam is {self.beam}": self.samples > 0 and self.beam > 1,
            "temperature, top_k, top_p and seed are of sampling, and samples is 0": self.samples == 0
            and (self.temperature, self.top_k, self.top_p, self.seed) != (1.0, 0, 1.0, 0),
        }
        found = [problem for problem, present in problems.items() if present]
        if self.early_stopping not in get_args(EarlyStopping):
            found.append(f"early_stopping is {self.early_stopping!r}, not one of {', '.join(get_args(EarlyStopping))}")
        if found:
            raise TfexportError(f"these search options cannot be used: {'; '.join(found)}. Change them.")

    @classmethod
    def for_profile(cls, profile: ProfileName, **given: Any) -> SearchOptions:
        """The options that are `given`; those that are None are the profile's own.

        Raises:
            TfexportError: an option is out of range.
        """
        if profile not in PROFILES:
            raise TfexportError(f"there is no search profile {profile!r}. Use one of {', '.join(PROFILES)}.")
        theirs = PROFILES[profile]
        own = {
            "length_penalty": theirs.length_penalty,
            # A limit of one token leaves eos no later place than the first.
            "min_length": min(theirs.min_length, max(0, given.get("max_length", cls.max_length) - 1)),
        }
        chosen = {name: own.get(name) if value is None else value for name, value in given.items()}
        return cls(**{**own, **chosen, "profile": profile})

    @property
    def width(self) -> int:
        """Hypotheses of a sentence that are decoded at once."""
        return self.samples or self.beam

    @property
    def ranks_alone(self) -> bool:
        """Whether it asks of a step which tokens are best and no more: no scores to tell or to compare, and no logits for
        rules of its own."""
        asks = self.scores or self.beam > 1 or self.samples > 0 or self.alternatives > 0 or self.tells_attention
        has_rules = self.repetition_penalty != 1 or self.no_repeat_ngram > 0 or self.rules.renormalises
        return not (asks or has_rules or self.force_eos or self.rules.at_limit == "eos")

    @property
    def needs(self) -> Needs:
        """What the search asks of a runtime."""
        return Needs(self.width, self.ranks_alone, self.tells_attention)

    @property
    def tells_attention(self) -> bool:
        """Whether the search asks its runtime for cross-attention."""
        return self.attention or self.coverage_penalty > 0

    @property
    def rules(self) -> Profile:
        """What the profile does otherwise."""
        return PROFILES[self.profile]

    def limits(self, config: ModelConfig, src_len: IntArray) -> IntArray:
        """Most tokens to generate for sources of `src_len` [batch] ids."""
        limit = np.full(len(src_len), min(self.max_length, config.max_target_length))
        if self.max_length_ratio is not None:
            # Rounded first: in binary 50 * 1.1 is a little more than 55. Compared as floats: the product may be infinite.
            most = np.ceil(np.round(np.minimum(src_len * self.max_length_ratio, limit), 9))
            limit = np.minimum(limit, most.astype(np.int64))
        return np.maximum(limit, 1)

    @property
    def length_exponent(self) -> float:
        """The exponent A, as the profile takes it."""
        return max(self.length_penalty, self.rules.least_length_penalty)

    def normalise(self, log_prob: float, length: int) -> float:
        """The score of a hypothesis of `length` tokens."""
        base = (5.0 + length) / 6.0 if self.rules.google_length else float(length)
        return log_prob / base**self.length_exponent


class SearchSettings(TypedDict, total=False):
    """The fields of `SearchOptions` as keyword arguments, in the forms in which people write them; of what is not said the
    profile has values of its own."""

    beam: int
    nbest: int
    length_penalty: float
    min_length: int
    max_length: int
    max_length_ratio: float | None
    scores: bool
    token_scores: bool
    attention: bool
    alignment_layer: int
    coverage_penalty: float
    profile: ProfileName
    early_stopping: EarlyStopping | bool
    force_eos: bool
    repetition_penalty: float
    no_repeat_ngram: int
    suppress: tuple[int, ...] | str
    """Ids, or tokens of the target vocabulary separated by spaces."""
    suppress_first: tuple[int, ...] | str
    alternatives: int
    min_alternative_prob: float
    samples: int
    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class Source:
    """What is to be decoded, where its ids do not say it all."""

    ids: Sequence[int]
    """The encoder's, at least one."""
    prefix: tuple[int, ...] = ()
    """Ids that every output begins with; their log-probabilities count."""
    most: int | None = None
    """Most tokens of its outputs, beside the limits of the search."""
    least: int = 0
    """Fewest tokens before eos may come, beside that of the search."""
    candidates: IntArray | None = field(default=None, compare=False)
    """Target ids that may come in its outputs, beside eos and those of `prefix`; None for all."""
    line: int = 0
    """Its number, which decides with the seed what is drawn for it."""
    tokens: SourceTokens | None = None
    """Its ids as a person reads them, where who writes outputs asks for them."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Hypothesis:
    """One output of a search."""

    ids: tuple[int, ...]
    """Without bos, with eos when it came."""
    score: float
    """The log-probability after length normalisation; n-best lists are sorted by it. NaN, as `log_prob`, where greedy search
    was to tell none."""
    log_prob: float
    """Sum of the tokens' log-probabilities, eos included when it came."""
    finished: bool
    """False where the length limit, not eos, ended it."""
    token_log_probs: tuple[float, ...] = ()
    """Of each token, which sum up to `log_prob`; empty where they were not asked for."""
    attention: FloatArray | None = field(default=None, compare=False)
    """What each token attended to when it was chosen, [tokens, source ids]: cross-attention of one layer, the mean of its
    heads; None where it was not asked for."""

    @classmethod
    def of(
        cls,
        ids: tuple[int, ...],
        log_prob: float,
        options: SearchOptions,
        *,
        done: bool,
        steps: Iterable[float],
        attention: FloatArray | None = None,
    ) -> Hypothesis:
        """Scored; `steps` are the log-probabilities of its tokens, where they are asked for."""
        told = tuple(float(step) for step in steps) if options.token_scores else ()
        score = options.normalise(log_prob, len(ids))
        if options.coverage_penalty:
            assert attention is not None
            score += options.coverage_penalty * coverage(attention)
        return cls(ids, score, log_prob, done, told, attention if options.attention else None)


class Finished:
    """The hypotheses of one sentence that are finished, best first."""

    def __init__(self, options: SearchOptions, limit: int):
        self._options, self._limit = options, limit
        self._found: list[Hypothesis] = []
        self._top_ended = False
        self._ended_places: set[int] = set()

    def __len__(self) -> int:
        return len(self._found)

    def add(
        self,
        ids: tuple[int, ...],
        log_prob: float,
        *,
        rank: int,
        done: bool,
        again: bool = False,
        steps: Iterable[float] = (),
        attention: FloatArray | None = None,
    ) -> None:
        """A hypothesis that was candidate `rank` of its step, ended by eos if it is `done`. An earlier one wins a tie.

        Args:
            again: it goes on behind an eos, at which it was added before.
        """
        options, keeps = self._options, self._options.rules.keeps
        self._top_ended |= rank == 0
        self._ended_places.add(rank)
        if again or (keeps == "first" and len(self._found) == options.beam):
            return
        self._found.append(Hypothesis.of(ids, log_prob, options, done=done, steps=steps, attention=attention))
        self._found.sort(key=lambda hypothesis: -hypothesis.score)
        if keeps == "best":
            del self._found[options.beam :]

    def is_done(self, best_live: float, length: int) -> bool:
        """Whether the sentence is, when its best live hypothesis of `length` tokens has log-probability `best_live`."""
        options, rules = self._options, self._options.rules
        if best_live == -np.inf or self._is_decided(best_live, length):
            return True
        if rules.done == "all":
            return False
        if rules.done == "places":
            return len(self._ended_places) == options.beam
        if rules.top_ends and options.length_penalty == options.coverage_penalty == 0:
            return self._top_ended and len(self._found) >= options.nbest
        if len(self._found) < options.beam:
            return False
        if rules.done == "enough" or options.early_stopping == "true":
            return True
        if options.early_stopping == "never" and options.length_penalty > 0:
            length = self._limit
        # A coverage penalty takes from the scores of live ones too, and is none at best.
        return options.normalise(best_live, length) <= self._found[-1].score

    def _is_decided(self, best_live: float, length: int) -> bool:
        """Whether what goes on can come to nothing that would be among the best, so that it need not.

        Log-probabilities only fall, and a coverage penalty is none at best. What length makes of them is best at the limit,
        where the exponent is above 0, and with the next token elsewhere.
        """
        options = self._options
        if len(self._found) < options.nbest:
            return False
        best_length = self._limit if options.length_exponent > 0 else min(length + 1, self._limit)
        return options.normalise(best_live, best_length) <= self._found[options.nbest - 1].score

    def best(self) -> list[Hypothesis]:
        """The `nbest` ones, best first."""
        return self._found[: self._options.nbest]
