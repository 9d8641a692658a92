"""The rules about the next token: which tokens are allowed, their probabilities, and the candidates of a search.

If the rules are the same for all rows, as for suppressed tokens, the runtime's own ranking (`Runtime.best`) is enough: the
search requests some more tokens, and drops the banned ones. Rules that depend on a row's past tokens, on its source or on
all probabilities need the logits of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Runtime
from tfexport.runtimes.outputs import (
    Argmax,
    ArgmaxRequest,
    Best,
    BestRequest,
    FloatArray,
    IntArray,
    LogitsRequest,
    StepOutput,
    StepRequest,
    top_k,
)
from tfexport.search.hypothesis import Phrase, Source
from tfexport.search.options import SearchOptions
from tfexport.search.phrase_rules import PhraseRules
from tfexport.search.rules.history import HistoryRule
from tfexport.search.sampling import RandomStreams, draw

NO_HISTORY: IntArray = np.empty((0, 0), dtype=np.int64)
LogProbs = NDArray[np.float64]
History = Callable[[int, IntArray], IntArray]
"""Takes a length, and the index of the source of each group of rows. Returns the tokens of each row before this length, bos
first, [rows, length]. It is called only if a rule needs it."""


@dataclass(frozen=True)
class CommonRules:
    """The rules that all searches of a model with the same options share.

    Raises:
        TfexportError: an option suppresses eos, or an id that the model does not have.
    """

    banned: dict[tuple[bool, bool], tuple[int, ...]]
    """The banned ids of all rows, without duplicates, by two flags: whether an end would be too early, and whether this is
    the first token."""
    end_ids: tuple[int, ...]
    history_rules: list[type[HistoryRule]]

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, config: ModelConfig, options: SearchOptions) -> CommonRules:
        """The rules for a model and options, computed once for all batches."""
        never, ends = suppressed_ids(config, options), options.end_ids(config)
        first = (*options.suppress_first, *config.suppressed_first_ids)
        banned = {
            (is_early, is_first): tuple(dict.fromkeys([*(ends * is_early), *never, *(first * is_first)]))
            for is_early in (False, True)
            for is_first in (False, True)
        }
        return cls(banned, ends, options.active_rules)


def _prefixes(sources: Sequence[Source], forced_first_id: int) -> IntArray:
    """The forced token at each position, or -1, [sources, longest]."""
    first = [forced_first_id] * (forced_first_id >= 0)
    if not any(map(attrgetter("prefix"), sources)):
        return np.full((len(sources), len(first)), forced_first_id, dtype=np.int64)
    prefixes = [[*first, *source.prefix] for source in sources]
    forced = np.full((len(sources), max(map(len, prefixes))), -1, dtype=np.int64)
    for row, prefix in zip(forced, prefixes, strict=True):
        row[: len(prefix)] = prefix
    return forced


class TokenRules:
    """The rules of one search.

    Args:
        limits: the largest number of output tokens for each source, [batch].

    Raises:
        TfexportError: an option suppresses eos, or an id that the model does not have.
    """

    def __init__(self, runtime: Runtime, options: SearchOptions, sources: Sequence[Source], limits: IntArray):
        self.config = runtime.config
        self._options = options
        self._limits = limits
        self._sources = sources
        self._common = CommonRules.of(runtime.config, options)
        self._end_ids, self._history_rules = self._common.end_ids, self._common.history_rules
        self._prefix = _prefixes(sources, self.config.forced_first_id)
        self._min_lengths: IntArray | None = None
        if any(map(attrgetter("least"), sources)):
            self._min_lengths = np.array([source.least for source in sources], dtype=np.int64)
        self._largest_min_length = 0 if self._min_lengths is None else int(self._min_lengths.max())
        if options.samples:
            self._random = RandomStreams(options.seed, [source.line for source in sources], options.samples)
        self.use_argmax = needs_best_only(runtime, options) and not any(map(has_own_rules, sources))
        """Whether the search needs only the best token of each step, without its probability."""
        self._phrases = PhraseRules(sources, self.config.tgt_vocab_size)
        has_phrases = bool(self._phrases) or any(map(attrgetter("required"), sources))
        self._always_needs_logits = bool(options.samples or self._history_rules or has_phrases)
        self._eos_at_limit = ends_at_limit(options)
        # After this length no token is forced, and no ban on the end or the first token applies, so all steps have the same
        # rules. This never holds if the limit or renormalised probabilities matter.
        special = (self._prefix.shape[1], self._largest_min_length, options.min_new_tokens, 2)
        differs = self._eos_at_limit or options.search_profile.renormalises
        self._settled = math.inf if differs else max(special)
        self._settled_requests: dict[int, StepRequest] = {}
        self._min_new_tokens = options.min_new_tokens
        self._first = 2 if self.config.forced_first_id >= 0 else 1
        """The length after the first token that is not forced by the model."""
        # Transformers penalises log-probabilities in beam search; the paper and all other toolkits penalise logits.
        self._penalises_logits = options.beam == 1 or options.search_profile.renormalises

    def request(self, count: int, length: int, sentences: IntArray) -> StepRequest:
        """The outputs that a step must return, so that `best` finds the `count` best tokens of each row.

        Args:
            length: the number of output tokens, including the new token.
            sentences: the index of the source of each group of rows, [sentences].
        """
        if length <= self._settled:
            return self._request(count, length, sentences)
        if count not in self._settled_requests:
            self._settled_requests[count] = self._request(count, length, sentences)
        return self._settled_requests[count]

    def _request(self, count: int, length: int, sentences: IntArray) -> StepRequest:
        is_forced = self._is_forced_first(length)
        banned = () if is_forced else self._banned(length)
        if self.use_argmax and count == 1:
            return ArgmaxRequest(banned)
        if is_forced:
            return BestRequest(count)
        if self._needs_logits(length, sentences, banned):
            return LogitsRequest()
        return BestRequest(count + len(banned))

    def best(self, output: StepOutput, count: int, length: int, sentences: IntArray, history: History) -> Best | Argmax:
        """The `count` best tokens of each row, or the one sampled token.

        A banned token that only fills up a row of a small vocabulary has log-probability -inf. If the search needs no
        probabilities, and the runtime is faster without them, the token has its logit instead.

        Args:
            output: the output of a step for `request`.
            length, sentences: as in `request`.

        Raises:
            TfexportError: the runtime returned numbers that are not finite.
        """
        is_forced = self._is_forced_first(length)
        banned = () if is_forced else self._banned(length)
        if isinstance(output, Argmax):
            return self._argmax(output, banned, is_forced=is_forced)
        if isinstance(output, Best):
            require_finite(output.log_probs[:, 0])
            if is_forced:
                return force(output, self.config.forced_first_id, count)
            return output.without(banned, count, eos=self.config.eos_id) if banned else output
        return self.ranked(self.log_probs(output, length, sentences, history), count, length, sentences)

    def ranked(self, log_probs: LogProbs, count: int, length: int, sentences: IntArray) -> Best:
        """`best` from the log-probabilities of `log_probs`."""
        if self._options.samples:
            ids = draw(log_probs, self._random.uniform(sentences, length), self._options)[:, None]
        else:
            ids = top_k(log_probs, min(count, log_probs.shape[1]))
        forced = np.repeat(self.forced_tokens(length, sentences), len(log_probs) // len(sentences))
        ids[:, 0] = np.where(forced >= 0, forced, ids[:, 0])  # even if its probability is 0, like all others
        return Best(np.take_along_axis(log_probs, ids, axis=1), ids)

    def _argmax(self, best: Argmax, banned: tuple[int, ...], *, is_forced: bool) -> Argmax:
        if is_forced:
            require_finite(best.logits)
            return Argmax(np.zeros_like(best.logits), np.full_like(best.ids, self.config.forced_first_id))
        best = best.checked(banned, eos=self.config.eos_id)
        require_numbers(best.logits)
        return best

    def divided(self, phrases: Iterable[Phrase], index: int) -> tuple[list[Phrase], list[Phrase]]:
        """The required phrases of source `index` that its outputs can contain, and those that a rule excludes, with the
        phrases before them.
        """
        possible: list[Phrase] = []
        impossible: list[Phrase] = []
        never = {*self._common.banned[False, False], *self._end_ids}
        source = self._sources[index].ids
        for phrase in phrases:
            is_possible = never.isdisjoint(phrase.ids) and not self._phrases.forbid(phrase.ids, index)
            if is_possible:
                together = [each.ids for each in (*possible, phrase)]
                is_possible = not any(rule.excludes(self._options, together, source) for rule in self._history_rules)
            (possible if is_possible else impossible).append(phrase)
        return possible, impossible

    def banned_ahead(self, length: int, sentences: IntArray, steps: int) -> tuple[tuple[int, ...], ...] | None:
        """The banned ids of all rows for token `length` and the following ones, `steps` in all. None if these steps need
        more than the best tokens.
        """
        lengths = range(length, length + steps)
        if self._is_forced_first(length):
            return None
        if length > self._settled and not self._always_needs_logits:
            return (self._common.banned[False, False],) * steps
        banned = [self._banned(each) for each in lengths]
        if any(self._needs_logits(each, sentences, ids) for each, ids in zip(lengths, banned, strict=True)):
            return None
        return tuple(banned)

    def forced_tokens(self, length: int, sentences: IntArray) -> IntArray:
        """The forced token `length` of each of these sources, whatever its probability, or -1; [sentences]."""
        forced = np.where(self._must_end(length, sentences), self.config.eos_id, -1)
        if length > self._prefix.shape[1]:
            return forced
        prefix = self._prefix[sentences, length - 1]
        return np.where(prefix >= 0, prefix, forced)

    def _must_end(self, length: int, sentences: IntArray) -> NDArray[np.bool_]:
        """Flags for the sources whose token `length` must be eos."""
        return (self._limits[sentences] == length) & self._eos_at_limit

    def _is_before_end(self, length: int, sentences: IntArray) -> NDArray[np.bool_]:
        """Flags for the sources whose own rules ban eos as token `length`."""
        if self._min_lengths is None or length > self._largest_min_length:
            return np.zeros(len(sentences), dtype=bool)
        return np.asarray(length <= self._min_lengths[sentences])

    def _is_forced_first(self, length: int) -> bool:
        """Whether token `length` is the model's forced first token."""
        return length == 1 and self._first > 1

    def _banned(self, length: int) -> tuple[int, ...]:
        """The banned ids of all rows for token `length`, without duplicates."""
        return self._common.banned[length <= self._min_new_tokens, length == self._first]

    def _needs_logits(self, length: int, sentences: IntArray, banned: tuple[int, ...]) -> bool:
        return bool(
            self._always_needs_logits
            or length <= self._prefix.shape[1]
            or (banned and self._options.search_profile.renormalises)
            or (length <= self._largest_min_length and self._is_before_end(length, sentences).any())
            or (self._eos_at_limit and self._must_end(length, sentences).any())
        )

    def log_probs(self, logits: FloatArray, length: int, sentences: IntArray, history: History) -> LogProbs:
        """Log-probabilities [rows, vocab] after all rules, -inf for banned tokens; see `best`."""
        require_finite(logits.max(axis=1))
        options = self._options
        eos = self.config.eos_id
        vocabulary = np.arange(logits.shape[1])
        of_rows = np.repeat(sentences, len(logits) // len(sentences))
        scores = logits.astype(np.float64) if self._penalises_logits else log_softmax(logits)
        past = self._counted(history(length, sentences)) if self._history_rules or self._phrases else NO_HISTORY
        for rule in self._history_rules:
            rule.penalise(options, scores, past)
        log_probs = log_softmax(scores) if self._penalises_logits else scores
        allowed = np.ones(log_probs.shape, dtype=bool)
        allowed[:, list(self._banned(length))] = False
        for index in self._end_ids:
            allowed[self._is_before_end(length, of_rows), index] = False
        sources = [self._sources[index].ids for index in of_rows.tolist()] if self._history_rules else []
        for rule in self._history_rules:
            rule.ban(options, allowed, past, sources)
        if self._phrases:
            self._phrases.ban(allowed, past, of_rows.tolist())
        # If all tokens are banned, the output ends, as in `Best.without`.
        stuck = ~(allowed & (log_probs > -np.inf)).any(axis=1)
        allowed[stuck] = vocabulary == eos
        if options.force_eos:
            log_probs[self._must_end(length, of_rows), eos] = 0.0
        forced = self.forced_tokens(length, of_rows)
        rows = np.flatnonzero(forced >= 0)
        allowed[rows] = vocabulary == forced[rows, None]
        log_probs = np.where(allowed, log_probs, -np.inf)
        if options.search_profile.renormalises:
            possible = (log_probs > -np.inf).any(axis=1)
            log_probs[possible] = log_softmax(log_probs[possible])
        return log_probs

    def _counted(self, past: IntArray) -> IntArray:
        """The tokens that the rules about repetition count."""
        return past if self._options.search_profile.bos_counts else past[:, 1:]


def uses_argmax(runtime: Runtime, options: SearchOptions, source: Source) -> bool:
    """Whether the search of a source needs only the best token of each step."""
    return needs_best_only(runtime, options) and not has_own_rules(source)


def needs_best_only(runtime: Runtime, options: SearchOptions) -> bool:
    """Whether searches of sources without own rules need only the best token of each step."""
    return options.best_only and runtime.capabilities.argmax


def has_own_rules(source: Source) -> bool:
    """Whether the search of a source needs logits, or another graph because of a shortlist."""
    has_phrases = source.required or source.forbidden
    return bool(source.prefix or source.least or has_phrases or source.candidates is not None)


def ends_at_limit(options: SearchOptions) -> bool:
    """Whether the last token that the length limit allows is eos, whatever its probability."""
    return options.search_profile.at_limit == "eos" or options.force_eos


def log_softmax(logits: NDArray[Any]) -> LogProbs:
    """Log-probabilities of `logits` [.., vocab] in float64. Each row must have a finite logit."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def force(best: Best, token: int, count: int) -> Best:
    """`count` tokens of each row: `token` with probability 1, then others with probability 0."""
    forced = Best(np.full_like(best.log_probs[:, :count], -np.inf), best.ids[:, :count].copy())
    forced.log_probs[:, 0], forced.ids[:, 0] = 0.0, token
    return forced


def suppressed_ids(config: ModelConfig, options: SearchOptions) -> list[int]:
    """The ids that are never generated.

    Raises:
        TfexportError: an option suppresses eos, or an id that the model does not have.
    """
    special = {"bos": config.bos_id, "pad": config.pad_id, "unk": config.unk_id}
    suppressed = (*options.suppress, *options.suppress_first)
    named = [*options.end_tokens, *(index for rule in options.active_rules for index in rule.named_ids(options))]
    for index in (*suppressed, *named):
        if not 0 <= index < config.tgt_vocab_size:
            is_suppressed = "is to be suppressed" if index in suppressed else "is an id that an option names"
            raise TfexportError(
                f"{index} {is_suppressed}, but ids go from 0 to {config.tgt_vocab_size - 1}. Change it."
            )
    if config.eos_id in suppressed or (config.eos_id,) in options.bad_words:
        raise TfexportError("the end of a sentence cannot be suppressed. Use --min-length for longer outputs.")
    # In some models eos is also the padding or the unknown token. Then it may be generated.
    by_profile = {special[name] for name in options.search_profile.suppresses} - {*options.end_ids(config), -1}
    return [*options.suppress, *config.suppressed_ids, *by_profile]


def require_finite(values: NDArray[Any]) -> None:
    """Raises: TfexportError if any of the `values`, logits or log-probabilities, is NaN or infinite."""
    if not math.isfinite(values.sum(dtype=np.float64)):  # one call: float64 can hold any sum of finite float32
        raise TfexportError(
            "the model returned logits that are not finite numbers. Compare this runtime with `tfexport parity`, and check "
            "the checkpoint's weights for NaN or infinity."
        )


def require_numbers(log_probs: LogProbs) -> None:
    """Raises: TfexportError if a log-probability is NaN. A token of probability 0 has -inf."""
    if math.isnan(log_probs.min()):
        require_finite(log_probs)
