"""The beam searches of other toolkits, as what they do otherwise at the few points where they differ.

All but one of them look at the best 2 * beam continuations of a sentence, finish those among the first `beam` that end in
eos, and go on with the best `beam` of the others. They differ in how a finished hypothesis is scored, which are kept, when a
sentence is done, and what happens to hypotheses that the length limit ends. JoeyNMT goes on with the best `beam`, whether
they end in eos or not, so that an output and what might follow it compete with the others.

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
`beam_search.cpp`); JoeyNMT 2.3 (`decoding/search.py`, and the defaults of `testing` in `config.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ProfileName = Literal["tfexport", "hf", "opennmt", "fairseq", "marian", "joeynmt"]
EarlyStopping = Literal["false", "true", "never"]
"""When the profile `hf` is done with a sentence that has `beam` finished hypotheses: `false`: when the best live one, scored
at its present length, is no better than the worst of them; `never`: scored at the length limit, where A is above 0; `true`:
at once."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where a toolkit's search departs from ours."""

    length_penalty: float
    """The exponent A where none is given."""
    google_length: bool = False
    """Divide by ((5 + n) / 6) ** A (Wu et al. 2016, section 7) instead of n ** A."""
    least_length_penalty: float = -math.inf
    """An exponent below it counts as this one."""
    done: Literal["no_better", "enough", "all", "places"]
    """`no_better`: `beam` are finished, and no live hypothesis may beat the worst of them; `enough`: `beam` are finished;
    `all`: none is live; `places`: in each place of the beam, which are the ranks of a step's candidates, an eos has come at
    some step, whatever came there since."""
    keeps: Literal["best", "first", "every"]
    """Which finished hypotheses are kept: the `beam` best, the `beam` first, or every one."""
    top_ends: bool = False
    """Without a length penalty, be done once the best candidate of a step has ended and `nbest` are finished."""
    at_limit: Literal["compete", "end", "eos"]
    """What the length limit does: finished and live hypotheses `compete`; the first `beam` candidates `end`, whatever their
    last token; `eos` is the only token left."""
    narrows: bool = False
    """Whether a finished hypothesis leaves its place in the beam empty."""
    goes_past_end: bool = False
    """Whether a finished hypothesis stays in the beam, with eos a token like any other. It is no output a second time."""
    min_length: int = 0
    """Fewest tokens before eos where no number is given."""
    never: tuple[Literal["bos", "pad", "unk"], ...] = ()
    """Special tokens that are no output."""
    bos_came: bool = True
    """Whether bos is one of the tokens that came before, for the rules about repetition."""
    scores_continuation: bool = False
    """Whether an alternative's score is the log-probability of its first token and the score of what follows, by itself."""
    renormalises: bool = False
    """Whether tokens that may not come leave their probability to the others; a forced token then costs nothing."""


PROFILES: dict[ProfileName, Profile] = {
    "tfexport": Profile(length_penalty=0.6, google_length=True, done="no_better", keeps="best", at_limit="compete"),
    "hf": Profile(length_penalty=1.0, done="no_better", keeps="best", at_limit="end"),
    "opennmt": Profile(
        length_penalty=1.0,
        done="enough",
        keeps="every",
        top_ends=True,
        at_limit="end",
        bos_came=False,
        scores_continuation=True,
        renormalises=True,
    ),
    "fairseq": Profile(length_penalty=1.0, done="enough", keeps="first", at_limit="eos", min_length=1, never=("pad",)),
    "marian": Profile(length_penalty=0.0, done="all", keeps="every", at_limit="end", narrows=True, never=("unk",)),
    "joeynmt": Profile(
        length_penalty=0.0,
        google_length=True,
        least_length_penalty=0.0,
        done="places",
        keeps="every",
        at_limit="end",
        goes_past_end=True,
        min_length=1,
        never=("bos", "pad"),
    ),
}
