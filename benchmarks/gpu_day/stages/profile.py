"""Where the time of a step of `ort-cuda` goes: microseconds a node, the gaps between nodes, and what the host adds."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.timing import Setting
from benchmarks.gpu_day import models, place
from benchmarks.gpu_day.spans import Span, about, from_nsys, whole
from benchmarks.gpu_day.stage import Task, main, say
from benchmarks.gpu_day.watch import watch
from benchmarks.peers.decoders import RuntimePeer, one_line
from tfexport.bundle.reader import Bundle
from tfexport.contract import FLOATS
from tfexport.runtimes.base import AHEAD, Runtime
from tfexport.verification.parity import random_sources

SETTINGS = (("fp16", 1, 1), ("fp16", 32, 4), ("fp16", 32, 1), ("fp16", 1, 4), ("bf16", 1, 1), ("fp32", 1, 1))
TOKENS, WARMUP = 32, 3
NSYS_SECONDS = 60


def decoder(task: Task, bundle: Bundle, short: str, batch: int, beam: int) -> tuple[RuntimePeer, Setting]:
    """`ort-cuda` and what it decodes, warmed up, so that its steps are recorded."""
    peer = RuntimePeer("ort-cuda", place.runtime(task, "ort-cuda", bundle, FLOATS[short]))
    setting = Setting(random_sources(bundle.config, batch), beam, 8 if task.rehearsal else TOKENS)
    for _ in range(WARMUP):
        peer.decode(setting.sources, setting.options)
    return peer, setting


def run(task: Task) -> bool:
    """Profile a decode of each setting."""
    rows: list[dict[str, Any]] = []
    task.found["rows"] = rows
    bundle = models.base(task)
    for short, batch, beam in SETTINGS[:2] if task.rehearsal else SETTINGS:
        if task.left <= 0:
            task.found["left_out"] = f"from {short}, batch {batch}, beam {beam} on: the time was up"
            break
        row: dict[str, Any] = {"precision": short, "batch": batch, "beam": beam, "error": None}
        try:
            row |= _row(task, bundle, short, batch, beam)
        except Exception as error:  # the libraries' errors have no common base
            row["error"] = one_line(error)
        rows.append(row)
        task.save()
        say(str({name: value for name, value in row.items() if name != "kernels"}))
    if shutil.which("nsys") and task.left > NSYS_SECONDS:
        task.found["nsys"] = _by_nsys(task, rows[0].get("at_once", 1))
    return task.rehearsal or any("us_a_token" in row for row in rows)


def _row(task: Task, bundle: Bundle, short: str, batch: int, beam: int) -> dict[str, Any]:
    peer, setting = decoder(task, bundle, short, batch, beam)
    unwatched = [seconds for _ in range(3) for seconds in _steps(peer, setting)]
    seen = watch(lambda: _steps(peer, setting))
    row: dict[str, Any] = {"by": seen.by, "host_step_us": statistics.median(unwatched) * 1e6}
    if seen.spans:
        row |= whole(seen.spans, setting.tokens)
        found = about(seen.spans, at_once=_steps_at_once(peer.runtime, beam)) or {}
        return {**row, **found, "watched_step_us": statistics.median(peer.steps) * 1e6}
    return {**row, "launched": sum(seen.counts.values()), "host_steps": len(peer.steps)}


def _steps_at_once(runtime: Runtime, beam: int) -> int:
    """Steps of a search that end with one copy to the host."""
    capabilities = runtime.capabilities
    return AHEAD if (capabilities.greedy_ahead if beam == 1 else capabilities.beam_ahead) else 1


def _steps(peer: RuntimePeer, setting: Setting) -> list[float]:
    peer.decode(setting.sources, setting.options)
    return list(peer.steps)


def _by_nsys(task: Task, at_once: int) -> dict[str, Any]:
    """The first setting once more, seen by Nsight Systems; `at_once` as for `about`."""
    report = task.work / "nsys"
    record = ["nsys", "profile", "--trace=cuda", "--cuda-graph-trace=node", "--sample=none", "--cpuctxsw=none"]
    record += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--force-overwrite=true"]
    decode = [sys.executable, "-m", "benchmarks.gpu_day.profiled", "--work", str(task.work)]
    stats = ["nsys", "stats", "--report", "cuda_gpu_trace", "--format", "csv", "--force-export=true"]
    try:
        subprocess.run([*record, "-o", str(report), *decode], check=True, timeout=NSYS_SECONDS)
        done = subprocess.run(
            [*stats, str(Path(f"{report}.nsys-rep"))], capture_output=True, text=True, check=True, timeout=NSYS_SECONDS
        )
        found: list[Span] = from_nsys(done.stdout)
    except (OSError, subprocess.SubprocessError, KeyError, ValueError) as error:
        return {"error": one_line(error)}
    return {"error": None, **(about(found, at_once=at_once) or {"error": "it saw no step"})}


if __name__ == "__main__":
    sys.exit(main(run, stand_ins=True))
