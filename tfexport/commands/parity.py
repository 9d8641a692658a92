"""`tfexport parity`."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tfexport.commands.console import (
    print_expected,
    print_graphs,
    print_invariance,
    print_mismatches,
    print_parity,
    print_verdict,
    say,
    working,
)
from tfexport.commands.flags import AsJson, BundleDir, Input
from tfexport.commands.help import common_options
from tfexport.commands.signature import with_options
from tfexport.errors import BundleError, TfexportError
from tfexport.models.checkpoints.options import ReferenceOptions
from tfexport.option import Given, checked
from tfexport.system.input_files import opened, require_one_stdin
from tfexport.system.json_text import json_text
from tfexport.verification.options import CompareOptions

if TYPE_CHECKING:
    from tfexport.contract import Precision
    from tfexport.verification.invariance import Invariance
    from tfexport.verification.parity import Comparison, Reference


@common_options("--runtime --precision --beam --expect --targets --checkpoint --bisect --invariance --report --json")
@with_options
def parity(
    directory: BundleDir,
    source: Input = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="CKPT", help="Read this checkpoint again and compare with it.")
    ] = None,
    *,
    described: ReferenceOptions,
    runtime: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Runtime; may be repeated.")] = None,
    compared: Given[CompareOptions],
    targets: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Reference translations of INPUT, line by line, for BLEU and chrF."),
    ] = None,
    invariance: Annotated[
        bool,
        typer.Option(
            "--invariance", help="Also decode each sentence alone and in other batches, cache sizes and thread counts."
        ),
    ] = False,
    bisect: Annotated[bool, typer.Option("--bisect", help="Print for every graph how close its values are.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html", help="Write a page with plots by step and by layer, and with all differences."
        ),
    ] = None,
    certify: Annotated[
        bool,
        typer.Option(
            "--certify/--no-certify", help="Store certificates in DIR for the graphs that pass on real input."
        ),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Compare a bundle with PyTorch: every graph value by value, every weight and setting,
    and the outputs that its runtimes decode from real input. Prints numbers and a verdict; exit code 1 on failure.

    Without INPUT, random ids are decoded instead, and nothing is certified. With --checkpoint, the vocabularies are read
    from the files of the export, or given with the flags of `export`.
    """
    from tfexport.verification.bleu_chrf import scorer
    from tfexport.verification.parity import check

    reference = _reference(directory, checkpoint, described)
    _check_report(report)
    if targets is not None:
        scorer()  # before the long comparison
    if source is not None and targets is not None:
        require_one_stdin(source, targets)
    with (
        working("comparing"),
        contextlib.nullcontext() if source is None else opened(source) as lines,
        contextlib.nullcontext() if targets is None else opened(targets) as translations,
    ):
        options = CompareOptions(**checked(CompareOptions, compared))
        comparison = check(
            directory,
            lines,
            runtime or ["ort-cpu"],
            targets=translations,
            checkpoint=reference,
            say=say,
            **vars(options),
        )
        arranged = _arranged(comparison, options.batch_size) if invariance else []
    passed = comparison.passed and all(invariance.passed for invariance in arranged)
    if as_json:
        print(json_text({"passed": passed, **_record(comparison, arranged, values=bisect)}, indent=1))
    else:
        _print(comparison, arranged, bisect=bisect)
    if report is not None:
        _write_page(report, comparison, arranged)
    if certify and options.tolerance is not None:
        say("note: not certified: --tolerance replaces the limits of certificates")
    elif certify and source is not None:
        refuted = {(part.runtime, part.precision) for part in arranged if not part.passed}
        _certify(comparison, refuted)
    if not passed:
        raise typer.Exit(1)


def _reference(directory: Path, checkpoint: Path | None, described: ReferenceOptions) -> Reference | None:
    """The checkpoint to compare with, read as the flags describe, or as the export read it.

    Raises:
        TfexportError: there are flags for a checkpoint, but no checkpoint.
    """
    from tfexport.bundle.reader import open_bundle
    from tfexport.models.checkpoints.reading import family_or_module, hints_of, read_with_text
    from tfexport.verification.parity import Reference

    if checkpoint is None:
        if described != ReferenceOptions():
            raise TfexportError(
                "--family, --module, --config, --key, --ignore, vocabularies and languages describe the --checkpoint. Give "
                "--checkpoint CKPT too."
            )
        return None
    hints = hints_of(described, checkpoint, say)
    text, lost = described.or_recorded(open_bundle(directory).origin.text, checkpoint)
    for flag in lost:
        say(f"note: the export read {flag}, which no longer exists")
    return Reference(checkpoint, family_or_module(described), hints, partial(read_with_text, text=text))


def _check_report(report: Path | None) -> None:
    """Raises TfexportError if the page cannot be written, before the long comparison begins."""
    from tfexport.system.imports import figure_class
    from tfexport.verification.page import NO_PLOTS

    if report is not None and not report.parent.is_dir():
        raise TfexportError(f"there is no folder {report.parent} for the page. Make it, or give another --report.")
    if report is not None and report.is_dir():
        raise TfexportError(f"{report} is a folder. Give a file for the page with --report.")
    if report is not None:
        figure_class(NO_PLOTS)


def _arranged(comparison: Comparison, batch_size: int) -> list[Invariance]:
    """The outputs of each variant alone and in other batches, cache sizes and thread counts."""
    from tfexport.verification.invariance import invariance

    return [
        invariance(comparison.bundle, name, precision, comparison.sources, search, batch_size=batch_size)
        for name, precision in comparison.variants
        for search in comparison.searches
    ]


def _write_page(report: Path, comparison: Comparison, arranged: Sequence[Invariance]) -> None:
    from tfexport.verification.page import write_page

    write_page(report, comparison, arranged)
    say(f"note: written to {report}")


def _record(comparison: Comparison, arranged: Sequence[Invariance], *, values: bool) -> dict[str, Any]:
    """The results, for JSON."""
    return {
        "reports": [report.to_dict() for report in comparison.reports],
        "expected": [report.to_dict() for report in comparison.expected],
        "mismatches": [mismatch.to_dict() for mismatch in comparison.mismatches],
        "graphs": [check.to_dict(values=values) for checks in comparison.graphs.values() for check in checks],
        "invariance": [invariance.to_dict() for invariance in arranged],
    }


def _print(comparison: Comparison, arranged: Sequence[Invariance], *, bisect: bool) -> None:
    """Print the results for people."""
    for report in comparison.reports:
        print_parity(report)
    for expected in comparison.expected:
        print_expected(expected)
    print_graphs([check for checks in comparison.graphs.values() for check in checks], bisect=bisect)
    print_mismatches(comparison.mismatches)
    for arrangements in arranged:
        print_invariance(arrangements)
    print_verdict(comparison, arranged)


ENOUGH_STEPS = 10
"""The smallest number of steps of a comparison for a certificate: a few tokens prove nothing."""


def _certify(comparison: Comparison, refuted: Collection[tuple[str, Precision]]) -> None:
    """Store certificates of the comparisons that passed, and drop earlier ones that a failure refutes (`refuted`)."""
    from tfexport.verification.certificates import certify, write_certificates

    if comparison.unknown and comparison.source != "bundle":
        say("note: not certified: a tokenizer was not compared. Give --src-vocab and --tgt-vocab.")
        return
    passed, failed = [], []
    for (runtime, precision), reports in comparison.variants.items():
        holds = comparison.holds(precision) and all(report.passed for report in reports)
        holds = holds and comparison.is_expected(runtime, precision)
        if not holds or (runtime, precision) in refuted:
            failed.append((runtime, precision))
        elif max(report.steps for report in reports) < ENOUGH_STEPS:
            say(f"note: not certified: fewer than {ENOUGH_STEPS} steps were compared. Give more sentences.")
        else:
            numbers = [report.summary() for report in reports]
            passed.append(certify(comparison.bundle, runtime, precision, numbers, comparison.inputs, comparison.source))
    try:
        path = write_certificates(comparison.bundle, passed, failed)
    except BundleError as error:
        say(f"note: not certified: {error}")
        return
    if passed:
        say(f"note: certified in {path}: {', '.join(c.about for c in passed)}")
