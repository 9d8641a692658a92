"""A run over many rows of Parquet on Ray: rows and memory over time, beside plain workers on the same lines.

    python -m benchmarks.corpus_run BUNDLE TEXT --rows 1000000
    python -m benchmarks.corpus_run --render

Five runs, one after the other, which all read the same rows and write text:

1. `tfexport decode` with two workers.
2. `tfexport corpus` with two actors.
3. `tfexport decode` with two workers, and the larger batches of `tfexport corpus`.
4. `tfexport corpus` with two actors on a cluster of two nodes with a CPU each (`fuzz/ray_nodes.py`).
5. The first one again. The speed of a virtual CPU changes within half an hour, so the others are compared with both.

Their texts have to be the same. The benchmark needs `tfexport[ray]`, and two cores that nothing else uses. It writes
RESULTS/corpus_run.json, and draws the table and the plot from it alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.load import Memory
from benchmarks.report import machine
from benchmarks.tables import table
from tfexport.scale.options import ActorOptions

RESULTS = Path(__file__).parent / "results"
SHARDS = 200
INTERVAL = 1.0
"""Seconds between two samples."""
MEMORY_EVERY = 10
"""Samples with one measurement of memory, which takes a tenth of a second for all processes of Ray."""
WORKERS, ACTORS, NODES = "2 workers of decode", "2 actors of corpus", "2 actors on 2 nodes"
LARGE_BATCHES = f"{WORKERS}, batches of {ActorOptions().batch_size}"


def pss_mib(pids: Iterable[int]) -> float:
    """Memory of processes in MiB; what several of them share counts once."""
    return sum(memory.pss for pid in pids if (memory := Memory.of(pid)) is not None)


def watched(
    driver: subprocess.Popen[bytes], pids: Callable[[], Iterable[int]], rows: Callable[[], int | None]
) -> dict[str, Any]:
    """Time a process until it ends: the seconds, and samples of (seconds, rows that are written, MiB)."""
    began, samples, mib = time.monotonic(), [], 0.0
    while True:
        try:
            code = driver.wait(INTERVAL)
        except subprocess.TimeoutExpired:
            if len(samples) % MEMORY_EVERY == 0:
                mib = round(pss_mib(pids()), 1)
            samples.append((round(time.monotonic() - began, 1), rows(), mib))
            continue
        if code:
            raise SystemExit(f"a run ended with exit code {code}")
        return {"seconds": round(time.monotonic() - began, 2), "samples": samples}


def texts_of(output: Path) -> list[str]:
    """The texts of a run over a corpus, in the order of its ids."""
    return [text for part in sorted(output.glob("part-*.txt")) for text in lines_of(part)]


def lines_of(file: Path) -> list[str]:
    """The lines of a file."""
    return file.read_text(encoding="utf-8").splitlines()


def measure(bundle: Path, lines: Sequence[str], precision: str) -> list[dict[str, Any]]:
    """The five runs."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    from fuzz.processes import descendants
    from fuzz.ray_nodes import ENVIRONMENT, Nodes

    rows_per_shard = -(-len(lines) // SHARDS)
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": root}
    program, own = [sys.executable, "-m", "tfexport"], ["--threads", "1", "--precision", precision]
    found = []
    with tempfile.TemporaryDirectory(prefix="tfx", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        plain, columns = folder / "in.txt", folder / "in.parquet"
        plain.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        numbers = list(range(len(lines)))
        parquet.write_table(arrow.table({"number": numbers, "text": list(lines)}), columns)

        def written(output: Path) -> int:
            return len(list(output.glob("part-*.txt"))) * rows_per_shard

        with (folder / "log").open("wb") as log:

            def workers(name: str, output: Path, *more: str) -> dict[str, Any]:
                decode = [*program, "decode", str(bundle), str(plain), "-o", str(output), "--workers", "2", *more, *own]
                driver = subprocess.Popen(decode, env=environment, stderr=log)
                run = watched(driver, lambda: [driver.pid, *descendants(driver.pid)], lambda: None)
                return {"run": name, **run}

            def corpus(output: Path, *more: str) -> list[str]:
                shards = ["--rows-per-shard", str(rows_per_shard), "--output-format", "text"]
                given = ["-o", str(output), "--actors", "2", *shards, *more, *own]
                return [*program, "corpus", str(bundle), str(columns), *given]

            found.append(workers(WORKERS, folder / "plain"))
            wanted = lines_of(folder / "plain")

            out = folder / "ray"
            local = subprocess.Popen(corpus(out), env=environment, stderr=log)
            run = watched(local, lambda: [local.pid, *descendants(local.pid)], lambda: written(folder / "ray"))
            found.append({"run": ACTORS, **run, "same_text": texts_of(out) == wanted})

            run = workers(LARGE_BATCHES, folder / "large", "--batch-size", str(ActorOptions().batch_size))
            found.append({**run, "same_text": lines_of(folder / "large") == wanted})

            out = folder / "nodes"
            (folder / "cluster").mkdir()
            with Nodes(folder / "cluster", environment) as nodes:
                command = nodes.command(0, corpus(out, "--address", nodes.address))
                driver_of_nodes = subprocess.Popen(command, env=nodes.environment, stderr=log)

                def everything() -> list[int]:
                    return [driver_of_nodes.pid, *descendants(driver_of_nodes.pid), *nodes.processes()]

                run = watched(driver_of_nodes, everything, lambda: written(folder / "nodes"))
                run["namespaces"] = nodes.has_namespaces
            found.append({"run": NODES, **run, "same_text": texts_of(out) == wanted})

            run = workers(WORKERS, folder / "again")
            found.append({**run, "same_text": lines_of(folder / "again") == wanted})
    return found


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


def ratio(record: Mapping[str, Any], run: Mapping[str, Any], to: str) -> float:
    """The speed of a run, divided by the mean speed of the runs with the name `to`."""
    speeds = [1 / one["seconds"] for one in record["runs"] if one["run"] == to]
    return 1 / run["seconds"] / (sum(speeds) / len(speeds))


def markdown(record: Mapping[str, Any]) -> str:
    """The runs as a table."""
    about, rows = record["machine"], record["rows"]
    large = next(run["run"] for run in record["runs"] if run["run"].startswith(f"{WORKERS}, "))
    head = ("run", "seconds", "rows/s", "to 2 workers", "to these with large batches", "rows/s without the start")
    head += ("same text", "MiB")

    def cells(run: Mapping[str, Any]) -> list[str]:
        early, late = growth(run)
        same = {True: "yes", False: "NO"}.get(run.get("same_text"), "")
        memory = f"{early:,.0f}, at the end {late:,.0f}"
        return [
            *(run["run"], f"{run['seconds']:.0f}", f"{rows / run['seconds']:,.0f}"),
            *(f"{ratio(record, run, to):.2f}" for to in (WORKERS, large)),
            *(f"{steady_rate(run, rows):,.0f}", same, memory),
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
    for color, run in zip(("C7", "C0", "C2", "C1", "C8"), record["runs"], strict=True):
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
