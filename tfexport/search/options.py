"""`SearchOptions`: the options of a search, each declared once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from tfexport.errors import TfexportError
from tfexport.option import MOST_AT_ONCE, Options, checked, declared, option
from tfexport.search.profiles import PROFILES, EarlyStopping, ProfileName, SearchProfile
from tfexport.search.rules.bad_words import BadWords
from tfexport.search.rules.encoder_no_repeat_ngram import EncoderNoRepeatNgram
from tfexport.search.rules.history import PANEL, TERMS, HistoryRule
from tfexport.search.rules.no_repeat_ngram import NoRepeatNgram
from tfexport.search.rules.repetition_penalty import RepetitionPenalty
from tfexport.search.rules.sequence_bias import SequenceBias

if TYPE_CHECKING:
    from tfexport.config import ModelConfig
    from tfexport.runtimes.base import Needs

ConstraintOrder = Literal["ordered", "unordered"]
_SEARCH, _LENGTHS = "Search", "Lengths"
_SAMPLING = "Sampling"
_ALTERNATIVES = "Alternatives"
_SCORES = "Scores and attention"


@dataclass(frozen=True, kw_only=True)
class BaseSearchOptions(Options):
    """The options of a search, except those of its rules; see `SearchOptions`."""

    beam: int = option(
        1,
        minimum=1,
        maximum=MOST_AT_ONCE,
        help="Beam width; 1 is greedy.",
        panel=_SEARCH,
        also=("beam_size", "num_beams", "beams"),
    )
    nbest: int = option(
        1,
        minimum=1,
        help="Number of hypotheses for each sentence, best first; in text, tabs separate them.",
        panel=_SEARCH,
        also=("num_return_sequences", "num_hypotheses", "n_best"),
    )
    profile: ProfileName = option(
        "tfexport",
        flag="--search-profile",
        help="Search like this toolkit: its length penalty, early stopping, limits and defaults.",
        panel=_SEARCH,
    )
    """See `search/profiles.py`."""
    early_stopping: EarlyStopping = option(
        "false", help="early_stopping of Transformers, for --search-profile hf.", panel=_SEARCH
    )
    force_eos: bool = option(
        False, help="Force eos at the length limit, at no cost, for --search-profile hf.", panel=_SEARCH
    )
    """`forced_eos_token_id` of Transformers."""
    end_tokens: tuple[int, ...] = option(
        (),
        tokens=True,
        metavar="TOKENS",
        help="Tokens that end an output, in addition to eos.",
        panel=_SEARCH,
        also=("end_token", "eos_token_id", "stop_token_ids"),
    )
    patience: float = option(
        1.0,
        above=0,
        maximum=100,
        help="For beam search: a sentence is done when P times the beam are finished.",
        panel=_SEARCH,
    )
    """Kasai et al. 2022, section 3. The number of finished hypotheses is rounded, and at least `nbest`."""

    length_penalty: float = option(
        0.6,
        minimum=-10,
        maximum=10,
        help="Exponent A of the length penalty ((5 + length) / 6) ** A, or length ** A in hf, opennmt, fairseq and marian.",
        default_text="of the profile; 0.6",
        panel=_LENGTHS,
    )
    """Log-probabilities are divided by the length penalty (Wu et al. 2016, section 7; the paper uses beam 4 and 0.6). 0
    compares plain log-probabilities. Greedy search does not compare hypotheses, so its output does not depend on it."""
    min_length: int = option(
        0,
        minimum=0,
        help="Smallest number of tokens before eos; in hf, with the start token.",
        default_text="of the profile; 0",
        panel=_LENGTHS,
        also=("min_new_tokens", "min_decoding_length"),
    )
    max_length: int = option(
        256,
        minimum=1,
        help="Largest number of tokens to generate, eos included; in hf, with the start token.",
        panel=_LENGTHS,
        also=("max_new_tokens", "max_decoding_length"),
    )
    """The model's own limit also applies."""
    max_length_ratio: float | None = option(
        None,
        above=0,
        finite=False,
        help="Largest number of tokens to generate for each source id, rounded up.",
        panel=_LENGTHS,
    )

    suppress: tuple[int, ...] = option(
        (),
        tokens=True,
        metavar="TOKENS",
        help="Tokens to suppress, separated by spaces (ids, if the output format is ids).",
        panel=PANEL,
        also=("suppress_tokens",),
    )
    suppress_first: tuple[int, ...] = option(
        (),
        tokens=True,
        metavar="TOKENS",
        help="Tokens to suppress at the first position.",
        panel=PANEL,
        also=("begin_suppress_tokens",),
    )
    """If the model begins every output with a forced token, these tokens are suppressed at the position after it."""

    constraint_order: ConstraintOrder = option(
        "unordered",
        help="Whether outputs have the required phrases of a line in this order, or in any order.",
        panel=TERMS,
    )
    """`fairseq-interactive --constraints` alone means `ordered`."""

    alternatives: int = option(
        0,
        minimum=0,
        help="Complete each of the N most likely tokens after the prefix. Tabs separate the outputs, the most likely first.",
        panel=_ALTERNATIVES,
        also=("return_alternatives",),
    )
    """Each alternative is the best output with its own token there; see `search/alternatives.py`. 0 turns this off."""
    min_alternative_prob: float = option(
        0.0,
        minimum=0,
        maximum=1,
        help="For --alternatives: the minimum probability of such a token.",
        panel=_ALTERNATIVES,
    )
    """The most likely token is always included."""

    samples: int = option(
        0,
        minimum=0,
        maximum=MOST_AT_ONCE,
        help="Sample this number of outputs for each sentence, instead of searching for the best.",
        panel=_SAMPLING,
        also=("do_sample",),
    )
    """Samples are returned in the order in which they are drawn, so a larger number does not change the first ones. (In int8
    a few may change: one sample runs another graph than several.)"""
    temperature: float = option(
        1.0,
        above=0,
        help="For --samples: divide the logits by this number.",
        panel=_SAMPLING,
        also=("sampling_temperature",),
    )
    top_k: int = option(
        0, minimum=0, help="For --samples: sample from the K most likely tokens; 0 for all.", panel=_SAMPLING
    )
    """Fan et al. 2018, section 5.4."""
    top_p: float = option(
        1.0,
        above=0,
        maximum=1,
        help="For --samples: sample from the smallest set of tokens whose probabilities sum to P.",
        panel=_SAMPLING,
    )
    """Holtzman et al. 2020, section 3.1."""
    seed: int = option(
        0,
        minimum=0,
        maximum=2**64 - 1,
        help="For --samples: the seed. The same seed and line number give the same tokens.",
        panel=_SAMPLING,
    )

    scores: bool = option(
        True, flag="", help="Return scores. Greedy search without them returns NaN, and can be much faster."
    )
    """Greedy search without scores needs only the best token, not its probability. Beam search needs scores."""
    token_scores: bool = option(False, help="Write the log-probability of each token, in jsonl.", panel=_SCORES)
    attention: bool = option(
        False, flag="", help="Return the cross-attention of each token; see `Hypothesis.attention`."
    )
    alignment_layer: int = option(
        -1, help="Decoder layer of the attention, from 0; -1 is the last. Heads are averaged.", panel=_SCORES
    )
    coverage_penalty: float = option(
        0.0,
        minimum=0,
        metavar="BETA",
        help="Coverage penalty: lower the scores of outputs that skip parts of the source; 0.2 is common.",
        panel=_SCORES,
    )
    """The factor beta of `attention_trace.coverage` (Wu et al. 2016, section 7; the paper uses 0.2)."""

    def conflicts(self) -> list[str]:
        """Options that exclude each other, in words."""
        drawing = (self.temperature, self.top_k, self.top_p, self.seed) != (1.0, 0, 1.0, 0)
        conflicts = {
            f"nbest {self.nbest} needs a beam of at least {self.nbest}, and beam is {self.beam}": self.nbest
            > self.beam,
            f"min_length {self.min_length} is not below max_length {self.max_length}": self.min_length
            >= self.max_length,
            "max_length 1 leaves nothing to generate, because the profile hf counts the start token": self.max_new_tokens
            == 0,
            "patience needs beam search, and beam is 1": self.patience != 1 and self.beam == 1,
            f"the profile {self.profile} does not support patience": self.patience != 1
            and self.search_profile.done in ("all", "places"),
            f"early_stopping is {self.early_stopping}, which only the profile hf supports": self.early_stopping
            != "false"
            and self.profile != "hf",
            "force_eos needs the profile hf": self.force_eos and self.profile != "hf",
            "token_scores need scores": self.token_scores and not self.scores,
            "min_alternative_prob needs alternatives, and alternatives is 0": self.min_alternative_prob != 0
            and self.alternatives == 0,
            "the profile opennmt does not support coverage_penalty with alternatives": self.alternatives > 0
            and self.coverage_penalty != 0
            and self.search_profile.scores_continuation,
            "alternatives exclude nbest and samples": self.alternatives > 0 and (self.nbest > 1 or self.samples > 0),
            f"sampling does not use a beam, and beam is {self.beam}": self.samples > 0 and self.beam > 1,
            "temperature, top_k, top_p and seed need sampling, and samples is 0": self.samples == 0 and drawing,
        }
        return [conflict for conflict, present in conflicts.items() if present]

    @classmethod
    def of(cls, values: Mapping[str, Any], token_ids: Callable[[str], tuple[int, ...]] | None = None) -> Self:
        """The options with these `values`, by name. Missing options, and those that are None, have the profile's default.

        Lists become tuples, and text of tokens becomes ids.

        Args:
            token_ids: converts tokens of the target vocabulary, separated by spaces, to ids; for options whose values are
                tokens.

        Raises:
            TfexportError: an option does not exist, its value has a wrong type or is out of range, or a token is unknown.
        """
        chosen = {name: value for name, value in checked(cls, values).items() if value is not None}
        for name in chosen.keys() & {name for name, declaration in declared(cls).items() if declaration.about.tokens}:
            chosen[name] = _ids(name, chosen[name], token_ids)
        profile = PROFILES[chosen.get("profile", "tfexport")]
        own = {
            "length_penalty": profile.length_penalty,
            # With a limit of one token, eos must be possible as the first one.
            "min_length": min(profile.min_length, max(0, chosen.get("max_length", cls.max_length) - 1)),
        }
        return cls(**{**own, **chosen})

    @classmethod
    def for_profile(cls, profile: ProfileName, **values: Any) -> Self:
        """`of`, with the profile as the first argument."""
        return cls.of({"profile": profile, **values})

    @property
    def width(self) -> int:
        """Number of hypotheses of a sentence that are decoded at once."""
        return self.samples or self.beam

    @property
    def rows(self) -> int:
        """The largest number of rows that a sentence takes in a step graph."""
        return self.width * max(1, self.alternatives)

    @property
    def best_only(self) -> bool:
        """Whether the search needs only the best tokens: it returns and compares no scores, and no rule of its own reads
        logits."""
        compares = self.scores or self.beam > 1 or self.samples > 0 or self.alternatives > 0 or self.reads_attention
        has_rules = bool(self.active_rules) or self.search_profile.renormalises
        return not (compares or has_rules or self.force_eos or self.search_profile.at_limit == "eos")

    @property
    def reads_attention(self) -> bool:
        """Whether the search reads the cross-attention of its runtime."""
        return self.attention or self.coverage_penalty > 0

    @property
    def active_rules(self) -> list[type[HistoryRule]]:
        """The rules about past tokens that the options enable, in the order in which they run."""
        rules = [base for base in reversed(type(self).__mro__) if issubclass(base, HistoryRule)]
        return [rule for rule in rules if rule not in (HistoryRule, type(self)) and rule.is_active(self)]  # type: ignore[arg-type]

    @property
    def needs(self) -> Needs:
        """The properties of the search that decide which graphs a runtime loads."""
        from tfexport.runtimes.base import Needs

        return Needs(self.width, self.best_only, self.reads_attention)

    @property
    def max_new_tokens(self) -> int:
        """The largest number of tokens to generate."""
        return self.max_length - self.search_profile.counts_start

    @property
    def min_new_tokens(self) -> int:
        """The smallest number of tokens to generate before eos."""
        return max(0, self.min_length - self.search_profile.counts_start)

    @property
    def enough_finished(self) -> int:
        """The number of finished hypotheses after which a sentence may be done."""
        return max(self.nbest, round(self.beam * self.patience))

    def end_ids(self, config: ModelConfig) -> tuple[int, ...]:
        """The ids that end an output of this model, eos first."""
        return tuple(dict.fromkeys((config.eos_id, *self.end_tokens)))

    @property
    def search_profile(self) -> SearchProfile:
        """The settings of the profile."""
        return PROFILES[self.profile]

    @property
    def length_exponent(self) -> float:
        """The exponent A after the profile's lower bound."""
        return max(self.length_penalty, self.search_profile.least_length_penalty)

    def normalise(self, log_prob: float, length: int) -> float:
        """The score of a hypothesis with `length` tokens."""
        return log_prob / length_divisor(length, self.length_exponent, self.search_profile.google_length)


@dataclass(frozen=True, kw_only=True)
class SearchOptions(
    BadWords,
    EncoderNoRepeatNgram,
    NoRepeatNgram,
    RepetitionPenalty,
    SequenceBias,
    BaseSearchOptions,
):
    """The options of a search. Lengths count generated tokens, eos included.

    To add a rule about past tokens, write a `HistoryRule` in `search/rules/` and add it to the base classes. Rules run
    from the last to the first, which is the order of Transformers.

    Raises:
        TfexportError: an option is out of range, or two of them exclude each other.
    """


def length_divisor(length: int, exponent: float, google_length: bool) -> float:
    """The divisor for the log-probability of a hypothesis of `length` tokens.

    Args:
        google_length: use the length of Wu et al. 2016, section 7.
    """
    base = (5.0 + length) / 6.0 if google_length else float(length)
    return float(base**exponent)


def _ids(name: str, value: Any, token_ids: Callable[[str], tuple[int, ...]] | None) -> Any:
    """The value of an option whose values are tokens, with ids instead of text at every depth."""
    if isinstance(value, tuple):
        return tuple(_ids(name, item, token_ids) for item in value)
    if not isinstance(value, str):
        return value
    if token_ids is None:
        raise TfexportError(f"{name} is {value!r}, and there is no vocabulary. Give ids.")
    return token_ids(value)
