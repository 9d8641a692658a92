"""Input lines, output files, progress, warnings and reports of the command line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from tfexport.contract import short_name

if TYPE_CHECKING:
    from pathlib import Path

    from tfexport.bundle.reader import Engine
    from tfexport.contract import Precision
    from tfexport.exporter.engine_plan import PlanCost
    from tfexport.exporter.pipeline import Exported
    from tfexport.graph_checks.check import GraphCheck
    from tfexport.graph_checks.gate import Agreement
    from tfexport.models.checkpoints.load import Checkpoint, Inspection
    from tfexport.serving.triton import Repository
    from tfexport.verification.expected_decoding import ExpectedReport
    from tfexport.verification.files import Mismatch
    from tfexport.verification.invariance import Invariance
    from tfexport.verification.parity import Comparison
    from tfexport.verification.probe import Probe
    from tfexport.verification.report import ParityReport

Item = TypeVar("Item")


class Line(Protocol):
    """The result of an input line."""

    @property
    def line(self) -> int: ...
    @property
    def status(self) -> str: ...
    @property
    def message(self) -> str: ...


Marked = TypeVar("Marked", bound=Line)


def say(text: str) -> None:
    """Print a note, warning or error to stderr, so that it never mixes with results."""
    print(text, file=sys.stderr)


def with_progress(
    items: Iterable[Item], description: str, *, rows: Callable[[Item], int] | None = None
) -> Iterator[Item]:
    """Yield `items` and show their number on stderr, only on a terminal, and not between lines of output.

    Args:
        rows: the number of rows of a part, where items are parts of a command that prints no lines.
    """
    if not sys.stderr.isatty() or (rows is None and sys.stdout.isatty()):
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    text = "{task.description} {task.completed:,}"
    if rows is not None:
        text = "{task.description}: {task.fields[rows]:,} rows in {task.completed:,} parts"
    with Progress(SpinnerColumn(), TextColumn(text), TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task, count = progress.add_task(description, total=None, rows=0), 0
        for item in items:
            yield item
            count += rows(item) if rows is not None else 0
            progress.update(task, advance=1, rows=count)


@contextlib.contextmanager
def working(description: str) -> Iterator[None]:
    """Show on stderr, only on a terminal, that a long task is running."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(description):
        yield


def warned(results: Iterator[Marked], *, most: int = 10) -> Iterator[Marked]:
    """Warn of lines with a problem: a message for each of the first ones, then their number."""
    problems: dict[str, int] = {}
    lines = 0
    for result in results:
        lines += 1
        if result.message:
            problems[result.status] = problems.get(result.status, 0) + 1
            if sum(problems.values()) <= most:
                say(f"warning: line {result.line}: {result.status}: {result.message}")
        yield result
    if problems:
        counts = ", ".join(f"{count} {status}" for status, count in sorted(problems.items()))
        say(f"warning: of {lines} lines: {counts}; --output-format jsonl marks them")


def print_inspection(inspection: Inspection) -> None:
    """Print the result of `tfexport inspect` for people."""
    print(f"{inspection.path}: family {inspection.family}, {inspection.about}")
    print(f"parameters: {inspection.n_parameters:,}")
    for name, value in inspection.fields.items():
        print(f"  {name}: {value}")
    for note in inspection.notes:
        print(f"note: {note}")
    if inspection.ignored:
        print(f"ignored: {', '.join(inspection.ignored)}")
    for problem in inspection.problems:
        print(f"problem: {problem}")
    for name, flag in inspection.missing.items():
        print(f"not in the file: {name} (give {flag})")
    print("vocabulary: known" if inspection.vocabulary else "vocabulary: none (give --src-vocab and --tgt-vocab)")
    print(f"these settings are {inspection.confirmation.text}")


def print_export(loaded: Checkpoint, exported: Exported) -> None:
    """Print what was exported, with notes for the user."""
    for note in loaded.notes:
        say(f"note: {note}")
    if loaded.ignored:
        say(f"note: left out {', '.join(loaded.ignored)}, as --ignore says")
    if loaded.tokenizers.source is None or (loaded.tokenizers.target is None and not loaded.config.is_classifier):
        say("note: a side has no vocabulary and is decoded as ids only; --src-vocab and --tgt-vocab add them")
    for name, choice in exported.choices.items():
        print("\n".join(choice.summary(short_name(name))))
    print(f"exported {exported.directory}: family {loaded.family}")
    for precision, value in exported.closest.items():
        print(
            f"  {short_name(precision)} graphs equal our reading: errors reach {value.share:.0%} of the allowed rounding "
            f"error ({value.error:.1e} of {value.allowed:.1e}: {value.about})"
        )
        if precision != "float32" and precision in exported.agreements:
            _print_agreement(precision, exported.agreements[precision], exported.directory)
    if not exported.closest:
        print("  graphs were not compared with our reading")
    print(f"  our reading of {loaded.path.name} is {loaded.confirmation.text}")


def _print_agreement(precision: Precision, agreement: Agreement, directory: Path) -> None:
    """Print how often a precision chooses the token of float32, and warn if it is seldom."""
    name = short_name(precision)
    about = f"the token of float32 at {agreement.same} of {agreement.steps} steps of random sentences"
    print(f"  {name} chooses {about}")
    if agreement.is_low:
        say(
            f"warning: {name} chooses {about}. Compare it on your own text with tfexport parity {directory} INPUT, or leave "
            f"{name} out of --precision"
        )


def print_repository(repository: Repository, precision: Precision) -> None:
    """Print the Triton model repository that was written."""
    for note in repository.notes:
        say(f"note: {note}")
    print(f"wrote {repository.directory} in {short_name(precision)}: {', '.join(repository.models)}")


def print_graphs(checks: Sequence[GraphCheck], *, bisect: bool) -> None:
    """Print the result of `tfexport parity` for the graphs of a precision: wrong graphs, or all with `--bisect`."""
    wrong = [check for check in checks if check.first is not None]
    for check in checks if bisect else wrong:
        file = f"{check.file}{' with kernels' if check.with_kernels else ''}"
        value = check.largest
        if check.first is None:
            print(
                f"{file}: all {len(check.values)} values match PyTorch; closest to its limit: {value.about}, "
                f"off by {value.error:.1e} of {value.allowed:.1e}"
            )
            continue
        first, index = check.first, check.values.index(check.first)
        if check.is_broken:
            print(f"{file}: {first.about}")
            continue
        print(f"{file}: departs from PyTorch at {first.node}")
        print(
            f"  {first.about}: off by {first.error:.1e}, {first.allowed:.1e} is allowed (PyTorch's own is {first.own:.1e})"
        )
        if bisect:
            print(f"  {index} values before it are right")
    files = len({check.file for check in checks})
    if checks and not wrong and not bisect:
        print(f"  {files} graphs match their definition, value by value")


def print_mismatches(mismatches: Sequence[Mismatch]) -> None:
    """Print the differences between a bundle's files and its model."""
    for mismatch in mismatches[:MOST_MISMATCHES]:
        print(f"{mismatch}")
    if len(mismatches) > MOST_MISMATCHES:
        print(f"and {len(mismatches) - MOST_MISMATCHES} more")


def print_verdict(comparison: Comparison, arranged: Sequence[Invariance]) -> None:
    """Print the last line of `tfexport parity`: the verdict, and the parts that failed."""
    graphs: dict[str, bool] = {}
    for check in (check for checks in comparison.graphs.values() for check in checks):  # two per graph with kernels
        graphs[check.file] = graphs.get(check.file, True) and check.first is None
    parts = {
        "comparisons of outputs": [report.passed for report in comparison.reports],
        "comparisons with expected outputs": [report.passed for report in comparison.expected],
        "graphs": [*graphs.values()],
        "comparisons of batches": [invariance.passed for invariance in arranged],
    }
    wrong = [f"{passed.count(False)} of {len(passed)} {name}" for name, passed in parts.items() if not all(passed)]
    if comparison.mismatches:
        count = len(comparison.mismatches)
        wrong.append(f"{count} difference{'s' if count > 1 else ''} in the files")
    print(f"FAILED: {', '.join(wrong)}" if wrong else "PASSED")


MOST_MISMATCHES = 20
"""The largest number of mismatches in the text output; JSON has all."""


def print_invariance(invariance: Invariance) -> None:
    """Print the result of `tfexport parity --invariance` for a runtime."""
    print(
        f"{invariance.runtime} in {short_name(invariance.precision)}, beam {invariance.beam}: "
        f"{invariance.sentences} sentences, compared with each alone"
    )
    for arrangement in invariance.arrangements:
        about = (
            f"{arrangement.identical} with the same tokens, {arrangement.exact} of them to the last bit of the score"
        )
        ties = f", {arrangement.ties} ties" if arrangement.ties else ""
        print(f"  {arrangement.name:<15} {arrangement.error or about + ties}")
    print(f"  {'PASSED' if invariance.passed else 'FAILED'} (other tokens only if the scores tie)")


MOST_DIVERGENCES = 10
"""The largest number of different sentences in the text output, the worst first; JSON has all."""


def print_parity(report: ParityReport) -> None:
    """Print the result of `tfexport parity` for people."""
    print(f"{report.runtime} in {short_name(report.precision)} against PyTorch in {report.reference}:")
    print(f"  {report.sentences} sentences, {report.steps} steps, beam {report.beam}")
    for name, errors in report.cross.items():
        print(f"  {name:<16} max {errors.error:.1e}  (PyTorch's own rounding {errors.own:.1e})")
    logits = report.logits
    print(
        f"  {'logits':<16} max {logits.error:.1e}  (PyTorch's own rounding {logits.own:.1e})  KL {report.divergence:.1e}"
    )
    print(f"  best token the same at {report.top1_agree} of {report.steps} steps")
    print(f"  decoded tokens the same in {report.identical} of {report.sentences} sentences")
    if report.quality is not None:
        reference, own = report.quality
        print(f"  BLEU {own.bleu:.2f} (PyTorch {reference.bleu:.2f}), chrF {own.chrf:.2f} ({reference.chrf:.2f})")
    for divergence in sorted(report.divergences, key=lambda divergence: -divergence.margin)[:MOST_DIVERGENCES]:
        unit = "in log-probability" if report.beam == 1 else "in score"
        reason = ""
        if report.precision == "float32":
            reason = f", {'within' if report.is_tie(divergence) else 'beyond'} the allowed error"
        print(
            f"  sentence {divergence.sentence} differs from token {divergence.step} on: "
            f"{divergence.found} instead of {divergence.wanted}; "
            f"PyTorch prefers its own by {divergence.margin:.1e} {unit}{reason}"
        )
    if len(report.divergences) > MOST_DIVERGENCES:
        ties = f"; {report.ties} in all are within the allowed error" if report.precision == "float32" else ""
        print(f"  and {len(report.divergences) - MOST_DIVERGENCES} more sentences, closer ones{ties}")
    if report.divergences:
        print(
            f"  PyTorch prefers its own outputs by {report.loss:.1e} nats per token on average over all sentences, "
            f"by {report.furthest:.1e} at most"
        )
    print(f"  {'PASSED' if report.passed else 'FAILED'}")
    for failure in report.failures:
        print(f"    {failure}")


def print_expected(report: ExpectedReport) -> None:
    """Print what `tfexport parity --expect` says of a runtime."""
    variant = f"{report.runtime} in {short_name(report.precision)}"
    print(f"{variant}: {report.right} of {report.total} expected outputs of {report.path}")
    for difference in report.differences[:MOST_DIVERGENCES]:
        print(f"  {difference}")
    if len(report.differences) > MOST_DIVERGENCES:
        print(f"  and {len(report.differences) - MOST_DIVERGENCES} more lines")
    print(f"  {'PASSED' if report.passed else 'FAILED'}")


def print_probe(probe: Probe) -> None:
    """Print the result of `tfexport probe` for people."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    marks = {True: "[green]passed", False: "[bold red]FAILED", None: ""}
    table = Table(box=None, show_header=False, pad_edge=False, expand=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(overflow="fold")
    for check in probe.checks:
        error = "" if check.error is None else f"{check.error:.1e}"
        table.add_row(marks[check.passed], check.name, error, Text(check.about))
    console = Console(width=None if sys.stdout.isatty() else 10_000)
    with console.capture() as shown:
        console.print(table)
    print(f"{probe.path}: family {probe.family}")
    print("\n".join(line.rstrip() for line in shown.get().splitlines()))
    failed = [check.name for check in probe.checks if check.passed is False]
    print(f"FAILED: {', '.join(failed)}" if failed else "PASSED: it can be exported with the same flags")


def print_plan(cost: PlanCost) -> None:
    """Print the cost of engines, before they are built."""
    plan = cost.plan
    print(
        f"plan for {short_name(cost.precision)}: batches to {plan.max_batch}, beams to {plan.max_beam}, sources to "
        f"{plan.max_source} ids with padding, caches of {', '.join(map(str, plan.cache))} slots"
    )
    for part, size in cost.memory.items():
        print(f"  {part:<36} {size / 2**20:10.1f} MiB")
    print(
        f"  {'in all, of the GPU memory':<36} {sum(cost.memory.values()) / 2**20:10.1f} MiB of {cost.limit / 2**20:.0f}"
    )
    seconds = "some minutes each, timed on the GPU" if cost.seconds is None else f"about {cost.seconds:.0f} s"
    print(f"  to build: {cost.engines} engines, about {cost.disk / 2**20:.0f} MiB on disk, {seconds}")


def print_engine(engine: Engine, size: int) -> None:
    """Print one engine that was built."""
    print(f"built {engine.about}: {size / 2**20:.1f} MiB in {engine.seconds:.1f} s ({engine.library} {engine.version})")
