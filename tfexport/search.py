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
    tokens = np.full(batch, runtime.config.bos_id, dtype=np.int64)
    output: list[list[int]] = [[] for _ in range(batch)]
    log_prob = np.zeros(batch)

    for length in range(1, limits.max() + 1):
        best, state = runtime.best(state, tokens, 1 + (length <= options.min_length))
        best = _without_early_eos(best, length, 1, eos, options)
        tokens = best.ids[:, 0]
        for row in np.flatnonzero(live):
            output[sentence[row]].append(int(tokens[row]))
            log_prob[sentence[row]] += best.log_probs[row, 0]
        live &= (tokens != eos) & (length < limits[sentence])
        if not live.any():
            break
        if live.sum() <= COMPACT_BELOW * len(live):
            kept = np.flatnonzero(live)
            state, sentence, tokens, live = state.select(kept), sentence[kept], tokens[kept], live[kept]

    return [
        Hypothesis(tuple(ids), options.normalise(total, len(ids)), float(total), ids[-1] == eos)
        for ids, total in zip(output, log_prob, strict=True)
    ]


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
    prefix = np.zeros((batch, beam, 0), dtype=np.int64)
    tokens = np.full(batch * beam, config.bos_id, dtype=np.int64)

    for length in range(1, limits.max() + 1):
        best, state = runtime.best(state, tokens, 2 * beam + (length <= options.min_length))
        best = _without_early_eos(best, length, 2 * beam, config.eos_id, options)
        totals, parents, words = _best_continuations(best, scores, 2 * beam)  # each [live batch, candidates]

        keep, origin, appended, kept_scores = [], [], [], []
        for group, index in enumerate(sentence):
            is_eos = words[group] == config.eos_id
            for rank in np.flatnonzero(is_eos[:beam] & np.isfinite(totals[group, :beam])):
                ids = (*prefix[group, parents[group, rank]].tolist(), config.eos_id)
                _finish(finished[index], ids, totals[group, rank], options, done=True)
            living = np.flatnonzero(~is_eos)[:beam]  # a row ends once, so at least `beam` of 2 * `beam` live
            if _sentence_is_done(finished[index], totals[group, living[0]], length, options):
                continue
            if length == limits[index]:
                for rank in living[np.isfinite(totals[group, living])]:
                    ids = (*prefix[group, parents[group, rank]].tolist(), int(words[group, rank]))
                    _finish(finished[index], ids, totals[group, rank], options, done=False)
                continue
            keep.append(group)
            origin.append(parents[group, living])
            appended.append(words[group, living])
            kept_scores.append(totals[group, living])
        if not keep:
            break

        groups, parent = np.array(keep), np.stack(origin)
        tokens = np.concatenate(appended)
        scores = np.stack(kept_scores)
        prefix = np.concatenate([prefix[groups[:, None], parent], tokens.reshape(-1, beam, 1)], axis=2)
        rows = (groups[:, None] * beam + parent).ravel()
        if len(rows) != state.rows or (rows != np.arange(len(rows))).any():
            state = state.select(rows)
        sentence = sentence[groups]

    return [hypotheses[: options.nbest] for hypotheses in finished]


def _best_continuations(
    best: Best, scores: NDArray[np.float64], count: int
) -> tuple[NDArray[np.float64], IntArray, IntArray]:
    """The `count` best continuations of each sentence: summed log-probabilities, parent beams and tokens."""
    batch = len(scores)
    totals = (scores.reshape(-1, 1) + best.log_probs).reshape(batch, -1)
    order = np.argsort(-totals, axis=1, kind="stable")[:, :count]
    words = np.take_along_axis(best.ids.reshape(batch, -1), order, axis=1)
    return np.take_along_axis(totals, order, axis=1), order // best.ids.shape[1], words


def _finish(
    hypotheses: list[Hypothesis], ids: tuple[int, ...], log_prob: float, options: SearchOptions, *, done: bool
) -> None:
    """Add a hypothesis to the `beam` best, sorted best first; an earlier one wins a tie."""
    hypotheses.append(Hypothesis(ids, options.normalise(float(log_prob), len(ids)), float(log_prob), done))
    hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
    del hypotheses[options.beam :]


def _sentence_is_done(finished: list[Hypothesis], best_live: float, length: int, options: SearchOptions) -> bool:
    if not np.isfinite(best_live):
        return True
    return len(finished) == options.beam and options.normalise(best_live, length) <= finished[-1].score


def _without_early_eos(best: Best, length: int, count: int, eos: int, options: SearchOptions) -> Best:
    """The `count` best tokens of each row, without eos where it may not come yet.

    `best` has one token more than `count` then (where the vocabulary has): eos is one token of a row at most. The
    log-probabilities stay the model's own.

    Raises:
        TfexportError: the runtime gave something that is not a number.
    """
    if not np.isfinite(best.log_probs[:, 0]).all():
        raise TfexportError(
            "the model gave logits that are not finite numbers. Compare this runtime with `tfexport parity`, and check "
            "the checkpoint's weights for NaN or infinity."
        )
    if length > options.min_length:
        return Best(best.log_probs[:, :count], best.ids[:, :count])
    # A stable sort by "is eos" keeps the order of the others.
    order = np.argsort(best.ids == eos, axis=1, kind="stable")
    log_probs = np.where(best.ids == eos, -np.inf, best.log_probs)
    return Best(
        np.take_along_axis(log_probs, order, axis=1)[:, :count], np.take_along_axis(best.ids, order, axis=1)[:, :count]
    )
