"""`tfexport bench`: its flags, and how they become a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tfexport.commands.console import opened, say
from tfexport.commands.flags import AsJson, BundleDir, InputFormatOption, MaxLength, numbers_of
from tfexport.commands.output import writing
from tfexport.contract import precisions_of
from tfexport.errors import TfexportError
from tfexport.system.json_text import json_text

if TYPE_CHECKING:
    from tfexport.bundle.reader import Bundle
    from tfexport.decoding.line_reader import InputFormat

RANDOM_SENTENCES = 512
"""Most sentences that are made up where there is no input."""


def bench(
    directory: BundleDir,
    source: Annotated[
        Path | None, typer.Argument(metavar="[INPUT]", help="A sentence a line; - reads stdin. By default random ids.")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, int8 and the like, or several.")] = "fp32",
    threads: Annotated[str, typer.Option(help="CPU threads, or several numbers of them.")] = "1",
    batch_size: Annotated[
        str, typer.Option(help="Sentences decoded together, or several; best: what suits each contestant.")
    ] = "1,8,32",
    beam: Annotated[str, typer.Option(help="Beam width, or several.")] = "1",
    tokens: Annotated[int, typer.Option(min=1, help="Every output has exactly so many tokens.")] = 32,
    free: Annotated[bool, typer.Option("--free", help="Outputs end as the model ends them instead.")] = False,
    max_length: MaxLength = 256,
    sentences: Annotated[
        int | None, typer.Option(min=1, help="Decoded in a cell; by default at least a batch for each thread.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 5,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=FOLDER]",
            help="torch, torch-compiled, ctranslate2=FOLDER, hugging-face=FOLDER or optimum=FOLDER; may be repeated.",
        ),
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="The interpreter that runs a contestant; may be repeated."),
    ] = None,
    input_format: InputFormatOption = None,
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write all numbers here too, as JSON.")] = None,
) -> None:
    """Measure speed, memory and distance to the machine's limit, beside the alternatives, interleaved.

    Each contestant runs in a process of its own and in its best configuration of workers and threads.
    benchmarks/converters.py writes the folders.
    """
    from tfexport.bench.contestants import contestants_of
    from tfexport.bench.plan import Plan
    from tfexport.bench.report import EXPLANATION, cell_lines, heading
    from tfexport.bench.run import run
    from tfexport.bundle.reader import open_bundle

    batches = batch_size.split(",")
    plan = Plan(
        precisions=precisions_of(precision),
        threads=numbers_of("--threads", threads),
        batches=tuple(None if one.strip() == "best" else numbers_of("--batch-size", one)[0] for one in batches),
        beams=numbers_of("--beam", beam),
        tokens=None if free else tokens,
        max_length=max_length,
        rounds=rounds,
        sentences=sentences,
    )
    bundle = open_bundle(directory)
    contestants = contestants_of(directory, beside or [], python or [])

    def show(text: str) -> None:
        if not as_json:
            print(text, flush=True)

    sources = sentences_of(bundle, source, input_format)
    record: dict[str, Any] = {}

    def begun(facts: dict[str, Any]) -> None:
        record.update(facts)  # with the list of cells, which grows
        show(heading(facts))

    def done(cell: dict[str, Any]) -> None:
        keep()
        show("\n".join(cell_lines(cell, plan.tokens)))

    def keep() -> None:
        """After each cell: a run that is cut short leaves what it found."""
        if output is not None:
            with writing(output, {}) as out:
                print(json_text(record, indent=1), file=out.file)

    keep()  # also to see whether it can be written
    run(bundle, sources, contestants, plan, begun=begun, done=done, say=say)
    show(f"\n{EXPLANATION}")
    if as_json:
        print(json_text(record, indent=1))


def sentences_of(bundle: Bundle, source: Path | None, input_format: InputFormat | None) -> list[list[int]]:
    """The encoder ids of the lines of `source` that can be decoded, or random ones where there is no `source`.

    Raises:
        TfexportError: none can be decoded.
    """
    from tfexport.bench.plan import random_sources
    from tfexport.decoding.line_reader import Reader, Unreadable, without_bom

    if source is None:
        return random_sources(bundle.config, RANDOM_SENTENCES)
    reader, found, unreadable = Reader.of(bundle, input_format), [], 0
    with opened(source) as file:
        for line in without_bom(file):
            try:
                found.append(reader.ids(line))
            except Unreadable:
                unreadable += 1
    if not found:
        raise TfexportError(f"{source} has no line that can be decoded. Give another file.")
    if unreadable:
        say(f"note: {unreadable} lines of {source} cannot be decoded and are left out")
    return found
