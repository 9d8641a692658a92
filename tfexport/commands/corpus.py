"""`tfexport corpus`, `corpus-score` and `corpus-classify`."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from tfexport.commands.console import say, with_progress
from tfexport.commands.flags import BundleDir
from tfexport.commands.help import common_options
from tfexport.commands.signature import with_options
from tfexport.decoding.request_options import RuntimeOptions
from tfexport.option import Given, declared
from tfexport.scale.options import (
    ActorBatches,
    ActorOptions,
    ClassOptions,
    ClusterOptions,
    CorpusOptions,
    PairColumns,
    ScoreOptions,
    TextColumn,
)
from tfexport.search.options import SearchOptions

if TYPE_CHECKING:
    from tfexport.scale.manifest import Task

Sources = Annotated[
    list[str],
    typer.Argument(metavar="INPUT", help="Parquet, JSON lines or text (.gz, .zst): paths, globs, folders or URIs."),
]
OutputFolder = Annotated[str, typer.Option("-o", "--output", metavar="OUT", help="The folder of the output files.")]
ResumeRun = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run of the same command.")]


@common_options("-o --text-column --beam --runtime --precision --batch-size --actors --gpus --address --resume")
@with_options
def corpus(
    directory: BundleDir,
    source: Sources,
    output: OutputFolder,
    *,
    column: TextColumn,
    corpus: CorpusOptions,
    search: Given[SearchOptions],
    runtime: RuntimeOptions,
    batches: ActorBatches,
    cluster: ClusterOptions,
    resume: ResumeRun = False,
) -> None:
    """Translate whole corpora with Ray: a row of output for each row of input, in parts.

    A row that cannot be decoded is marked by its status, and counted. A run that was killed goes on with --resume.
    """
    from tfexport.scale.manifest import Task
    from tfexport.scale.translator import Translator

    options = {**asdict(column), **search, **asdict(runtime), **asdict(batches)}
    task = Task(Translator, directory.absolute(), options)
    _run(task, source, output, column, corpus, cluster, resume=resume, about="translating")


@common_options("-o --source-column --target-column --reverse --runtime --precision --actors --gpus --address --resume")
@with_options
def corpus_score(
    directory: BundleDir,
    source: Sources,
    output: OutputFolder,
    *,
    columns: PairColumns,
    corpus: CorpusOptions,
    scores: ScoreOptions,
    runtime: RuntimeOptions,
    batches: ActorBatches,
    cluster: ClusterOptions,
    resume: ResumeRun = False,
) -> None:
    """Score parallel corpora with Ray, for example to filter them: a row of output for each row of input, in parts.

    All columns are kept, and scores are added. A row that cannot be scored is marked by its status, and counted.
    """
    from tfexport.scale.manifest import Task
    from tfexport.scale.scorer import Scorer

    reverse = None if scores.reverse is None else scores.reverse.absolute()
    options = {**asdict(columns), **asdict(scores), **asdict(runtime), **asdict(batches), "reverse": reverse}
    task = Task(Scorer, directory.absolute(), options)
    _run(task, source, output, columns, corpus, cluster, resume=resume, about="scoring")


@common_options("-o --text-column --top --labels --runtime --precision --actors --gpus --address --resume")
@with_options
def corpus_classify(
    directory: BundleDir,
    source: Sources,
    output: OutputFolder,
    *,
    column: TextColumn,
    corpus: CorpusOptions,
    classes: ClassOptions,
    runtime: RuntimeOptions,
    actor: ActorOptions,
    cluster: ClusterOptions,
    resume: ResumeRun = False,
) -> None:
    """Classify the rows of whole corpora with Ray: a row of output for each row of input, in parts.

    All columns are kept, and classes are added. A row that cannot be read is marked by its status, and counted.
    """
    from tfexport.scale.classifier import Classifier
    from tfexport.scale.manifest import Task

    labels = None if classes.labels is None else classes.labels.absolute()
    options = {**asdict(column), **asdict(classes), **asdict(runtime), **asdict(actor), "labels": labels}
    task = Task(Classifier, directory.absolute(), options)
    _run(task, source, output, column, corpus, cluster, resume=resume, about="classifying")


def _run(
    task: Task,
    source: list[str],
    output: str,
    columns: TextColumn | PairColumns,
    corpus: CorpusOptions,
    cluster: ClusterOptions,
    *,
    resume: bool,
    about: str,
) -> None:
    """Compute the rows of inputs.

    Args:
        columns: that are read.
        about: what the progress bar says.
    """
    from tfexport.scale.cluster import disconnect
    from tfexport.scale.driver_lock import only_driver
    from tfexport.scale.manifest import Manifest, RunFolder
    from tfexport.scale.run import inputs_of, run
    from tfexport.scale.storage import Place, inputs

    flags = {option.flag: getattr(columns, name) for name, option in declared(type(columns)).items()}
    folder = Place.of(output)
    files = inputs_of(inputs(source, without=folder), flags)
    out = RunFolder(folder, corpus.output_format or files[0].format)
    manifest = Manifest.of(task, corpus, files, out.format)
    if out.format == "text":  # the manifest has the format, and what follows from it is no option that was given
        task = replace(task, options=task.kind.for_text(task.options))
    counts: Counter[str] = Counter()
    with only_driver(out.folder, out.own) as check:
        manifest.begin(out, resume=resume)
        try:
            for done in with_progress(run(manifest, out, task, cluster), about, rows=lambda done: done.shard.rows):
                check()
                counts.update(done.statuses)
        except BaseException as error:
            # The frames of the error hold the run. It ends before the cluster: else Ray Data starts another to end there.
            traceback.clear_frames(error.__traceback__)
            disconnect()  # else Ray tells of its actors while the process ends
            if isinstance(error, KeyboardInterrupt | SystemExit):
                rows = sum(shard.rows for shard in out.done())
                say(f"interrupted: {rows:,} rows are written. Continue with --resume.")
            raise
    statuses = ", ".join(f"{count:,} {status}" for status, count in counts.most_common())
    say(f"{sum(counts.values()):,} rows in {output}" + (f": {statuses}" if statuses else ""))
