"""Numeric parity: the files, the graphs and the runtimes of a bundle against PyTorch, with a verdict."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file

from tfexport import contract, graph_contract, kernels
from tfexport.bundle.reader import MANIFEST, Bundle, open_bundle
from tfexport.contract import Precision
from tfexport.decoding.line_reader import Reader, read_pairs
from tfexport.decoding.translate import Writer
from tfexport.errors import BundleError, RuntimeUnavailable, TfexportError
from tfexport.graph_checks.check import GraphCheck, check_graph
from tfexport.graph_checks.definition import Definition
from tfexport.models.checkpoints.load import Checkpoint, load_checkpoint
from tfexport.models.checkpoints.own_module import FAMILY as MODULE_FAMILY
from tfexport.models.checkpoints.own_module import OwnModule
from tfexport.models.checkpoints.recognise import Chosen
from tfexport.models.transformer import Transformer
from tfexport.option import checked
from tfexport.runtimes import load_runtime
from tfexport.runtimes.base import Runtime
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions
from tfexport.system.processes import return_freed_memory
from tfexport.verification.bleu_chrf import Quality
from tfexport.verification.compare import compare, compare_all, random_sources
from tfexport.verification.expected_decoding import ExpectedReport, compare_outputs, examples_of
from tfexport.verification.files import (
    Mismatch,
    config_mismatches,
    generation_mismatches,
    graph_specs,
    manifest_mismatches,
    tokenizer_mismatches,
    weights_mismatches,
)
from tfexport.verification.options import CompareOptions
from tfexport.verification.reference_outputs import as_inputs
from tfexport.verification.report import ParityReport
from tfexport.verification.structure import structure_mismatches

__all__ = ["Comparison", "as_inputs", "check", "check_graphs", "compare", "compare_all", "random_sources"]

RANDOM_SENTENCES = 32


@dataclass(frozen=True)
class Comparison:
    """A comparison of a bundle with PyTorch: its inputs and its results."""

    bundle: Bundle
    reference: TorchRuntime
    source: str
    """The source of the reference's weights: `bundle`, or the sha256 of a checkpoint that was read again."""
    inputs: Mapping[str, Any]
    """The sha256 of the decoded ids, the number of sentences, and whether they are random."""
    sources: Sequence[Sequence[int]]
    """The ids that were decoded."""
    reports: Sequence[ParityReport]
    """A report for each runtime, precision and beam."""
    searches: Sequence[SearchOptions]
    graphs: Mapping[Precision, Sequence[GraphCheck]]
    """The checks of every graph of the bundle in these precisions, value by value."""
    mismatches: Sequence[Mismatch]
    """Differences from the model in the weights files, the tokenizers and the manifest."""
    unknown: Sequence[str] = ()
    """The sides whose tokenizer was not compared, because the checkpoint has none."""
    expected: Sequence[ExpectedReport] = ()
    """The comparison of each runtime and precision with the outputs of the owner's own program."""

    @property
    def variants(self) -> dict[tuple[str, Precision], list[ParityReport]]:
        """The reports by runtime and precision."""
        variants: dict[tuple[str, Precision], list[ParityReport]] = {}
        for report in self.reports:
            variants.setdefault((report.runtime, report.precision), []).append(report)
        return variants

    def holds(self, precision: Precision) -> bool:
        """Whether the files of the bundle, and its graphs in a precision, match their definitions."""
        return not self.mismatches and all(graph.first is None for graph in self.graphs.get(precision, ()))

    @property
    def passed(self) -> bool:
        """Whether every output, every graph and every file passed."""
        return (
            all(report.passed for report in self.reports)
            and all(report.passed for report in self.expected)
            and all(map(self.holds, self.graphs))
            and not self.mismatches
        )

    def is_expected(self, runtime: str, precision: Precision) -> bool:
        """Whether a runtime decodes all expected outputs; also if there are none."""
        return all(
            report.passed for report in self.expected if (report.runtime, report.precision) == (runtime, precision)
        )


@dataclass(frozen=True)
class Reference:
    """A checkpoint to read again: the comparison then also finds errors between the checkpoint and the bundle."""

    checkpoint: Path
    family: Chosen | OwnModule = None
    """A family of the user, whose name alone is in the bundle, or the user's own module."""
    hints: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the checkpoint does not contain. Others come from the manifest."""
    load: Callable[..., Checkpoint] = load_checkpoint
    """Reads the checkpoint, from its path, the hints and `family`."""


def check(
    directory: Path,
    lines: Iterable[bytes] | None,
    runtimes: Sequence[str],
    *,
    targets: Iterable[bytes] | None = None,
    checkpoint: Path | Reference | None = None,
    say: Callable[[str], None] = print,
    **compared: Any,
) -> Comparison:
    """Compare the files, the graphs and the runtimes of a bundle with PyTorch, on `lines` or on random ids.

    Args:
        targets: a translation of each line, for BLEU and chrF of the runtime and of the reference.
        checkpoint: the reference; by default the bundle's own weights.
        say: gets notes for the user.
        compared: options of `CompareOptions`; without beams, only greedy search.

    Raises:
        TfexportError: the bundle or the checkpoint cannot be read, no line can be decoded, or the numbers of targets and
            lines differ.
    """
    options = CompareOptions(**checked(CompareOptions, {"beams": (1,), **compared}))
    threads, tolerance = options.threads, options.tolerance
    bundle = open_bundle(directory)
    if targets is not None and lines is None:
        raise TfexportError("targets are translations of the input, and no input was given. Give INPUT too.")
    examples = None if options.expect is None else examples_of(bundle, options.expect)
    writer = None if targets is None else Writer.of(bundle, "text")
    reference, source = TorchRuntime.from_bundle(bundle, threads=threads), "bundle"
    unknown: tuple[str, ...] = ()
    mismatches = [*structure_mismatches(bundle), *manifest_mismatches(bundle)]
    if checkpoint is not None:
        read = checkpoint if isinstance(checkpoint, Reference) else Reference(checkpoint)
        afresh = _read_afresh(bundle, read, say)
        reference, source, unknown = TorchRuntime(afresh.model), afresh.sha256, afresh.unknown
        mismatches += afresh.mismatches
    mismatches += weights_mismatches(bundle, reference.model)
    model, reference = reference.model, reference.in_float64() if options.float64 else reference
    wanted: list[str] = []
    if lines is None:
        say(f"note: no input was given: comparing on {RANDOM_SENTENCES} sentences of random ids")
        sources = random_sources(bundle.config, RANDOM_SENTENCES)
    else:
        sources, wanted = read_pairs(lines, targets, Reader.of(bundle, options.input_format), say)
    loaded = _loaded(bundle, runtimes, options.precisions, threads, say)
    searches = [SearchOptions(beam=beam, max_length=options.max_length) for beam in options.beams]
    reports = compare_all(
        reference, loaded, sources, searches, batch_size=options.batch_size, tolerance=tolerance, random=lines is None
    )
    for report in reports:
        report.reference = "fp64" if options.float64 else "fp32"
    if writer is not None:
        for report in reports:
            report.quality = quality_of(report, writer, wanted)
    expected = [compare_outputs(runtime, examples, batch_size=options.batch_size) for runtime in loaded if examples]
    of_graphs = dict.fromkeys(runtime.precision for runtime in loaded if not runtime.name.startswith("torch"))
    del loaded  # the graphs are loaded again, one by one
    graphs = {precision: check_graphs(bundle, model, precision, tolerance=tolerance) for precision in of_graphs}
    inputs = _summary(sources, random=lines is None)
    return Comparison(
        bundle,
        reference,
        source,
        inputs,
        sources,
        reports,
        searches,
        graphs,
        mismatches,
        unknown,
        expected,
    )


def _summary(sources: Sequence[Sequence[int]], *, random: bool) -> dict[str, Any]:
    """The digest and number of the compared sentences, for certificates."""
    sha256 = hashlib.sha256(json.dumps(sources).encode()).hexdigest()
    return {"sha256": sha256, "sentences": len(sources), "random": random}


def check_graphs(
    bundle: Bundle, model: Transformer, precision: Precision, *, tolerance: float | None = None
) -> list[GraphCheck]:
    """Compare every graph of a bundle in a precision with its definition: with the functions that the bundle defines, and
    with the kernels of this machine if there are any.

    Args:
        model: the model in float32.
        tolerance: a fixed limit instead of the limit that follows from rounding.
    """
    path = bundle.directory / contract.weights_file(precision)
    try:
        stored = load_file(path) if precision in contract.QUANTIZED else None
    except (OSError, ValueError, SafetensorError) as error:
        return [GraphCheck.broken(path.name, f"cannot be read: {error}")]
    specs = graph_specs(bundle)
    listed = [(graph.role, graph.precision, graph.dialect) for graph in bundle.graphs if graph.precision == precision]
    try:
        definition = Definition.of(model, precision, stored, bundle.in_float32.get(precision, ()))
    except (KeyError, ValueError, RuntimeError) as error:  # weights with other names or shapes; reported for the file
        return [GraphCheck.broken(path.name, f"its tensors are not those of this model: {error}")]
    checks = []
    for key, spec in ((key, specs[key]) for key in listed if key in specs):
        try:
            bundle.graph(*key)
        except BundleError as error:
            checks.append(GraphCheck.broken(spec.file, str(error)))
            continue
        for with_kernels in (False, True) if spec.dialect == "ort" and kernels.library() else (False,):
            checks.append(
                check_graph(definition, spec, bundle.directory, with_kernels=with_kernels, tolerance=tolerance)
            )
        return_freed_memory(now=True)
    return checks


def quality_of(report: ParityReport, writer: Writer, targets: Sequence[str]) -> tuple[Quality, Quality]:
    """The quality of the reference's outputs and of the runtime's, as text from `writer`."""
    reference, other = (
        Quality.of([writer.text(ids) for ids in outputs], targets) for outputs in zip(*report.outputs, strict=True)
    )
    return reference, other


def _loaded(
    bundle: Bundle,
    names: Sequence[str],
    precisions: Sequence[Precision],
    threads: int | None,
    say: Callable[[str], None],
) -> list[Runtime]:
    """The runtimes in these precisions. Without `precisions`, take all that can run, and print a note for the others."""
    loaded: list[Runtime] = []
    for name in names:
        refused: dict[Precision, TfexportError] = {}
        for precision in precisions or bundle.precisions:
            try:
                loaded.append(load_runtime(name, bundle, precision=precision, threads=threads))
            except (RuntimeUnavailable, BundleError) as error:
                if precisions:
                    raise
                refused[precision] = error
        if len(refused) == len(bundle.precisions):
            raise next(iter(refused.values()))
        for precision, reason in refused.items():
            say(f"note: {name} is not compared in {contract.short_name(precision)}: {reason}")
    return loaded


@dataclass(frozen=True)
class _Afresh:
    """A checkpoint that was read again."""

    model: Transformer
    sha256: str
    mismatches: list[Mismatch]
    unknown: tuple[str, ...]
    """The sides whose tokenizer the checkpoint lacks."""


_SPELT = ("pad_id", "bos_id", "eos_id", "unk_id")
"""Ids that vocabularies also contain, which are compared."""


_LENGTHS = ("max_source_length", "max_target_length")
"""Limits that an export may lower. The position tables in the weights, which are compared, have as many rows."""


def _overriding(name: str, in_bundle: Any, in_checkpoint: Any) -> str:
    """The message about a setting of the manifest that the checkpoint contradicts."""
    return (
        f"{name} is {in_bundle!r}, the checkpoint's own is {in_checkpoint!r}: if the bundle is right, give --config "
        f"FILE.json with {json.dumps({name: in_bundle})}"
    )


def _read_afresh(bundle: Bundle, read: Reference, say: Callable[[str], None]) -> _Afresh:
    path, hints = read.checkpoint, read.hints
    if isinstance(read.family, OwnModule) and bundle.origin.family != MODULE_FAMILY:
        raise TfexportError(  # both may be right, and still spell the same model with other tensors
            f"{bundle.directory} was exported without --module, so it cannot be compared with {read.family.about}. Export "
            "the checkpoint again with --module and compare that bundle, or leave --module out."
        )
    loaded = read.load(path, {**bundle.origin.given, **hints}, family=read.family or bundle.origin.family)
    if loaded.sha256 != bundle.origin.sha256:
        say(f"note: {path} is not the file that {bundle.directory} was exported from")
    model = loaded.build_model()
    read_graphs, own_graphs = (
        [contract.describe(graph, config) for graph in graph_contract.graphs_of(config)]
        for config in (loaded.config, bundle.config)
    )
    if not isinstance(model, Transformer) or read_graphs != own_graphs:
        differs = "; ".join(mismatch.about for mismatch in config_mismatches(bundle, loaded.config))
        raise TfexportError(
            f"{path} and {bundle.directory} have different sizes and cannot be compared: {differs}. Give the "
            "checkpoint that this bundle was exported from, and the same settings with --config."
        )
    mismatches, unknown = tokenizer_mismatches(bundle, loaded.tokenizers)
    believed = [name for name in loaded.assumed if name not in hints and (unknown or name not in _SPELT)]
    for name, own in loaded.overridden.items():
        if name in hints:
            continue
        about = _overriding(name, getattr(loaded.config, name), own)
        if name in _LENGTHS:
            say(f"note: {about}")
        else:  # the manifest alone cannot overrule the checkpoint, with which it is compared
            mismatches.append(Mismatch(MANIFEST, about))
    if believed:
        about = ", ".join(f"{name} {bundle.origin.given[name]}" for name in believed)
        say(f"note: {path} does not contain {about}: not compared, unless --config FILE.json has it")
    # Special ids come from the manifest if the checkpoint has none. The checkpoint's vocabularies may contradict them.
    mismatches += [Mismatch(MANIFEST, odd) for odd in loaded.odd if odd not in bundle.origin.notes]
    for side in unknown:
        flag = "--src-vocab" if side == "source" else "--tgt-vocab"
        say(f"note: the {side} tokenizer is not compared, because {path} has none: give it with {flag}")
    mismatches += generation_mismatches(bundle, loaded.generation)
    return _Afresh(model, loaded.sha256, [*config_mismatches(bundle, loaded.config), *mismatches], tuple(unknown))
