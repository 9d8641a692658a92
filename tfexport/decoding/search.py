"""Greedy and beam search, and sampling, over any runtime, in NumPy.

Ties break the same way wherever the host or ONNX Runtime's CPU provider ranks tokens: the lower beam first, then the lower
token id. A GPU may rank equal logits in any order. Scores are summed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.decoding.alternatives import with_alternatives
from tfexport.decoding.attention_trace import Attended
from tfexport.decoding.hypothesis import Finished, Hypothesis, Source, length_limits
from tfexport.decoding.options import SearchOptions
from tfexport.decoding.token_rules import NextTokens
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Best, IntArray, Runtime, Shortlisting, State
from tfexport.runtimes.masked_shortlist import Masked

__all__ = ["Hypothesis", "SearchOptions", "Source", "pad", "search", "search_steps"]

COMPACT_BELOW = 0.75
"""Greedy rows leave the batch when the live ones are at most this part of it: a copy of the cache must pay for itself."""
ALL = slice(None)
"""An index for all sentences while none is done: NumPy takes half the time for it that it takes for an array of them."""


def search(
    runtime: Runtime[State], sources: Sequence[Source | Sequence[int]], options: SearchOptions
) -> list[list[Hypothesis]]:
    """Decode `sources` (encoder ids, each at least one) as one batch; for each the `nbest` hypotheses, best first, or the
    samples in the order in which they were drawn.

    Raises:
        TfexportError: the runtime gave logits that are not numbers, or an option does not fit the model.
    """
    if options.alternatives and sources:
        return with_alternatives(search, _begun, runtime, _asked(sources), replace(options, scores=True))
    steps = search_steps(runtime, sources, options)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return list(done.value)


Decided = Callable[[int], tuple[IntArray, NDArray[np.float64]]]
"""Of a source, by its place: the tokens that its best output is sure to begin with, and their log-probabilities [length]."""
Steps = Generator[Decided, None, list[list[Hypothesis]]]
"""A search that stops after each step but the last, and tells what is decided by then; it returns what it finds."""


def search_steps(runtime: Runtime[State], sources: Sequence[Source | Sequence[int]], options: SearchOptions) -> Steps:
    """`search`, step by step, for who wants to see tokens as they are decided."""
    if not sources:
        return []
    asked = _asked(sources)
    runtime, state = _begun(runtime, asked, options)
    src_len = np.array([len(source) for source in asked])
    attended = None
    if options.tells_attention:
        attended = Attended(options.alignment_layer, runtime.config.n_decoder_layers, src_len, options.width)
    limits = np.minimum(length_limits(options, runtime.config, src_len), runtime.capacity.target)
    most = [limit if source.most is None else source.most for source, limit in zip(asked, limits, strict=True)]
    limits = np.minimum(limits, np.array(most, dtype=np.int64))
    next_tokens = NextTokens(runtime, options, asked, limits)
    decode = _greedy if options.beam == 1 else _beam
    return (yield from decode(next_tokens, state, limits, options, attended))


def _asked(sources: Sequence[Source | Sequence[int]]) -> list[Source]:
    return [source if isinstance(source, Source) else Source(source) for source in sources]


def _begun(runtime: Runtime[State], sources: Sequence[Source], options: SearchOptions) -> tuple[Runtime[State], State]:
    """The state of a search before any token, and the runtime that it is for."""
    src_ids, src_len = pad([source.ids for source in sources], runtime.config.pad_id)
    asked: dict[str, Any] = {"beam": options.width, **({"attention": True} if options.tells_attention else {})}
    if all(source.candidates is None for source in sources):
        return runtime, runtime.encode(src_ids, src_len, **asked)
    every = np.arange(runtime.config.tgt_vocab_size)
    candidates = [
        every if source.candidates is None else np.union1d(source.candidates, [*source.prefix, runtime.config.eos_id])
        for source in sources
    ]
    # Graphs for shortlists do not tell attention.
    own = isinstance(runtime, Shortlisting) and not options.tells_attention
    shortlisting: Any = runtime if own else Masked(runtime)
    return shortlisting, shortlisting.encode_shortlisted(src_ids, src_len, candidates, **asked)


def pad(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[IntArray, IntArray]:
    """Ragged `sequences` to ids [batch, longest] filled with `pad_id`, and lengths [batch]."""
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    ids = np.full((len(sequences), lengths.max()), pad_id, dtype=np.int64)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    return ids, lengths


def _greedy(
    next_tokens: NextTokens, state: State, limits: IntArray, options: SearchOptions, attended: Attended | None
) -> Steps:
    """The best next token, or the one that is drawn, until it is eos; `width` outputs of each sentence."""
    bos, eos, width = next_tokens.config.bos_id, next_tokens.config.eos_id, options.width
    batch = len(limits)
    sentence = np.arange(batch)  # [sentences]: the sentence that a group of rows decodes
    live = np.ones((batch, width), dtype=bool)  # [sentences, width]
    soonest = int(limits.min())  # before it no output is at its limit
    tokens = np.full(batch * width, bos, dtype=np.int64)
    # By sentence; what comes after an output's end is never read.
    output = np.empty((limits.max(), batch, width), dtype=np.int64)
    log_probs = np.empty((limits.max(), batch, width))
    lengths = np.repeat(limits[:, None], width, axis=1)

    def history() -> IntArray:
        past = output[: length - 1, sentence].reshape(length - 1, len(sentence) * width).T
        return np.concatenate([np.full((len(past), 1), bos), past], axis=1)

    def decided(index: int) -> tuple[IntArray, NDArray[np.float64]]:
        known = min(length, int(lengths[index, 0]))
        return output[:known, index, 0], log_probs[:known, index, 0]

    for length in range(1, limits.max() + 1):
        best, state = next_tokens.best(state, tokens, 1, length, sentence, history)
        if best.log_probs.min() == -np.inf:
            impossible = best.log_probs.reshape(-1, width) == -np.inf
            if (live & impossible)[next_tokens.said(length, sentence) < 0].any():
                raise _nothing_may_come()
        if attended:
            attended.add(state.attention, sentence)
        tokens = best.ids[:, 0]
        found = tokens.reshape(-1, width)
        those = sentence if len(sentence) < batch else ALL
        output[length - 1, those] = found
        log_probs[length - 1, those] = best.log_probs[:, 0].reshape(-1, width)
        ends = live & (found == eos)
        if length >= soonest:
            ends |= live & (limits[sentence, None] <= length)
        if ends.any():
            groups, samples = np.nonzero(ends)
            lengths[sentence[groups], samples] = length
            live &= ~ends
            going_on = np.asarray(live.any(axis=1))
            if not going_on.any():
                break
            if going_on.sum() <= COMPACT_BELOW * len(going_on):
                kept = _closed_up(going_on)
                rows = (kept[:, None] * width + np.arange(width)).ravel()
                state, tokens = state.select(rows), tokens[rows]
                sentence, live = sentence[kept], live[kept]
        yield decided

    def hypothesis(index: int, sample: int) -> Hypothesis:
        length = int(lengths[index, sample])
        ids = tuple(output[:length, index, sample].tolist())
        steps = log_probs[:length, index, sample]
        log_prob = float(steps.sum()) if options.scores else math.nan
        attention = attended.by(index, [sample] * length) if attended else None
        return Hypothesis.of(ids, log_prob, options, done=ids[-1] == eos, steps=steps, attention=attention)

    return [[hypothesis(index, sample) for sample in range(width)] for index in range(batch)]


def _nothing_may_come() -> TfexportError:
    return TfexportError(
        "the model gives probability 0 to all that an output may go on with, its end included. Leave out the rule or the "
        "forced beginning that asks for it."
    )


def _closed_up(live: NDArray[np.bool_]) -> IntArray:
    """The live rows, those at the end in the places of those that ended: so few rows move."""
    rows = np.flatnonzero(live)
    places = np.arange(len(rows))
    gaps = places[~live[: len(rows)]]
    places[gaps] = rows[len(rows) - len(gaps) :]
    return places


def _beam(
    next_tokens: NextTokens, state: State, limits: IntArray, options: SearchOptions, attended: Attended | None
) -> Steps:
    """Beam search, which `decoding/profiles.py` describes.

    At each step the best 2 * beam continuations are looked at: those among the first `beam` that end in eos are
    finished, the best `beam` of the others live on (of all, where the profile goes past the end).
    """
    config, beam, rules = next_tokens.config, options.beam, options.rules
    batch = len(limits)
    sentence = np.arange(batch)  # [live batch]: the sentence that a group of rows decodes
    finished = [Finished(options, limit) for limit in limits.tolist()]
    # A hypothesis that does not exist has log-probability -inf: at first there is one a sentence.
    scores = np.full((batch, beam), -np.inf)
    scores[:, 0] = 0.0
    # The tokens of all steps, and the beam of the step before that each continues: hypotheses are read off backwards.
    words = np.empty((limits.max(), batch, beam), dtype=np.int64)
    parents = np.empty((limits.max(), batch, beam), dtype=np.int64)
    sums = np.empty((limits.max(), batch, beam))
    tokens = np.full(batch * beam, config.bos_id, dtype=np.int64)
    first_rows, in_place, below_limit = np.arange(batch)[:, None] * beam, np.arange(beam), np.zeros(batch, dtype=bool)
    soonest = int(limits.min())  # before it no output is at its limit

    def finish(group: int, parent: int, last: int, log_prob: float, *, rank: int) -> None:
        """The hypothesis of a sentence that ends in token `last` after beam `parent` of the step before is finished."""
        index = sentence[group]
        came, before = words[: length - 1, index].tolist(), parents[: length - 1, index].tolist()
        ids, places = [last], [parent]  # backwards; the beam that each token continues
        for step in range(length - 2, -1, -1):
            ids.append(came[step][places[-1]])
            places.append(before[step][places[-1]])
        ids.reverse()
        places.reverse()
        steps: Sequence[float] = ()
        if options.token_scores:
            steps = np.diff([0.0, *sums[np.arange(length - 1), index, places[1:]], log_prob]).tolist()
        attention = attended.by(index, places) if attended else None
        done, again = last == config.eos_id, config.eos_id in ids[:-1]
        finished[index].add(tuple(ids), log_prob, rank=rank, done=done, again=again, steps=steps, attention=attention)

    def told(those: IntArray, count: int) -> tuple[IntArray, NDArray[np.float64]]:
        """The first `count` tokens of the live hypotheses of some sentences, and their sums: [sentences, beam, count]."""
        ids = np.empty((len(those), beam, count), dtype=np.int64)
        totals, place = np.empty(ids.shape), np.tile(np.arange(beam), (len(those), 1))
        for step in range(count - 1, -1, -1):
            at = step, those[:, None], place
            ids[..., step], totals[..., step], place = words[at], sums[at], parents[at]
        return ids, totals

    def history() -> IntArray:
        past = told(sentence, length - 1)[0].reshape(len(sentence) * beam, -1)
        return np.concatenate([np.full((len(past), 1), config.bos_id), past], axis=1)

    def decided(index: int) -> tuple[IntArray, NDArray[np.float64]]:
        """What all have in common that may become the best: those that are live, and the best that is finished."""
        group = np.flatnonzero(sentence == index)  # none where the sentence is done
        ids, totals = (found[np.isfinite(scores[group])] for found in told(sentence[group], length))
        outputs = [*zip(ids, np.diff(totals, prepend=0.0), strict=True)]
        outputs += [(np.array(one.ids), np.array(one.token_log_probs)) for one in finished[index].best()[:1]]
        shortest = min(len(tokens) for tokens, _ in outputs)
        every = np.stack([tokens[:shortest] for tokens, _ in outputs])
        common = int(np.logical_and.accumulate((every == every[0]).all(axis=0)).sum())
        return outputs[0][0][:common], outputs[0][1][:common]

    for length in range(1, limits.max() + 1):
        best, state = next_tokens.best(state, tokens, 2 * beam, length, sentence, history)
        if attended:
            attended.add(state.attention, sentence)
        totals, origin, found = _best_continuations(best, scores, 2 * beam)  # each [live batch, candidates]
        if rules.narrows:
            places = beam - np.array([len(finished[index]) for index in sentence])
            totals[np.arange(totals.shape[1]) >= places[:, None]] = -np.inf
        is_eos = found == config.eos_id
        some_end, may_be_at_limit = bool(is_eos[:, :beam].any()), length >= soonest
        scores, parent, token = totals[:, :beam], origin[:, :beam], found[:, :beam]
        if some_end and not rules.goes_past_end:
            # A row ends once, so at least `beam` of the 2 * `beam` go on. The sort keeps their order.
            going_on = np.argsort(is_eos, axis=1, kind="stable")[:, :beam]
            every = np.arange(len(sentence))[:, None]
            scores, parent, token = totals[every, going_on], origin[every, going_on], found[every, going_on]
        those = sentence if len(sentence) < batch else ALL
        words[length - 1, those], parents[length - 1, those], sums[length - 1, those] = token, parent, scores

        at_limit = limits[sentence] == length if may_be_at_limit else below_limit
        if some_end or may_be_at_limit:
            ends = is_eos | (at_limit[: len(sentence), None] & (rules.at_limit != "compete"))
            ends = (ends & (totals > -np.inf))[:, :beam]
            for group, rank in np.argwhere(ends).tolist():
                last, log_prob = int(found[group, rank]), float(totals[group, rank])
                finish(group, int(origin[group, rank]), last, log_prob, rank=rank)
        kept = np.zeros(len(sentence), dtype=bool)
        for group, (index, best_live) in enumerate(zip(sentence.tolist(), scores[:, 0].tolist(), strict=True)):
            if best_live == -np.inf and not len(finished[index]):
                raise _nothing_may_come()
            if not at_limit[group]:
                if not finished[index].is_done(best_live, length):
                    kept[group] = True
            elif rules.at_limit == "compete" and not finished[index].is_done(best_live, length):
                for rank in np.flatnonzero(np.isfinite(scores[group])).tolist():
                    last, log_prob = int(token[group, rank]), float(scores[group, rank])
                    finish(group, int(parent[group, rank]), last, log_prob, rank=rank)
        if not kept.any():
            break
        rows, some_left = first_rows[: len(sentence)] + parent, not kept.all()
        if some_left:
            order = _closed_up(kept)
            rows, token, scores, sentence = rows[order], token[order], scores[order], sentence[order]
        tokens = token.ravel()
        if some_left or (parent != in_place).any():
            state = state.select(rows.ravel())
        yield decided

    return [hypotheses.best() for hypotheses in finished]


def _best_continuations(
    best: Best, scores: NDArray[np.float64], count: int
) -> tuple[NDArray[np.float64], IntArray, IntArray]:
    """The `count` best continuations of each sentence: summed log-probabilities, parent beams and tokens."""
    totals = (scores.reshape(-1, 1) + best.log_probs).reshape(len(scores), -1)
    order = (-totals).argsort(axis=1, kind="stable")[:, :count]
    # In the flat arrays; one sentence alone begins at 0.
    places = order if len(order) == 1 else order + np.arange(0, totals.size, totals.shape[1])[:, None]
    return totals.take(places), order // best.ids.shape[1], best.ids.take(places)
