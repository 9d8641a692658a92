"""How many planted faults does `tfexport parity` find, and does it pass what is right?

    python -m fuzz.faults.planted [--work FOLDER] [--jobs 2] [--only TEXT] [--no-bisect] [--quick] [--shared ../shared]
    python -m fuzz.faults.planted --clean
    python -m fuzz.faults.planted --hard [--t5-base]

A fault is a changed weight, node, definition, tokenizer or setting in a copy of a bundle, whose manifest then tells the new
sums. `weights.py`, `settings.py`, `graphs.py` and `attention.py` list all. A fault counts as found where the plain verdict
on the copy is not "passed". `--bisect` is to name the place. The exit code is 1 where fewer than 95 % of the faults that can
change an output are found, or where a clean bundle is rejected.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from fuzz.faults.bases import BUILDERS, Base, real
from fuzz.faults.fault import Fault
from fuzz.faults.gate import Prepared, certified, copied, parity, prepare, reason, without_numbers
from fuzz.faults.graphs import graph_faults, planted_into
from fuzz.faults.settings import manifest_faults, tokenizer_faults
from fuzz.faults.weights import weight_faults
from makers.paths import SHARED

WANTED = 0.95
"""Of the faults that can change an output, so many are to be found by the plain verdict."""

Bases = dict[str, Prepared]


@dataclass(frozen=True)
class Outcome:
    """What the gate made of a fault."""

    fault: str
    plain: bool
    """Found by the plain verdict."""
    certified: bool
    """It was certified in its precision all the same."""
    bisect: bool | None = None
    """Found by bisecting; None where that was not asked for."""
    right: bool | None = None
    """Bisecting named its place."""
    said: str = ""
    seconds: float = 0.0
    measured: bool = True
    """Not where the clean bundle is rejected in this precision already."""


def every_fault() -> list[Fault]:
    """The catalogue.

    Raises:
        ValueError: a name is there twice.
    """
    faults = [*weight_faults(), *tokenizer_faults(), *manifest_faults(), *graph_faults()]
    names = [fault.name for fault in faults]
    if len(set(names)) < len(names):
        raise ValueError(f"names twice: {sorted({name for name in names if names.count(name) > 1})}")
    return faults


def measured(fault: Fault, prepared: Prepared, place: Path, *, bisect: bool, quick: bool) -> Outcome:
    """Plant a fault into a copy of a bundle at `place`, and ask the gate."""
    if fault.precision in prepared.alarms:
        return Outcome(fault.name, False, False, said="the clean bundle is rejected", measured=False)
    folder = copied(prepared.bundle, place)
    planted_into(folder, fault)
    own = ["--precision", fault.precision]
    # `--bisect` changes what is printed, and not the verdict.
    flags = [*(["--bisect"] if bisect else []), *(own if quick else prepared.precision_flags())]
    answer = parity(prepared.base, folder, *flags)
    held = certified(folder, fault.precision)
    said = "" if answer.passed else reason(answer)
    if not bisect:
        return Outcome(fault.name, not answer.passed, held, said=said, seconds=answer.seconds)
    news = [line for line in answer.output.splitlines() if without_numbers(line) not in prepared.told]
    named = [line.strip() for line in news if any(place in line for place in fault.places)]
    found = not answer.passed
    return Outcome(
        fault.name,
        found,
        held,
        found,
        found and bool(named),
        said if not found or named else f"{said} // bisect: {' / '.join(line.strip() for line in news[:4])}",
        answer.seconds,
    )


def _in_worker(fault_name: str, prepared: Prepared, place: Path, bisect: bool, quick: bool) -> Outcome:
    torch.set_num_threads(1)
    fault = next(fault for fault in every_fault() if fault.name == fault_name)
    try:
        return measured(fault, prepared, place, bisect=bisect, quick=quick)
    except Exception as error:  # the fault could not be planted: the catalogue is wrong
        return Outcome(fault_name, False, False, said=f"NOT PLANTED: {type(error).__name__}: {error}", measured=False)


def outcomes(
    faults: Sequence[Fault], bases: Bases, work: Path, *, jobs: int, bisect: bool, quick: bool
) -> Iterator[Outcome]:
    """What became of all faults; one that ends the process counts as found."""
    context, waiting = get_context("spawn"), list(faults)
    while waiting:
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            running: dict[Future[Outcome], Fault] = {}
            try:
                while waiting or running:
                    while waiting and len(running) < jobs:
                        fault = waiting.pop(0)
                        place = work / "planted" / fault.name.replace(" ", "_").replace("/", "_")
                        arguments = (fault.name, bases[fault.base], place, bisect, quick)
                        running[pool.submit(_in_worker, *arguments)] = fault
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        outcome = future.result()
                        del running[future]
                        yield outcome
            except BrokenProcessPool:
                first, *others = running.values()
                if others:  # which of them ended the process is told by running each alone
                    jobs, waiting = 1, [first, *others, *waiting]
                else:
                    yield Outcome(first.name, True, False, True if bisect else None, said="the process was ended")


def prepared_bases(names: Sequence[str], work: Path, shared: Path, console: Console, *, bisect: bool) -> Bases:
    """The clean bundles, exported; what the gate says of them is printed."""
    found: Bases = {}
    for name in names:
        folder = work / name
        folder.mkdir(parents=True, exist_ok=True)
        base: Base | None = BUILDERS[name](folder) if name in BUILDERS else real(folder, shared)
        if base is None:
            console.print(f"{name}: its checkpoint is not in {shared}; its faults are left out")
            continue
        found[name] = prepare(base, folder / "bundle", bisect=bisect)
        for precision, said in found[name].alarms.items():
            console.print(f"[red]FALSE ALARM[/red] {name} in {precision}: {said}", highlight=False)
    return found


def mark(value: bool | None) -> str:
    return "" if value is None else "[green]yes" if value else "[red]no"


def report(faults: Sequence[Fault], results: dict[str, Outcome], console: Console) -> float:
    """Print what was found and what escaped; returns the share of the faults found that can change an output."""
    table = Table("fault", "base", "dialect", "plain", "bisect", "place", "certified", "s", box=None)
    counted = [fault for fault in faults if fault.name in results]
    for fault in counted:
        outcome = results[fault.name]
        if outcome.measured:
            marks = (mark(outcome.plain), mark(outcome.bisect), mark(outcome.right))
            held = "[red]yes" if outcome.certified else ""
            name = f"{fault.name}{' (harmless)' if fault.harmless else ''}"
            table.add_row(name, fault.base, fault.dialect, *marks, held, f"{outcome.seconds:.1f}")
    console.print(table)
    for fault in counted:
        outcome = results[fault.name]
        why = f"harmless: {fault.harmless}" if fault.harmless else fault.about
        if not outcome.measured:
            console.print(f"not measured: {fault.name}: {outcome.said}", highlight=False)
        elif not outcome.plain:
            console.print(f"[red]escaped[/red] {fault.name} ({fault.file}): {why}", highlight=False)
        elif outcome.right is False:
            console.print(f"[yellow]misplaced[/yellow] {fault.name}: {outcome.said}", highlight=False, markup=True)
    real_ones = [results[f.name] for f in counted if not f.harmless and results[f.name].measured]
    harmless = [results[f.name] for f in counted if f.harmless and results[f.name].measured]
    total = len(real_ones)
    plain = sum(outcome.plain for outcome in real_ones)
    console.print(f"{total} faults that can change an output: {plain} rejected ({plain / max(1, total):.1%})")
    if any(outcome.bisect is not None for outcome in real_ones):
        found, right = (sum(bool(getattr(o, name)) for o in real_ones) for name in ("bisect", "right"))
        console.print(f"by --bisect: {found} found, {right} with their place named ({right / max(1, total):.1%})")
    held = sum(outcome.certified for outcome in real_ones)
    console.print(
        f"{held} certified all the same; {len(harmless)} harmless ones, {sum(o.plain for o in harmless)} rejected"
    )
    console.print(f"{sum(not results[f.name].measured for f in counted)} not measured")
    return plain / max(1, total)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Planted faults against tfexport parity.")
    parser.add_argument("--work", type=Path, help="where checkpoints and bundles are kept for the next run")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="faults whose name or base has this text")
    parser.add_argument("--base", action="append", help="faults of this checkpoint; may be repeated")
    parser.add_argument("--sample", type=int, default=1, help="every so many faults alone, for a quick look")
    parser.add_argument("--no-bisect", dest="bisect", action="store_false")
    parser.add_argument("--quick", action="store_true", help="compare the fault's own precision alone")
    parser.add_argument("--list", action="store_true", help="print the catalogue")
    parser.add_argument("--clean", action="store_true", help="clean bundles of every kind: is one rejected?")
    parser.add_argument("--hard", action="store_true", help="checkpoints that are right and round badly")
    parser.add_argument("--t5-base", action="store_true", help="with --hard: one of T5-base's size too, 1 GB")
    options = parser.parse_args(arguments)
    console = Console(width=200 if not sys.stdout.isatty() else None)
    faults = [fault for fault in every_fault() if options.only in f"{fault.name} {fault.base}"]
    if options.base:
        faults = [fault for fault in faults if fault.base in options.base]
    faults = faults[:: options.sample]
    if options.list:
        table = Table("fault", "base", "precision", "dialect", "what", "bisect names", box=None)
        for fault in faults:
            table.add_row(fault.name, fault.base, fault.precision, fault.dialect, fault.about, ", ".join(fault.places))
        console.print(table, f"{len(faults)} faults")
        return 0
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        if options.clean or options.hard:
            from fuzz.faults.clean import check_clean, check_hard

            bad = check_clean(work, console) if options.clean else 0
            bad += check_hard(work, console, t5_base=options.t5_base) if options.hard else 0
            return 1 if bad else 0
        names = list(dict.fromkeys(fault.base for fault in faults))
        bases = prepared_bases(names, work, options.shared, console, bisect=options.bisect)
        faults = [fault for fault in faults if fault.base in bases]
        results: dict[str, Outcome] = {}
        for outcome in outcomes(faults, bases, work, jobs=options.jobs, bisect=options.bisect, quick=options.quick):
            results[outcome.fault] = outcome
            console.print(
                f"{len(results)}/{len(faults)} {'found  ' if outcome.plain else 'escaped'} {outcome.fault}"
                f"{'' if outcome.measured else f' ({outcome.said})'}",
                highlight=False,
                markup=False,
            )
        share = report(faults, results, console)
        alarms = sum(len(prepared.alarms) for prepared in bases.values())
    return 1 if share < WANTED or alarms else 0


if __name__ == "__main__":
    sys.exit(main())
