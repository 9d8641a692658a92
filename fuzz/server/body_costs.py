"""Large bodies in every field of every address: what do they cost the server, and do they delay `/health`?

    python -m fuzz.server.body_costs [--cases 200] [--seed 0] [--clients 1] [--slow 0] [--only TEXT]

The fields come from the server's OpenAPI description. Each gets a body of `--max-body` bytes: strings of one repeated unit,
lists of many values, deep nesting, long numbers, and objects with many keys, mostly invalid. Meanwhile `/health` is asked
again and again. `--clients` sends several bodies at once. `--slow` clients keep connections open with half of a body.

`tfexport serve` runs in a process of its own, over a small random model. The exit code is 1 where an answer takes longer
than `ANSWER` seconds, `/health` longer than `HEALTH`, or the server takes more than `MEMORY` times the size of the bodies.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch

from fuzz.server.openapi import NAMES, bundles
from makers.servers import Running, serving
from tfexport.serving.options import ServerOptions

ANSWER, HEALTH, MEMORY = 5.0, 0.25, 20
SIZE = ServerOptions().max_body
LEAST = SIZE
"""Bytes that a smaller body counts for: `MEMORY` bounds what any body may take."""
MANY = 250_000
"""Values of a list that the server parses: below its largest number of values."""

UNITS = (
    "'",
    " ",
    ". ",
    "w4 ",
    "\\n",
    "a",
    "\\u0041",
    "ä",
    "<b>",
    "<!--",
    "<?",
    "![](",
    "&amp;",
    "e\u0301",
    '\\"',
    "s4. ",
)
ITEMS = ('""', '"a"', "1", "{}", "[]", "null", "[1]", '[["a"]]', '{"name":"TEXT"}', "1e400", "-1")


@dataclass(frozen=True)
class Case:
    """A request."""

    path: str
    about: str
    make: Callable[[], bytes]
    """Makes the body: all bodies together have 18 GB."""
    kind: str = "application/json"


@dataclass
class Costs:
    """What a case cost."""

    case: Case
    status: int
    seconds: float
    health: float = 0.0
    memory: float = 0.0
    problems: list[str] = field(default_factory=list)


def values() -> Iterator[tuple[str, Callable[[], str]]]:
    """JSON of about `SIZE` bytes, by name."""
    size = SIZE - 500
    for unit in UNITS:
        yield f"text of {unit!r}", lambda unit=unit: '"' + unit * (size // len(unit.encode())) + '"'  # type: ignore[misc]
    for item in ITEMS:
        most = size // (len(item) + 1)
        for count in (most, min(most, MANY // (item.count("[") + item.count("{") + 1))):
            yield f"list of {count} {item}", lambda item=item, count=count: f"[{','.join([item] * count)}]"  # type: ignore[misc]
    yield "nested lists", lambda: "[" * (size // 2) + "]" * (size // 2)
    yield "nested objects", lambda: '{"a":' * (size // 6) + "1" + "}" * (size // 6)
    yield "a few nested lists", lambda: "[" * 100_000 + "]" * 100_000
    yield "digits", lambda: "1" * size
    yield "decimals", lambda: "0." + "1" * size
    yield "keys", lambda: "{" + ",".join(f'"k{number}":1' for number in range(MANY // 2)) + "}"
    yield "the same key", lambda: "{" + ",".join(['"a":1'] * (MANY // 2)) + "}"
    yield "no end", lambda: '"' + "\\\\" * (size // 2)


def forms() -> Iterator[Case]:
    """Forms of `/translate`."""
    encoded, multipart = "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"
    head = b'--x\r\nContent-Disposition: form-data; name="q"\r\n\r\n'
    repeated = [
        (encoded, b"q=", unit, b"&source=de&target=en") for unit in (b"'", b"%41", b"+", b"%C3%A4", b"%", b"\xff")
    ]
    repeated += [(encoded, b"", unit, b"") for unit in (b"q=a&", b"&", b"x=&", b"q")]
    repeated += [(multipart, head, unit, b"\r\n--x--\r\n") for unit in (b"a", b"\r\n--", b"\r\n--x")]
    repeated += [(multipart, b"", head + b"a\r\n", b""), (multipart, b"--x\r\n", b"A: b\r\n", b"")]
    for kind, begin, unit, end in repeated:
        count = (SIZE - len(begin) - len(end)) // len(unit)
        body = partial(_repeated, begin, unit, count, end)
        yield Case("/translate", f"{kind.partition(';')[0]} of {unit!r}", body, kind)


def _repeated(begin: bytes, unit: bytes, count: int, end: bytes) -> bytes:
    return begin + unit * count + end


def fields_of(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The paths of all fields of an object, through lists of objects."""
    if "$ref" in schema:
        yield from fields_of(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    for kind in (*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])):
        yield from fields_of(kind, schemas)
    for name, value in schema.get("properties", {}).items():
        yield (name,)
        yield from ((name, *deeper) for deeper in fields_of(value, schemas))


SMALL: dict[str, dict[str, Any]] = {
    "translate": {"text": "w4", "model": NAMES[0]},
    "score": {"text": "w4", "target_text": "w4", "model": NAMES[0]},
    "classify": {"text": "w4", "model": NAMES[1]},
    "libre": {"q": "w4", "source": "de", "target": "en"},
    "detect": {"q": "w4"},
}
"""Requests that are answered, by the names of their schemas."""


def cases(description: Mapping[str, Any]) -> Iterator[Case]:
    """All cases: each value in place of each field."""
    yield from forms()
    schemas = description["components"]["schemas"]
    for path, methods in description["paths"].items():
        if "requestBody" not in methods.get("post", {}):
            continue
        reference = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
        small = SMALL[reference["$ref"].rpartition("/")[2].removesuffix("Request").lower()]
        address = path.replace("{name}", NAMES[0])
        for place in ((), *dict.fromkeys(fields_of(reference, schemas))):
            for name, make in values():
                about = f"{'.'.join(place)}: {name}"
                yield Case(address, about, partial(_placed, small, place, make))


def _placed(small: Any, place: Sequence[str], make: Callable[[], str]) -> bytes:
    return placed(small, place, make()).encode()


def disguised(case: Case, chooser: random.Random) -> Case:
    """A case as it is, or so that checks may take it for something else."""
    disguise = chooser.choice(("", "", "form", "text", "utf-16"))
    if disguise == "utf-16":
        return replace(case, make=lambda: case.make()[: SIZE // 2].decode("utf-8", "replace").encode("utf-16-le"))
    kinds = {"form": "application/x-www-form-urlencoded+json", "text": "text/plain"}
    return replace(case, kind=kinds.get(disguise, case.kind), about=f"{case.about} {disguise}".strip())


def placed(small: Any, place: Sequence[str], value: str) -> str:
    """A request with a value, as JSON, at one place."""
    if not place:
        return value
    if isinstance(small, list):
        return f"[{placed(small[0] if small else {}, place, value)}]"
    given = small if isinstance(small, dict) else {}
    others = [f"{json.dumps(name)}:{json.dumps(own)}" for name, own in given.items() if name != place[0]]
    return "{" + ",".join([*others, f"{json.dumps(place[0])}:{placed(given.get(place[0]), place[1:], value)}"]) + "}"


class Monitor:
    """Asks `/health` and reads the memory of a server, until it is closed."""

    def __init__(self, server: Running):
        self._server, self._ends = server, threading.Event()
        self.health = self.memory = 0.0
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._ask, self._read)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        with self._server.client() as client:
            while not self._ends.wait(0.01):
                began = time.monotonic()
                client.get("/health").raise_for_status()
                self.health = max(self.health, time.monotonic() - began)

    def _read(self) -> None:
        while not self._ends.wait(0.005):
            self.memory = max(self.memory, self.resident())

    def resident(self) -> float:
        """Bytes of memory of the server."""
        status = Path(f"/proc/{self._server.process.pid}/status").read_text(encoding="ascii")
        return 1024 * float(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])

    def close(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()


def run_together(server: Running, monitor: Monitor, several: Sequence[Case]) -> list[Costs]:
    """Send cases at once; the last has the costs of all together."""
    bodies = [case.make() for case in several]
    monitor.health, monitor.memory, before = 0.0, 0.0, monitor.resident()

    def send(case: Case, body: bytes) -> Costs:
        began = time.monotonic()
        try:
            address, headers = server.url + case.path, {"Content-Type": case.kind}
            status = httpx.post(address, content=body, headers=headers, timeout=120).status_code
        except httpx.HTTPError as error:
            return Costs(case, 0, time.monotonic() - began, problems=[repr(error)])
        return Costs(case, status, time.monotonic() - began)

    with ThreadPoolExecutor(len(several)) as clients:
        costs = list(clients.map(send, several, bodies))
    time.sleep(0.02)
    for cost in costs:
        cost.problems += [f"{cost.seconds:.1f} s"] * (cost.seconds > ANSWER * len(several))
        cost.problems += [f"status {cost.status}"] * (cost.status >= 500)
    last, sent = costs[-1], max(LEAST, sum(map(len, bodies)))
    last.health, last.memory = monitor.health, (monitor.memory - before) / sent
    last.problems += [f"/health took {1000 * last.health:.0f} ms"] * (last.health > HEALTH)
    last.problems += [f"memory of {last.memory:.0f} bodies"] * (last.memory > MEMORY)
    return costs


@contextmanager
def slow_clients(server: Running, count: int) -> Iterator[None]:
    """Connections with half of a request, which are made again when the server ends them."""
    with ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(b"POST /v1/translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{")
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Large bodies in every field of every address.")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--slow", type=int, default=0)
    parser.add_argument("--only", default="", help="cases with this text in their names")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        places = [f"{name}={place}" for name, place in bundles(folder).items()]
        with serving(folder / "log", *places, "--receive-timeout", 600) as server:
            every = list(cases(httpx.get(f"{server.url}/openapi.json").json()))
            every = [case for case in every if options.only in f"{case.path} {case.about}"]
            chooser = random.Random(options.seed)
            chosen = [disguised(case, chooser) for case in chooser.sample(every, min(options.cases, len(every)))]
            costs: list[Costs] = []
            monitor = Monitor(server)
            with slow_clients(server, options.slow):
                for start in range(0, len(chosen), options.clients):
                    for cost in run_together(server, monitor, chosen[start : start + options.clients]):
                        costs.append(cost)
                        if cost.problems:
                            case = cost.case
                            print(f"{case.path} {case.about}: {', '.join(cost.problems)}", flush=True)
            monitor.close()
    bad = sum(bool(cost.problems) for cost in costs)
    print(
        f"{len(costs)} of {len(every)} cases: answers within {max(cost.seconds for cost in costs):.1f} s, /health within "
        f"{1000 * max(cost.health for cost in costs):.0f} ms, memory of {max(cost.memory for cost in costs):.0f} bodies; "
        f"{bad} problems"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
