"""Speed of `ort-cuda` beside eager PyTorch, Hugging Face and CTranslate2: all in one run, in rounds that take turns."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.timing import Meter, Runs, Setting, measure, summary
from benchmarks.gpu_day import models, place
from benchmarks.gpu_day.processes import launch
from benchmarks.gpu_day.stage import Task, main, say
from benchmarks.gpu_day.stages.environment import gpu_now
from benchmarks.gpu_day.unpack import ROOT
from benchmarks.peers.decoders import Peer, RuntimePeer, load_peer, one_line
from tfexport.bundle.reader import Bundle
from tfexport.contract import FLOATS
from tfexport.verification.parity import random_sources

PEERS = ("torch-cuda", "ort-cuda", "hugging-face", "ctranslate2")
USE_TORCH = ("torch", "hugging")
"""How the names of those begin whose memory PyTorch's allocator gives."""
TRIAL_SECONDS = 75
"""For the trial of a peer: CTranslate2's wheel may have PTX alone for a GPU, which the driver compiles at its first use."""


@dataclass(frozen=True)
class Matrix:
    """What is measured: every precision with each of its settings, pairs of batch size and beam."""

    precisions: tuple[str, ...] = ("fp16",)
    settings: tuple[tuple[int, int], ...] = ((1, 1), (32, 1), (1, 4), (32, 4), (256, 1), (256, 4))
    tokens: int = 32
    warmup: int = 3
    repeats: int = 10

    def for_rehearsal(self) -> Matrix:
        return Matrix(self.precisions, ((1, 1), (3, 4)), tokens=6, warmup=1, repeats=2)


FIRST = Matrix()
MORE = Matrix(("bf16", "fp32"), ((1, 1), (32, 1), (32, 4)), repeats=6)
"""Measured after the first, with what time is left, of these peers."""
OWN = ("torch-cuda", "ort-cuda")


def run(task: Task) -> bool:
    """Try each peer in a process of its own, then measure those that work."""
    bundle = models.base(task)
    task.found |= {"trials": {}, "rows": [], "gpu_before": gpu_now()}
    names = [name for name in PEERS if _works(task, name)]
    done = measure_all(task, bundle, names, FIRST)
    if done:
        measure_all(task, bundle, [name for name in names if name in OWN], MORE)
    task.found["gpu_after"] = gpu_now()
    return done and "ort-cuda" in names


def _works(task: Task, name: str) -> bool:
    """Whether a peer decodes: one that ends its process would end all of them."""
    log = task.work / f"trial-{name}.log"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_day.trial", name, "--work", str(task.work)]
    rehearse = ["--rehearse"] if task.rehearsal else []
    seconds = min(TRIAL_SECONDS, max(1.0, task.left))
    outcome = launch([*command, *rehearse], seconds, log, folder=ROOT, environment=os.environ)
    said = "" if outcome.code == 0 else f"stopped after {seconds:.0f} s" if outcome.code is None else outcome.last_line
    task.found["trials"][name] = {"code": outcome.code, "seconds": outcome.seconds, "said": said}
    task.save()
    say(f"trial of {name}: {said or 'it decodes'}, {outcome.seconds:.0f} s")
    return outcome.code == 0


def peer(task: Task, name: str, bundle: Bundle, short: str) -> Peer:
    """What decodes under this name, in a rehearsal on the CPU.

    Raises:
        TfexportError: it cannot run here, or not this model or precision.
    """
    precision = FLOATS[short]
    if name == "ort-cuda":
        return RuntimePeer(name, place.runtime(task, name, bundle, precision))
    if task.rehearsal and name == "ctranslate2":
        precision = "float32"  # all that it computes in on every CPU
    found = load_peer(
        place.ON_CPU.get(name, name) if task.rehearsal else name, place.device(task), bundle, precision, None
    )
    found.name = name  # type: ignore[misc]  # in a rehearsal that of the one whose place it takes
    return found


def measure_all(task: Task, bundle: Bundle, names: Sequence[str], matrix: Matrix) -> bool:
    """Add rows to the results, saved after each setting; whether all were measured before the time was up."""
    if not names:
        return False
    matrix = matrix.for_rehearsal() if task.rehearsal else matrix
    task.found["ratio_to"] = names[0]
    sources = random_sources(bundle.config, max(batch for batch, _ in matrix.settings))
    for short in matrix.precisions:
        peers, meters, missing = _load(task, names, bundle, short)
        for batch, beam in matrix.settings:
            if task.left <= 0:
                task.found["left_out"] = f"from {short}, batch {batch}, beam {beam} on: the time was up"
                task.save()
                return False
            say(f"{short}, batch {batch}, beam {beam}")
            setting = Setting(sources[:batch], beam, matrix.tokens)
            runs = {name: Runs(error=error) for name, error in missing.items()}
            runs |= measure(peers, meters, setting, warmup=matrix.warmup, repeats=matrix.repeats)
            for name in names:
                row = summary(runs[name], runs[names[0]], matrix.tokens * batch)
                place_of = {"runtime": name, "precision": short, "batch": batch, "beam": beam}
                task.found["rows"].append({**place_of, **row})
            task.save()
    return True


def _load(
    task: Task, names: Sequence[str], bundle: Bundle, short: str
) -> tuple[list[Peer], dict[str, Meter], dict[str, str]]:
    peers: list[Peer] = []
    meters: dict[str, Meter] = {}
    missing: dict[str, str] = {}
    for name in names:
        meters[name] = Meter(place.device(task), name.startswith(USE_TORCH))
        try:
            meters[name].around(lambda name=name: peers.append(peer(task, name, bundle, short)))  # type: ignore[misc]
        except Exception as error:  # the libraries' errors have no common base
            missing[name] = one_line(error)
            say(f"{name} in {short}: {missing[name]}")
    return peers, meters, missing


if __name__ == "__main__":
    sys.exit(main(run, stand_ins=True))
