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
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tfexport import contract, kernels
from tfexport.bundle import Bundle, open_bundle
from tfexport.bundle_check import (
    Mismatch,
    config_mismatches,
    graph_specs,
    manifest_mismatches,
    tokenizer_mismatches,
    weights_mismatches,
)
from tfexport.config import ModelConfig
from tfexport.contract import Precision
from tfexport.cpus import return_freed_memory
from tfexport.definition import Definition
from tfexport.errors import BundleError, RuntimeUnavailable, TfexportError
from tfexport.graph_check import GraphCheck, check_graph
from tfexport.graph_modules import Model
from tfexport.lines import InputFormat, Reader, read_pairs
from tfexport.models.checkpoint import Checkpoint, load_checkpoint
from tfexport.models.recognition import Chosen
from tfexport.models.transformer import Transformer
from tfexport.next_tokens import log_softmax, suppressed
from tfexport.parity_report import LIMITS, Divergence, Errors, ParityReport, Position
from tfexport.quality import Quality
from tfexport.rounding import SAMPLES
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
        random: the sources are random ids. They are no text, and a model is less sure of its best token: below float32 the
            share of best tokens says nothing then.
    """
    reports = []
    for runtime in runtimes:
        limits = replace(LIMITS[runtime.precision], error=tolerance)
        if random and runtime.precision != "float32":
            limits = replace(limits, top1=0.0)
        reports += [ParityReport(runtime.name, runtime.precision, limits, options.beam) for options in searches]
    for options in searches:
        for runtime in runtimes:
            batch_size = runtime.capacity.batch_size(batch_size, options.beam)
    for batch in _batches(sources, batch_size):
        for index, options in enumerate(searches):
            best = [hypotheses[0] for hypotheses in search(reference, batch, options)]
            these = list(zip(runtimes, reports[index :: len(searches)], strict=True))
            outputs = [_decoded(runtime, batch, options, report) for runtime, report in these]
            for part in _parts(reference.config, best):
                expected = _Expected.of(reference, batch[part], best[part], options)
                for (runtime, report), found in zip(these, outputs, strict=True):
                    _compare_part(reference, runtime, expected, None if found is None else found[part], report)
    return reports


def _batches(sources: Iterable[Sequence[int]], size: int) -> Iterator[list[Sequence[int]]]:
    rest = iter(sources)
    while batch := list(islice(rest, size)):
        yield batch


def _decoded(
    runtime: Runtime[Any], batch: list[Sequence[int]], options: SearchOptions, report: ParityReport
) -> list[Hypothesis] | None:
    """The best output of each sentence; None where there are none, which the report says."""
    try:
        # As `decode` has it, with beams: greedy search tells no scores then.
        return [hypotheses[0] for hypotheses in search(runtime, batch, replace(options, scores=options.beam > 1))]
    except Exception as error:  # those of ONNX Runtime have no common base
        report.error = _said(error)
        return None


def _said(error: Exception) -> str:
    return (
        str(error) if isinstance(error, TfexportError) else f"it cannot be run: {(str(error).splitlines() or [''])[0]}"
    )


MOST_LOGITS = 2**25
"""That are in memory at once, in float64."""


def _parts(config: ModelConfig, best: Sequence[Hypothesis]) -> Iterator[slice]:
    """The sentences of a batch in parts whose logits fit into memory."""
    longest = max(len(hypothesis.ids) for hypothesis in best)
    size = max(1, MOST_LOGITS // (longest * config.tgt_vocab_size))
    for start in range(0, len(best), size):
        yield slice(start, start + size)


@dataclass(frozen=True)
class _Along:
    """Logits along outputs, in float64, and how far PyTorch's own in float32 are from them."""

    tgt_ids: IntArray
    """[batch, tgt]: bos and the outputs without their last tokens."""
    tgt_len: IntArray
    words: IntArray
    """[batch, tgt], the tokens that follow."""
    logits: NDArray[np.float64]
    """[batch, tgt, vocab] along `tgt_ids`."""
    own: NDArray[np.float64]
    """[batch, tgt]: the largest distance of a logit."""

    @classmethod
    def of(
        cls, reference: TorchRuntime, src_ids: IntArray, src_len: IntArray, outputs: Sequence[Sequence[int]]
    ) -> _Along:
        tgt_ids, tgt_len = as_inputs(reference.config, outputs)
        logits: Any = reference.in_float64().teacher_forced(src_ids, src_len, tgt_ids)
        own = np.abs(logits - reference.in_float32().teacher_forced(src_ids, src_len, tgt_ids)).max(axis=-1)
        words, _ = pad(outputs, reference.config.pad_id)
        return cls(tgt_ids, tgt_len, words, logits, own)

    def log_probs(self, sentence: int) -> NDArray[np.float64]:
        """Of the tokens of an output."""
        length = self.tgt_len[sentence]
        return log_softmax(self.logits[sentence, :length])[np.arange(length), self.words[sentence, :length]]


@dataclass(frozen=True)
class _Expected:
    """What the reference finds for some sentences."""

    sources: list[Sequence[int]]
    options: SearchOptions
    src_ids: IntArray
    src_len: IntArray
    best: list[Hypothesis]
    cross: list[NDArray[np.float64]]
    own_cross: list[FloatArray]
    along: _Along
    """Its best outputs."""

    @classmethod
    def of(
        cls, reference: TorchRuntime, sources: list[Sequence[int]], best: list[Hypothesis], options: SearchOptions
    ) -> _Expected:
        src_ids, src_len = pad(sources, reference.config.pad_id)
        cross: list[Any] = reference.in_float64().encode(src_ids, src_len).cross
        own_cross = reference.in_float32().encode(src_ids, src_len).cross
        along = _Along.of(reference, src_ids, src_len, [hypothesis.ids for hypothesis in best])
        return cls(sources, options, src_ids, src_len, best, cross, own_cross, along)


def as_inputs(config: ModelConfig, outputs: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """What a decoder reads to give `outputs`: padded ids [batch, tgt] that begin with bos, and their lengths."""
    return pad([[config.bos_id, *output[:-1]] for output in outputs], config.pad_id)


def _compare_part(
    reference: TorchRuntime,
    runtime: Runtime[Any],
    expected: _Expected,
    found: list[Hypothesis] | None,
    report: ParityReport,
) -> None:
    try:
        _compare_cross(reference, runtime, expected, report)
        spread = _compare_logits(reference, runtime, expected, report)
        if found is not None:
            _compare_outputs(reference, runtime, expected, found, spread, report)
    except Exception as error:
        report.error = report.error or _said(error)
    if found is None:
        report.outputs += [(wanted.ids, ()) for wanted in expected.best]
    report.sentences += len(expected.best)


def _compare_cross(reference: TorchRuntime, runtime: Runtime[Any], expected: _Expected, report: ParityReport) -> None:
    found = runtime.encode(expected.src_ids, expected.src_len).cross
    real = np.arange(expected.src_ids.shape[1]) < expected.src_len[:, None]  # [batch, src]
    tensors: Iterable[Sequence[Any]] = zip(expected.cross, expected.own_cross, found, strict=True)
    for index, those in enumerate(tensors):
        name = f"cross.{index // 2}.{('key', 'value')[index % 2]}"
        exact, own, got = (tensor.swapaxes(1, 2)[real] for tensor in those)
        report.cross.setdefault(name, Errors()).compare(exact, own, got)
    if all(errors.error <= report.allowed(errors) for errors in report.cross.values()):
        return
    for seed in range(SAMPLES):
        again = reference.with_random_rounding(seed).encode(expected.src_ids, expected.src_len).cross
        for errors, exact, own in zip(report.cross.values(), expected.cross, again, strict=True):
            errors.own = max(errors.own, float(np.abs(exact - own).swapaxes(1, 2)[real].max()))


@dataclass(frozen=True)
class _Spread:
    """What the runtime's own logits say of some outputs."""

    behind: NDArray[np.float64]
    """[batch, tgt]: by how much the best logit is above that of the output's token."""
    log_prob: NDArray[np.float64]
    """[batch, tgt]: of the output's token."""
    error: NDArray[np.float64]
    """[batch, tgt]: the largest distance of a logit from float64's."""


def _steps(
    runtime: Runtime[Any], src_ids: IntArray, src_len: IntArray, tgt_ids: IntArray, beam: int
) -> Iterator[FloatArray]:
    """The runtime's logits [batch, vocab] at each position of `tgt_ids`, which all beams of a sentence are fed."""
    state = runtime.encode(src_ids, src_len, beam=beam)
    for position in range(tgt_ids.shape[1]):
        logits, state = runtime.step(state, tgt_ids[:, position].repeat(beam))
        yield logits[::beam]


def _spread(
    runtime: Runtime[Any],
    src_ids: IntArray,
    src_len: IntArray,
    along: _Along,
    options: SearchOptions,
    see: Callable[[int, FloatArray], None] = lambda position, logits: None,
) -> _Spread:
    config, shape, rows = runtime.config, along.tgt_ids.shape, np.arange(len(src_len))
    spread = _Spread(np.zeros(shape), np.zeros(shape), np.zeros(shape))
    never = suppressed(config, options)
    is_forced = config.forced_first_id >= 0
    for position, logits in enumerate(_steps(runtime, src_ids, src_len, along.tgt_ids, options.beam)):
        see(position, logits)
        spread.error[:, position] = np.abs(along.logits[:, position] - logits).max(axis=1)
        if is_forced and position == 0:  # it comes whatever the logits are, with a log-probability of 0
            continue
        words = along.words[:, position]
        if options.beam > 1:
            spread.log_prob[:, position] = log_softmax(logits)[rows, words]
            continue
        allowed = logits.copy()
        allowed[:, [*never, *config.suppressed_first_ids * (position == int(is_forced))]] = -np.inf
        spread.behind[:, position] = allowed.max(axis=1) - logits[rows, words]
    return spread


def _compare_logits(
    reference: TorchRuntime, runtime: Runtime[Any], expected: _Expected, report: ParityReport
) -> _Spread:
    """Feed the runtime the reference's outputs."""
    along = expected.along

    def see(position: int, logits: FloatArray) -> None:
        live = position < along.tgt_len
        if position == len(report.positions):
            report.positions.append(Position())
        own = float(along.own[live, position].max())
        report.positions[position].compare(along.logits[live, position], own, logits[live])

    spread = _spread(runtime, expected.src_ids, expected.src_len, along, expected.options, see)
    # Not all sentences: only those of which an error is not explained yet.
    allowed = np.array([report.allowed(position) for position in report.positions[: along.tgt_ids.shape[1]]])
    live = np.arange(len(allowed)) < along.tgt_len[:, None]
    odd = np.flatnonzero((live & ~(spread.error <= allowed)).any(axis=1))
    for seed in range(SAMPLES if len(odd) else 0):
        given = expected.src_ids[odd], expected.src_len[odd], along.tgt_ids[odd]
        again = reference.with_random_rounding(seed).teacher_forced(*given)
        own = np.where(live[odd], np.abs(along.logits[odd] - again).max(axis=-1), 0.0).max(axis=0)
        for position, error in zip(report.positions, own.tolist(), strict=False):
            position.own = max(position.own, error)
    return spread


def _compare_outputs(
    reference: TorchRuntime,
    runtime: Runtime[Any],
    expected: _Expected,
    found: list[Hypothesis],
    spread: _Spread,
    report: ParityReport,
) -> None:
    """Compare the tokens that were decoded, and ask whether they follow from the runtime's own logits."""
    best, first = expected.best, report.sentences + 1
    report.outputs += [(wanted.ids, got.ids) for wanted, got in zip(best, found, strict=True)]
    same = [index for index, (wanted, got) in enumerate(zip(best, found, strict=True)) if wanted.ids == got.ids]
    other = [index for index in range(len(best)) if index not in set(same)]
    report.identical += len(same)
    for index in same:
        if not _is_founded(found[index], expected, spread, index, report):
            report.unfounded.append(first + index)
    if not other:
        return
    src_ids, src_len = expected.src_ids[other], expected.src_len[other]
    along = _Along.of(reference, src_ids, src_len, [found[index].ids for index in other])
    spread = _spread(runtime, src_ids, src_len, along, expected.options)
    for place, index in enumerate(other):
        report.divergences.append(_divergence(expected, along, index, place, found[index], first + index, report))
        if not _is_founded(found[index], expected, spread, place, report):
            report.unfounded.append(first + index)


def _is_founded(got: Hypothesis, expected: _Expected, spread: _Spread, row: int, report: ParityReport) -> bool:
    """Whether an output follows from the runtime's logits along it, which are in this row of `spread`.

    Each logit may be off by what it is off from float64 in this very step, or by what rounding explains: greedy search and
    beams have other graphs than the one that tells logits, and in 8 bits what is rounded up in one may be rounded down in
    the other.
    """
    length = len(got.ids)
    noise = 2 * np.maximum(spread.error[row, :length], report.tie_of(report.logits))
    if expected.options.beam == 1:
        return bool((spread.behind[row, :length] <= noise).all())
    return bool(abs(spread.log_prob[row, :length].sum() - got.log_prob) <= noise.sum())


def _divergence(
    expected: _Expected, along: _Along, index: int, place: int, got: Hypothesis, sentence: int, report: ParityReport
) -> Divergence:
    """Where and by how much the output `got` of a sentence differs from the reference's."""
    wanted, options = expected.best[index], expected.options
    both = zip(wanted.ids, got.ids, strict=False)
    step = next((i for i, (one, other) in enumerate(both) if one != other), min(len(wanted.ids), len(got.ids)))
    token, other = (ids[step] if step < len(ids) else None for ids in (wanted.ids, got.ids))
    own, theirs = expected.along.log_probs(index), along.log_probs(place)
    length = max(len(wanted.ids), len(got.ids))
    noise = 2 * report.tie_of(report.logits)
    if options.beam == 1 and token is not None and other is not None:
        log_probs = log_softmax(expected.along.logits[index, step])
        margin = float(log_probs[token] - log_probs[other])
    else:
        margin = options.normalise(float(own.sum()), len(own)) - options.normalise(float(theirs.sum()), len(theirs))
        noise *= options.normalise(float(length), length)
    outputs = (wanted.ids, got.ids)
    loss = float(own.mean() - theirs.mean())
    return Divergence(sentence, step + 1, token, other, margin, outputs, is_tie=abs(margin) <= noise, loss=loss)


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
    graphs: Mapping[Precision, Sequence[GraphCheck]]
    """Every graph of the bundle in these precisions, value by value."""
    mismatches: Sequence[Mismatch]
    """What differs from the model in the weights files, the tokenizers and the manifest."""

    @property
    def variants(self) -> dict[tuple[str, Precision], list[ParityReport]]:
        """The reports by runtime and precision."""
        found: dict[tuple[str, Precision], list[ParityReport]] = {}
        for report in self.reports:
            found.setdefault((report.runtime, report.precision), []).append(report)
        return found

    def holds(self, precision: Precision) -> bool:
        """Whether the files of the bundle, and its graphs in a precision, are what they are defined as."""
        return not self.mismatches and all(graph.first is None for graph in self.graphs.get(precision, ()))

    @property
    def passed(self) -> bool:
        """Every output, every graph and every file."""
        return (
            all(report.passed for report in self.reports) and all(map(self.holds, self.graphs)) and not self.mismatches
        )


Load = Callable[..., Checkpoint]
"""`load_checkpoint`, or one that knows more of the checkpoint's text."""


def check(
    directory: Path,
    lines: Iterable[bytes] | None,
    runtimes: Sequence[str],
    *,
    targets: Iterable[bytes] | None = None,
    checkpoint: Path | None = None,
    family: Chosen = None,
    load: Load = load_checkpoint,
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
    """Compare the files, the graphs and the runtimes of a bundle with PyTorch, on `lines` or on random ids.

    The reference is the bundle's own weights, or `checkpoint` read afresh: the second also finds what went wrong between
    the checkpoint and the bundle.

    Args:
        targets: a translation of each line, for BLEU and chrF beside the reference's.
        family: that of the checkpoint, where it is the user's own; the bundle has no more than its name.
        load: reads the checkpoint, of this path, with what it does not tell itself, and of this family.
        float64: the reference decodes in float64 too.
        tolerance: a fixed limit in the place of what follows from rounding.
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
    mismatches = manifest_mismatches(bundle)
    if checkpoint is not None:
        afresh = _read_afresh(bundle, checkpoint, family, load, say)
        reference, source = TorchRuntime(afresh.model), afresh.sha256
        mismatches += afresh.mismatches
    mismatches += weights_mismatches(bundle, reference.model)
    model, reference = reference.model, reference.in_float64() if float64 else reference
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
    of_graphs = dict.fromkeys(runtime.precision for runtime in loaded if not runtime.name.startswith("torch"))
    del loaded  # the graphs are loaded anew, one by one
    graphs = {precision: check_graphs(bundle, model, precision, tolerance=tolerance) for precision in of_graphs}
    inputs = {
        "sha256": hashlib.sha256(json.dumps(sources).encode()).hexdigest(),
        "sentences": len(sources),
        "random": lines is None,
    }
    return Comparison(bundle, reference, source, inputs, sources, reports, searches, graphs, mismatches)


def check_graphs(
    bundle: Bundle, model: Transformer, precision: Precision, *, tolerance: float | None = None
) -> list[GraphCheck]:
    """Every graph of a bundle in a precision beside its definition: as the bundle defines its functions, and with the
    kernels of this machine where there are any.

    Args:
        model: float32.
        tolerance: a fixed limit in the place of what follows from rounding.
    """
    path = bundle.directory / contract.weights_file(precision)
    stored = load_file(path) if precision in contract.QUANTIZED else None
    specs = graph_specs(bundle)
    listed = [(graph.role, graph.precision, graph.dialect) for graph in bundle.graphs if graph.precision == precision]
    try:
        definition = Definition.of(model, precision, stored, bundle.in_float32.get(precision, ()))
    except (KeyError, ValueError, RuntimeError) as error:  # weights of other names or shapes, which is told of the file
        return [GraphCheck.broken(path.name, f"its tensors are not those of this model: {error}")]
    found = []
    for spec in (specs[key] for key in listed if key in specs):
        for with_kernels in (False, True) if spec.dialect == "ort" and kernels.library() else (False,):
            found.append(
                check_graph(definition, spec, bundle.directory, with_kernels=with_kernels, tolerance=tolerance)
            )
        return_freed_memory(now=True)
    return found


def quality_of(report: ParityReport, writer: Writer, targets: Sequence[str]) -> tuple[Quality, Quality]:
    """The quality of the reference's outputs and of the runtime's, as the text that `writer` makes of them."""
    one, other = (
        Quality.of([writer.text(ids) for ids in outputs], targets) for outputs in zip(*report.outputs, strict=True)
    )
    return one, other


GATE = {"sentences": 8, "length": 16}
"""Of the comparison that every export must pass: random ids and short outputs, so that it takes a second or two."""


def gate(directory: Path, model: Model, *, tolerance: float | None = None) -> None:
    """A short comparison of all precisions of a bundle that ONNX Runtime computes on a CPU, greedy and with beams.

    Args:
        model: that was exported, in float32.
        tolerance: a fixed limit in the place of what follows from rounding.

    Raises:
        TfexportError: something is outside the limits.
    """
    bundle = open_bundle(directory)
    if not isinstance(model, Transformer):  # a classifier has nothing to decode
        return
    reference = TorchRuntime(model)
    sources = random_sources(bundle.config, GATE["sentences"])

    def reports(beam: int) -> list[ParityReport]:
        runtimes = [load_runtime("ort-cpu", bundle, precision=p) for p in bundle.precisions]
        options = SearchOptions(beam=beam, max_length=GATE["length"])
        return compare_all(reference, runtimes, sources, [options], random=True, tolerance=tolerance)

    # Loaded anew for each, so that the graphs of both are not in memory at once.
    for report in (report for beam in (1, 4) for report in reports(beam)):
        if not report.passed:
            short = contract.short_name(report.precision)
            others = (
                f" Leave {short} out of --precision,"
                if report.precision != "float32"
                else " Report this with the config,"
            )
            raise TfexportError(
                f"the exported graphs in {short} do not decode as PyTorch does with beam {report.beam}: "
                f"{'; '.join(report.failures)}. Nothing was exported.{others} allow more with --tolerance N, or export with "
                "--no-parity and look into it with tfexport parity --bisect."
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


@dataclass(frozen=True)
class _Afresh:
    """A checkpoint read once more."""

    model: Transformer
    sha256: str
    mismatches: list[Mismatch]


def _read_afresh(bundle: Bundle, path: Path, family: Chosen, load: Load, say: Callable[[str], None]) -> _Afresh:
    loaded = load(path, bundle.origin.given, family=family or bundle.origin.family)
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
    mismatches, unknown = tokenizer_mismatches(bundle, loaded.tokenizers)
    for side in unknown:
        flag = "--src-vocab" if side == "source" else "--tgt-vocab"
        say(f"note: the {side} tokenizer is compared with nothing, as {path} has none: give it with {flag}")
    return _Afresh(model, loaded.sha256, [*config_mismatches(bundle, loaded.config), *mismatches])
