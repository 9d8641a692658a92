"""What is compared, with the settings that were best for each engine, and what was tried to find them."""

from __future__ import annotations

from pathlib import Path

from benchmarks.serve.systems import System, behind_litserve, ours

LIMITS = {"small": 0.2, "base": 2.0}
"""Seconds of p99 for each model."""

WAITS: dict[str, tuple[str, ...]] = {"small": (), "base": ("--max-wait", "1.5")}
"""Of our server: by default it refuses what would wait for more than a second. The limit of `base` leaves room for more."""

BATCHES: dict[tuple[str, str], tuple[int, float]] = {("ctranslate2", "small"): (8, 0.002)}
"""Largest batch and timeout by engine and model, where `--tune` found better ones than the defaults."""

DEFAULT_BATCH = (32, 0.005)

SIZES = (8, 32)
TIMEOUTS = (0.002, 0.02)
WORKERS = ((2, 1), (1, 2))
"""Worker processes, and threads of each."""


def systems(bundle: Path, precision: str) -> list[System]:
    """The servers that are compared."""
    found = [ours(bundle, precision, *WAITS[bundle.name])]
    engines = ["tfexport", "ctranslate2"] + (["transformers"] if precision == "fp32" else [])
    for engine in engines:
        size, timeout = BATCHES.get((engine, bundle.name), DEFAULT_BATCH)
        found.append(_litserve(engine, bundle, precision, size, timeout, 2, 1))
    return found


def candidates(engine: str, bundle: Path, precision: str) -> list[System]:
    """An engine with several settings."""
    if engine == "serve":
        tried: dict[str, tuple[str, ...]] = {
            "two processes": (),
            "two processes, 64 slots": ("--slots", "64"),
            "two threads": ("--worker-kind", "threads"),
            "one process": ("--workers", "1", "--worker-kind", "processes"),
            "one thread": ("--workers", "1", "--worker-kind", "threads"),
        }
        return [_named(ours(bundle, precision, *flags), name) for name, flags in tried.items()]
    found = []
    for workers, threads in WORKERS:
        for size in SIZES:
            for timeout in TIMEOUTS:
                one = _litserve(engine, bundle, precision, size, timeout, workers, threads)
                found.append(_named(one, f"{workers} x {threads}, {size}, {1e3 * timeout:g} ms"))
    return found


def _litserve(
    engine: str, bundle: Path, precision: str, size: int, timeout: float, workers: int, threads: int
) -> System:
    return behind_litserve(
        engine,
        bundle,
        precision,
        *("--max-batch", str(size), "--batch-timeout", str(timeout)),
        *("--workers", str(workers), "--threads", str(threads)),
    )


def _named(system: System, name: str) -> System:
    return System(name, system.module, system.arguments, system.ready)
