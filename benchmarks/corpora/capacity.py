"""Hours and cost of a billion lines, from measured rates of `tfexport decode` and `tfexport corpus` on this machine.

    python -m benchmarks.corpora.capacity small=build/de-en --precisions fp32,int8 --lines 40000
    python -m benchmarks.corpora.capacity --table

Each bundle is measured in each precision with one and two processes: workers of `decode`, and actors of Ray. Each is timed
over few and over many lines, in turns. The rate is that of the lines between, so that it has no start in it: a run over a
billion lines starts once. Needs `tfexport[ray]`, and a machine with two free cores. Writes RESULTS/corpus_capacity.json,
and the tables, which come from it alone, beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.paths import RESULTS, SENTENCES
from benchmarks.tables import table

LINES = 1_000_000_000
CORES = (16, 64, 256, 1024)
COUNTS = (1, 2)
"""Processes that decode at once."""
SHARDS = 40
"""Of the many lines, so that two actors end at nearly one time."""
LEAST_REPEATS = 3
"""Of each run, for numbers that are worth telling."""
FEW = 10
"""The many lines divided by the few."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


# --- measuring


@dataclass(frozen=True)
class Measured:
    """A bundle in a precision, over two files of lines."""

    bundle: Path
    precision: str
    few: Path
    many: Path
    rows_per_shard: int

    def seconds(self, engine: str, count: int, source: Path) -> float:
        """Wall time of a command over a file."""
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "out")
            command, own = ("decode", ["--workers", str(count)]), ["--threads", "1", "--precision", self.precision]
            if engine == "ray":
                command = ("corpus", ["--actors", str(count), "--rows-per-shard", str(self.rows_per_shard)])
            name, flags = command
            given = [str(self.bundle), str(source), "-o", out, *flags, *own]
            began = time.monotonic()
            _tfexport(name, *given)
            return time.monotonic() - began

    def tokens(self) -> float:
        """Of an output, on average."""
        flags = ["--threads", "1", "--precision", self.precision, "--output-format", "ids"]
        found = _tfexport("decode", str(self.bundle), str(self.few), *flags).splitlines()
        return statistics.mean(len(line.split()) for line in found)

    def record(self, repeats: int) -> dict[str, Any]:
        """All times, by engine and number of processes."""
        kinds = [(engine, count) for count in COUNTS for engine in ("plain", "ray")]
        times: dict[tuple[str, int], dict[str, list[float]]] = {kind: {"few": [], "many": []} for kind in kinds}
        for turn in range(repeats):
            for kind in kinds if turn % 2 == 0 else kinds[::-1]:
                for name, source in (("few", self.few), ("many", self.many)):
                    times[kind][name].append(self.seconds(*kind, source))
                    print(
                        f"{self.bundle.name} {self.precision} {kind} {name}: {times[kind][name][-1]:.2f} s", flush=True
                    )
        runs: dict[str, dict[str, Any]] = {"plain": {}, "ray": {}}
        for (engine, count), found in times.items():
            runs[engine][str(count)] = found
        return {"precision": self.precision, "tokens_per_line": self.tokens(), "seconds": runs}


def _tfexport(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tfexport", *arguments],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode:
        raise SystemExit(f"tfexport {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def measure(bundles: Mapping[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """The record of all bundles."""
    rows = max(1, options.lines // SHARDS)
    many, few = rows * SHARDS, rows * SHARDS // FEW
    texts = options.text.read_text(encoding="utf-8").splitlines()
    models = []
    with tempfile.TemporaryDirectory() as temporary:
        files = {name: Path(temporary) / f"{name}.txt" for name in ("few", "many")}
        for name, count in (("few", few), ("many", many)):
            files[name].write_text("".join(f"{line}\n" for line in islice(cycle(texts), count)), encoding="utf-8")
        for name, bundle in bundles.items():
            for precision in options.precisions.split(","):
                found = Measured(bundle, precision, files["few"], files["many"], rows).record(options.repeats)
                models.append({"model": name, **found})
    settings = {"few": few, "many": many, "rows_per_shard": rows, "repeats": options.repeats, "text": options.text.name}
    return {"machine": machine("cpu"), "settings": settings, "usd_per_core_hour": options.price, "models": models}


# --- what follows from a record


def rate(record: Mapping[str, Any], engine: str, count: int, settings: Mapping[str, Any]) -> float:
    """Lines a second of all processes together, without the start.

    Raises:
        ValueError: many lines took no longer than few: there were too few of them.
    """
    seconds = record["seconds"][engine][str(count)]
    between = statistics.median(seconds["many"]) - statistics.median(seconds["few"])
    if between <= 0:
        raise ValueError(f"{record['model']} {record['precision']} took no time for the lines. Measure more --lines.")
    return float((settings["many"] - settings["few"]) / between)


def start(record: Mapping[str, Any], engine: str, count: int, settings: Mapping[str, Any]) -> float:
    """Seconds of a run that do not depend on its lines."""
    few = statistics.median(record["seconds"][engine][str(count)]["few"])
    return float(few - settings["few"] / rate(record, engine, count, settings))


def measured_table(record: Mapping[str, Any]) -> list[str]:
    """What was measured."""
    settings = record["settings"]
    head = ["model", "precision", "tokens in a line"]
    head += [f"lines/s, {name}" for name in ("1 worker", "1 actor", "2 workers", "2 actors")]
    head += ["actor / worker", "2 actors / 2 workers", "tokens/s and core", "start with Ray, s"]

    def cells(one: Mapping[str, Any]) -> list[str]:
        plain, ray = ([rate(one, engine, count, settings) for count in COUNTS] for engine in ("plain", "ray"))
        ratios = [f"{r / p:.2f}" for p, r in zip(plain, ray, strict=True)]
        rates = [f"{value:,.0f}" for pair in zip(plain, ray, strict=True) for value in pair]
        tokens = one["tokens_per_line"]
        per_core = f"{tokens * ray[-1] / COUNTS[-1]:,.0f}"
        begin = f"{start(one, 'ray', COUNTS[-1], settings):.0f}"
        return [one["model"], one["precision"], f"{tokens:.1f}", *rates, *ratios, per_core, begin]

    return table(head, map(cells, record["models"]))


def capacity_table(record: Mapping[str, Any], lines: int = LINES, cores: Sequence[int] = CORES) -> list[str]:
    """Hours and cost of so many lines, from the rate of two actors."""
    price = record["usd_per_core_hour"]
    head = ["model", "precision", *(f"hours, {count:,} cores" for count in cores), "core hours", "cost, USD"]

    def cells(one: Mapping[str, Any]) -> list[str]:
        hours = core_hours(one, record["settings"], lines)
        spread = [f"{hours / count:,.1f}" for count in cores]
        return [one["model"], one["precision"], *spread, f"{hours:,.0f}", f"{hours * price:,.0f}"]

    return table(head, map(cells, record["models"]))


def core_hours(record: Mapping[str, Any], settings: Mapping[str, Any], lines: int = LINES) -> float:
    """Of so many lines, with the rate that each of two actors had."""
    each = rate(record, "ray", COUNTS[-1], settings) / COUNTS[-1]
    return lines / each / 3600


def markdown(record: Mapping[str, Any]) -> str:
    """Both tables, and what they are of."""
    about, settings = record["machine"], record["settings"]
    said = [
        f"{about['cpu']}, {about['cpus']} CPUs, {about['date'][:10]}; tfexport {about['versions']['tfexport']}.",
        f"Lines of `{settings['text']}`, repeated: {settings['few']:,} and {settings['many']:,}, medians of "
        f"{settings['repeats']} runs. Greedy search, one thread for each worker and actor, default batches.",
    ]
    if settings["repeats"] < LEAST_REPEATS:
        said.append("**This was a short run, to try the script: its rates may be far off.**")
    assumed = (
        f"A billion lines of this length, at {record['usd_per_core_hour']:g} USD for a core hour, which is an assumption. "
        "Each core is taken to compute what each of two did together: machines whose memory is slower for many cores take "
        "longer. Rates of more than two actors were not measured."
    )
    parts = ["\n".join(said), "\n".join(measured_table(record)), assumed, "\n".join(capacity_table(record))]
    return "\n\n".join(parts)


def _bundles(given: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for one in given:
        name, sign, folder = one.partition("=")
        if not sign or not Path(folder).is_dir():
            raise SystemExit(f"{one!r} is not NAME=BUNDLE, or there is no such folder. Export the model first.")
        yield name, Path(folder).absolute()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Hours and cost of a billion lines.")
    parser.add_argument("bundles", nargs="*", metavar="NAME=BUNDLE")
    parser.add_argument("--table", action="store_true", help="write the tables of the record that is there")
    parser.add_argument("--precisions", default="fp32,int8", help="that the bundles have")
    parser.add_argument("--text", type=Path, default=SENTENCES, help="lines to repeat")
    parser.add_argument("--lines", type=int, default=40_000, help="of the longer run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--price", type=float, default=0.04, help="USD for a core hour, for the cost")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if bool(options.bundles) == options.table:
        parser.error("give bundles to measure, or --table")
    file = options.results / "corpus_capacity.json"
    if options.bundles:
        record = measure(dict(_bundles(options.bundles)), options)
        markdown(record)  # tells of too few lines before a record is replaced
        file.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    record = json.loads(file.read_text(encoding="utf-8"))
    file.with_suffix(".md").write_text(f"# Capacity for corpora\n\n{markdown(record)}\n", encoding="utf-8")
    print(markdown(record))


if __name__ == "__main__":
    main()
