"""`tfexport score`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tfexport.commands.console import say, warned, with_progress
from tfexport.commands.flags import BundleDir, InputFormatOption, OutputFile, Resume
from tfexport.commands.output import content_of, refuse_to_replace, writing
from tfexport.commands.signature import with_options
from tfexport.decoding.request_options import BatchOptions, RuntimeOptions
from tfexport.system.input_files import opened, require_one_stdin
from tfexport.system.json_text import json_text

if TYPE_CHECKING:
    from tfexport.decoding.translate import Result, Writer

Text = Annotated[Path, typer.Argument(help="One sentence per line; - reads stdin.")]


@with_options
def score(
    directory: BundleDir,
    source: Text,
    target: Annotated[Path, typer.Argument(help="Translations of SOURCES, line by line.")],
    output: OutputFile = None,
    *,
    runtime: RuntimeOptions,
    batches: BatchOptions,
    input_format: InputFormatOption = None,
    target_format: Annotated[
        Literal["text", "tokens", "ids"] | None,
        typer.Option(help="Format of the translations; ids are without bos, and with eos if the output ends with it."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON record per line, with status, tokens and ids.")
    ] = False,
    resume: Resume = False,
) -> None:
    """Score given translations: the log-probability of each line and of each of its tokens, eos last.

    A line that cannot be read gives an empty line and a warning; --json has its status.
    """
    from tfexport.bundle.reader import MANIFEST, file_sha256, open_bundle
    from tfexport.decoding.line_reader import Reader
    from tfexport.decoding.translate import Writer, scored, translate, window_size
    from tfexport.decoding.workers import CpuSplit
    from tfexport.runtimes import load_runtime, require_workers, takes_workers
    from tfexport.search.search import SearchOptions

    require_one_stdin(source, target)
    refuse_to_replace(output, source, target, bundle=directory)
    bundle = open_bundle(directory)
    name, chosen = runtime.runtime, runtime.number_format
    reader, writer = Reader.of(bundle, input_format), Writer.of(bundle, target_format)
    split = CpuSplit.choose(batches.workers, batches.threads, at_once=takes_workers(name, bundle, chosen))
    require_workers(name, bundle, chosen, split.workers)
    model = load_runtime(name, bundle, precision=chosen, threads=split.threads, share_weights=batches.share_weights)
    options = SearchOptions(length_penalty=0.0, max_length=bundle.config.max_target_length, token_scores=True)
    about = {
        "bundle": file_sha256(directory / MANIFEST),
        "runtime": name,
        "precision": model.precision,
        "input": [str(source), reader.format],
        "outputs": [content_of(target), writer.format],
        "output": "json" if as_json else "text",
    }
    window = window_size(batches.batch_size, split.workers)
    with (
        opened(source) as lines,
        opened(target) as targets,
        writing(output, about, resume=resume, window=window) as out,
    ):
        results = translate(
            model,
            reader,
            lines,
            options,
            batch_size=batches.batch_size,
            window=window,
            workers=split.workers,
            done=out.done,
            outputs=writer.reader(whole=True, lines=targets),
        )
        with_unknown = 0
        for result in warned(with_progress(map(scored, results), "scoring lines")):
            with_unknown += writer.has_unknown(result)
            print(_line(result, writer, as_json), file=out.file)
        if with_unknown and writer.format != "ids":
            say(
                f"warning: {with_unknown} translations have words that the target vocabulary lacks. They are scored as its "
                "unknown token: give the translations as the model writes them, in its case and tokenisation"
            )


def _line(result: Result, writer: Writer, as_json: bool) -> str:
    if as_json:
        return json_text(writer.score_record(result), ensure_ascii=False)
    if not result.hypotheses:
        return ""
    (found,) = result.hypotheses
    steps = " ".join(f"{step:.6f}" for step in found.token_log_probs)
    return f"{found.log_prob:.6f}\t{steps}"
