"""`tfexport attend`."""

from __future__ import annotations

import contextlib
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import typer

from tfexport.commands.console import say, warned
from tfexport.commands.flags import BundleDir, InputFormatOption, Threads
from tfexport.commands.help import common_options
from tfexport.commands.signature import with_options
from tfexport.decoding.request_options import MapOptions, RuntimeOptions
from tfexport.errors import TfexportError
from tfexport.system.input_files import opened, require_one_stdin


@common_options("-o --layer --head --lines --runtime --precision --beam --max-length --input-format --target-format")
@with_options
def attend(
    directory: BundleDir,
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="One sentence per line; - reads stdin.")],
    target: Annotated[
        Path | None,
        typer.Argument(metavar="TARGETS", help="One output for each line; by default the sentences are decoded."),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The file to write: an .html page or a .png picture.")
    ] = Path("attention.html"),
    *,
    drawn: MapOptions,
    runtime: RuntimeOptions,
    beam: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Beam width of the decoding; 1 by default.")
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Largest number of tokens to generate, eos included; 256 by default."),
    ] = None,
    input_format: InputFormatOption = None,
    target_format: Annotated[
        Literal["text", "tokens", "ids"] | None,
        typer.Option(help="Format of TARGETS; ids are without bos, and with eos if the output ends with it."),
    ] = None,
    threads: Threads = None,
) -> None:
    """Draw the attention of output tokens to their sources, by layer and head, from the exported graph.

    This needs a bundle that was exported with --alignments, or the runtime torch.
    """
    from dataclasses import replace

    from tfexport.bundle.reader import open_bundle
    from tfexport.decoding.attention_maps import (
        Attention,
        MapSelection,
        attention_maps,
        labels_of,
        png,
        require_drawable,
    )
    from tfexport.decoding.attention_page import page
    from tfexport.decoding.job import Job, Request, Setup, whole_outputs
    from tfexport.option import Given
    from tfexport.runtimes import load_runtime

    _require_format(output)
    if target is not None and (beam is not None or max_length is not None):
        raise TfexportError("--beam and --max-length are for decoding, but TARGETS are given. Leave them out.")
    require_one_stdin(source, target or Path())
    bundle = open_bundle(directory)
    search = Given({"beam": beam, "max_length": max_length}) if target is None else whole_outputs(bundle.config)
    setup = Setup.of(bundle, Request(search=search, input_format=input_format, output_format=target_format))
    setup, writer = replace(setup, reader=replace(setup.reader, tells_tokens=True)), setup.writer
    model = load_runtime(runtime.runtime, bundle, precision=runtime.number_format, threads=threads)
    job = Job(setup=setup, runtime=model, batch_size=1, window=1)
    selection = MapSelection(drawn.layer, drawn.head)
    sentences, sizes = [], []
    with opened(source) as lines, opened(target) if target else contextlib.nullcontext() as targets:
        outputs = writer.reader(whole=True, lines=targets) if targets is not None else None
        for result in islice(warned(job.lines(lines, outputs=outputs)), drawn.lines):
            if not result.hypotheses:
                continue
            assert result.source is not None
            assert result.source.tokens is not None
            ids = result.hypotheses[0].ids
            sizes.append((len(result.source.ids), len(ids)))
            require_drawable(bundle.config, sizes)
            weights = attention_maps(model, result.source.ids, ids)
            sentences.append(Attention(result.source.tokens.words, labels_of(ids, writer.tokenizer), weights))
        if next(lines, None) is not None:
            say(f"note: further lines are not drawn: --lines is {drawn.lines}")
    if not sentences:
        raise TfexportError("the input has no line that can be decoded. Give real sentences.")
    is_png = output.suffix == ".png"
    name = directory.resolve().name
    _write(output, png(sentences, selection) if is_png else page(name, sentences, selection).encode())
    say(f"wrote {output}")


def _write(output: Path, content: bytes) -> None:
    try:
        output.write_bytes(content)
    except OSError as error:
        raise TfexportError(f"cannot write {output}: {error.strerror}. Give another file with -o.") from error


def _require_format(output: Path) -> None:
    """Raises TfexportError if the file cannot be drawn, before the long work begins."""
    from tfexport.decoding.attention_maps import NO_PNG
    from tfexport.system.imports import figure_class

    if output.suffix not in (".html", ".png"):
        raise TfexportError(f"{output} is neither .html nor .png. Give one of them with -o.")
    if output.suffix == ".png":
        figure_class(NO_PNG)
