"""Memory under load: many `tfexport decode` commands over one bundle, and one command over very many lines.

    python -m benchmarks.memory.load TEXT --bundle base=DIR --bundle embedded=DIR [--processes 8] [--sentences 100000]

`processes`  N commands decode at once. What of their memory is nobody else's (USS) is compared with all that one command
             takes when it is alone, each with packed weights of its own: a whole copy.
`growth`     one command decodes the lines of TEXT, shuffled and repeated; its memory, workers included, by lines done.

Reads /proc, so it is for Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.memory.commands import PATIENCE, Memory, commands, family
from benchmarks.paths import RESULTS
from tfexport.bench.machine import facts
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.contract import precisions_of
from tfexport.decoding.translate import WINDOW_BATCHES
from tfexport.errors import TfexportError

SENTENCES = 32
"""Of a window in `processes`, or fewer where a window is smaller; the rest of its lines is empty and costs nothing."""

MAX_LENGTH = 12
"""Tokens of an output in `processes`: random models never end one by themselves."""

SETTLED = 10_000
"""Lines after which memory should grow no more: by then long sentences were there, and all buffers have their sizes."""


# --- many processes


def memory_of_many(count: int, flags: Sequence[str], lines: Sequence[bytes]) -> list[Memory]:
    """The most memory that each of `count` commands had while all decoded a window, after all had decoded one.

    Raises:
        TfexportError: one of them failed.
    """
    with commands(count, flags) as started:
        for command in started:
            command.give(lines)
        for command in started:
            command.wait_for(len(lines))
        samples: list[list[Memory]] = [[] for _ in started]
        ended = threading.Event()

        def sample() -> None:
            while not ended.is_set():
                for command, found in zip(started, samples, strict=True):
                    if memory := Memory.of(command.process.pid):
                        found.append(memory)
                ended.wait(0.1)

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            for command in started:
                command.give(lines)
            for command in started:
                command.wait_for(2 * len(lines))
        finally:
            ended.set()
            sampler.join()
        return [Memory.most(found) for found in samples]


def seconds_of_one_line(flags: Sequence[str], line: bytes) -> float:
    """Of a command for one line, from its start to its end."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "tfexport", "decode", *flags]
    done = subprocess.run(command, input=line, capture_output=True, check=False)
    if done.returncode:
        raise TfexportError(f"a command failed: {done.stderr.decode(errors='replace').strip()}")
    return time.perf_counter() - begun


def processes(options: argparse.Namespace, text: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """The rows of `processes`, with packed weights of their own and shared."""
    repeats = options.repeats
    for (name, directory), precision, beam, batch in product(
        options.bundle, options.precision, options.beam, options.batch_size
    ):
        bundle = open_bundle(directory)
        if precisions_of(precision)[0] not in bundle.precisions:
            continue
        lines = window_of(given(bundle, text), batch)
        usual = [str(directory), "--precision", precision, "--beam", str(beam), "--batch-size", str(batch)]
        usual += ["--workers", "1", "--threads", "1", "--max-length", str(MAX_LENGTH)]
        (whole,) = memory_of_many(1, usual, lines)
        ways = {False: usual, True: [*usual, "--share-weights"]}
        # The two in turn, so that what else the machine does meets both; the first with sharing packs.
        times = [{way: seconds_of_one_line(flags, lines[0]) for way, flags in ways.items()} for _ in range(repeats + 1)]
        for sharing, flags in ways.items():
            seconds = [each[sharing] for each in times]
            found = memory_of_many(options.processes, flags, lines)
            row = {
                "model": name,
                "precision": precision,
                "beam": beam,
                "batch_size": batch,
                "share_weights": sharing,
                "whole": whole.rounded(),
                "processes": [memory.rounded() for memory in found],
                "unique_part": max(memory.uss for memory in found) / whole.rss,
                "together": round(sum(memory.pss for memory in found), 1),
                "first_seconds": seconds[0],
                "seconds": seconds[1:],
            }
            say(
                f"{name} {precision} beam {beam} batch {batch} {'shared' if sharing else 'own'}: whole {whole.rss:.0f} "
                f"MiB, unique {max(memory.uss for memory in found):.0f} ({row['unique_part']:.0%}), together "
                f"{row['together']:.0f}, one line {median(seconds[1:]):.2f} s"
            )
            yield row


def window_of(lines: Sequence[bytes], batch: int) -> list[bytes]:
    """As many lines as a command with one worker reads before it answers."""
    size = batch * WINDOW_BATCHES
    text = list(lines[: min(SENTENCES, size)])
    return text + [b"\n"] * (size - len(text))


# --- many lines


def growth(options: argparse.Namespace, text: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """The rows of `growth`, over the bundle that was named last."""
    name, directory = options.bundle[-1]
    lines = repeated(given(open_bundle(directory), text), options.sentences)
    for precision, beam, workers in product(options.precision, options.beam, options.workers):
        flags = [str(directory), "--precision", precision, "--beam", str(beam), "--workers", str(workers)]
        begun = time.perf_counter()
        samples = memory_over([*flags, "--threads", "1"], lines, count=1 + workers * (workers > 1))
        row = {"model": name, "precision": precision, "beam": beam, "workers": workers, "sentences": len(lines)}
        row |= {"seconds": time.perf_counter() - begun, **summary(samples), "samples": samples}
        say(
            f"{name} {precision} beam {beam}, workers {workers}: {row['before']:.1f} MiB after {row['settled']:,} lines, "
            f"{row['after']:.1f} at the end: {row['growth']:+.1%}; {row['seconds']:.0f} s"
        )
        yield row


def memory_over(
    flags: Sequence[str], lines: Sequence[bytes], *, count: int, every: float = 0.5
) -> list[tuple[int, float]]:
    """Lines done and MiB that the command and its workers have together, what is in files left out, while all of its `count`
    processes are there.

    Raises:
        TfexportError: the command failed.
    """
    samples: list[tuple[int, float]] = []
    with commands(1, flags) as (command,):
        command.give_all(lines)
        begun = time.monotonic()
        while command.process.poll() is None and command.done < len(lines):
            if time.monotonic() - begun > PATIENCE:
                raise TfexportError(f"nothing came after {command.done} lines: {command.said()}")
            time.sleep(every)
            found = [Memory.of(process) for process in family(command.process.pid)]
            if command.done and all(found) and len(found) == count:
                if not samples or command.done > samples[-1][0]:
                    begun = time.monotonic()
                samples.append((command.done, round(sum(memory.own for memory in found if memory), 2)))
        command.wait_for(len(lines))
    return samples


def summary(samples: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Growth from when a tenth of the lines is done (or `SETTLED`) to the last tenth; medians, as each batch differs."""
    total = samples[-1][0]
    settled = min(SETTLED, total // 10)
    before = [memory for done, memory in samples if settled <= done <= 2 * settled] or [samples[0][1]]
    after = [memory for done, memory in samples if done >= total - total // 10]
    found = {"settled": settled, "before": median(before), "after": median(after), "most": max(m for _, m in samples)}
    return {**found, "growth": found["after"] / found["before"] - 1}


# --- text


def given(bundle: Bundle, text: Sequence[bytes]) -> list[bytes]:
    """The lines for a bundle: text, or for one without a vocabulary random ids, as many as a line has words."""
    if bundle.tokenizer("source"):
        return list(text)
    chosen = random.Random(0)
    size = bundle.config.src_vocab_size
    return [
        b"%s\n" % b" ".join(b"%d" % chosen.randrange(4, size) for _ in line.split()) for line in text if line.split()
    ]


def repeated(lines: Sequence[bytes], count: int) -> list[bytes]:
    """`count` lines: all of them, again and again, each time in another order."""
    chosen, found = random.Random(0), []
    while len(found) < count:
        found += chosen.sample(lines, len(lines))
    return found[:count]


# --- results


PROCESSES = """## {count} commands over one bundle

MiB at the peak, while all of them decode. `whole`: all that one command has (RSS) when it is alone and shares nothing.
`unique`: what of a command's memory is nobody else's (USS; the largest of the {count}), and its part of `whole`.
`together`: what the {count} take (PSS, added up). `one line`: seconds of a whole command for one line (median). `shared`
is with `--share-weights`; the first of such commands, which packs, took the seconds in brackets.

| model | | beam | batch | whole | unique | shared | together | shared | one line | shared |
|---|---|---|---|---|---|---|---|---|---|---|"""

GROWTH = """
## {sentences:,} lines through one command

MiB of the command and its workers together, without what is in files (libraries and mapped weights: they grow not, and
count by how many other programs have them): median between line {settled:,} and line {twice:,}, median of the last tenth,
and the most that was seen.

| model | | beam | workers | before | at the end | growth | most | seconds |
|---|---|---|---|---|---|---|---|---|"""


def table(record: dict[str, Any]) -> str:
    """Both parts as Markdown."""
    machine = record["machine"]
    versions = ", ".join(f"{name} {machine['versions'].get(name)}" for name in ("onnxruntime", "numpy"))
    parts = [
        f"# Memory under load\n\n{machine['cpu']}, {machine['cpus']} CPUs; Python {machine['python']}, {versions}.\n"
    ]
    if rows := record["processes"]:
        parts.append(PROCESSES.format(count=len(rows[0]["processes"])))
        for own, shared in zip(rows[::2], rows[1::2], strict=True):
            unique = [max(memory["uss"] for memory in row["processes"]) for row in (own, shared)]
            parts.append(
                f"| {own['model']} | {own['precision']} | {own['beam']} | {own['batch_size']} | {own['whole']['rss']:.0f} | "
                f"{unique[0]:.0f} ({own['unique_part']:.0%}) | {unique[1]:.0f} ({shared['unique_part']:.0%}) | "
                f"{own['together']:.0f} | {shared['together']:.0f} | {median(own['seconds']):.2f} | "
                f"{median(shared['seconds']):.2f} ({shared['first_seconds']:.2f}) |"
            )
    if rows := record["growth"]:
        parts.append(GROWTH.format(**rows[0], twice=2 * rows[0]["settled"]))
        parts += [
            f"| {row['model']} | {row['precision']} | {row['beam']} | {row['workers']} | {row['before']:.1f} | "
            f"{row['after']:.1f} | {row['growth']:+.1%} | {row['most']:.1f} | {row['seconds']:.0f} |"
            for row in rows
        ]
    return "\n".join(parts) + "\n"


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Memory over lines done."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(8, 4), layout="constrained")
    for row in rows:
        done, memory = zip(*row["samples"], strict=True)
        panel.plot(done, memory, linewidth=1, label=f"{row['precision']}, beam {row['beam']}, workers {row['workers']}")
    panel.set_ylim(bottom=0)
    panel.set_xlabel("lines done")
    panel.set_ylabel("MiB in no file, workers included")
    panel.grid(color="#dddddd")
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def named(given: str) -> tuple[str, Path]:
    name, equals, path = given.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{given!r} is not NAME=DIR")
    return name, Path(path)


def numbers(given: str) -> list[int]:
    return [int(word) for word in given.split(",")]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory under load.")
    parser.add_argument("text", type=Path, help="source sentences, one a line")
    parser.add_argument("--bundle", type=named, action="append", required=True, help="NAME=DIR; several times")
    parser.add_argument("--only", choices=("processes", "growth"))
    parser.add_argument("--precision", type=lambda given: given.split(","), default=["fp32", "int8"])
    parser.add_argument("--beam", type=numbers, default=[1, 4])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--batch-size", type=numbers, default=[1, 32], help="of `processes`")
    parser.add_argument("--repeats", type=int, default=3, help="of the commands for one line")
    parser.add_argument("--sentences", type=int, default=100_000)
    parser.add_argument("--workers", type=numbers, default=[1, 2], help="of `growth`")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    text = options.text.read_bytes().splitlines(keepends=True)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "load.json"
    # What is not measured anew stays as it was.
    record: dict[str, Any] = {"processes": [], "growth": []}
    if path.exists():
        record |= json.loads(path.read_text(encoding="utf-8"))
    record["machine"] = facts()
    try:
        # Packed weights of its own, so that the first command is the first.
        with tempfile.TemporaryDirectory() as cache, environment(XDG_CACHE_HOME=cache):
            for part, measure in (("processes", processes), ("growth", growth)):
                if options.only in (None, part):
                    record[part] = merged(record[part], list(measure(options, text)))
    except TfexportError as error:
        say(f"error: {error}")
        return 2
    path.write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")
    (options.out / "load.md").write_text(table(record), encoding="utf-8")
    if record["growth"]:
        plot(record["growth"], options.out / "load.png")
    say(f"written: {options.out / 'load'}.json and .md")
    return 0


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of both, the new ones in place of those of the same settings."""
    settings = ("model", "precision", "beam", "workers", "batch_size", "share_weights")
    rows = {tuple(row.get(name) for name in settings): row for row in (*old, *new)}
    return list(rows.values())


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    sys.exit(main())
