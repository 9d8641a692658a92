"""`tfexport score`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tfexport.commands.console import say, warned, with_progress
from tfexport.commands.flags import BundleDir, InputFormatOption, OutputFile, Resume
from tfexport.commands.help import common_options
from tfexport.commands.output import content_of, refuse_to_replace, writing
from tfexport.commands.signature import with_options
from tfexport.decoding.request_options import BatchOptions, RuntimeOptions
from tfexport.system.input_files import opened, require_one_stdin
from tfexport.system.json_text import json_text

if TYPE_CHECKING:
    from tfexport.decoding.translate import Result, Writer

Text = Annotated[Path, typer.Argument(metavar="SOURCES", help="One sentence per line; - reads stdin.")]


@common_options(
    "-o --runtime --precision --batch-size --workers --threads --input-format --target-format --json --resume"
)
@with_options
def score(
    directory: BundleDir,
    source: Text,
    target: Annotated[Path, typer.Argument(metavar="TARGETS", help="Translations of SOURCES, line by line.")],
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
    from tfexport.decoding.job import Job, Request, Setup, whole_outputs
    from tfexport.decoding.translate import scored

    require_one_stdin(source, target)
    refuse_to_replace(output, source, target, bundle=directory)
    bundle = open_bundle(directory)
    request = Request(search=whole_outputs(bundle.config), input_format=input_format, output_format=target_format)
    job = Job.load(Setup.of(bundle, request), runtime, batches)
    reader, writer = job.setup.reader, job.setup.writer
    about = {
        "bundle": file_sha256(directory / MANIFEST),
        "runtime": runtime.runtime,
        "precision": job.runtime.precision,
        "input": [str(source), reader.format],
        "outputs": [content_of(target), writer.format],
        "output": "json" if as_json else "text",
    }
    with (
        opened(source) as lines,
        opened(target) as targets,
        writing(output, about, resume=resume, window=job.lines_at_once) as out,
    ):
        results = job.lines(lines, outputs=writer.reader(whole=True, lines=targets), done=out.done)
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
    (output,) = result.hypotheses
    steps = " ".join(f"{step:.6f}" for step in output.token_log_probs)
    return f"{output.log_prob:.6f}\t{steps}"
