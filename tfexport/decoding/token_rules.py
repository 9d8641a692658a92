"""Which tokens may come next, how likely they are, and which of them a search looks at.

Where the answer is the same for all rows, as with tokens that are suppressed, the runtime's own ranking (`best`) serves:
some more of its best tokens are asked for, and those that may not come are left out. What depends on a row's past, on its
source, or on all probabilities needs the logits of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tfexport.config import ModelConfig
from tfexport.decoding.hypothesis import Source
from tfexport.decoding.options import SearchOptions
from tfexport.decoding.sampling import Streams, draw
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Best, FloatArray, IntArray, Ranking, Runtime, State, top_k

Scores = NDArray[np.float64]
History = Callable[[], IntArray]
"""The tokens of each row so far, [rows, length], bos first; called only where a rule asks for it."""


class NextTokens:
    """The rules of one search.

    Args:
        limits: most tokens of each source, [batch].

    Raises:
        TfexportError: an option names an id that the model has not, or eos as one that is suppressed.
    """

    def __init__(self, runtime: Runtime[Any], options: SearchOptions, sources: Sequence[Source], limits: IntArray):
        self.config = runtime.config
        self._runtime, self._options, self._limits = runtime, options, limits
        self._never = suppressed(runtime.config, options)
        first = [self.config.forced_first_id] * (self.config.forced_first_id >= 0)
        prefixes = [[*first, *source.prefix] for source in sources]
        longest = max(map(len, prefixes), default=0)
        # [batch, longest]: the forced token of each place, -1 where none is.
        self._forced = np.full((len(sources), longest), -1, dtype=np.int64)
        for row, prefix in zip(self._forced, prefixes, strict=True):
            row[: len(prefix)] = prefix
        self._least = np.array([source.least for source in sources], dtype=np.int64)
        self._most_least = int(self._least.max(initial=0))
        self._streams = Streams(options.seed, [source.line for source in sources], options.samples)
        self._ranking: Ranking | None = None
        # Not by `isinstance`, which for protocols takes as long as a third of a small model's step.
        if options.ranks_alone and getattr(runtime, "ranks", False):
            # What a source asks for beside its ids needs logits, or is another graph's.
            plain = all(not source.prefix and not source.least and source.candidates is None for source in sources)
            self._ranking = cast(Ranking, runtime) if plain else None
        self._bans: dict[tuple[bool, bool], list[int]] = {}
        self._always_needs_logits = bool(options.samples or options.repetition_penalty != 1 or options.no_repeat_ngram)
        self._may_have_to_end = options.rules.at_limit == "eos" or options.force_eos
        # Transformers penalises log-probabilities in beam search; the paper and all others logits.
        self._penalises_logits = options.beam == 1 or options.rules.renormalises

    def best(
        self, state: State, tokens: IntArray, count: int, length: int, sentence: IntArray, history: History
    ) -> tuple[Best, State]:
        """The `count` best tokens of each row after `tokens` [rows], which is to be token `length` of its output.

        When sampling, the one token that is drawn. A token that may not come, which only fills up a row of a vocabulary
        that has too few others, has log-probability -inf. Where the search asks for no scores, there may be logits in the
        place of log-probabilities.

        Args:
            sentence: [sentences]: the sources that groups of rows decode.

        Raises:
            TfexportError: the runtime gave something that is not a number.
        """
        if length == 1 and self.config.forced_first_id >= 0:
            if self._ranking is not None:
                best, state = self._ranking.best_alone(state, tokens, ())
            else:
                best, state = self._runtime.best(state, tokens, count)
            require_numbers(best.log_probs[:, 0])
            return certain(best, self.config.forced_first_id, count), state
        banned = self._banned(length)
        if self._ranking is not None:
            best, state = self._ranking.best_alone(state, tokens, banned)
            if math.isfinite(best.log_probs.sum()):  # so are all of them; where the sum alone is not, no harm is done
                return best, state
            nothing = best.log_probs == -np.inf
            require_numbers(best.log_probs[~nothing] if banned else best.log_probs)
            ends = nothing & (self.config.eos_id in banned)  # as in `without`
            return Best(np.where(ends, 0.0, best.log_probs), np.where(ends, self.config.eos_id, best.ids)), state
        if not self._needs_logits(length, sentence, banned):
            best, state = self._runtime.best(state, tokens, count + len(banned))
            require_numbers(best.log_probs[:, 0])
            return without(best, banned, count, end=self.config.eos_id), state
        logits, state = self._runtime.step(state, tokens)
        require_numbers(logits.max(axis=1))
        source = np.repeat(sentence, len(tokens) // len(sentence))
        scores = self._scores(logits, banned, length, source, history)
        if self._options.samples:
            ids = draw(scores, self._streams.uniform(sentence, length), self._options)[:, None]
        else:
            ids = top_k(scores, min(count, scores.shape[1]))
        said = self.said(length, source)
        ids[:, 0] = np.where(said >= 0, said, ids[:, 0])  # also where it has no probability, as then all others have
        return Best(np.take_along_axis(scores, ids, axis=1), ids), state

    def _banned(self, length: int) -> list[int]:
        """Ids that no row may have as token `length`, each once."""
        is_early, is_first = (
            length <= self._options.min_length,
            length == (2 if self.config.forced_first_id >= 0 else 1),
        )
        if (is_early, is_first) not in self._bans:
            early = [self.config.eos_id] * is_early
            first = (*self._options.suppress_first, *self.config.suppressed_first_ids) * is_first
            self._bans[is_early, is_first] = list(dict.fromkeys([*early, *self._never, *first]))
        return self._bans[is_early, is_first]

    def _needs_logits(self, length: int, sentence: IntArray, banned: list[int]) -> bool:
        return bool(
            self._always_needs_logits
            or length <= self._forced.shape[1]
            or (banned and self._options.rules.renormalises)
            or (length <= self._most_least and (length <= self._least[sentence]).any())
            or (self._may_have_to_end and self._must_end(length, sentence).any())
        )

    def _must_end(self, length: int, rows: IntArray) -> NDArray[np.bool_]:
        """Which of these sources may have nothing but eos as token `length`."""
        return (self._limits[rows] == length) & self._may_have_to_end

    def said(self, length: int, source: IntArray) -> IntArray:
        """Token `length` of these sources where it comes whatever the model says of it, -1 elsewhere; both are [sources]."""
        said = np.where(self._must_end(length, source), self.config.eos_id, -1)
        if length > self._forced.shape[1]:
            return said
        forced = self._forced[source, length - 1]
        return np.where(forced >= 0, forced, said)

    def _past(self, history: History) -> IntArray:
        return history() if self._options.rules.bos_came else history()[:, 1:]

    def _scores(self, logits: FloatArray, banned: list[int], length: int, source: IntArray, history: History) -> Scores:
        """Log-probabilities [rows, vocab] as the rules leave them, -inf for what may not come; `source` is [rows]."""
        options, eos = self._options, self.config.eos_id
        scores = logits.astype(np.float64) if self._penalises_logits else log_softmax(logits)
        if options.repetition_penalty != 1:
            penalise_repetition(scores, self._past(history), options.repetition_penalty)
        if self._penalises_logits:
            scores = log_softmax(scores)
        allowed = np.ones(scores.shape, dtype=bool)
        allowed[:, banned] = False
        allowed[length <= self._least[source], eos] = False
        if options.no_repeat_ngram:
            ban_repeated_ngrams(allowed, self._past(history), options.no_repeat_ngram)
        # Where nothing may come any more an output ends, as in `without`.
        stuck = ~(allowed & (scores > -np.inf)).any(axis=1)
        allowed[stuck] = np.arange(scores.shape[1]) == eos
        if options.force_eos:
            scores[self._must_end(length, source), eos] = 0.0
        said = self.said(length, source)
        rows = np.flatnonzero(said >= 0)
        allowed[rows] = np.arange(scores.shape[1]) == said[rows, None]
        scores = np.where(allowed, scores, -np.inf)
        if options.rules.renormalises:
            possible = (scores > -np.inf).any(axis=1)
            scores[possible] = log_softmax(scores[possible])
        return scores


def penalise_repetition(scores: Scores, history: IntArray, penalty: float) -> None:
    """Make the tokens of `history` [rows, length] less likely in `scores` [rows, vocab], logits or log-probabilities, in
    place: divided by the penalty where above 0, multiplied elsewhere; once, however often a token came."""
    seen = np.take_along_axis(scores, history, axis=1)
    np.put_along_axis(scores, history, np.where(seen < 0, seen * penalty, seen / penalty), axis=1)


def ban_repeated_ngrams(allowed: NDArray[np.bool_], history: IntArray, n: int) -> None:
    """Take from `allowed` [rows, vocab], in place, what would end `n` tokens that `history` [rows, length] has already."""
    if history.shape[1] < n:
        return
    ngrams = np.lib.stride_tricks.sliding_window_view(history, n, axis=1)  # [rows, places, n]
    last = history[:, history.shape[1] - (n - 1) :]
    rows, places = np.nonzero((ngrams[..., :-1] == last[:, None]).all(axis=2))
    allowed[rows, ngrams[rows, places, -1]] = False


def log_softmax(logits: NDArray[Any]) -> Scores:
    """Log-probabilities of `logits` [.., vocab], each row of which has a finite one, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def without(best: Best, banned: Sequence[int], count: int, *, end: int) -> Best:
    """The `count` best tokens of each row that are not `banned`; `end` where all that the model thinks possible are. Where
    it does not think the end possible either, all have log-probability -inf.

    `best` has as many more as are banned, where the vocabulary has: each is one token of a row at most. The
    log-probabilities stay the model's own.
    """
    # Mostly eos alone, for which NumPy's `isin` takes as long as a small model's layer.
    is_banned = best.ids == banned[0] if len(banned) == 1 else np.isin(best.ids, banned)
    if not is_banned.any():
        return Best(best.log_probs[:, :count], best.ids[:, :count])
    if best.ids.shape[1] == count + len(banned) and best.log_probs[:, -1].min() > -np.inf:
        kept = ~is_banned  # at least `count` of each row, all of them possible
        kept &= kept.cumsum(axis=1) <= count
        return Best(best.log_probs[kept].reshape(-1, count), best.ids[kept].reshape(-1, count))
    # Such a row has every possible token, as it has more than are banned: `end` too.
    stuck = ~((best.log_probs > -np.inf) & ~is_banned).any(axis=1)
    is_banned[stuck] = best.ids[stuck] != end
    # A stable sort by "is banned" keeps the order of the others.
    order = np.argsort(is_banned, axis=1, kind="stable")[:, :count]
    every = np.arange(len(order))[:, None]
    return Best(np.where(is_banned, -np.inf, best.log_probs)[every, order], best.ids[every, order])


def certain(best: Best, token: int, count: int) -> Best:
    """`count` tokens of each row, of which `token` has probability 1 and comes first, whatever the model says."""
    forced = Best(np.full_like(best.log_probs[:, :count], -np.inf), best.ids[:, :count].copy())
    forced.log_probs[:, 0], forced.ids[:, 0] = 0.0, token
    return forced


def suppressed(config: ModelConfig, options: SearchOptions) -> list[int]:
    """The ids that are never generated.

    Raises:
        TfexportError: an option names an id that the model has not, or eos.
    """
    special = {"bos": config.bos_id, "pad": config.pad_id, "unk": config.unk_id}
    given = (*options.suppress, *options.suppress_first)
    wrong = [index for index in given if not 0 <= index < config.tgt_vocab_size]
    if wrong:
        raise TfexportError(f"{wrong[0]} is to be suppressed, but ids go from 0 to {config.tgt_vocab_size - 1}.")
    if config.eos_id in given:
        raise TfexportError("the end of a sentence cannot be suppressed. Use --min-length for longer outputs.")
    # bos and eos may be the padding or the unknown token too, in some models: these are outputs.
    never = {special[name] for name in options.rules.never} - {config.eos_id, -1}
    return [*options.suppress, *config.suppressed_ids, *never]


def require_numbers(values: NDArray[Any]) -> None:
    """Raises: TfexportError where logits are NaN or infinite."""
    if not math.isfinite(values.sum(dtype=np.float64)):  # one call; a sum of float32's numbers is finite in float64
        raise TfexportError(
            "the model gave logits that are not finite numbers. Compare this runtime with `tfexport parity`, and check "
            "the checkpoint's weights for NaN or infinity."
        )
