"""A day on a GPU machine: `make gpu-day`, or where there is no make

    python3 -m benchmarks.gpu_day                      # what is not done yet, in 25 minutes at most
    python3 -m benchmarks.gpu_day --background         # the same, without a terminal
    python3 -m benchmarks.gpu_day --minutes 9          # a part; the next call goes on
    python3 -m benchmarks.gpu_day --from speed         # this stage and those after it, again
    python3 -m benchmarks.gpu_day --only profile
    python3 -m benchmarks.gpu_day --rehearse           # without a GPU

Results are in `build/gpu-day/results`, of a rehearsal in `build/gpu-day/rehearsal`: `summary.md`, `summary.json`, a file and
a log of each stage, and all of it in `results.tar.xz`. Exit codes: 0 every stage ended as it should, 1 one did not, 2
nothing was run, more than 128: ended by a signal.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.cuda_dry import build
from benchmarks.gpu_day import plan, runner, summary
from benchmarks.gpu_day.parts import BadPack, OtherPython
from benchmarks.gpu_day.plan import Stage
from benchmarks.gpu_day.processes import launch
from benchmarks.gpu_day.state import State
from benchmarks.gpu_day.unpack import FOLDER, PACK, ROOT, SITE, unpack
from tfexport.system.file_locks import lock_folder

DAY_LOG = "day.log"
ENDS = (signal.SIGTERM, signal.SIGINT)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="first", metavar="STAGE", help="run this stage and those after it, also again")
    parser.add_argument("--only", metavar="STAGE", help="run this stage alone, also again")
    parser.add_argument("--minutes", type=float, default=plan.MINUTES, help="for this call")
    parser.add_argument("--background", action="store_true", help="go on without this terminal, and print where")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, over the stand-ins of make cuda-dry")
    parser.add_argument("--list", action="store_true", help="show the stages and their limits, and run nothing")
    parser.add_argument("--pack", type=Path, default=PACK, help="what make gpu-day-pack made")
    parser.add_argument("--results", type=Path, help="by default in build/gpu-day")
    options = parser.parse_args(arguments)
    if options.first and options.only:
        parser.error("give --from or --only, not both")
    options.results = (options.results or FOLDER / ("rehearsal" if options.rehearse else "results")).absolute()
    options.all = plan.stages(rehearsal=options.rehearse)
    try:
        options.stages = plan.chosen(options.all, first=options.first, only=options.only)
    except plan.UnknownStage as error:
        parser.error(str(error))
    return options


def environment(unpacked: Mapping[str, Any], *, rehearsal: bool) -> dict[str, str]:
    """What the processes of the stages get: the packages of the pack, and in a rehearsal the stand-ins of CUDA."""
    given = dict(os.environ)
    paths, libraries = list(unpacked.get("paths", [])), list(unpacked.get("libraries", []))
    if rehearsal:
        stand_ins, provider = _stand_ins(unpacked)
        libraries, paths = stand_ins, [*paths, *provider]  # no real library of CUDA may come first
    given["PYTHONPATH"] = os.pathsep.join([*paths, str(ROOT), *filter(None, [given.get("PYTHONPATH")])])
    given["LD_LIBRARY_PATH"] = os.pathsep.join([*libraries, *filter(None, [given.get("LD_LIBRARY_PATH")])])
    # The machine has no network: a library that tries one would wait for it.
    given |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "CUDA_CACHE_MAXSIZE": str(4 << 30)}
    return given


def _stand_ins(unpacked: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Folders of the stand-ins and of ONNX Runtime's CUDA provider: that of the pack where there is one."""
    try:
        build.prepare(download=True)
    except (build.Missing, subprocess.CalledProcessError) as error:
        say(f"note: no stand-ins of CUDA can be made, so ort-cuda is not rehearsed: {error}")
        return [], []
    return [str(build.LIBRARIES)], [] if "onnxruntime-gpu" in unpacked.get("used", {}) else [str(build.SITE)]


def say(line: str) -> None:
    """Tell it to who still listens: the end of a terminal ends no day."""
    with suppress(OSError):
        print(line, flush=True)


def run(options: argparse.Namespace) -> int:
    """Run the stages of `options`, whose results folder this process has locked."""
    end = time.monotonic() + options.minutes * 60  # to unpack takes a part of it
    try:
        unpacked = unpack(options.pack, SITE, say=say)
    except BadPack as error:
        if not (options.rehearse and isinstance(error, OtherPython)):
            say(f"error: {error}")
            return 2
        say(f"note: the packages of this machine are rehearsed, and no pack: {error}")
        unpacked = {}
    given = environment(unpacked, rehearsal=options.rehearse)
    state = State(options.results, rehearsal=options.rehearse)
    work = FOLDER / ("rehearsal-work" if options.rehearse else "work")

    def start(stage: Stage, seconds: float) -> runner.Outcome:
        out, log = options.results / f"{stage.name}.json", options.results / f"{stage.name}.log"
        log.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            stage.module,
            "--out",
            str(out),
            "--work",
            str(work),
            "--seconds",
            str(seconds),
        ]
        rehearse = ["--rehearse"] if options.rehearse else []
        return launch([*command, *rehearse], seconds, log, folder=ROOT, environment=given)

    def saved() -> None:
        try:
            summary.write(summary.collect(options.all, state, options.results), options.results)
        except Exception as error:  # the results themselves are there, and the next stage must run
            say(f"note: no summary was written: {type(error).__name__}: {error}")

    again = bool(options.first or options.only)
    run_stages = partial(runner.run, options.stages, state, start, saved=saved, say=say, again=again)
    good = run_stages(seconds=end - time.monotonic())
    say(f"written: {options.results / summary.MARKDOWN}")
    return 0 if good else 1


def _ended(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def in_background(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Start this command again in a session of its own, with its output in a file."""
    log = options.results / DAY_LOG
    command = [sys.executable, "-m", "benchmarks.gpu_day", *(word for word in arguments if word != "--background")]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT, start_new_session=True
        )
    say(f"process {process.pid} runs the day. Follow it with: tail -f {log}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(given)
    if options.list:
        for stage in options.all:
            say(f"{stage.name:16} {stage.limit:4} s  {stage.about}")
        return 0
    options.results.mkdir(parents=True, exist_ok=True)
    if options.background:
        return in_background(given, options)
    for number in ENDS:
        signal.signal(number, _ended)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        lock = lock_folder(options.results)
    except BlockingIOError:
        say(f"a day is running already in {options.results}. Wait for it, or give another folder with --results.")
        return 2
    try:
        return run(options)
    finally:
        os.close(lock)


if __name__ == "__main__":
    sys.exit(main())
