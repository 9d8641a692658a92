"""The rate at which servers keep a limit of p99 latency.

    python -m benchmarks.serve [--quick] [--only "small, int8"] [--rounds 7] [--seconds 7]

Each part is a model in a precision. All servers of a part are started, and take turns: a round gives each of them a run at
the rate that its search asks for next (`ladder.py`), while the others are stopped. Results are kept after every run.

    python -m benchmarks.serve --tune ctranslate2 --only "small, int8"

tries sizes and timeouts of the batches of an engine behind LitServe, in the place of the servers that are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.serve import OURS, offline, report, settings
from benchmarks.serve.client import Measured, offer, saturate
from benchmarks.serve.ladder import Ladder, keeps
from benchmarks.serve.models import ROOT, prepare
from benchmarks.serve.systems import Running, System
from tfexport.bench.machine import busy_cpus, facts

RESULTS = ROOT / "benchmarks" / "results"
TEXTS = (
    ROOT.parent / "shared" / "data" / "multi30k" / "test_2016_flickr.de",
    ROOT / "benchmarks" / "sentences.de",
)
"""Real sentences; the first file that is there."""

PATH = "/v1/translate"
WARM, FIRST = 600, 300
"""Requests before anything is measured, and those that say where the search begins. A search whose first run meets a server
that is not warm stays too low."""
CLIENTS = 64
"""Of the closed loop that says where the search begins."""
Keep = Callable[[dict[str, Any]], None]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Rates that HTTP servers sustain within a limit of p99 latency.")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "serve-load", help="of the models")
    parser.add_argument("--only", help="a part such as 'small, int8'; by default all")
    parser.add_argument("--systems", help="some of the servers, by parts of their names, with commas")
    parser.add_argument("--tune", choices=("tfexport", "ctranslate2", "transformers", "serve"), help="see above")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each server")
    parser.add_argument("--seconds", type=float, default=7, help="of each run; half as many more of base")
    parser.add_argument("--quick", action="store_true", help="two short rounds, to see that all of it runs")
    parser.add_argument("--preliminary", help="say in the results that they are, and why")
    parser.add_argument("--render", action="store_true", help="measure nothing: draw what is in the results")
    parser.add_argument("--out", type=Path, default=RESULTS / "serve_load.json")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.seconds = 2, 2.0
    return options


def sentences() -> Path:
    """The file of the sentences."""
    return next(path for path in TEXTS if path.exists())


def bodies(stream: bool = False) -> list[bytes]:
    """Requests, each with a sentence."""
    lines = sentences().read_text(encoding="utf-8").splitlines()[:1000]
    asked: dict[str, Any] = {"scores": False, **({"stream": True} if stream else {})}
    return [json.dumps({"text": line, **asked}).encode() for line in lines if line.strip()]


def parts(options: argparse.Namespace, folders: Sequence[Path]) -> Iterator[tuple[Path, str, float]]:
    """Models in precisions, with the limit of p99 in seconds."""
    for folder in folders:
        for precision in ("fp32", "int8"):
            if options.only in (None, f"{folder.name}, {precision}"):
                yield folder, precision, settings.LIMITS[folder.name]


def systems_of(options: argparse.Namespace, bundle: Path, precision: str) -> list[System]:
    found = (
        settings.candidates(options.tune, bundle, precision) if options.tune else settings.systems(bundle, precision)
    )
    asked = options.systems.split(",") if options.systems else [""]
    return [one for one in found if any(name.strip() in one.name for name in asked)]


def measure(options: argparse.Namespace, bundle: Path, precision: str, limit: float, keep: Keep) -> None:
    """A part: rounds over all servers."""
    seconds = options.seconds * (1.5 if bundle.name == "base" else 1)
    plain, streams = bodies(), bodies(stream=True)
    with ExitStack() as stack:
        running: dict[str, Running] = {}
        ladders: dict[str, Ladder] = {}
        for system in systems_of(options, bundle, precision):
            try:
                server = stack.enter_context(Running(system))
            except RuntimeError as error:
                say(str(error))
                continue
            url = server.address + PATH
            saturate(url, plain[:WARM], CLIENTS)
            ladders[system.name] = Ladder(saturate(url, plain[:FIRST], CLIENTS))
            running[system.name] = server
            server.rest()
            say(f"{bundle.name}, {precision}, {system.name}: {ladders[system.name].start:.0f}/s in a closed loop")

        def run(name: str, rate: float, *, stream: bool = False) -> Measured:
            server = running[name]
            others = busy_cpus(0.5)  # of other programs: all servers are stopped
            server.go_on()
            before = server.cpu_seconds
            found = offer(server.address + PATH, streams if stream else plain, rate, seconds, streams=stream)
            record = found.to_dict() | {
                "model": bundle.name,
                "precision": precision,
                "system": name,
                "limit": limit,
                "stream": stream,
                "kept": keeps(found.p99, found.failed, found.requests, limit),
                "cpu_per_request": (server.cpu_seconds - before) / max(1, found.requests),
                "memory": server.memory,
                "busy_before": others,
            }
            server.rest()
            say(
                f"{bundle.name}, {precision}, {name}{', streams' if stream else ''}: {rate:.1f}/s, p50 "
                f"{1e3 * found.p50:.0f} ms, p99 {1e3 * found.p99:.0f} ms, {1e3 * record['cpu_per_request']:.2f} CPU ms, "
                f"client {found.client_cpu:.2f}, failed {found.failed}, others {others or 0:.1f}"
            )
            keep(record)
            return found

        for _ in range(options.rounds):
            for name, ladder in ladders.items():
                rate = ladder.next
                found = run(name, rate)
                ladder.note(rate, kept=keeps(found.p99, found.failed, found.requests, limit))
        for name, ladder in ladders.items():
            if name.startswith(OURS) and not options.tune:
                run(name, 0.7 * (ladder.best or ladder.next), stream=True)
            say(f"{bundle.name}, {precision}, {name}: {ladder.best:.1f} requests a second within {limit:g} s")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def write(runs: Sequence[dict[str, Any]], offline: Sequence[dict[str, Any]], about: dict[str, Any], path: Path) -> None:
    """Results, one run a line; whole or not at all."""
    alone = json.dumps([{k: _short(v) for k, v in one.items()} for one in offline])
    lines = ",\n".join(json.dumps({k: _short(v) for k, v in run.items()}) for run in runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(f'{{"about": {json.dumps(about)},\n"offline": {alone},\n"runs": [\n{lines}\n]}}\n')
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    # So that SIGTERM ends the servers too, which would otherwise stay as they are: stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    path: Path = options.out
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"runs": [], "about": {}}
    if not options.render:
        about = {"machine": facts(), "preliminary": options.preliminary}
        folders = prepare(options.folder)
        for bundle, precision, limit in parts(options, folders):
            # What is measured again takes the place of what is there.
            here = {"model": bundle.name, "precision": precision}
            runs, alone = (
                [one for one in earlier.get(kind, []) if not here.items() <= one.items()]
                for kind in ("runs", "offline")
            )
            if not options.tune:
                alone.append({**here, "cpu_seconds": offline.seconds_of(bundle, sentences(), precision)})
            earlier = {"runs": runs, "offline": alone, "about": about}

            def keep(record: dict[str, Any], runs: list[dict[str, Any]] = runs, alone: Any = alone) -> None:
                runs.append(record)
                write(runs, alone, about, path)

            measure(options, bundle, precision, limit, keep)
    if earlier["runs"]:
        text = report.markdown(earlier)
        path.with_suffix(".md").write_text(text, encoding="utf-8")
        report.plot(earlier["runs"], path.with_suffix(".png"))
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
