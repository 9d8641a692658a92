"""Faults around a server: workers are killed, clients go away or are hostile; and many requests.

    python -m fuzz.server.failures [--kills 200] [--disconnects 1000] [--stalls 20] [--requests 100000]
        [--mixed 200000] [--clients 16] [--seed 0]

`tfexport serve` runs in a process of its own, over a small random model. Each answer is compared with `translate_ids`.

kills        a worker process is killed while clients ask; each request gets its answer, once
disconnects  clients go away at random moments, with and without streams; nothing of their requests is left in the server
stalls       clients read nothing, or send half of a body or of its headers; their connections end, and others are answered
requests     many in a row; memory, file descriptors and threads of the server do not grow
mixed        the same with hostile clients beside honest ones, which are answered right and in time (`hostile_clients`)

Figures are printed. The exit code is 1 where an answer is lost, wrong or a fault of the server, or where something grew.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import torch

from fuzz.server.hostile_clients import Mixed
from fuzz.server.known_answers import Load
from makers.servers import Size, serving, workers
from makers.serving_bundle import write_bundle

RECEIVE, SEND = 2.0, 2.0
"""Seconds that the server waits for clients."""

GROWTH = 24 * 2**20
"""Bytes that may be added in the second half of many requests: allocators settle slowly."""


async def kills(load: Load, count: int, clients: int) -> None:
    """Kill a worker, and wait until another has its place."""
    done = 0

    async def kill() -> None:
        nonlocal done
        for number in range(count):
            await asyncio.sleep(load.random.uniform(0, 0.3))
            there = workers(load.running)
            if there:
                os.kill(load.random.choice(there), signal.SIGKILL)
            end = time.monotonic() + 60
            while await asyncio.to_thread(load.running.metric, "tfexport_worker_restarts_total") <= number:
                if time.monotonic() > end:
                    load.figures.problem("a worker that was killed is not replaced")
                    break
                await asyncio.sleep(0.02)
            done = number + 1

    await asyncio.gather(load.clients(clients, lambda: done >= count), kill())
    load.figures.seen["kills"] += done


async def disconnects(load: Load, count: int, clients: int) -> None:
    """Go away at a random moment, while others stay."""
    left = count

    async def leave() -> None:
        nonlocal left
        async with httpx.AsyncClient(base_url=load.running.url, timeout=120) as client:
            while left > 0:
                left -= 1
                body = {**load.draw().body, "max_length": 55, "min_length": 50, "beam": 4, "samples": None}
                if load.random.random() < 0.5:
                    body |= {"ids": body["ids"] * 8}
                try:
                    await asyncio.wait_for(client.post("/v1/translate", json=body), load.random.uniform(0.001, 0.4))
                    load.figures.seen["answers before the client left"] += 1
                except TimeoutError:
                    load.figures.seen["disconnects"] += 1
                except httpx.HTTPError as error:
                    load.figures.problem(f"a request was lost: {error!r}")

    await asyncio.gather(load.clients(2, lambda: left <= 0), *(leave() for _ in range(clients)))
    await load.require_rest()
    load.figures.seen["cancelled"] += int(
        load.running.metric('tfexport_requests_total{model="model",outcome="cancelled"}')
    )


REQUEST = (
    b"POST /v1/translate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
)
UNREAD = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 400
STALLS: dict[str, tuple[bytes, str]] = {
    "half a body": (REQUEST + b'{"ids": [[4', "slow request"),
    "half of the headers": (REQUEST[:40], "slow headers"),
    "nothing sent": (b"", "slow headers"),
    "nothing read": (UNREAD, "slow reader"),
}


async def stalls(load: Load, count: int, clients: int) -> None:
    """Clients that send half, or read nothing, beside others that ask."""
    open_ones: list[socket.socket] = []
    before = {reason: _refused(load, reason) for _, reason in STALLS.values()}
    wanted: Counter[str] = Counter()
    for number in range(count):
        sent, reason = list(STALLS.values())[number % len(STALLS)]
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", load.running.port))
        one.setblocking(False)
        with suppress(BlockingIOError):
            one.send(sent)
        open_ones.append(one)
        wanted[reason] += 1
    end = time.monotonic() + 12 * (RECEIVE + SEND)
    missing: dict[str, float] = dict(wanted)

    def is_over() -> bool:
        return not any(missing.values()) or time.monotonic() > end

    async def watch() -> None:
        while not is_over():
            await asyncio.sleep(0.5)
            for reason, number in wanted.items():
                found = await asyncio.to_thread(_refused, load, reason)
                missing[reason] = max(0.0, number - (found - before[reason]))

    await asyncio.gather(watch(), load.clients(min(clients, 4), is_over))
    for one in open_ones:
        one.close()
    for reason, number in missing.items():
        load.figures.seen[f"ended: {reason}"] += int(wanted[reason] - number)
        if number:
            load.figures.problem(f"{number:.0f} of {wanted[reason]} connections were not ended: {reason}")
    await load.require_rest()


def _refused(load: Load, reason: str) -> float:
    return load.running.metric(f'tfexport_http_refused_total{{reason="{reason}"}}')


@asynccontextmanager
async def require_size(load: Load, answered: Callable[[], int], count: int) -> AsyncIterator[None]:
    """Check that the server does not grow in the second half of `count` requests; the first lets allocators settle."""
    sizes, began = {0: Size.of(load.running)}, time.monotonic()

    async def watch() -> None:
        while answered() < count // 2:
            await asyncio.sleep(0.02)
        sizes[count // 2] = Size.of(load.running)

    watching = asyncio.create_task(watch())
    yield
    seconds = time.monotonic() - began
    await watching
    await asyncio.sleep(6)  # idle connections end
    sizes[count] = Size.of(load.running)
    for number, size in sorted(sizes.items()):
        print(f"  {number:>8,} requests: {size.resident / 2**20:.1f} MiB, {size.files} files, {size.threads} threads")
    print(f"  {count / seconds:.0f} requests per second")
    middle, last = sizes[count // 2], sizes[count]
    if last.resident - middle.resident > GROWTH:
        load.figures.problem(f"memory grew by {(last.resident - middle.resident) / 2**20:.1f} MiB")
    if last.files > middle.files + 4 or last.threads > middle.threads + 4:
        load.figures.problem(f"files or threads grew: {middle}, then {last}")
    await load.require_rest()


async def requests(load: Load, count: int, clients: int) -> None:
    """Many requests."""
    answered = 0

    def is_over() -> bool:
        nonlocal answered
        answered += 1
        return answered > count

    async with require_size(load, lambda: answered, count):
        await load.clients(clients, is_over)


async def mixed(load: Load, count: int, clients: int) -> None:
    """Hostile clients beside honest ones."""
    state = Mixed(load, count)
    async with require_size(load, lambda: state.sent, count):
        await state.run(clients)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Faults around a server.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--disconnects", type=int, default=1000)
    parser.add_argument("--stalls", type=int, default=20)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--mixed", type=int, default=200_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    phases: dict[Callable[[Load, int, int], Awaitable[None]], int] = {
        kills: options.kills,
        disconnects: options.disconnects,
        stalls: options.stalls,
        requests: options.requests,
        mixed: options.mixed,
    }
    bad = 0
    with tempfile.TemporaryDirectory() as temporary:
        bundle = write_bundle(Path(temporary)).directory
        limits = ["--receive-timeout", RECEIVE, "--send-timeout", SEND]
        for phase, count in phases.items():
            if not count:
                continue
            log = Path(temporary) / f"{phase.__name__}.log"
            patience = [] if phase is mixed else ["--max-wait", 60]
            with serving(
                log, f"model={bundle}", "--workers", 2, "--worker-kind", "processes", *limits, *patience
            ) as running:
                load, began = Load(bundle, running, options.seed), time.monotonic()
                asyncio.run(phase(load, count, options.clients))
                said = [line for line in log.read_text(encoding="utf-8").splitlines() if "INFO request" not in line]
                if any(line.startswith("Traceback") for line in said):
                    load.figures.problem("a fault of the server:\n" + "\n".join(said[-15:]))
                running.process.send_signal(signal.SIGTERM)
                if (code := running.process.wait(60)) != 0:
                    load.figures.problem(f"the server ended with {code}")
            told = ", ".join(f"{number:,} {what}" for what, number in sorted(load.figures.seen.items()))
            print(
                f"{phase.__name__}: {told}; {len(load.figures.problems)} problems; {time.monotonic() - began:.0f} s",
                flush=True,
            )
            bad += len(load.figures.problems)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
