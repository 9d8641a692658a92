"""`tfexport parity`."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tfexport.commands.console import (
    opened,
    print_graphs,
    print_invariance,
    print_mismatches,
    print_parity,
    print_verdict,
    require_one_stdin,
    say,
    working,
)
from tfexport.commands.flags import (
    AsJson,
    BatchSize,
    BundleDir,
    ConfigOption,
    Input,
    InputFormatOption,
    Lowercase,
    MaxLength,
    SourceCodes,
    SourceLanguage,
    SourcePrefix,
    SourceTokenizer,
    SourceVocabulary,
    TargetCodes,
    TargetLanguage,
    TargetVocabulary,
    Threads,
    family_of,
    hints_of,
    numbers_of,
)
from tfexport.contract import precisions_of
from tfexport.errors import BundleError, TfexportError
from tfexport.system.json_text import json_text

if TYPE_CHECKING:
    from tfexport.contract import Precision
    from tfexport.verification.parity import Comparison


def parity(
    directory: BundleDir,
    source: Input = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="CKPT", help="Compare with this checkpoint, read afresh.")
    ] = None,
    family: Annotated[
        str | None, typer.Option(metavar="FILE.py", help="The family file of your own that CKPT was exported with.")
    ] = None,
    config: ConfigOption = None,
    src_vocab: SourceVocabulary = None,
    tgt_vocab: TargetVocabulary = None,
    src_tokenizer: SourceTokenizer = "whitespace",
    lowercase: Lowercase = False,
    src_bpe: SourceCodes = None,
    tgt_bpe: TargetCodes = None,
    src_lang: SourceLanguage = None,
    tgt_lang: TargetLanguage = None,
    prefix: SourcePrefix = "",
    runtime: Annotated[list[str] | None, typer.Option(help="Runtime to compare; may be repeated.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(metavar="P,...", help="Precisions to compare, as in fp32,int8; by default all there are."),
    ] = None,
    beam: Annotated[str, typer.Option(metavar="N,...", help="Beam widths of the free decoding.")] = "1,4",
    max_length: MaxLength = 256,
    batch_size: BatchSize = 32,
    targets: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A translation of each line of INPUT, for BLEU and chrF.")
    ] = None,
    float64: Annotated[bool, typer.Option("--float64", help="Compute the reference in float64.")] = False,
    invariance: Annotated[
        bool,
        typer.Option("--invariance", help="Also decode each sentence alone, in other batches, caches and threads."),
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="Largest absolute difference that passes; by default what follows from rounding."),
    ] = None,
    bisect: Annotated[bool, typer.Option("--bisect", help="Tell of every graph how close its values are.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write a page with plots by step and layer, and what differs."),
    ] = None,
    certify: Annotated[
        bool, typer.Option("--certify/--no-certify", help="Keep what passes on real input as certificates in BUNDLE.")
    ] = True,
    input_format: InputFormatOption = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Compare a bundle with PyTorch: every graph value by value, every weight and setting, and what its runtimes decode of
    real input. Prints numbers and a verdict; exit code 1 on failure.

    Without INPUT random ids are decoded instead, and nothing is certified. With --checkpoint the vocabularies are found
    where the export read them, or given with the flags of `export`.
    """
    from tfexport.bundle.reader import open_bundle
    from tfexport.commands.text_settings import TextSettings
    from tfexport.verification.invariance import invariance as decode_in_arrangements
    from tfexport.verification.parity import check

    text = TextSettings(src_vocab, tgt_vocab, src_tokenizer, lowercase, src_bpe, tgt_bpe, src_lang, tgt_lang, prefix)
    if (family is not None or config is not None or text != TextSettings()) and checkpoint is None:
        raise TfexportError(
            "--family, --config, vocabularies and languages say how --checkpoint is read. Give --checkpoint CKPT too."
        )
    hints: dict[str, Any] = {}
    if checkpoint is not None:
        hints = hints_of(checkpoint, config)
        text, lost = text.or_recorded(open_bundle(directory).origin.text, checkpoint)
        for flag in lost:
            say(f"note: the export read {flag}, which is not there now")
    if report is not None and not report.parent.is_dir():
        raise TfexportError(f"there is no folder {report.parent} for the page. Make it, or give another --report.")
    if report is not None and report.is_dir():
        raise TfexportError(f"{report} is a folder. Give a file for the page with --report.")
    if source is not None and targets is not None:
        require_one_stdin(source, targets)
    with (
        working("comparing"),
        contextlib.nullcontext() if source is None else opened(source) as lines,
        contextlib.nullcontext() if targets is None else opened(targets) as translations,
    ):
        comparison = check(
            directory,
            lines,
            runtime or ["ort-cpu"],
            targets=translations,
            checkpoint=checkpoint,
            family=family_of(family),
            hints=hints,
            load=text.load,
            float64=float64,
            beams=numbers_of("--beam", beam),
            max_length=max_length,
            batch_size=batch_size,
            tolerance=tolerance,
            precisions=precisions_of(precision) if precision is not None else None,
            input_format=input_format,
            threads=threads,
            say=say,
        )
        arranged = [
            decode_in_arrangements(
                comparison.bundle, name, compared, comparison.sources, options, batch_size=batch_size
            )
            for name, compared in (comparison.variants if invariance else ())
            for options in comparison.searches
        ]
    checks = [check for checks in comparison.graphs.values() for check in checks]
    if as_json:
        content: Any = {
            "passed": comparison.passed and all(found.passed for found in arranged),
            "reports": [found.to_dict() for found in comparison.reports],
            "mismatches": [found.to_dict() for found in comparison.mismatches],
            "graphs": [found.to_dict(values=bisect) for found in checks],
            "invariance": [found.to_dict() for found in arranged],
        }
        print(json_text(content, indent=1))
    else:
        for found in comparison.reports:
            print_parity(found)
        print_graphs(checks, bisect=bisect)
        print_mismatches(comparison.mismatches)
        for arrangements in arranged:
            print_invariance(arrangements)
        print_verdict(comparison, arranged)
    if report is not None:
        from tfexport.verification.page import write_page

        write_page(report, comparison, arranged)
        say(f"note: written to {report}")
    if certify and tolerance is not None:
        say("note: not certified: --tolerance takes the place of the limits that certificates are for")
    elif certify and source is not None:
        _certify(comparison, {(found.runtime, found.precision) for found in arranged if not found.passed})
    if not (comparison.passed and all(found.passed for found in arranged)):
        raise typer.Exit(1)


ENOUGH_STEPS = 10
"""Of a comparison that is to be certified: a token or two say nothing."""


def _certify(comparison: Comparison, refuted: Collection[tuple[str, Precision]]) -> None:
    """Keep the certificates of what passed, and drop earlier ones of what failed, here or otherwise (`refuted`)."""
    from tfexport.verification.certificates import certify, write_certificates

    if comparison.unknown and comparison.source != "bundle":
        say("note: not certified: a tokenizer was compared with nothing. Give --src-vocab and --tgt-vocab.")
        return
    passed, failed = [], []
    for (runtime, precision), reports in comparison.variants.items():
        holds = comparison.holds(precision) and all(report.passed for report in reports)
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
