"""Numeric parity: a runtime's results against PyTorch, on real input, with a verdict.

Three comparisons: the encoder's cross keys and values; logits of every step along the reference's own output, the
runtime stepping with its cache and the reference reading the whole target at once; and freely decoded tokens, where for
each sentence that differs the reference says by how much it prefers its own output.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tfexport import contract
from tfexport.bundle import Bundle, open_bundle
from tfexport.config import ModelConfig
from tfexport.contract import Precision
from tfexport.errors import BundleError, RuntimeUnavailable, TfexportError
from tfexport.lines import InputFormat, Reader, read_pairs
from tfexport.models.checkpoint import load_checkpoint
from tfexport.models.recognition import Chosen
from tfexport.models.transformer import Transformer
from tfexport.next_tokens import log_softmax
from tfexport.parity_report import LIMITS, Divergence, Errors, ParityReport, Position
from tfexport.quality import Quality
from tfexport.runtimes import load_runtime
from tfexport.runtimes.base import FloatArray, IntArray, Runtime
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search import Hypothesis, SearchOptions, pad, search
from tfexport.translate import Writer

RANDOM_SENTENCES = 32


def random_sources(config: ModelConfig, count: int, *, seed: int = 0) -> list[list[int]]:
    """Random encoder ids of lengths from 1 to 40, for where there is no real input at hand."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, min(40, config.max_source_length) + 1, count)
    return [random.integers(0, config.src_vocab_size, length).tolist() for length in lengths]


def compare(
    reference: TorchRuntime,
    runtime: Runtime[Any],
    sources: Iterable[Sequence[int]],
    options: SearchOptions,
    *,
    batch_size: int = 32,
    tolerance: float | None = None,
) -> ParityReport:
    """Compare `runtime` with `reference` on `sources`, lists of encoder ids, decoding with `options`.

    `tolerance` takes the place of the error of `LIMITS`.
    """
    (report,) = compare_all(reference, [runtime], sources, [options], batch_size=batch_size, tolerance=tolerance)
    return report


def compare_all(
    reference: TorchRuntime,
    runtimes: Sequence[Runtime[Any]],
    sources: Iterable[Sequence[int]],
    searches: Sequence[SearchOptions],
    *,
    batch_size: int = 32,
    tolerance: float | None = None,
    random: bool = False,
) -> list[ParityReport]:
    """`compare` of every runtime with every search; the reference decodes once for all of them.

    Args:
        random: the sources are random ids. They are no text, and a model is less sure of its best token: below float32 only
            the size of the errors counts then.
    """
    reports = []
    for runtime in runtimes:
        limits = LIMITS[runtime.precision]
        if random and runtime.precision != "float32":
            limits = replace(limits, top1=0.0)
        if tolerance is not None:
            limits = replace(limits, error=tolerance)
        reports += [ParityReport(runtime.name, runtime.precision, limits, options.beam) for options in searches]
    for options in searches:
        for runtime in runtimes:
            batch_size = runtime.capacity.batch_size(batch_size, options.beam)
    for batch in _batches(sources, batch_size):
        for index, options in enumerate(searches):
            expected = _Expected.of(reference, batch, options)
            for runtime, report in zip(runtimes, reports[index :: len(searches)], strict=True):
                _compare_batch(reference, runtime, expected, report)
    return reports


def _batches(sources: Iterable[Sequence[int]], size: int) -> Iterator[list[Sequence[int]]]:
    rest = iter(sources)
    while batch := list(islice(rest, size)):
        yield batch


@dataclass(frozen=True)
class _Expected:
    """What the reference finds for a batch."""

    sources: list[Sequence[int]]
    options: SearchOptions
    src_ids: IntArray
    src_len: IntArray
    best: list[Hypothesis]
    cross: list[FloatArray]
    tgt_ids: IntArray
    """[batch, tgt]: bos and its best outputs without their last tokens."""
    tgt_len: IntArray
    logits: FloatArray
    """[batch, tgt, vocab] along `tgt_ids`."""

    @classmethod
    def of(cls, reference: TorchRuntime, sources: list[Sequence[int]], options: SearchOptions) -> _Expected:
        src_ids, src_len = pad(sources, reference.config.pad_id)
        best = [hypotheses[0] for hypotheses in search(reference, sources, options)]
        tgt_ids, tgt_len = as_inputs(reference.config, [hypothesis.ids for hypothesis in best])
        logits = reference.teacher_forced(src_ids, src_len, tgt_ids)
        cross = reference.encode(src_ids, src_len).cross
        return cls(sources, options, src_ids, src_len, best, cross, tgt_ids, tgt_len, logits)


def as_inputs(config: ModelConfig, outputs: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """What a decoder reads to give `outputs`: padded ids [batch, tgt] that begin with bos, and their lengths."""
    return pad([[config.bos_id, *output[:-1]] for output in outputs], config.pad_id)


def _compare_batch(reference: TorchRuntime, runtime: Runtime[Any], expected: _Expected, report: ParityReport) -> None:
    try:
        options = replace(expected.options, scores=False)  # as `decode` has it
        found = [hypotheses[0] for hypotheses in search(runtime, expected.sources, options)]
    except TfexportError as error:  # then the errors of its numbers say more
        report.error = str(error)
        report.outputs += [(wanted.ids, ()) for wanted in expected.best]
        report.sentences += len(expected.best)
    else:
        _compare_outputs(reference, expected, found, report)
    _compare_cross(runtime, expected, report)
    _compare_logits(runtime, expected, report)


def _compare_outputs(
    reference: TorchRuntime, expected: _Expected, found: list[Hypothesis], report: ParityReport
) -> None:
    for index, (wanted, got) in enumerate(zip(expected.best, found, strict=True)):
        if wanted.ids == got.ids:
            report.identical += 1
        else:
            sentence = report.sentences + index + 1
            report.divergences.append(_divergence(reference, expected, index, got, sentence, report.limits.error))
        report.outputs.append((wanted.ids, got.ids))
    report.sentences += len(found)


def _compare_cross(runtime: Runtime[Any], expected: _Expected, report: ParityReport) -> None:
    got = runtime.encode(expected.src_ids, expected.src_len).cross
    real = np.arange(expected.src_ids.shape[1]) < expected.src_len[:, None]  # [batch, src]
    for index, (one, other) in enumerate(zip(expected.cross, got, strict=True)):
        name = f"cross.{index // 2}.{('key', 'value')[index % 2]}"
        errors = report.cross.setdefault(name, Errors())
        errors.add(one.swapaxes(1, 2)[real], other.swapaxes(1, 2)[real])


def _compare_logits(runtime: Runtime[Any], expected: _Expected, report: ParityReport) -> None:
    """Feed the runtime the reference's output, to all beams of a sentence; the logits of the first are compared."""
    beam = expected.options.beam
    state = runtime.encode(expected.src_ids, expected.src_len, beam=beam)
    for position in range(expected.tgt_ids.shape[1]):
        logits, state = runtime.step(state, expected.tgt_ids[:, position].repeat(beam))
        live = position < expected.tgt_len
        wanted, got = expected.logits[live, position], logits[::beam][live]
        report.logits.add(wanted, got)
        if position == len(report.positions):
            report.positions.append(Position())
        report.positions[position].add(wanted, got)


def _divergence(
    reference: TorchRuntime, expected: _Expected, index: int, got: Hypothesis, sentence: int, error: float
) -> Divergence:
    """Where and by how much the output `got` of a sentence of a batch differs from the reference's."""
    wanted = expected.best[index]
    both = zip(wanted.ids, got.ids, strict=False)
    step = next((i for i, (one, other) in enumerate(both) if one != other), min(len(wanted.ids), len(got.ids)))
    token, other = (ids[step] if step < len(ids) else None for ids in (wanted.ids, got.ids))
    if expected.options.beam == 1 and token is not None and other is not None:
        log_probs = log_softmax(expected.logits[index, step])
        margin = float(log_probs[token] - log_probs[other])
    else:
        margin = wanted.score - _score(reference, expected, index, got)
    outputs = (wanted.ids, got.ids)
    return Divergence(sentence, step + 1, token, other, margin, outputs, is_tie=abs(margin) <= 2 * error)


def _score(reference: TorchRuntime, expected: _Expected, index: int, got: Hypothesis) -> float:
    """The reference's score of an output that it did not find."""
    tgt_ids, _ = as_inputs(reference.config, [got.ids])
    length = expected.src_len[index : index + 1]
    logits = reference.teacher_forced(expected.src_ids[index : index + 1, : length[0]], length, tgt_ids)[0]
    log_prob = float(log_softmax(logits)[np.arange(len(got.ids)), list(got.ids)].sum())
    return expected.options.normalise(log_prob, len(got.ids))


@dataclass(frozen=True)
class Comparison:
    """What was compared with what, and the reports of it."""

    bundle: Bundle
    reference: TorchRuntime
    source: str
    """Of the reference's weights: `bundle`, or the sha256 of a checkpoint that was read afresh."""
    inputs: Mapping[str, Any]
    """The sha256 of the ids that were decoded, how many sentences they are, and whether they are random."""
    sources: Sequence[Sequence[int]]
    """The ids that were decoded."""
    reports: Sequence[ParityReport]
    """One for each runtime, precision and beam."""
    searches: Sequence[SearchOptions]

    @property
    def variants(self) -> dict[tuple[str, Precision], list[ParityReport]]:
        """The reports by runtime and precision."""
        found: dict[tuple[str, Precision], list[ParityReport]] = {}
        for report in self.reports:
            found.setdefault((report.runtime, report.precision), []).append(report)
        return found


def check(
    directory: Path,
    lines: Iterable[bytes] | None,
    runtimes: Sequence[str],
    *,
    targets: Iterable[bytes] | None = None,
    checkpoint: Path | None = None,
    family: Chosen = None,
    float64: bool = False,
    beams: Sequence[int] = (1,),
    max_length: int = 256,
    batch_size: int = 32,
    tolerance: float | None = None,
    precisions: Sequence[Precision] | None = None,
    input_format: InputFormat | None = None,
    threads: int | None = None,
    say: Callable[[str], None] = print,
) -> Comparison:
    """Compare the runtimes of a bundle with PyTorch on `lines`, or on random ids.

    The reference is the bundle's own weights, or `checkpoint` read afresh: the second also finds what went wrong between
    the checkpoint and the bundle.

    Args:
        targets: a translation of each line, for BLEU and chrF beside the reference's.
        family: that of the checkpoint, where it is the user's own; the bundle has no more than its name.
        float64: the reference computes in float64, which tells whose rounding an error is.
        precisions: those that each runtime is compared in; by default all of the bundle that it can run.

    Raises:
        TfexportError: the bundle or the checkpoint cannot be read, or no line can be decoded, or the targets are not as many
            as the lines.
    """
    bundle = open_bundle(directory)
    if targets is not None and lines is None:
        raise TfexportError("targets are translations of the input, and there is none. Give INPUT too.")
    writer = None if targets is None else Writer.of(bundle, "text")
    reference, source = TorchRuntime.from_bundle(bundle, threads=threads), "bundle"
    if checkpoint is not None:
        reference, source = _read_afresh(bundle, checkpoint, family, say)
    if float64:
        reference.model.double()
    wanted: list[str] = []
    if lines is None:
        say(f"note: no input was given: comparing on {RANDOM_SENTENCES} sentences of random ids")
        sources = random_sources(bundle.config, RANDOM_SENTENCES)
    else:
        sources, wanted = read_pairs(lines, targets, Reader.of(bundle, input_format), say)
    loaded = _loaded(bundle, runtimes, precisions, threads, say)
    searches = [SearchOptions(beam=beam, max_length=max_length) for beam in beams]
    reports = compare_all(
        reference, loaded, sources, searches, batch_size=batch_size, tolerance=tolerance, random=lines is None
    )
    for report in reports:
        report.reference = "fp64" if float64 else "fp32"
    if writer is not None:
        for report in reports:
            report.quality = quality_of(report, writer, wanted)
    inputs = {
        "sha256": hashlib.sha256(json.dumps(sources).encode()).hexdigest(),
        "sentences": len(sources),
        "random": lines is None,
    }
    return Comparison(bundle, reference, source, inputs, sources, reports, searches)


def quality_of(report: ParityReport, writer: Writer, targets: Sequence[str]) -> tuple[Quality, Quality]:
    """The quality of the reference's outputs and of the runtime's, as the text that `writer` makes of them."""
    one, other = (
        Quality.of([writer.text(ids) for ids in outputs], targets) for outputs in zip(*report.outputs, strict=True)
    )
    return one, other


GATE = {"sentences": 8, "length": 16}
"""Of the comparison that every export must pass: random ids and short outputs, so that it takes a second or two."""


def gate(directory: Path) -> None:
    """A short comparison of all precisions of a bundle that ONNX Runtime computes on a CPU, greedy and with beams.

    Raises:
        TfexportError: something is outside the limits.
    """
    bundle = open_bundle(directory)
    if bundle.config.is_classifier:
        return
    reference = TorchRuntime.from_bundle(bundle)
    sources = random_sources(bundle.config, GATE["sentences"])

    def reports(beam: int) -> list[ParityReport]:
        runtimes = [load_runtime("ort-cpu", bundle, precision=p) for p in bundle.precisions]
        options = SearchOptions(beam=beam, max_length=GATE["length"])
        return compare_all(reference, runtimes, sources, [options], random=True)

    # Loaded anew for each, so that the graphs of both are not in memory at once.
    for report in (report for beam in (1, 4) for report in reports(beam)):
        if not report.passed:
            raise TfexportError(
                f"the exported graphs in {contract.short_name(report.precision)} do not decode as PyTorch does with beam "
                f"{report.beam}: logits differ by {report.logits.max:.1e} (at most {report.limits.error:.0e} is accepted), "
                f"{report.identical} of {report.sentences} sentences are the same. Nothing was exported: leave this "
                "precision out, give a stricter --budget where it has one, or export with --no-parity and look into it with "
                "tfexport parity --bisect."
            )


def _loaded(
    bundle: Bundle,
    names: Sequence[str],
    precisions: Sequence[Precision] | None,
    threads: int | None,
    say: Callable[[str], None],
) -> list[Runtime[Any]]:
    """The runtimes in these precisions; where none are asked for, those that cannot be run are only told."""
    loaded: list[Runtime[Any]] = []
    for name in names:
        refused: dict[Precision, TfexportError] = {}
        for precision in precisions or bundle.precisions:
            try:
                loaded.append(load_runtime(name, bundle, precision=precision, threads=threads))
            except (RuntimeUnavailable, BundleError) as error:
                if precisions is not None:
                    raise
                refused[precision] = error
        if len(refused) == len(bundle.precisions):
            raise next(iter(refused.values()))
        for precision, reason in refused.items():
            say(f"note: {name} is not compared in {contract.short_name(precision)}: {reason}")
    return loaded


def _read_afresh(bundle: Bundle, path: Path, family: Chosen, say: Callable[[str], None]) -> tuple[TorchRuntime, str]:
    loaded = load_checkpoint(path, bundle.origin.given, family=family or bundle.origin.family)
    if loaded.sha256 != bundle.origin.sha256:
        say(f"note: {path} is not the file that {bundle.directory} was exported from")
    model = loaded.build_model()
    theirs, ours = (
        [contract.describe(graph, config) for graph in contract.graphs_of(config)]
        for config in (loaded.config, bundle.config)
    )
    if not isinstance(model, Transformer) or theirs != ours:
        raise TfexportError(
            f"{path} is of other sizes than {bundle.directory}, so there is nothing to compare. Give the checkpoint that "
            "this bundle was exported from."
        )
    return TorchRuntime(model), loaded.sha256
