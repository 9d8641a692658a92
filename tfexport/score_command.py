"""`tfexport score`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tfexport.console import opened, require_one_stdin, say, warned, with_progress
from tfexport.contract import precisions_of
from tfexport.json_text import json_text
from tfexport.options import (
    BatchSize,
    BundleDir,
    InputFormatOption,
    PrecisionOption,
    RuntimeOption,
    Threads,
    Workers,
)

Text = Annotated[Path, typer.Argument(help="A sentence a line; - reads stdin.")]


def score(
    directory: BundleDir,
    source: Text,
    target: Annotated[Path, typer.Argument(help="A translation of each of its lines.")],
    runtime: RuntimeOption = "ort-cpu",
    precision: PrecisionOption = None,
    input_format: InputFormatOption = None,
    target_format: Annotated[
        Literal["text", "tokens", "ids"] | None,
        typer.Option(help="Of the translations; ids have no bos, and the eos that they end with."),
    ] = None,
    batch_size: BatchSize = 32,
    workers: Workers = None,
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="A record a line, with status, tokens and ids.")] = False,
) -> None:
    """Tell how likely given translations are: the log-probability of each line and of each of its tokens, eos last.

    A line that cannot be read gives an empty line, a warning, and its status in --json.
    """
    from tfexport.batching import Split
    from tfexport.bundle import open_bundle
    from tfexport.lines import Reader
    from tfexport.runtimes import load_runtime, require_workers, takes_workers
    from tfexport.search import SearchOptions
    from tfexport.translate import Writer, scored, translate

    require_one_stdin(source, target)
    bundle = open_bundle(directory)
    chosen = precisions_of(precision)[0] if precision else None
    reader, writer = Reader.of(bundle, input_format), Writer.of(bundle, target_format)
    split = Split.of(workers, threads, at_once=takes_workers(runtime, bundle, chosen))
    require_workers(runtime, bundle, chosen, split.workers)
    model = load_runtime(runtime, bundle, precision=chosen, threads=split.threads)
    options = SearchOptions(length_penalty=0.0, max_length=bundle.config.max_target_length, token_scores=True)
    with opened(source) as lines, opened(target) as targets:
        results = translate(
            model,
            reader,
            lines,
            options,
            batch_size=batch_size,
            workers=split.workers,
            outputs=writer.reader(whole=True, lines=targets),
        )
        with_unknown = 0
        for result in warned(with_progress(map(scored, results), "scoring lines")):
            with_unknown += writer.has_unknown(result)
            if as_json:
                print(json_text(writer.score_record(result), ensure_ascii=False))
            elif result.hypotheses:
                (found,) = result.hypotheses
                steps = " ".join(f"{step:.6f}" for step in found.token_log_probs)
                print(f"{found.log_prob:.6f}\t{steps}")
            else:
                print()
        if with_unknown and writer.format != "ids":
            say(
                f"warning: {with_unknown} translations have words that the target vocabulary lacks, scored as its unknown "
                "token: give them as the model writes them, in its case and tokenisation"
            )
