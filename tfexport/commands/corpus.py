"""`tfexport corpus`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Annotated

import typer

from tfexport.commands.console import say, with_progress
from tfexport.commands.flags import BundleDir
from tfexport.commands.signature import Given, with_options
from tfexport.decoding.options import SearchOptions
from tfexport.decoding.request_options import RuntimeOptions
from tfexport.scale.options import ClusterOptions, CorpusOptions, TranslatorBatches


@with_options
def corpus(
    directory: BundleDir,
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...", help="Parquet, JSON lines or text (.gz, .zst): paths, globs, folders or URIs."
        ),
    ],
    output: Annotated[str, typer.Option("-o", "--output", metavar="OUT", help="The folder of the output files.")],
    *,
    corpus: CorpusOptions,
    search: Given[SearchOptions],
    runtime: RuntimeOptions,
    batches: TranslatorBatches,
    cluster: ClusterOptions,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run of the same command.")] = False,
) -> None:
    """Translate whole corpora with Ray: a row of output for each row of input, in parts.

    A row that cannot be decoded is marked by its status, and counted. A run that was killed goes on with --resume.
    """
    from tfexport.scale.manifest import Manifest, Output
    from tfexport.scale.run import inputs_of, run
    from tfexport.scale.storage import Place, inputs

    found = inputs_of(inputs(source), corpus.text_column)
    out = Output(Place.of(output), corpus.output_format or found[0].format)
    options = {**search, **asdict(runtime), **asdict(batches)}
    manifest = Manifest.of(directory, options, corpus, found, out.format)
    manifest.begin(out, resume=resume)
    counts: Counter[str] = Counter()
    bundle = str(directory.absolute())
    for done in with_progress(run(manifest, out, corpus.text_column, bundle, options, cluster), "translating shards"):
        counts.update(done.statuses)
    statuses = ", ".join(f"{count:,} {status}" for status, count in counts.most_common())
    say(f"{sum(counts.values()):,} rows in {output}" + (f": {statuses}" if statuses else ""))
