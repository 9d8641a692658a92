"""The whole matrix of `tfexport bench` for several bundles: every number, tables and a plot.

    python -m benchmarks.cpu.matrix BUNDLE... --optimum-python VENV/bin/python

A bundle's other forms lie beside it, as `peers/converters.py` writes them: BUNDLE.ct2, BUNDLE.hf and BUNDLE.optimum. Two
parts: `forced`, where every output has the same number of tokens, and `mixed`, where the model ends them and each contestant
has its best batch size; the second is for models that read text. What is measured again takes the place of what is in the
results already, so that a matrix can be measured piece by piece.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu import report as cpu_report
from benchmarks.paths import RESULTS, SENTENCES
from tfexport.bench.contestants import OWN, Contestant
from tfexport.bench.plan import Cell, Plan
from tfexport.bench.report import cell_lines, heading
from tfexport.bench.run import peaks_of, run
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.commands.bench import sentences_of
from tfexport.contract import precisions_of
from tfexport.errors import TfexportError
from tfexport.option import numbers
from tfexport.search.profiles import PROFILES

SUFFIXES = {"ctranslate2": "ct2", "hugging-face": "hf", "optimum": "optimum"}
BESIDE = ("torch", *SUFFIXES)
PARTS = ("forced", "mixed")
KEY = ("model", "part", "precision", "threads", "batch", "beam")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed of bundles on this CPU, beside the alternatives.")
    parser.add_argument("bundles", type=Path, nargs="*", metavar="BUNDLE", help="none: draw what is in the results")
    parser.add_argument("--input", type=Path, default=SENTENCES, help="a sentence a line, for models that read text")
    parser.add_argument("--beside", default=",".join(BESIDE), help=f"of {', '.join(BESIDE)}")
    parser.add_argument("--optimum-python", type=Path, help="the interpreter with Optimum")
    parser.add_argument("--precision", default="fp32,int8")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--batch-size", default="1,8,32", help="of the part with forced lengths")
    parser.add_argument("--beam", default="1,4")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--sentences", type=int, help="of the part with mixed lengths; by default some batches")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--search-profile",
        default="tfexport",
        choices=PROFILES,
        help="whose rules the own search has: opennmt does what CTranslate2 does; greedy search is slower with it",
    )
    parser.add_argument(
        "--only", action="append", metavar="PARTS", help="cells that have all of these, as in 'emb, mixed, beam 4'"
    )
    parser.add_argument("--quick", action="store_true", help="few cells and rounds, to see that all of it runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.threads, options.batch_size, options.beam, options.tokens, options.rounds = "1", "1,8", "1", 8, 2
    names = options.beside.split(",") if options.beside else []
    unknown = sorted({*names} - {*BESIDE})
    if unknown:
        parser.error(f"there is nothing to measure beside that is called {unknown[0]}")
    options.beside = names
    return options


def contestants_of(bundle: Path, options: argparse.Namespace) -> list[Contestant]:
    """The own runtime and the others; what has no folder says so in its row."""
    found = [Contestant(OWN, bundle)]
    for name in options.beside:
        path = bundle.with_name(f"{bundle.name}.{SUFFIXES[name]}") if name in SUFFIXES else bundle
        other = options.optimum_python if name == "optimum" else None
        found.append(Contestant(name, path, other or Path(sys.executable)))
    return found


def plans_of(bundle: Bundle, options: argparse.Namespace) -> Iterator[tuple[str, Plan]]:
    """The parts of one bundle's matrix."""
    shared: dict[str, Any] = {
        "precisions": precisions_of(options.precision),
        "threads": numbers("--threads", options.threads),
        "beams": numbers("--beam", options.beam),
        "rounds": options.rounds,
        "profile": options.search_profile,
    }
    yield "forced", Plan(**shared, batches=numbers("--batch-size", options.batch_size), tokens=options.tokens)
    if bundle.tokenizer("source") is not None:
        yield "mixed", Plan(**shared, batches=(None,), tokens=None, sentences=options.sentences)
    else:
        say(f"{bundle.directory.name} reads no text: no cells of mixed lengths")


def wanted(name: str, only: Sequence[str] | None) -> bool:
    """Whether a cell of this name, parts with commas between them, is asked for: it has all parts of one of `only`."""
    parts = _parts(name)
    return not only or any(_parts(asked) <= parts for asked in only)


def _parts(name: str) -> set[str]:
    return {part.strip() for part in name.split(",")}


def measure(bundles: Sequence[Path], options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Measure the matrix of each bundle; `keep` is given every cell, with its model and part."""
    say("measuring the machine")
    peaks = peaks_of(numbers("--threads", options.threads))
    for directory in bundles:
        bundle = open_bundle(directory)
        source = options.input if bundle.tokenizer("source") is not None else None
        sources = sentences_of(bundle, source, None)
        for part, plan in plans_of(bundle, options):
            place = f"{directory.name}, {part}"
            cells = [cell for cell in plan.cells if wanted(f"{place}, {cell.about}", options.only)]
            if cells:
                measure_part(bundle, part, sources, plan, cells, peaks, options, keep)


def measure_part(
    bundle: Bundle,
    part: str,
    sources: Sequence[list[int]],
    plan: Plan,
    cells: Sequence[Cell],
    peaks: Any,
    options: argparse.Namespace,
    keep: Callable[[dict[str, Any]], None],
) -> None:
    name = bundle.directory.name
    facts: dict[str, Any] = {}

    def begun(record: dict[str, Any]) -> None:
        facts.update({key: record[key] for key in ("machine", "peaks", "options", "contestants", "config")})
        print(heading(record), flush=True)

    def done(cell: dict[str, Any]) -> None:
        print("\n".join(cell_lines(cell, plan.tokens)), flush=True)
        keep({"model": name, "part": part, **cell, "run": facts})

    try:
        contestants = contestants_of(bundle.directory, options)
        run(bundle, sources, contestants, plan, begun=begun, done=done, say=say, cells=cells, peaks=peaks)
    except TfexportError as error:
        say(f"{name}, {part}: {error}")  # its cells are kept, with the reason of each row


def key_of(cell: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[field] for field in KEY)


def read(path: Path) -> list[dict[str, Any]]:
    """The cells of earlier runs; what they share with others of their run is stored once."""
    if not path.exists():
        return []
    record = json.loads(path.read_text(encoding="utf-8"))
    return [{**cell, "run": record["runs"][cell["run"]]} for cell in record["cells"]]


def write(cells: Sequence[dict[str, Any]], path: Path) -> None:
    """One line for each run and each cell, in the order of the matrix; numbers to 6 digits."""
    runs: list[str] = []
    lines = []
    for cell in sorted(cells, key=_order):
        facts = json.dumps(_short(cell["run"]), allow_nan=False)
        if facts not in runs:
            runs.append(facts)
        lines.append(json.dumps(_short({**cell, "run": runs.index(facts)}), allow_nan=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    text = '{"runs": [\n' + ",\n".join(runs) + '\n],\n"cells": [\n' + ",\n".join(lines) + "\n]}\n"
    path.write_text(text, encoding="utf-8")


def _order(cell: dict[str, Any]) -> tuple[Any, ...]:
    batch = cell["batch"] or 0
    return (cell["model"], cell["part"], cell["precision"], cell["threads"], batch, cell["beam"])


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list | tuple) else value


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    path = options.out / "cpu.json"
    try:
        cells = {key_of(cell): cell for cell in read(path)}

        def keep(cell: dict[str, Any]) -> None:
            cells[key_of(cell)] = cell
            write(list(cells.values()), path)  # a run that is cut short leaves what it found

        if options.bundles:
            measure(options.bundles, options, keep)
        if not cells:
            raise TfexportError(f"there are no results in {path}. Give bundles to measure.")
        found = sorted(cells.values(), key=_order)
        text = cpu_report.markdown(found)
        (options.out / "cpu.md").write_text(text, encoding="utf-8")
        cpu_report.plot(found, options.out / "cpu.png")
    except TfexportError as error:
        say(f"error: {error}")
        return 2
    print(text)
    say(f"written: {path}, cpu.md and cpu.png beside it")
    missing = itertools.chain.from_iterable(cpu_report.missing(cell) for cell in found)
    for line in dict.fromkeys(missing):
        say(f"not measured: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
