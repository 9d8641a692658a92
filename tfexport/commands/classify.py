"""`tfexport classify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tfexport.commands.console import say, warned, with_progress
from tfexport.commands.flags import (
    BatchSize,
    BundleDir,
    Input,
    InputFormatOption,
    OutputFile,
    PrecisionOption,
    Resume,
    Threads,
)
from tfexport.commands.output import content_of, refuse_to_replace, writing
from tfexport.contract import precisions_of
from tfexport.system.input_files import opened
from tfexport.system.json_text import json_text


def classify(
    directory: BundleDir,
    source: Input = None,
    output: OutputFile = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Number of classes for each line, best first.")] = 1,
    labels: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Names of the classes, one per line, class 0 first.")
    ] = None,
    runtime: Annotated[str, typer.Option(metavar="NAME", help="Runtime: ort-cpu or torch.")] = "ort-cpu",
    precision: PrecisionOption = None,
    batch_size: BatchSize = 32,
    input_format: InputFormatOption = None,
    output_format: Annotated[
        Literal["text", "jsonl"],
        typer.Option(help="text: each class and its probability; jsonl: also the status."),
    ] = "text",
    threads: Threads = None,
    resume: Resume = False,
) -> None:
    """Classify sentences with an encoder classifier: always one output line for each input line.

    A line that cannot be read (too long, not UTF-8) gives an empty line and a warning; jsonl has its status.
    """
    from tfexport.bundle.reader import MANIFEST, file_sha256, open_bundle
    from tfexport.decoding.classify import ClassWriter, classify, read_labels
    from tfexport.decoding.line_reader import Reader
    from tfexport.decoding.translate import window_size
    from tfexport.runtimes import load_classifier

    refuse_to_replace(output, source, labels, bundle=directory)
    bundle = open_bundle(directory)
    chosen = precisions_of(precision)[0] if precision else None
    model = load_classifier(runtime, bundle, precision=chosen, threads=threads)
    reader = Reader.of(bundle, input_format)
    names, writer = read_labels(labels, bundle.config.n_classes) if labels else None, ClassWriter()
    if input_format is None and reader.format == "ids":
        say(f"note: {directory} has no source vocabulary: the input is read as ids")
    about = {
        "bundle": file_sha256(directory / MANIFEST),
        "runtime": runtime,
        "precision": chosen,
        "input": [str(source), reader.format],
        "output": [output_format, top, content_of(labels)],
    }
    with opened(source) as lines:
        at_terminal = lines.isatty()  # answer line by line at a terminal
        window = 1 if at_terminal else window_size(batch_size, 1)
        with writing(output, about, resume=resume, window=window) as out:
            results = classify(
                model, reader, lines, top=top, batch_size=batch_size, window=window, done=out.done, labels=names
            )
            for result in warned(with_progress(results, "classifying lines")):
                as_json = output_format == "jsonl"
                line = json_text(writer.record(result), ensure_ascii=False) if as_json else writer.line(result)
                print(line, file=out.file, flush=at_terminal)
