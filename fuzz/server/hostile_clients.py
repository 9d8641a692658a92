"""Hostile clients beside honest ones: each client has an address of its own, and honest ones notice nothing.

heavy      eight requests at once, each of eight sentences with a wide beam
large      large bodies in every field (`body_costs`)
raw        damaged and hostile HTTP: upgrades with a request in their body, two hosts, floods of headers, half requests
gone       clients that leave before the answer
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx

from fuzz.server import body_costs
from fuzz.server.known_answers import Load
from tfexport.serving.http.large_requests import LARGE

HONEST = (0, 0, 2 * LARGE)
"""The padding of each honest client's requests: the server treats large bodies in another way."""
PAUSE = 0.02
"""Seconds between two requests of an honest client."""
ANSWER_WITHIN = 5.0
"""Seconds in which an honest request must be answered."""
LARGE_BODIES = 40

RAW = (
    b"POST /v1/translate HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 44\r\n\r\n"
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /v1/translate HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/translate HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/translate HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{",
    b"POST /v1/translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n{}",
    b"POST /v1/translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/translate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1;" + b"x" * 100_000,
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 20_000,
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200,
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)


@dataclass
class Mixed:
    """The state of the clients."""

    load: Load
    count: int
    sent: int = 0
    seconds: list[float] = field(default_factory=list)
    """Of honest requests."""
    addresses: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def more(self) -> bool:
        """Count a request; whether it is to be sent."""
        self.sent += 1
        return self.sent <= self.count

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client with an address of its own."""
        transport = httpx.AsyncHTTPTransport(local_address=self._address())
        async with httpx.AsyncClient(base_url=self.load.running.url, timeout=120, transport=transport) as client:
            yield client

    def _address(self) -> str:
        number = next(self.addresses)
        return f"127.1.{number // 250}.{1 + number % 250}"

    async def honest(self, padding: int) -> None:
        async with self.client() as client:
            while self.more():
                began, refused = time.monotonic(), self.load.figures.seen["429"] + self.load.figures.seen["503"]
                await self.load.ask(client, padding)
                self.seconds.append(time.monotonic() - began)
                if self.load.figures.seen["429"] + self.load.figures.seen["503"] > refused:
                    self.load.figures.problem("an honest client was refused")
                if self.seconds[-1] > ANSWER_WITHIN:
                    self.load.figures.problem(f"an honest client waited {self.seconds[-1]:.1f} s")
                await asyncio.sleep(PAUSE)

    async def heavy(self) -> None:
        body = {"ids": [[4 + number] * 20 for number in range(8)], "beam": 32, "max_length": 30}
        async with self.client() as client:
            await asyncio.gather(
                *(self._repeated(client, lambda: ("/v1/translate", json.dumps(body))) for _ in range(8))
            )

    async def large(self, bodies: list[tuple[str, bytes]]) -> None:
        chooser = random.Random(0)
        async with self.client() as client:
            await self._repeated(client, lambda: chooser.choice(bodies))

    async def _repeated(self, client: httpx.AsyncClient, draw: Callable[[], tuple[str, str | bytes]]) -> None:
        while self.more():
            path, body = draw()
            with suppress(httpx.HTTPError):
                status = (
                    await client.post(path, content=body, headers={"Content-Type": "application/json"})
                ).status_code
                self.load.figures.seen[f"hostile {status}"] += 1
                if status == 500:
                    self.load.figures.problem(f"a fault of the server: {body[:200]!r}")
                await asyncio.sleep(0.02 if status == 429 else 0)

    async def raw(self) -> None:
        chooser, address = random.Random(1), self._address()
        while self.more():
            sent = chooser.choice(RAW)
            cut = chooser.choice((len(sent), chooser.randint(1, len(sent))))
            with suppress(OSError, TimeoutError):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", self.load.running.port, local_addr=(address, 0)
                )
                for part in (sent[:cut], sent[cut:]):
                    writer.write(part)
                    await writer.drain()
                if chooser.random() < 0.5:
                    writer.write_eof()
                async with asyncio.timeout(0.05):
                    await reader.read(1000)
                writer.close()
            self.load.figures.seen["raw"] += 1

    async def gone(self) -> None:
        chooser = random.Random(2)
        async with self.client() as client:
            while self.more():
                asked = self.load.draw()
                with suppress(httpx.HTTPError, TimeoutError):
                    async with asyncio.timeout(chooser.uniform(0, 0.02)):
                        await client.post("/v1/translate", json=asked.body)
                self.load.figures.seen["left"] += 1

    async def run(self, clients: int) -> None:
        """All clients, until `count` requests were sent.

        Args:
            clients: the number of hostile ones.
        """
        description = httpx.get(f"{self.load.running.url}/openapi.json").json()
        every = [case for case in body_costs.cases(description) if case.kind == "application/json"]
        bodies = [(case.path, case.make()) for case in random.Random(0).sample(every, LARGE_BODIES)]
        kinds = itertools.cycle((self.heavy, lambda: self.large(bodies), self.raw, self.raw, self.gone))
        hostile = [kind() for kind in itertools.islice(kinds, clients)]
        await asyncio.gather(*(self.honest(padding) for padding in HONEST), *hostile)
        ordered = sorted(self.seconds)
        median, late = (ordered[int(part * (len(ordered) - 1))] for part in (0.5, 0.99))
        print(
            f"  {len(ordered):,} honest requests: median {1000 * median:.0f} ms, 99 % within {1000 * late:.0f} ms, all "
            f"within {1000 * ordered[-1]:.0f} ms"
        )
