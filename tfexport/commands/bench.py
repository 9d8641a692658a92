"""`tfexport bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tfexport.bench.options import BenchOptions
from tfexport.commands.console import say
from tfexport.commands.flags import AsJson, BundleDir, InputFormatOption
from tfexport.commands.help import common_options
from tfexport.commands.output import writing
from tfexport.commands.signature import with_options
from tfexport.errors import TfexportError
from tfexport.system.input_files import opened
from tfexport.system.json_text import json_text

if TYPE_CHECKING:
    from tfexport.bundle.reader import Bundle
    from tfexport.decoding.request_options import InputFormat

RANDOM_SENTENCES = 512
"""The largest number of random sentences if there is no input."""


@common_options("--beside --precision --threads --batch-size --beam --tokens --sentences --rounds -o --json")
@with_options
def bench(
    directory: BundleDir,
    source: Annotated[
        Path | None,
        typer.Argument(metavar="INPUT", help="One sentence per line; - reads stdin. By default random ids."),
    ] = None,
    *,
    measured: BenchOptions,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=FOLDER]",
            help="torch, ctranslate2=FOLDER, hugging-face=FOLDER or optimum=FOLDER; may be repeated.",
        ),
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="The Python interpreter of a contestant; may be repeated."),
    ] = None,
    input_format: InputFormatOption = None,
    as_json: AsJson = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Also write all numbers to this file, as JSON."),
    ] = None,
) -> None:
    """Measure speed, memory and distance to the machine's limit, beside the alternatives, interleaved.

    Each contestant runs in a process of its own and in its best configuration of workers and threads.
    benchmarks/peers/converters.py writes the folders.
    """
    from tfexport.bench.contestants import contestants_of
    from tfexport.bench.plan import Plan
    from tfexport.bench.report import EXPLANATION, cell_lines, heading
    from tfexport.bench.run import run
    from tfexport.bundle.reader import open_bundle

    plan = Plan(
        precisions=measured.precisions,
        threads=measured.threads,
        batches=tuple(batch or None for batch in measured.batches),
        beams=measured.beams,
        tokens=None if measured.free else measured.tokens,
        max_length=measured.max_length,
        rounds=measured.rounds,
        sentences=measured.sentences,
    )
    bundle = open_bundle(directory)
    contestants = contestants_of(directory, beside or [], python or [])

    def show(text: str) -> None:
        if not as_json:
            print(text, flush=True)

    sources = sentences_of(bundle, source, input_format)
    record: dict[str, Any] = {}

    def begun(facts: dict[str, Any]) -> None:
        record.update(facts)  # includes the growing list of cells
        show(heading(facts))

    def done(cell: dict[str, Any]) -> None:
        keep()
        show("\n".join(cell_lines(cell, plan.tokens)))

    def keep() -> None:
        """Write the rows after each cell, so that an interrupted run keeps its results."""
        if output is not None:
            with writing(output, {}) as out:
                print(json_text(record, indent=1), file=out.file)

    keep()  # also checks that the file can be written
    run(bundle, sources, contestants, plan, begun=begun, done=done, say=say)
    show(f"\n{EXPLANATION}")
    if as_json:
        print(json_text(record, indent=1))


def sentences_of(bundle: Bundle, source: Path | None, input_format: InputFormat | None) -> list[list[int]]:
    """The encoder ids of the lines of `source` that can be decoded, or random ids without a `source`.

    Raises:
        TfexportError: no line can be decoded.
    """
    from tfexport.bench.plan import random_sources
    from tfexport.decoding.line_reader import Reader, Unreadable

    if source is None:
        return random_sources(bundle.config, RANDOM_SENTENCES)
    reader, sentences, unreadable = Reader.of(bundle, input_format), [], 0
    with opened(source) as file:
        for line in file:
            try:
                sentences.append(reader.ids(line))
            except Unreadable:
                unreadable += 1
    if not sentences:
        raise TfexportError(f"{source} has no line that can be decoded. Give another file.")
    if unreadable:
        say(f"note: {unreadable} lines of {source} cannot be decoded and are left out")
    return sentences
