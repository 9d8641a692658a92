"""Requests that arrive at random moments, whether or not earlier ones were answered.

MLPerf LoadGen, scenario `Server`, draws the moments (a Poisson process) and takes each latency from the moment at which a
request was due, not from when it was sent. aiohttp sends the requests. All of it is one process with one event loop.
"""

from __future__ import annotations

import asyncio
import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import mlperf_loadgen as loadgen  # type: ignore[import-not-found]
import uvloop

GIVE_UP = 30.0
"""Seconds after which a request has failed."""


@dataclass(frozen=True)
class Measured:
    """What became of the requests of a run. Seconds are from when a request was due to the end of its answer."""

    rate: float
    """Requests per second that were due, by the plan."""
    requests: int
    failed: int
    """Of them, those without an answer: with another status, or none in time."""
    p50: float
    p90: float
    p99: float
    longest: float
    completed: float
    """Answers per second."""
    client_cpu: float
    """CPU seconds of this process, per second."""
    first_p50: float | None = None
    """To the first token; of streams alone."""
    first_p99: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def offer(url: str, bodies: Sequence[bytes], rate: float, seconds: float, *, streams: bool = False) -> Measured:
    """Send `bodies` to `url`, in an order drawn at random, for so many seconds; wait for the answers.

    Args:
        rate: requests per second, the mean of the Poisson process.
        streams: answers are server-sent events, and the first of them is a token.
    """
    return uvloop.run(_offer(url, bodies, rate, seconds, streams))


async def _offer(url: str, bodies: Sequence[bytes], rate: float, seconds: float, streams: bool) -> Measured:
    loop, failed = asyncio.get_running_loop(), 0
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    timeout = aiohttp.ClientTimeout(total=GIVE_UP)
    headers = {"Content-Type": "application/json"}
    running: set[asyncio.Task[None]] = set()
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:

        async def send(number: int, body: bytes) -> None:
            nonlocal failed
            tokens = 1
            try:
                async with session.post(url, data=body) as answer:
                    if streams:
                        async for _ in answer.content.iter_any():
                            if tokens == 1:
                                loadgen.FirstTokenComplete([loadgen.QuerySampleResponse(number, 0, 0)])
                            tokens += 1
                    else:
                        await answer.read()
                    failed += answer.status != 200
            except (aiohttp.ClientError, TimeoutError):
                failed += 1
            loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(number, 0, 0, tokens)])

        def begin(number: int, body: bytes) -> None:
            task = loop.create_task(send(number, body))
            running.add(task)
            task.add_done_callback(running.discard)

        def issue(samples: Any) -> None:
            for sample in samples:
                loop.call_soon_threadsafe(begin, sample.id, bodies[sample.index])

        started, before = time.perf_counter(), _cpu_seconds()
        found = await asyncio.to_thread(_run, issue, len(bodies), rate, seconds, streams)
        busy = (_cpu_seconds() - before) / (time.perf_counter() - started)
    kinds = {"p50": "50.00_percentile", "p90": "90.00_percentile", "p99": "99.00_percentile", "longest": "max"}
    first = {f"first_{name}": found.get(f"result_first_token_{kinds[name]}_latency_ns") for name in ("p50", "p99")}
    return Measured(
        rate=rate,
        requests=int(found["result_query_count"]),
        failed=failed,
        completed=found["result_completed_samples_per_sec"],
        client_cpu=busy,
        **{name: found[f"result_{kind}_latency_ns"] / 1e9 for name, kind in kinds.items()},
        **{name: value / 1e9 for name, value in first.items() if value is not None},
    )


def _run(issue: Callable[[Any], None], count: int, rate: float, seconds: float, streams: bool) -> dict[str, Any]:
    """A run of LoadGen: what its detailed log says."""
    settings = loadgen.TestSettings()
    settings.scenario, settings.mode = loadgen.TestScenario.Server, loadgen.TestMode.PerformanceOnly
    settings.server_target_qps = rate
    settings.min_duration_ms = settings.max_duration_ms = int(1000 * seconds)
    settings.min_query_count = 1
    settings.use_token_latencies = streams
    system = loadgen.ConstructSUT(issue, lambda: None)
    samples = loadgen.ConstructQSL(count, count, lambda _: None, lambda _: None)
    try:
        with tempfile.TemporaryDirectory() as folder:
            logs = loadgen.LogSettings()
            logs.log_output.outdir, logs.enable_trace = folder, False
            loadgen.StartTestWithLogSettings(system, samples, settings, logs)
            text = (Path(folder) / "mlperf_log_detail.txt").read_text(encoding="utf-8")
    finally:
        loadgen.DestroyQSL(samples)
        loadgen.DestroySUT(system)
    lines = (json.loads(line.partition(" ")[2]) for line in text.splitlines() if line.startswith(":::MLLOG"))
    return {line["key"]: line["value"] for line in lines}


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _closed(url: str, bodies: Sequence[bytes], clients: int) -> float:
    waiting = list(reversed(bodies))
    async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as session:

        async def client() -> None:
            while waiting:
                async with session.post(url, data=waiting.pop()) as answer:
                    await answer.read()
                    answer.raise_for_status()

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return len(bodies) / (time.perf_counter() - started)


def saturate(url: str, bodies: Sequence[bytes], clients: int) -> float:
    """Answers per second where each of so many clients sends its next request when it has its answer."""
    return uvloop.run(_closed(url, bodies, clients))
