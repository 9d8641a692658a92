"""Compares runtimes with PyTorch on the same sources: cross keys and values, logits of every step, and decoded tokens.

There are three comparisons:

1. The encoder's cross keys and values.
2. The logits of every step along the reference's own output. The runtime makes steps with its cache; the reference reads
   the whole target at once.
3. Freely decoded tokens. For each sentence that differs, the reference measures by how much it prefers its own output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.graph_checks.rounding import EPS, SAMPLES, logit_errors
from tfexport.runtimes.base import Runtime
from tfexport.runtimes.outputs import FloatArray, IntArray
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import Hypothesis, SearchOptions, search
from tfexport.search.token_rules import log_softmax, suppressed_ids
from tfexport.verification.reference_outputs import Along, Expected, Memories, Memory
from tfexport.verification.report import LIMITS, Divergence, Errors, ParityReport, Position


def random_sources(config: ModelConfig, count: int, *, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Random encoder ids of lengths from 1 to `longest`, for comparisons without real input."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, min(longest, config.max_source_length) + 1, count)
    return [random.integers(0, config.src_vocab_size, length).tolist() for length in lengths]


def compare(
    reference: TorchRuntime,
    runtime: Runtime,
    sources: Iterable[Sequence[int]],
    options: SearchOptions,
    *,
    batch_size: int = 32,
    tolerance: float | None = None,
) -> ParityReport:
    """Compare `runtime` with `reference` on `sources`, lists of encoder ids, decoding with `options`.

    `tolerance` replaces the error limit of `LIMITS`.
    """
    (report,) = compare_all(reference, [runtime], sources, [options], batch_size=batch_size, tolerance=tolerance)
    return report


def compare_all(
    reference: TorchRuntime,
    runtimes: Sequence[Runtime],
    sources: Iterable[Sequence[int]],
    searches: Sequence[SearchOptions],
    *,
    batch_size: int = 32,
    tolerance: float | None = None,
    random: bool = False,
    memories: Memories | None = None,
) -> list[ParityReport]:
    """`compare` of every runtime with every search; the reference decodes once for all of them.

    Args:
        random: the sources are random ids. They are not text, and a model is less sure of its best token. So below float32
            the share of best tokens and the loss have no limit.
        memories: the memories of an earlier comparison of the same few sources. By default, memories are kept for one batch.
    """
    reports = []
    for runtime in runtimes:
        limits = replace(LIMITS[runtime.precision], error=tolerance)
        if random and runtime.precision != "float32":
            limits = replace(limits, top1=0.0, loss=math.inf, furthest=math.inf, kl=math.inf)
        those = [ParityReport(runtime.name, runtime.precision, limits, options.beam) for options in searches]
        for report in those:  # the encoder does not depend on the search: it is compared with the first one
            report.cross = those[0].cross
        reports += those
    for options in searches:
        for runtime in runtimes:
            batch_size = runtime.capacity.batch_size(batch_size, options.beam)
    for batch in _batches(sources, batch_size):
        known = memories or Memories(reference)
        for index, options in enumerate(searches):
            best = [hypotheses[0] for hypotheses in search(reference, batch, options)]
            these = list(zip(runtimes, reports[index :: len(searches)], strict=True))
            outputs = [_decoded(runtime, batch, options, report) for runtime, report in these]
            for part in _parts(reference.config, best):
                memory = known.of(batch[part])
                expected = Expected.of(reference, memory, best[part], options)
                for (runtime, report), decoded in zip(these, outputs, strict=True):
                    if index == 0:
                        _compare_cross(reference, runtime, memory, report)
                    _compare_part(reference, runtime, expected, None if decoded is None else decoded[part], report)
    return reports


def _batches(sources: Iterable[Sequence[int]], size: int) -> Iterator[list[Sequence[int]]]:
    rest = iter(sources)
    while batch := list(islice(rest, size)):
        yield batch


def _decoded(
    runtime: Runtime, batch: list[Sequence[int]], options: SearchOptions, report: ParityReport
) -> list[Hypothesis] | None:
    """The best output of each sentence; None after an error, which the report then has."""
    try:
        # As in `decode`: greedy search computes no scores, beam search does.
        return [hypotheses[0] for hypotheses in search(runtime, batch, replace(options, scores=options.beam > 1))]
    except Exception as error:  # those of ONNX Runtime have no common base
        report.error = _said(error)
        return None


def _said(error: Exception) -> str:
    return (
        str(error) if isinstance(error, TfexportError) else f"it cannot be run: {(str(error).splitlines() or [''])[0]}"
    )


MOST_LOGITS = 2**25
"""The largest number of logits in memory at once, in float64."""


def _parts(config: ModelConfig, best: Sequence[Hypothesis]) -> Iterator[slice]:
    """The sentences of a batch, in parts whose logits fit into memory."""
    longest = max(len(hypothesis.ids) for hypothesis in best)
    size = max(1, MOST_LOGITS // (longest * config.tgt_vocab_size))
    for start in range(0, len(best), size):
        yield slice(start, start + size)


def _compare_part(
    reference: TorchRuntime,
    runtime: Runtime,
    expected: Expected,
    hypotheses: list[Hypothesis] | None,
    report: ParityReport,
) -> None:
    try:
        spread = _compare_logits(reference, runtime, expected, report)
        if hypotheses is not None:
            _compare_outputs(reference, runtime, expected, hypotheses, spread, report)
    except Exception as error:
        report.error = report.error or _said(error)
    if hypotheses is None:
        report.outputs += [(wanted.ids, ()) for wanted in expected.best]
    report.sentences += len(expected.best)


def _compare_cross(reference: TorchRuntime, runtime: Runtime, memory: Memory, report: ParityReport) -> None:
    try:
        computed = runtime.encode(memory.src_ids, memory.src_len).cross
    except Exception as error:
        report.error = report.error or _said(error)
        return
    real = np.arange(memory.src_ids.shape[1]) < memory.src_len[:, None]  # [batch, src]
    tensors: Iterable[Sequence[Any]] = zip(memory.exact.cross, memory.own.cross, computed, strict=True)
    for index, those in enumerate(tensors):
        name = f"cross.{index // 2}.{('key', 'value')[index % 2]}"
        exact, own, got = (tensor.swapaxes(1, 2)[real] for tensor in those)
        report.cross.setdefault(name, Errors()).compare(exact, own, got)
    if all(errors.error <= report.allowed(errors) for errors in report.cross.values()):
        return
    for seed in range(SAMPLES):
        again = reference.with_random_rounding(seed).encode(memory.src_ids, memory.src_len).cross
        for errors, exact, own in zip(report.cross.values(), memory.exact.cross, again, strict=True):
            errors.own = max(errors.own, float(np.abs(exact - own).swapaxes(1, 2)[real].max()))


@dataclass(frozen=True)
class _Spread:
    """The runtime's own logits along some outputs."""

    behind: NDArray[np.float64]
    """[batch, tgt]: by how much the best logit is above the logit of the output's token."""
    log_prob: NDArray[np.float64]
    """[batch, tgt]: the log-probability of the output's token."""
    error: NDArray[np.float64]
    """[batch, tgt]: the largest distance of a logit from its value in float64."""


def _steps(
    runtime: Runtime, src_ids: IntArray, src_len: IntArray, tgt_ids: IntArray, beam: int
) -> Iterator[FloatArray]:
    """The runtime's logits [batch, vocab] at each position of `tgt_ids`, which all beams of a sentence are fed."""
    state = runtime.encode(src_ids, src_len, beam=beam)
    for position in range(tgt_ids.shape[1]):
        logits, state = runtime.step(state, tgt_ids[:, position].repeat(beam))
        yield logits[::beam]


def _spread(
    runtime: Runtime,
    src_ids: IntArray,
    src_len: IntArray,
    along: Along,
    options: SearchOptions,
    see: Callable[[int, FloatArray, NDArray[np.float64]], None] = lambda position, logits, errors: None,
) -> _Spread:
    config, shape, rows = runtime.config, along.tgt_ids.shape, np.arange(len(src_len))
    spread = _Spread(np.zeros(shape), np.zeros(shape), np.zeros(shape))
    never = suppressed_ids(config, options)
    is_forced = config.forced_first_id >= 0
    for position, logits in enumerate(_steps(runtime, src_ids, src_len, along.tgt_ids, options.beam)):
        spread.error[:, position] = logit_errors(along.logits[:, position], logits)
        see(position, logits, spread.error[:, position])
        if is_forced and position == 0:  # a forced token does not depend on the logits, and has log-probability 0
            continue
        words = along.words[:, position]
        if options.beam > 1:
            spread.log_prob[:, position] = log_softmax(logits)[rows, words]
            continue
        allowed = logits.copy()
        allowed[:, [*never, *config.suppressed_first_ids * (position == int(is_forced))]] = -np.inf
        spread.behind[:, position] = allowed.max(axis=1) - logits[rows, words]
    return spread


def _compare_logits(reference: TorchRuntime, runtime: Runtime, expected: Expected, report: ParityReport) -> _Spread:
    """Feed the runtime the reference's outputs."""
    along = expected.along

    def see(position: int, logits: FloatArray, errors: NDArray[np.float64]) -> None:
        live = position < along.tgt_len
        if position == len(report.positions):
            report.positions.append(Position())
        own = float(along.own[live, position].max())
        error = float(errors[live].max())
        report.positions[position].compare(along.logits[live, position], own, logits[live], error)

    memory = expected.memory
    spread = _spread(runtime, memory.src_ids, memory.src_len, along, expected.options, see)
    # Only the sentences with an error that is not explained yet.
    allowed = np.array([report.allowed(position) for position in report.positions[: along.tgt_ids.shape[1]]])
    live = np.arange(len(allowed)) < along.tgt_len[:, None]
    odd = np.flatnonzero((live & ~(spread.error <= allowed)).any(axis=1))
    for seed in range(SAMPLES if len(odd) else 0):
        forced = memory.src_ids[odd], memory.src_len[odd], along.tgt_ids[odd]
        again = reference.with_random_rounding(seed).teacher_forced(*forced)
        own = np.where(live[odd], logit_errors(along.logits[odd], again), 0.0).max(axis=0)
        for position, error in zip(report.positions, own.tolist(), strict=False):
            position.own = max(position.own, error)
    return spread


def _compare_outputs(
    reference: TorchRuntime,
    runtime: Runtime,
    expected: Expected,
    hypotheses: list[Hypothesis],
    spread: _Spread,
    report: ParityReport,
) -> None:
    """Compare the decoded tokens, and check whether they follow from the runtime's own logits."""
    best, first = expected.best, report.sentences + 1
    report.outputs += [(wanted.ids, got.ids) for wanted, got in zip(best, hypotheses, strict=True)]
    same = [index for index, (wanted, got) in enumerate(zip(best, hypotheses, strict=True)) if wanted.ids == got.ids]
    other = [index for index in range(len(best)) if index not in set(same)]
    report.identical += len(same)
    report.founded += [(first + index, _needed(hypotheses[index], expected, spread, index)) for index in same]
    if not other:
        return
    memory = Memory.of(reference, [expected.memory.sources[index] for index in other])
    along = Along.of(reference, memory, [hypotheses[index].ids for index in other])
    spread = _spread(runtime, memory.src_ids, memory.src_len, along, expected.options)
    divergences = [_divergence(expected, along, i, place, hypotheses[i], first + i) for place, i in enumerate(other)]
    if report.precision != "float32":
        _search_narrower(reference, memory, along, divergences, expected.options, report.limits.loss)
    report.divergences += divergences
    for place, index in enumerate(other):
        report.founded.append((first + index, _needed(hypotheses[index], expected, spread, place)))


def _needed(got: Hypothesis, expected: Expected, spread: _Spread, row: int) -> float:
    """The smallest error of a logit, in the graph that decoded, with which the output follows from the runtime's logits.

    These logits are in this row of `spread`. The result is 0 or less if the output follows from them without an error.

    Greedy and beam search use other graphs than the one that returns logits. In 8 bits, one graph may round a number up that
    the other rounds down. So the two differ by the errors of both against float64. `spread` has the errors of the graph that
    returns logits.
    """
    length = max(1, len(got.ids))
    known = spread.error[row, :length]
    if expected.options.beam == 1:
        return float((spread.behind[row, :length] / 2 - known).max())
    log_probs = spread.log_prob[row, :length]
    summed = 4 * EPS["float32"] * np.abs(log_probs)  # log-probabilities are float32
    return float((abs(log_probs.sum() - got.log_prob) - summed.sum()) / (2 * length) - known.mean())


def _divergence(expected: Expected, along: Along, index: int, place: int, got: Hypothesis, sentence: int) -> Divergence:
    """The place and the size of the difference between the output `got` of a sentence and the reference's."""
    wanted, options = expected.best[index], expected.options
    both = zip(wanted.ids, got.ids, strict=False)
    step = next(
        (i for i, (expected_token, other) in enumerate(both) if expected_token != other),
        min(len(wanted.ids), len(got.ids)),
    )
    token, other = (ids[step] if step < len(ids) else None for ids in (wanted.ids, got.ids))
    own, others = expected.along.log_probs(index), along.log_probs(place)
    length = max(len(wanted.ids), len(got.ids))
    errors = 2.0
    if options.beam == 1 and token is not None and other is not None:
        log_probs = log_softmax(expected.along.logits[index, step])
        margin = float(log_probs[token] - log_probs[other])
    else:
        margin = options.normalise(float(own.sum()), len(own)) - options.normalise(float(others.sum()), len(others))
        errors *= options.normalise(float(length), length)
    outputs = (wanted.ids, got.ids)
    loss = loss_per_token(options, own, others)
    return Divergence(sentence, step + 1, token, other, margin, outputs, errors, loss)


def _search_narrower(
    reference: TorchRuntime,
    memory: Memory,
    along: Along,
    divergences: list[Divergence],
    options: SearchOptions,
    allowed: float,
) -> None:
    """Compare outputs with a loss above `allowed` with the reference's outputs of narrower beams; the smallest loss counts.

    A beam search is not continuous. Rounding can move a hypothesis from the last place of the beam to the next one, where
    the search loses it and everything that follows from it. A narrower beam is a search without this hypothesis.
    """
    for beam in range(options.beam - 1, 0, -1):
        places = [place for place, divergence in enumerate(divergences) if not divergence.loss <= allowed]
        if not places:
            return
        those = Memory.of(reference, [memory.sources[place] for place in places])
        best = [hypotheses[0].ids for hypotheses in search(reference, those.sources, replace(options, beam=beam))]
        narrower = Along.of(reference, those, best)
        for row, place in enumerate(places):
            loss = loss_per_token(options, narrower.log_probs(row), along.log_probs(place))
            if loss < divergences[place].loss:
                # No gain: it would make up for the losses of other sentences.
                divergences[place] = replace(divergences[place], loss=max(0.0, loss), beam=beam)


def loss_per_token(options: SearchOptions, own: NDArray[np.float64], other_log_probs: NDArray[np.float64]) -> float:
    """By how much the reference prefers its own output, in nats per token.

    In greedy search this is the difference of the mean log-probabilities of a token. Beam search compares scores, and the
    two outputs may have very different lengths. There it is the difference of the scores, divided by the larger of two
    scores: those of one nat per token at the lengths of the two outputs. With an untrained model, rounding may remove from
    the beam a hypothesis that ends at once. A longer output remains, and the difference is a sum over all its tokens.

    Args:
        own: the reference's log-probabilities of the tokens of its own output [tgt], in nats.
        other_log_probs: the reference's log-probabilities of the tokens of the other output [tgt], in nats.
    """
    if options.beam == 1:
        return float(own.mean() - other_log_probs.mean())
    score, other = (options.normalise(float(each.sum()), len(each)) for each in (own, other_log_probs))
    return (score - other) / max(
        options.normalise(float(length), length) for length in (len(own), len(other_log_probs))
    )
