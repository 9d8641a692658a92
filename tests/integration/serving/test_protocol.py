"""HTTP/1.1 over raw sockets, with an application that answers with what it was sent."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from tfexport.serving.http.bodies import ClientGoneError, read_body, run_while_there
from tfexport.serving.http.connections import MOST_HEADERS, Connection
from tfexport.serving.options import ServerOptions
from tfexport.serving.state import State
from tfexport.serving.telemetry.metrics import Metrics

UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


class Echo:
    """A server whose application answers with the method, the path and the body of each request."""

    def __init__(self, loop: str):
        self.cancelled = 0
        options = ServerOptions()
        metrics = Metrics(SimpleNamespace(served=[]), State())  # type: ignore[arg-type]
        config = uvicorn.Config(
            self._answer, port=0, loop=loop, lifespan="off", ws="none", log_config=None, interface="asgi3",
            http=partial(Connection, options, metrics, Counter()),
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        async def echo(scope: Any, receive: Any, send: Any) -> None:
            body = (await receive())["body"]
            if scope["path"] == "/slow":
                try:
                    await asyncio.sleep(3)
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
            if scope["path"] == "/stream":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                for more in (True, True, True, False):
                    await send({"type": "http.response.body", "body": b"parts" * more, "more_body": more})
                    await asyncio.sleep(0.4)
                return
            answer = json.dumps([scope["method"], scope["path"], body.decode()]).encode()
            headers = [(b"content-length", b"%d" % len(answer)), (b"x-headers", b"%d" % len(scope["headers"]))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": answer})

        try:
            body = await read_body(scope, receive, most=10**6, seconds=5)
        except ClientGoneError:
            return
        await run_while_there(echo, scope, body, receive, send)

    def talk(
        self, *parts: bytes, count: int = 1, half_close: bool = False, wait: float = 0.05
    ) -> tuple[list[Any], bytes]:
        """Send parts one by one; returns the echoes, and all that was answered.

        Args:
            count: the number of echoes to wait for, before those that must not come get a moment.
        """
        answer, echoes = b"", list[Any]()
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            for number, part in enumerate(parts):
                time.sleep(wait if number else 0)
                client.sendall(part)
            if half_close:
                client.shutdown(socket.SHUT_WR)
            is_open = True
            while is_open:
                client.settimeout(20 if len(echoes) < count else 0.2)
                try:
                    is_open = bool(part := client.recv(2**20))
                except (TimeoutError, ConnectionResetError):
                    break
                answer += part
                bodies = re.findall(rb"HTTP/1.1 200 OK\r\n.*?\r\n\r\n(\[.*?\])(?=HTTP/1.1 |$)", answer, re.DOTALL)
                echoes = [json.loads(body) for body in bodies]
        return echoes, answer

    def wait_for_cancelled(self, count: int) -> None:
        """Check all connections as `check_always` does, until so many requests were cancelled."""
        loop, ends = self.server.servers[0].get_loop(), time.monotonic() + 20
        while self.cancelled < count and time.monotonic() < ends:
            time.sleep(0.1)
            for connection in list(self.server.server_state.connections):
                loop.call_soon_threadsafe(connection.check, time.monotonic())  # type: ignore[union-attr]
        assert self.cancelled == count

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join(10)


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def echo(request: pytest.FixtureRequest) -> Iterator[Echo]:
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    server = Echo(request.param)
    yield server
    server.close()


def post(body: str = "Ein Hund", headers: str = "", path: str = "/a") -> tuple[bytes, bytes]:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode(), body.encode()


def chunked(body: str = "Ein Hund", headers: str = "") -> tuple[bytes, bytes]:
    head = f"POST /a HTTP/1.1\r\nHost: a\r\n{headers}Transfer-Encoding: chunked\r\n\r\n"
    parts = "".join(f"{len(part):x}\r\n{part}\r\n" for part in (body[:3], body[3:]))
    return head.encode(), f"{parts}0\r\n\r\n".encode()


ECHOED = ["POST", "/a", "Ein Hund"]
SMUGGLED = "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize("framed", [post, chunked])
def test_an_upgrade_is_ignored_and_its_body_read(echo: Echo, framed: Any) -> None:
    head, body = framed(headers=UPGRADE)
    assert echo.talk(head + body)[0] == [ECHOED]
    assert echo.talk(head, body)[0] == [ECHOED]
    assert echo.talk(head, body[:4], body[4:])[0] == [ECHOED]
    assert echo.talk(*(bytes([byte]) for byte in head + body), wait=0)[0] == [ECHOED]
    assert echo.talk((head + body) * 50, count=50)[0] == [ECHOED] * 50


def test_a_body_behind_an_upgrade_is_no_request(echo: Echo) -> None:
    head, body = post(SMUGGLED, UPGRADE)
    for parts in ((head + body,), (head, body)):
        assert echo.talk(*parts)[0] == [["POST", "/a", SMUGGLED]]


def test_upgrades_without_a_body(echo: Echo) -> None:
    websocket = (
        b"GET /w HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n"
    )
    head, body = post()
    assert echo.talk(websocket)[0] == [["GET", "/w", ""]]
    assert echo.talk(websocket + head + body + websocket, count=3)[0] == [["GET", "/w", ""], ECHOED, ["GET", "/w", ""]]


def test_a_client_that_sends_no_more_gets_its_answer(echo: Echo) -> None:
    for path in ("/a", "/slow"):
        head, body = post(path=path)
        assert echo.talk(head + body, half_close=True)[0] == [["POST", path, "Ein Hund"]]
        old = (head + body).replace(b"HTTP/1.1", b"HTTP/1.0")
        echoes, answer = echo.talk(old, half_close=True)
        assert echoes == [["POST", path, "Ein Hund"]]
        assert b"100 Continue" not in answer
    first, second = post("1"), post("2")
    echoes, _ = echo.talk(b"".join([*first, *second]), count=2, half_close=True)
    assert [body for _, _, body in echoes] == ["1", "2"]


def test_a_client_that_left_is_noticed(echo: Echo) -> None:
    head, body = post(path="/slow")
    before = echo.cancelled
    with socket.create_connection(("127.0.0.1", echo.port)) as client:
        client.sendall(head + body)
        time.sleep(0.3)
    echo.wait_for_cancelled(before + 1)


def test_half_of_a_request_gets_no_answer(echo: Echo) -> None:
    head, body = post()
    assert echo.talk(head + body[:3], half_close=True)[1] == b""


@pytest.mark.parametrize("line", [b"X-A: %b\r\n" % (b"a" * 1000), b"a;%b\r\n0123456789\r\n" % (b"x" * 1000)])
def test_headers_and_framing_are_bounded_behind_a_running_request(echo: Echo, line: bytes) -> None:
    head, body = post(path="/slow")
    behind = b"POST /a HTTP/1.1\r\nHost: a\r\n" + (b"Transfer-Encoding: chunked\r\n\r\n" if b";" in line else b"")
    sent = 0
    with socket.create_connection(("127.0.0.1", echo.port)) as client:
        client.sendall(head + body + behind)
        try:
            while sent < 100 * MOST_HEADERS:
                client.sendall(line)
                sent += len(line)
                time.sleep(0.0001)
        except OSError:
            pass
    assert sent < 100 * MOST_HEADERS


def test_many_small_requests_and_chunks_are_not_refused(echo: Echo) -> None:
    head, body = post()
    assert echo.talk((head + body) * 2000, count=2000)[0] == [ECHOED] * 2000
    text = "a" * 30_000
    single = b"".join(b"1\r\na\r\n" for _ in text) + b"0\r\n\r\n"
    assert echo.talk(chunked()[0] + single)[0] == [["POST", "/a", text]]


def test_curl_asks_for_http2(echo: Echo) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("there is no curl")
    url = f"http://127.0.0.1:{echo.port}/a"
    done = subprocess.run([curl, "-s", "--http2", "-d", "Ein Hund", url], capture_output=True, timeout=20, check=True)
    assert json.loads(done.stdout) == ECHOED


JAVA = """
import java.net.URI; import java.net.http.*;
public class Ask { public static void main(String[] given) throws Exception {
  var request = HttpRequest.newBuilder(URI.create(given[0])).POST(HttpRequest.BodyPublishers.ofString("Ein Hund")).build();
  System.out.print(HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString()).body());
} }
"""


@pytest.mark.sampled(every=2)
def test_java_asks_for_http2(echo: Echo, tmp_path: Path) -> None:
    java = shutil.which("java")
    if java is None:
        pytest.skip("there is no JDK")
    (tmp_path / "Ask.java").write_text(JAVA, encoding="utf-8")
    url = f"http://127.0.0.1:{echo.port}/a"
    done = subprocess.run([java, "Ask.java", url], capture_output=True, timeout=60, check=True, cwd=tmp_path)
    assert json.loads(done.stdout) == ECHOED


def test_trailers_are_no_headers(echo: Echo) -> None:
    head, _ = chunked()
    trailers = b"3\r\nEin\r\n0\r\nHost: evil.example\r\nX-Forwarded-For: 10.1.1.1\r\nX-Echo: b\r\n\r\n"
    echoes, answer = echo.talk(head + trailers)
    assert echoes == [["POST", "/a", "Ein"]]
    assert b"x-headers: 2\r\n" in answer


@pytest.mark.parametrize("damage", [b"GARBAGE\r\n\r\n", b"POST /b HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n"])
def test_damage_behind_requests_does_not_spoil_their_responses(echo: Echo, damage: bytes) -> None:
    head, body = post()
    slow, slow_body = post(path="/slow")
    for requests, wanted in (((head + body) * 3, [ECHOED] * 3), (slow + slow_body, [["POST", "/slow", "Ein Hund"]])):
        echoes, answer = echo.talk(requests + damage, count=len(wanted))
        assert echoes == wanted
        assert b"400" not in answer
    assert echo.talk(damage, count=0)[1].startswith(b"HTTP/1.1 400 ")


def test_half_of_a_request_behind_others_costs_them_nothing(echo: Echo) -> None:
    head, body = post(path="/slow")
    echoes, _ = echo.talk(head + body + head + body[:3], half_close=True)
    assert echoes == [["POST", "/slow", "Ein Hund"]]


@pytest.mark.parametrize("resets", [False, True])
def test_a_client_that_left_is_noticed_whatever_it_has_pipelined(echo: Echo, resets: bool) -> None:
    head, body = post(path="/slow")
    before = echo.cancelled
    with socket.create_connection(("127.0.0.1", echo.port)) as client:
        client.sendall(head + body + b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(0.3)
        if resets:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    echo.wait_for_cancelled(before + 1)


def test_interim_responses_stand_before_responses_only(echo: Echo) -> None:
    stream, _ = post(path="/stream", body="")
    get = b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n"
    _, answer = echo.talk(get + stream + get, half_close=True, count=3)
    first, _, rest = answer.partition(b"HTTP/1.1 200 OK")
    assert set(first.split(b"\r\n\r\n")) <= {b"HTTP/1.1 100 Continue", b""}
    assert b"5\r\nparts\r\n" * 3 in rest
