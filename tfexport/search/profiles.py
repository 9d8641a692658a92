"""Search profiles: the differences between the beam searches of other toolkits and tfexport's.

All profiles except JoeyNMT's take the best 2 * beam continuations of a sentence, finish those among the first `beam` that
end in eos, and continue with the best `beam` of the others. They differ in the score of a finished hypothesis, in the
hypotheses that they keep, in the criterion that ends a sentence, and in the treatment of the length limit. JoeyNMT
continues with the best `beam`, including those that end in eos. So an output and its continuations compete with the others.

| profile | score of n tokens with log-probability p | a sentence is done when | at the limit |
|---|---|---|---|
| tfexport | p / ((5 + n) / 6) ** A, A = 0.6 | `beam` are finished, and no live one scores higher | live ones compete |
| hf | p / n ** A, A = 1 | the same; see `EarlyStopping` | the first `beam` end |
| opennmt | p / n ** A, A = 1 | `beam` are finished | the first `beam` end |
| fairseq | p / n ** A, A = 1 | `beam` are finished | each gets an eos |
| marian | p / n ** A, A = 0 | all are finished: each narrows the beam by one | the first ones end |
| joeynmt | p / ((5 + n) / 6) ** A, A = 0 | an eos has come in each of the `beam` places | those without an eos end |

Sources: `generate` of Transformers 5 (its documentation of `GenerationConfig`, and `_beam_search`); CTranslate2 4
(documentation of `Translator.translate_batch`, which OpenNMT models are decoded with, and `decoding.cc`); fairseq 0.12
(`SequenceGenerator`); Marian 1.12 (`--normalize`, `--max-length-factor` and `--allow-unk` of marian-decoder, and
`beam_search.cpp`); JoeyNMT 2.3 (`joeynmt/search.py`, and the defaults of `testing` in `config.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ProfileName = Literal["tfexport", "hf", "opennmt", "fairseq", "marian", "joeynmt"]
EarlyStopping = Literal["false", "true", "never"]
"""When the profile `hf` is done with a sentence that has `beam` finished hypotheses. `true`: at once. `false`: when the best
live hypothesis, scored at its present length, is no better than the worst finished one. `never`: the same, but scored at the
length limit if A is above 0."""


@dataclass(frozen=True, kw_only=True)
class SearchProfile:
    """The settings of a toolkit's search."""

    length_penalty: float
    """The default of the exponent A."""
    google_length: bool = False
    """Divide by ((5 + n) / 6) ** A (Wu et al. 2016, section 7) instead of n ** A."""
    least_length_penalty: float = -math.inf
    """The smallest exponent; lower ones are raised to it."""
    done: Literal["no_better", "enough", "all", "places"]
    """The criterion that ends a sentence. `no_better`: `beam` are finished, and no live hypothesis can beat the worst of
    them. `enough`: `beam` are finished. `all`: none is live. `places`: each rank among a step's candidates, from 0 to
    `beam` - 1, has had an eos at some step."""
    keeps: Literal["best", "first", "every"]
    """The finished hypotheses that are kept: the `beam` best, the `beam` first, or every one."""
    top_ends: bool = False
    """Without a length penalty, a sentence is done once the best candidate of a step has ended and `nbest` are finished."""
    at_limit: Literal["compete", "end", "eos"]
    """The outputs at the length limit. `compete`: the live hypotheses compete with the finished ones. `end`: the first
    `beam` candidates are finished, whatever their last token is. `eos`: the last token can only be eos."""
    narrows_beam: bool = False
    """Each finished hypothesis makes the beam of its sentence narrower by one."""
    continues_past_eos: bool = False
    """A finished hypothesis stays in the beam, as if eos were an ordinary token. Its continuations are not outputs."""
    min_length: int = 0
    """The default of the smallest number of tokens before eos."""
    counts_start: bool = False
    """Lengths count the token that the decoder begins with."""
    suppresses: tuple[Literal["bos", "pad", "unk"], ...] = ()
    """Special tokens that are never generated."""
    bos_counts: bool = True
    """The rules about repetition count bos as a token of the output."""
    scores_continuation: bool = False
    """The score of an alternative is the log-probability of its first token plus the score of the continuation alone."""
    renormalises: bool = False
    """The probability of banned tokens is distributed over the others. A forced token then has log-probability 0."""


PROFILES: dict[ProfileName, SearchProfile] = {
    "tfexport": SearchProfile(
        length_penalty=0.6, google_length=True, done="no_better", keeps="best", at_limit="compete"
    ),
    "hf": SearchProfile(length_penalty=1.0, done="no_better", keeps="best", at_limit="end", counts_start=True),
    "opennmt": SearchProfile(
        length_penalty=1.0,
        done="enough",
        keeps="every",
        top_ends=True,
        at_limit="end",
        min_length=1,
        bos_counts=False,
        scores_continuation=True,
        renormalises=True,
    ),
    "fairseq": SearchProfile(
        length_penalty=1.0, done="enough", keeps="first", at_limit="eos", min_length=1, suppresses=("pad",)
    ),
    "marian": SearchProfile(
        length_penalty=0.0, done="all", keeps="every", at_limit="end", narrows_beam=True, suppresses=("unk",)
    ),
    "joeynmt": SearchProfile(
        length_penalty=0.0,
        google_length=True,
        least_length_penalty=0.0,
        done="places",
        keeps="every",
        at_limit="end",
        continues_past_eos=True,
        min_length=1,
        suppresses=("bos", "pad"),
    ),
}
