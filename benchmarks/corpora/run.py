"""A run over many rows of Parquet on Ray: rows and memory over time, beside plain workers on the same lines.

    python -m benchmarks.corpora.run BUNDLE TEXT --rows 1000000
    python -m benchmarks.corpora.run --render

Four runs read the same rows and write text:

1. `tfexport decode` with two workers.
2. `tfexport corpus` with two actors.
3. `tfexport corpus` with two actors on a cluster of two nodes with a CPU each (`makers/ray_nodes.py`).
4. `tfexport decode` with two workers, and the larger batches of `tfexport corpus`.

They take turns of some seconds (`turns.py`), so that they meet the same speed of the CPUs. Their texts have to be the same.
The benchmark needs `tfexport[ray]`, root, and two cores that nothing else uses. It writes RESULTS/corpus_run.json, and draws
the table and the plot from it alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.corpora.turns import Group, Job, take_turns
from benchmarks.machine import machine
from benchmarks.paths import RESULTS
from benchmarks.tables import table
from makers.paths import ROOT
from tfexport.scale.options import ActorOptions

SHARDS = 200
WORKERS, ACTORS, NODES = "2 workers of decode", "2 actors of corpus", "2 actors on 2 nodes"
LARGE_BATCHES = f"{WORKERS}, batches of {ActorOptions().batch_size}"


def texts_of(output: Path) -> list[str]:
    """The texts of a run over a corpus, in the order of its ids."""
    return [text for part in sorted(output.glob("part-*.txt")) for text in lines_of(part)]


def lines_of(file: Path) -> list[str]:
    """The lines of a file."""
    return file.read_text(encoding="utf-8").splitlines()


def measure(bundle: Path, lines: Sequence[str], precision: str) -> list[dict[str, Any]]:
    """The four runs."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    from makers.ray_nodes import ENVIRONMENT, Nodes

    rows_per_shard = -(-len(lines) // SHARDS)
    root = str(ROOT)
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": root}
    program, own = [sys.executable, "-m", "tfexport"], ["--threads", "1", "--precision", precision]
    with tempfile.TemporaryDirectory(prefix="tfx", ignore_cleanup_errors=True) as temporary, ExitStack() as stack:
        folder = Path(temporary)
        plain, columns = folder / "in.txt", folder / "in.parquet"
        plain.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        numbers = list(range(len(lines)))
        parquet.write_table(arrow.table({"number": numbers, "text": list(lines)}), columns)
        outputs = {
            name: folder / f"out-{number}" for number, name in enumerate((WORKERS, ACTORS, NODES, LARGE_BATCHES))
        }
        groups = {name: stack.enter_context(Group(output.name)) for name, output in outputs.items()}

        def decode(name: str, *more: str) -> Job:
            given = [str(bundle), str(plain), "-o", str(outputs[name]), "--workers", "2", *more, *own]
            return Job(name, [*program, "decode", *given], environment, groups[name])

        def corpus(name: str, *more: str) -> Job:
            shards = ["--rows-per-shard", str(rows_per_shard), "--output-format", "text"]
            given = [str(bundle), str(columns), "-o", str(outputs[name]), "--actors", "2", *shards, *more, *own]

            def written() -> int:
                return len(list(outputs[name].glob("part-*.txt"))) * rows_per_shard

            return Job(name, [*program, "corpus", *given], environment, groups[name], written)

        (folder / "cluster").mkdir()
        with groups[NODES].joined():
            nodes = stack.enter_context(Nodes(folder / "cluster", environment))
        on_nodes = corpus(NODES, "--address", nodes.address)
        on_nodes.command, on_nodes.environment = nodes.command(0, [*on_nodes.command]), nodes.environment
        groups[NODES].freeze()
        large = decode(LARGE_BATCHES, "--batch-size", str(ActorOptions().batch_size))
        jobs = [decode(WORKERS), corpus(ACTORS), on_nodes, large]
        with (folder / "log").open("wb") as log:
            try:
                take_turns(jobs, log.fileno())
            except RuntimeError as error:
                said = (folder / "log").read_text(encoding="utf-8", errors="replace")[-2000:]
                raise SystemExit(f"{said}\n{error}") from error
        groups[NODES].thaw()  # for its end
        texts = {name: lines_of(output) if output.is_file() else texts_of(output) for name, output in outputs.items()}
        return [
            {
                **{"run": job.name, "seconds": round(job.seconds, 2), "cpu_seconds": round(job.cpu_seconds, 1)},
                **({} if job.name == WORKERS else {"same_text": texts[job.name] == texts[WORKERS]}),
                **({"namespaces": nodes.has_namespaces} if job is on_nodes else {}),
                "samples": job.samples,
            }
            for job in jobs
        ]


# --- what follows from a record


def steady_rate(run: Mapping[str, Any], rows: int) -> float:
    """Rows a second, without the start: between the first and the last samples with new rows. Of workers, over all."""
    seen = [(seconds, done) for seconds, done, _ in run["samples"] if done]
    if not seen or seen[-1][1] == seen[0][1]:
        return float(rows / run["seconds"])
    (began, first), (_, last) = seen[0], seen[-1]
    ended = min(seconds for seconds, done in seen if done == last)
    return float((last - first) / (ended - began))


def growth(run: Mapping[str, Any]) -> tuple[float, float]:
    """The median memory in the second and in the last fifth of a run, in MiB."""
    memory = [mib for *_, mib in run["samples"]]
    if len(memory) < 5:
        return (min(memory, default=0.0), max(memory, default=0.0))
    fifth = len(memory) // 5
    second, last = sorted(memory[fifth : 2 * fifth]), sorted(memory[-fifth:])
    return second[len(second) // 2], last[len(last) // 2]


def markdown(record: Mapping[str, Any]) -> str:
    """The runs as a table."""
    about, rows = record["machine"], record["rows"]
    seconds = {run["run"]: run["seconds"] for run in record["runs"]}
    large = next(name for name in seconds if name.startswith(f"{WORKERS}, "))
    head = ("run", "seconds", "rows/s", "to 2 workers", f"to {large.replace(' of decode', '')}", "CPU seconds")
    head += ("rows/s without the start", "same text", "MiB")

    def cells(run: Mapping[str, Any]) -> list[str]:
        early, late = growth(run)
        same = {True: "yes", False: "NO"}.get(run.get("same_text"), "")
        return [
            *(run["run"], f"{run['seconds']:.0f}", f"{rows / run['seconds']:,.0f}"),
            *(f"{seconds[to] / run['seconds']:.3f}" for to in (WORKERS, large)),
            *(
                f"{run['cpu_seconds']:.0f}",
                f"{steady_rate(run, rows):,.0f}",
                same,
                f"{early:,.0f}, at the end {late:,.0f}",
            ),
        ]

    said = f"{about['cpu']}, {about['cpus']} CPUs, {about['date'][:10]}."
    said += f" {rows:,} rows of Parquet, {record['precision']}, greedy search."
    return f"{said}\n\n" + "\n".join(table(head, map(cells, record["runs"])))


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Rows and memory over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    for color, run in zip(("C7", "C0", "C1", "C2"), record["runs"], strict=True):
        seconds, rows, memory = zip(*run["samples"], strict=True)
        if run["run"].startswith(WORKERS):
            above.plot([0, run["seconds"]], [0, record["rows"] / 1e6], color=color, linestyle="--", label=run["run"])
        else:
            above.plot(seconds, [count / 1e6 for count in rows], color=color, label=run["run"])
        below.plot(seconds, memory, color=color, label=run["run"])
    above.set_ylabel("rows written, millions")
    below.set_ylabel("memory, MiB")
    below.set_xlabel("seconds")
    below.set_ylim(bottom=0)
    above.legend()
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A run over many rows on Ray, beside plain workers.")
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("text", type=Path, nargs="?", help="lines to repeat")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--render", action="store_true", help="draw the record that is there")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if (options.text is None) != options.render:
        parser.error("give a bundle and a text to measure, or --render")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what is frozen, too
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / "corpus_run.json"
    if not options.render:
        every = options.text.read_text(encoding="utf-8").splitlines()
        lines = list(islice(cycle(every), options.rows))
        runs = measure(options.bundle, lines, options.precision)
        record = {"machine": machine("cpu"), "rows": len(lines), "precision": options.precision, "runs": runs}
        file.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    record = json.loads(file.read_text(encoding="utf-8"))
    draw(record, file.with_suffix(".png"))
    print(markdown(record))
    return 0 if all(run.get("same_text", True) for run in record["runs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
