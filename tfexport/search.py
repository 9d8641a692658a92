"""Greedy and beam search over any runtime, in NumPy.

Ties break the same way wherever the host or ONNX Runtime's CPU provider ranks tokens: the lower beam first, then the lower
token id. A GPU may rank equal logits in any order. Scores are summed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Best, IntArray, Runtime, State

COMPACT_BELOW = 0.75
"""Greedy rows leave the batch when the live ones are at most this part of it: a copy of the cache must pay for itself."""


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
    beam 4 and 0.6 are the paper's own); 0 compares plain log-probabilities. Greedy search has nothing to compare."""
    min_length: int = 0
    """Fewest tokens before eos may come."""
    max_length: int = 256
    """Most tokens; the model's own limit holds beside it."""
    max_length_ratio: float | None = None
    """Most tokens for each source id, rounded up."""

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
        }
        found = [problem for problem, present in problems.items() if present]
        if found:
            raise TfexportError(f"these search options cannot be used: {'; '.join(found)}. Change them.")

    def limits(self, config: ModelConfig, src_len: IntArray) -> IntArray:
        """Most tokens to generate for sources of `src_len` [batch] ids."""
        limit = np.full(len(src_len), min(self.max_length, config.max_target_length))
        if self.max_length_ratio is not None:
            # Rounded first: in binary 50 * 1.1 is a little more than 55. Compared as floats: the product may be infinite.
            most = np.ceil(np.round(np.minimum(src_len * self.max_length_ratio, limit), 9))
            limit = np.minimum(limit, most.astype(np.int64))
        return np.maximum(limit, 1)

    def normalise(self, log_prob: float, length: int) -> float:
        return log_prob / ((5.0 + length) / 6.0) ** self.length_penalty


@dataclass(frozen=True)
class Hypothesis:
    """One output of a search."""

    ids: tuple[int, ...]
    """Without bos, with eos when it came."""
    score: float
    """The log-probability after length normalisation; n-best lists are sorted by it."""
    log_prob: float
    """Sum of the tokens' log-probabilities, eos included when it came."""
    finished: bool
    """False where the length limit, not eos, ended it."""


def search(runtime: Runtime[State], sources: Sequence[Sequence[int]], options: SearchOptions) -> list[list[Hypothesis]]:
    """Decode `sources` (encoder ids, each at least one) as one batch; for each the `nbest` hypotheses, best first.

    Raises:
        TfexportError: the runtime gave logits that are not numbers.
    """
    if not sources:
        return []
    src_ids, src_len = pad(sources, runtime.config.pad_id)
    state = runtime.encode(src_ids, src_len, beam=options.beam)
    limits = np.minimum(options.limits(runtime.config, src_len), runtime.capacity.target)
    if options.beam == 1:
        return [[hypothesis] for hypothesis in _greedy(runtime, state, limits, options)]
    return _beam(runtime, state, limits, options)


def pad(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[IntArray, IntArray]:
    """Ragged `sequences` to ids [batch, longest] filled with `pad_id`, and lengths [batch]."""
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    ids = np.full((len(sequences), lengths.max()), pad_id, dtype=np.int64)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    return ids, lengths


def _greedy(runtime: Runtime[State], state: State, limits: IntArray, options: SearchOptions) -> list[Hypothesis]:
    eos = runtime.config.eos_id
    batch = len(limits)
    sentence = np.arange(batch)  # [rows]: the sentence that a row decodes
    live = np.ones(batch, dtype=bool)  # [rows]
    limit = limits  # [rows]
    tokens = np.full(batch, runtime.config.bos_id, dtype=np.int64)
    # By sentence; what comes after a sentence's end is never read.
    output = np.empty((limits.max(), batch), dtype=np.int64)
    log_probs = np.empty((limits.max(), batch))
    lengths = limits.copy()

    for length in range(1, limits.max() + 1):
        best, state = runtime.best(state, tokens, 1 + len(_banned(length, runtime.config, options)))
        best = _allowed(best, length, 1, runtime.config, options)
        tokens = best.ids[:, 0]
        output[length - 1, sentence] = tokens
        log_probs[length - 1, sentence] = best.log_probs[:, 0]
        ends = live & ((tokens == eos) | (limit <= length))
        if ends.any():
            lengths[sentence[ends]] = length
            live &= ~ends
            if not live.any():
                break
            if live.sum() <= COMPACT_BELOW * len(live):
                kept = _closed_up(live)
                state = state.select(kept)
                sentence, tokens, limit, live = sentence[kept], tokens[kept], limit[kept], live[kept]

    hypotheses = []
    for index, length in enumerate(lengths.tolist()):
        ids, total = output[:length, index].tolist(), float(log_probs[:length, index].sum())
        hypotheses.append(Hypothesis(tuple(ids), options.normalise(total, length), total, ids[-1] == eos))
    return hypotheses


def _closed_up(live: NDArray[np.bool_]) -> IntArray:
    """The live rows, those at the end in the places of those that ended: so few rows move."""
    rows = np.flatnonzero(live)
    places = np.arange(len(rows))
    gaps = places[~live[: len(rows)]]
    places[gaps] = rows[len(rows) - len(gaps) :]
    return places


def _beam(runtime: Runtime[State], state: State, limits: IntArray, options: SearchOptions) -> list[list[Hypothesis]]:
    """Beam search, stopped for a sentence when no live hypothesis beats the worst of its `beam` finished ones.

    At each step the best 2 * beam continuations are looked at: those among the first `beam` that end in eos are
    finished, the best `beam` of the others live on.
    """
    config, beam = runtime.config, options.beam
    batch = len(limits)
    sentence = np.arange(batch)  # [live batch]: the sentence that a group of rows decodes
    finished: list[list[Hypothesis]] = [[] for _ in range(batch)]
    # A hypothesis that does not exist has log-probability -inf: at first there is one a sentence.
    scores = np.full((batch, beam), -np.inf)
    scores[:, 0] = 0.0
    # The tokens of all steps, and the beam of the step before that each continues: hypotheses are read off backwards.
    words = np.empty((limits.max(), batch, beam), dtype=np.int64)
    parents = np.empty((limits.max(), batch, beam), dtype=np.int64)
    tokens = np.full(batch * beam, config.bos_id, dtype=np.int64)

    def ids_of(index: int, length: int, parent: int, last: int) -> tuple[int, ...]:
        """The hypothesis of a sentence that ends in token `last` after beam `parent` of step `length - 1`."""
        ids = [last]
        for step in range(length - 2, -1, -1):
            ids.append(int(words[step, index, parent]))
            parent = int(parents[step, index, parent])
        return tuple(reversed(ids))

    for length in range(1, limits.max() + 1):
        best, state = runtime.best(state, tokens, 2 * beam + len(_banned(length, config, options)))
        best = _allowed(best, length, 2 * beam, config, options)
        totals, origin, found = _best_continuations(best, scores, 2 * beam)  # each [live batch, candidates]
        is_eos = found == config.eos_id
        every = np.arange(len(sentence))[:, None]
        # A row ends once, so at least `beam` of the 2 * `beam` go on. The sort keeps their order.
        going_on = np.argsort(is_eos, axis=1, kind="stable")[:, :beam]
        scores, parent, token = totals[every, going_on], origin[every, going_on], found[every, going_on]
        words[length - 1, sentence], parents[length - 1, sentence] = token, parent

        ends = is_eos[:, :beam] & (totals[:, :beam] > -np.inf)
        if ends.any():
            for group, rank in np.argwhere(ends).tolist():
                index = sentence[group]
                ids = ids_of(index, length, int(origin[group, rank]), config.eos_id)
                _finish(finished[index], ids, totals[group, rank], options, done=True)
        kept = []
        for group, (index, best_live) in enumerate(zip(sentence.tolist(), scores[:, 0].tolist(), strict=True)):
            if _sentence_is_done(finished[index], best_live, length, options):
                continue
            if length < limits[index]:
                kept.append(group)
                continue
            for rank in np.flatnonzero(np.isfinite(scores[group])).tolist():
                ids = ids_of(index, length, int(parent[group, rank]), int(token[group, rank]))
                _finish(finished[index], ids, scores[group, rank], options, done=False)
        if not kept:
            break
        rows = (every * beam + parent)[kept].ravel()
        tokens, scores, sentence = token[kept].ravel(), scores[kept], sentence[kept]
        if len(rows) != state.rows or (rows != np.arange(len(rows))).any():
            state = state.select(rows)

    return [hypotheses[: options.nbest] for hypotheses in finished]


def _best_continuations(
    best: Best, scores: NDArray[np.float64], count: int
) -> tuple[NDArray[np.float64], IntArray, IntArray]:
    """The `count` best continuations of each sentence: summed log-probabilities, parent beams and tokens."""
    batch = len(scores)
    totals = (scores.reshape(-1, 1) + best.log_probs).reshape(batch, -1)
    order = np.argsort(-totals, axis=1, kind="stable")[:, :count]
    every = np.arange(batch)[:, None]
    return totals[every, order], order // best.ids.shape[1], best.ids.reshape(batch, -1)[every, order]


def _finish(
    hypotheses: list[Hypothesis], ids: tuple[int, ...], log_prob: float, options: SearchOptions, *, done: bool
) -> None:
    """Add a hypothesis to the `beam` best, sorted best first; an earlier one wins a tie."""
    hypotheses.append(Hypothesis(ids, options.normalise(float(log_prob), len(ids)), float(log_prob), done))
    hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
    del hypotheses[options.beam :]


def _sentence_is_done(finished: list[Hypothesis], best_live: float, length: int, options: SearchOptions) -> bool:
    if best_live == -np.inf:
        return True
    return len(finished) == options.beam and options.normalise(best_live, length) <= finished[-1].score


def _banned(length: int, config: ModelConfig, options: SearchOptions) -> list[int]:
    """The tokens that may not be the output's token number `length`."""
    return [*config.suppressed_ids, *([config.eos_id] if length <= options.min_length else [])]


def _allowed(best: Best, length: int, count: int, config: ModelConfig, options: SearchOptions) -> Best:
    """The `count` best tokens of each row, without those that may not come; a forced first token is certain.

    `best` has as many tokens more than `count` as are banned (where the vocabulary has): each is one token of a row at most.
    The log-probabilities stay the model's own.

    Raises:
        TfexportError: the runtime gave something that is not a number.
    """
    if not np.isfinite(best.log_probs[:, 0]).all():
        raise TfexportError(
            "the model gave logits that are not finite numbers. Compare this runtime with `tfexport parity`, and check "
            "the checkpoint's weights for NaN or infinity."
        )
    if length == 1 and config.forced_first_id >= 0:
        forced = Best(np.full_like(best.log_probs[:, :count], -np.inf), best.ids[:, :count].copy())
        forced.log_probs[:, 0], forced.ids[:, 0] = 0.0, config.forced_first_id
        return forced
    banned = _banned(length, config, options)
    if not banned or not (is_banned := np.isin(best.ids, banned)).any():
        return Best(best.log_probs[:, :count], best.ids[:, :count])
    # A stable sort by "is banned" keeps the order of the others.
    order = np.argsort(is_banned, axis=1, kind="stable")[:, :count]
    every = np.arange(len(order))[:, None]
    return Best(np.where(is_banned, -np.inf, best.log_probs)[every, order], best.ids[every, order])
