"""Limits, keys, metrics, logs and reloads of the HTTP server, without a socket."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from starlette.testclient import TestClient

import tfexport
from makers.tiny import HINTS, SRC_VOCAB, TinyCheckpoint, tiny_transformer
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.errors import BundleError, TfexportError
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.scheduling.metrics import Counters
from tfexport.serving import catalog as catalogs
from tfexport.serving.access.keys import Keys
from tfexport.serving.app import create_app
from tfexport.serving.catalog import Catalog, CatalogEntry, HowToLoad
from tfexport.serving.options import ServerOptions
from tfexport.serving.reload import Reloader
from tfexport.serving.state import State
from tfexport.serving.telemetry import metrics as metrics_module
from tfexport.serving.telemetry.logs import FIELDS, JsonFormatter, TextFormatter
from tfexport.verification.certificates import certify, write_certificates

LONG = " ".join(f"de{4 + n % (SRC_VOCAB - 4)}" for n in range(12))
ENDLESS: dict[str, Any] = {"text": LONG, "min_length": 19, "max_length": 20, "beam": 4}
KEY = "0123456789abcdef-anna"


@pytest.fixture(scope="module")
def catalog(tiny_bundle: Path) -> Iterator[Catalog]:
    found = Catalog([CatalogEntry("tiny", tiny_bundle)], HowToLoad())
    yield found
    found.close()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# who may ask\nanna {KEY}  # from Anna\n\nberta {KEY[::-1]}\n", encoding="utf-8")
    return path


def client(catalog: Catalog, state: State | None = None, **options: Any) -> TestClient:
    return TestClient(create_app(catalog, ServerOptions(**options), state))


def ask(to: TestClient, **more: Any) -> httpx.Response:
    return to.post("/v1/translate", json={"text": "de5 de6"}, **more)  # type: ignore[return-value]


def metric(of: TestClient, line: str, **headers: str) -> float:
    text = of.get("/metrics", headers=headers).text
    return sum(float(value) for value in re.findall(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE))


# --- limits


def test_a_body_that_is_too_large_is_refused(catalog: Catalog) -> None:
    it = client(catalog, max_body=100)
    assert ask(it).status_code == 200
    large = it.post("/v1/translate", json={"text": "de5 " * 100})
    assert (large.status_code, large.headers["connection"]) == (413, "close")
    assert large.json() == {"error": "this request is larger than 100 bytes. Send fewer sentences at once."}
    chunks = it.post("/v1/translate", content=(b" " * 60 for _ in range(1000)))  # without a length
    assert chunks.status_code == 413
    assert metric(it, 'tfexport_http_refused_total{reason="size"}') == 2


def test_a_body_that_does_not_come_is_not_waited_for(catalog: Catalog) -> None:
    app, sent = create_app(catalog, ServerOptions(receive_timeout=0.05)), list[dict[str, Any]]()
    parts = iter([{"type": "http.request", "body": b'{"te', "more_body": True}])

    async def receive() -> dict[str, Any]:
        for part in parts:
            return part
        await asyncio.sleep(60)
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope_of("POST"), receive, send))
    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["error"].startswith("this request did not arrive within 0.05 seconds")


def scope_of(method: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": "/v1/translate",
        "raw_path": b"/v1/translate",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("10.0.0.1", 5),
        "server": ("host", 80),
        "scheme": "http",
        "root_path": "",
    }


def test_requests_at_once_are_bounded(catalog: Catalog) -> None:
    state = State()
    it = client(catalog, state, max_requests=2)
    state.active = 2
    refused = ask(it)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert it.get("/health").status_code == 200  # who only looks is not counted
    state.active = 1
    assert ask(it).status_code == 200
    assert state.active == 1


def test_the_rate_of_an_address_is_bounded(catalog: Catalog) -> None:
    it = client(catalog, rate="3/minute")
    assert [ask(it).status_code for _ in range(4)] == [200, 200, 200, 429]
    refused = ask(it)
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"].startswith("more than 3/minute requests")
    assert it.get("/v1/models").status_code == 200
    other = TestClient(it.app, client=("2001:db8::1", 1))
    neighbor = TestClient(it.app, client=("2001:db8::2", 1))
    assert [ask(one).status_code for one in (other, neighbor, other, neighbor)] == [200, 200, 200, 429]


def test_an_ipv4_address_is_one_on_every_kind_of_socket(catalog: Catalog) -> None:
    it = client(catalog, rate="1/hour")
    addresses = ("::ffff:10.0.0.1", "::ffff:10.0.0.2", "10.0.0.1")
    clients = [TestClient(it.app, client=(address, 1)) for address in addresses]
    assert [ask(one).status_code for one in clients] == [200, 200, 429]


def test_one_client_has_at_most_half_of_the_requests(catalog: Catalog) -> None:
    state = State()
    it = client(catalog, state, max_requests=4)
    for _ in range(2):
        state.begin("10.0.0.1")
    assert ask(TestClient(it.app, client=("10.0.0.1", 1))).status_code == 429
    assert ask(TestClient(it.app, client=("10.0.0.2", 1))).status_code == 200


def test_the_bytes_of_bodies_are_bounded(catalog: Catalog) -> None:
    state = State()
    it = client(catalog, state, max_body=1000)
    for size, address in ((32_000 - 100, "10.0.0.1"), (32_000 - 100, "10.0.0.2")):
        state.begin(address, size)
    long = {"text": "de5 " * 30}
    first, other = (TestClient(it.app, client=(address, 1)) for address in ("10.0.0.1", "10.0.0.3"))
    assert first.post("/v1/translate", json=long).status_code == 429
    assert first.post("/v1/translate", json={"text": "de5"}).status_code == 200
    assert other.post("/v1/translate", json=long).status_code == 200
    assert other.post("/v1/translate", content=iter([b"{}"])).status_code == 429  # it may have 1,000 bytes
    state.end("10.0.0.1", 32_000 - 100)
    assert first.post("/v1/translate", json=long).status_code == 200
    assert it.request("GET", "/health", content=b"a" * 10_000).status_code == 413
    assert state.held == 32_000 - 100


def test_rates_are_checked() -> None:
    with pytest.raises(TfexportError, match="rate is 'often', not such as 10/second"):
        ServerOptions(rate="often")


# --- keys


def test_who_asks_needs_a_key(catalog: Catalog, keys: Path) -> None:
    it = client(catalog, keys=keys)
    for headers in ({"Authorization": f"Bearer {KEY}"}, {"authorization": f"bearer {KEY}"}, {"X-API-Key": KEY[::-1]}):
        assert ask(it, headers=headers).status_code == 200
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"X-API-Key": KEY + "x"}):
        refused = ask(it, headers=headers)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert refused.json() == {"error": "this server needs an API key. Send it as Authorization: Bearer KEY."}


def test_a_key_may_have_any_letters(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("anna schlüssel-für-übersetzer\n", encoding="utf-8")
    it = client(catalog, keys=tmp_path / "keys")
    for headers in ({"X-API-Key": "schlüssel-für-übersetzer".encode()}, {"X-API-Key": b"schl\xfcssel"}):
        assert ask(it, headers=headers).status_code == (200 if b"\xc3" in headers["X-API-Key"] else 401)


def test_who_looks_needs_none_but_for_metrics(catalog: Catalog, keys: Path) -> None:
    it = client(catalog, keys=keys)
    assert [it.get(path).status_code for path in ("/health", "/ready", "/v1/models", "/metrics")] == [200] * 3 + [401]
    assert it.get("/metrics", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200


def test_a_key_may_be_in_the_body(catalog: Catalog, keys: Path) -> None:
    app = create_app(catalog, ServerOptions(keys=keys))

    @app.post("/form")
    async def form() -> str:
        return "taken"

    it = TestClient(app)
    files = {name: (None, value) for name, value in {"q": "de5", "api_key": KEY}.items()}
    assert it.post("/form", json={"q": "de5", "api_key": KEY}).status_code == 200
    assert it.post("/form", data={"q": "de5", "api_key": KEY}).status_code == 200
    words = {"Content-Type": "application/x-www-form-urlencoded"}
    assert it.post("/form", content=f"q=läuft&api_key={KEY}".encode(), headers=words).status_code == 200
    if importlib.util.find_spec("python_multipart") is not None:
        assert it.post("/form", files=files).status_code == 200
    bad: list[dict[str, Any]] = [
        {"json": {"api_key": "wrong"}},
        {"json": {"api_key": [KEY]}},
        {"content": b'{"api_key": "\\ud800"}'},
        {"json": [KEY]},
        {"content": b"\xff{"},
        {"content": b"[" * 100_000},
        {"data": {"api_key": "wrong"}},
        {"files": {"api_key": ("file", KEY)}},
        {"content": b"--x", "headers": {"content-type": "multipart/form-data"}},
        {},
    ]
    assert [it.post("/form", **one).status_code for one in bad] == [401] * len(bad)


def test_each_key_has_a_rate_of_its_own(catalog: Catalog, keys: Path) -> None:
    it = client(catalog, keys=keys, rate="2/hour")
    anna, berta = {"X-API-Key": KEY}, {"X-API-Key": KEY[::-1]}
    assert [ask(it, headers=anna).status_code for _ in range(3)] == [200, 200, 429]
    assert ask(it, headers=berta).status_code == 200
    # Who guesses keys is an address.
    assert [ask(it, headers={"X-API-Key": "guess"}).status_code for _ in range(3)] == [401, 401, 429]


@pytest.mark.parametrize(
    "text", ["", "# nobody\n", "anna\n", "anna short\n", f"anna {KEY} more\n", f"a {KEY}\nb {KEY}\n"]
)
def test_files_of_keys_are_checked(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TfexportError, match=str(path)):
        Keys.read(path)
    with pytest.raises(TfexportError, match="cannot read the keys in"):
        Keys.read(tmp_path / "missing")


# --- CORS


def test_pages_of_other_origins_are_allowed_by_name(catalog: Catalog, keys: Path) -> None:
    asked = {"Origin": "https://one.example", "Access-Control-Request-Method": "POST"}
    off, on = client(catalog), client(catalog, cors=("https://one.example",), keys=keys)
    assert off.options("/v1/translate", headers=asked).status_code == 405
    allowed = on.options("/v1/translate", headers=asked)  # which brings no key
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://one.example")
    assert on.options("/v1/translate", headers={**asked, "Origin": "https://two.example"}).status_code == 400
    refused = ask(on, headers={"Origin": "https://one.example"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://one.example")


# --- clients that go away


def gone_after(app: FastAPI, body: dict[str, Any], catalog: Catalog) -> int:
    """Ask, go away when the sentence is decoded, and return the messages that came."""
    sent = 0
    model = catalog.find().translator

    async def run() -> None:
        told = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

        async def receive() -> dict[str, Any]:
            for one in told:
                return one
            while not model.serving_metrics()["live_rows"]:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal sent
            sent += 1

        await app(scope_of("POST"), receive, send)

    asyncio.run(run())
    return sent


@pytest.mark.parametrize("stream", [False, True])
def test_sentences_of_clients_that_go_away_leave_the_batch(catalog: Catalog, stream: bool) -> None:
    app, model = create_app(catalog), catalog.find().translator
    before = model.serving_metrics()["cancelled"]
    body = {**ENDLESS, "beam": 8, **({"stream": True} if stream else {"text": [LONG] * 200})}
    for _ in range(20):  # it may be decoded before anyone sees that nobody waits
        gone_after(app, body, catalog)
        if model.serving_metrics()["cancelled"] > before:  # type: ignore[operator]
            break
    else:
        raise AssertionError("no request was cancelled")
    it = TestClient(app)
    assert metric(it, "tfexport_http_requests_active") == 0
    assert ask(it).status_code == 200


# --- metrics and logs


def test_metrics_tell_what_schedulers_and_the_server_counted(catalog: Catalog) -> None:
    it = client(catalog)
    before = metric(it, 'tfexport_requests_total{model="tiny",outcome="finished"}')
    assert ask(it).status_code == 200
    assert it.get("/" + "x" * 50).status_code == it.get("/y").status_code == 404
    assert metric(it, 'tfexport_requests_total{model="tiny",outcome="finished"}') == before + 1
    assert metric(it, 'tfexport_http_requests_total{address="/v1/translate",method="POST",status="200"}') == 1
    assert metric(it, 'tfexport_http_requests_total{address="other",method="GET",status="404"}') == 2
    text = it.get("/metrics").text
    for wanted in ("tfexport_queue_requests{", "tfexport_step_seconds_bucket{", "process_resident_memory_bytes"):
        assert wanted in text
    counts = re.findall(r'tfexport_request_seconds_bucket\{le="[^"]*",model="tiny"\} (\S+)', text)
    assert counts == sorted(counts, key=float)
    assert float(counts[-1]) == metric(it, 'tfexport_request_seconds_count{model="tiny"}')


def test_refused_requests_have_the_label_of_their_address(catalog: Catalog, keys: Path) -> None:
    it = client(catalog, keys=keys, max_body=100)
    for path in ("/v1/translate", "/translate"):
        assert it.post(path, json={}).status_code == 401
        assert it.post(path, content=b"a" * 101).status_code == 413
    for address in ("/v1/translate", "/translate"):
        for status in (401, 413):
            line = f'tfexport_http_requests_total{{address="{address}",method="POST",status="{status}"}}'
            assert metric(it, line, **{"X-API-Key": KEY}) == 1


def test_clients_are_not_told_where_bundles_are(catalog: Catalog) -> None:
    it = client(catalog)
    for option in ({"attention": True}, {"replace_unk": True}):
        refused = it.post("/v1/translate", json={"text": "de5", **option})
        assert refused.status_code == 400
        assert str(catalog.find().bundle.directory) not in refused.json()["error"]
        assert refused.json()["error"].startswith("tiny has no graphs that return attention")


def test_all_counters_are_metrics() -> None:
    told = {*metrics_module.OUTCOMES, *metrics_module.GAUGES, *metrics_module.COUNTERS, *metrics_module.HISTOGRAMS}
    assert told == {one.name for one in fields(Counters)}


def test_each_request_is_a_line_of_the_log_without_its_text(
    catalog: Catalog, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    it = client(catalog, keys=keys)
    logging.getLogger("tfexport").propagate = True
    with caplog.at_level(logging.INFO, logger="tfexport.requests"):
        answer = ask(it, headers={"X-API-Key": KEY, "X-Request-ID": "abc-1"})
        assert answer.headers["x-request-id"] == "abc-1"
        other = ask(it, headers={"X-Request-ID": "forged\tid"})
        assert re.fullmatch("[0-9a-f]{32}", other.headers["x-request-id"])
    first, second = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    ids = answer.json()["results"][0]["hypotheses"][0]["ids"]
    wanted = {"id": "abc-1", "status": 200, "model": "tiny", "sentences": 1, "key": "anna", "address": "/v1/translate"}
    assert wanted.items() <= first.items()
    assert (first["tokens_in"], first["tokens_out"], first["client"]) == (4, len(ids), "testclient")
    assert first["seconds"] > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", first["time"])
    assert (second["status"], second.get("key"), second.get("model")) == (401, None, None)
    text = caplog.text + "".join(TextFormatter().format(record) for record in caplog.records)
    assert "status=200" in text
    for secret in ("de5", KEY, answer.json()["results"][0]["hypotheses"][0]["text"]):
        assert secret not in text + json.dumps([getattr(record, FIELDS) for record in caplog.records])


def test_a_fault_is_an_answer_with_the_id_of_the_log(catalog: Catalog, caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(catalog)

    @app.get("/fault")
    async def fault() -> None:
        raise ZeroDivisionError

    logging.getLogger("tfexport").propagate = True
    answer = TestClient(app).get("/fault", headers={"X-Request-ID": "here"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "here")
    assert "fault of the server" in answer.json()["error"]
    assert "request here failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


# --- readiness and certificates


def test_a_server_that_drains_is_not_ready_and_still_answers(catalog: Catalog) -> None:
    state = State()
    it = client(catalog, state)
    assert (it.get("/ready").status_code, it.get("/ready").json()["status"]) == (200, "ready")
    state.is_draining = True
    assert (it.get("/ready").status_code, it.get("/ready").json()["status"]) == (503, "draining")
    answer = ask(it)
    assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    assert it.get("/health").status_code == 200


def test_ready_tells_what_has_no_certificate_and_certified_refuses_it(catalog: Catalog, tiny_bundle: Path) -> None:
    [told] = client(catalog).get("/ready").json()["models"]
    assert told["certified"] is False
    assert "was not compared with our reading on real text" in told["problem"]
    assert told["confirmed"] is False
    assert told["reading"].startswith("unconfirmed: n_heads 3, ")
    with pytest.raises(
        TfexportError, match=r"is not served: .* not compared with our reading on real text. Run tfexport parity"
    ):
        Catalog([CatalogEntry("tiny", tiny_bundle)], HowToLoad(certified=True))


SERVED = "de5 de6 de7"


@pytest.fixture
def certified(own_bundle: Path) -> str:
    """`own_bundle` gets a certificate; what it decodes."""
    bundle = open_bundle(own_bundle)
    about = {"sha256": "0" * 64, "sentences": 3, "random": False}
    write_certificates(bundle, [certify(bundle, "ort-cpu", "float32", [{"beam": 1}], about, "bundle")])
    return str(tfexport.load(own_bundle, threads=1).translate(SERVED).text)


@pytest.fixture
def other(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Path:
    """A bundle of the same model with other weights and without a certificate."""
    torch.save(tiny_transformer(seed=5).state_dict(), tmp_path / "other.pt")
    checkpoint = load_checkpoint(tmp_path / "other.pt", HINTS, tokenizers=tiny_checkpoint.tokenizers())
    return export(checkpoint, tmp_path / "other", gate=None).directory


def changes_when_it_is_open(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Change a bundle between its opening and its load."""

    def opened(directory: Path) -> Bundle:
        bundle = open_bundle(directory)
        change()
        return bundle

    monkeypatch.setattr(catalogs, "open_bundle", opened)


def test_a_link_that_is_set_to_another_bundle_has_no_effect_on_what_is_certified(
    own_bundle: Path, other: Path, certified: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, new = tmp_path / "link", tmp_path / "new"
    link.symlink_to(own_bundle)

    def change() -> None:
        new.symlink_to(other)
        new.replace(link)

    changes_when_it_is_open(monkeypatch, change)
    catalog = Catalog([CatalogEntry("own", link)], HowToLoad(certified=True))
    try:
        assert catalog.find().translator.translate(SERVED).text == certified
        assert tfexport.load(other, threads=1).translate(SERVED).text != certified
    finally:
        catalog.close()


@pytest.mark.usefixtures("certified")
@pytest.mark.parametrize("how", ["replaced", "written"])
@pytest.mark.parametrize("names", [["weights.safetensors"], ["weights.safetensors", "manifest.json"]])
def test_files_that_change_after_the_bundle_was_opened_are_not_served_as_certified(
    own_bundle: Path, other: Path, monkeypatch: pytest.MonkeyPatch, how: str, names: list[str]
) -> None:
    def change() -> None:
        for name in names:
            file, new = own_bundle / name, own_bundle / "new"
            before = file.stat()
            if how == "replaced":
                shutil.copy(other / name, new)
                new.replace(file)
            else:
                file.write_bytes((other / name).read_bytes())
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    changes_when_it_is_open(monkeypatch, change)
    with pytest.raises(BundleError, match=r"was replaced, written to or removed after it was opened\. Load it again"):
        Catalog([CatalogEntry("own", own_bundle)], HowToLoad(certified=True))


# --- reload


@pytest.fixture
def own(own_bundle: Path) -> Iterator[Catalog]:
    found = Catalog([CatalogEntry("own", own_bundle)], HowToLoad())
    yield found
    found.close()


def reloader(of: Catalog) -> tuple[Reloader, TestClient]:
    app = create_app(of)
    return Reloader(of, app.state.metrics, 1.0), TestClient(app)


def touch(bundle: Path) -> None:
    """As a copy of the same bundle would."""
    manifest = bundle / "manifest.json"
    shutil.copy(manifest, bundle / "manifest.new")
    (bundle / "manifest.new").rename(manifest)


def test_a_link_that_is_set_to_another_bundle_is_a_change(
    own_bundle: Path, other: Path, certified: str, tmp_path: Path
) -> None:
    link, new = tmp_path / "link", tmp_path / "new"
    link.symlink_to(own_bundle)
    catalog = Catalog([CatalogEntry("own", link)], HowToLoad())
    try:
        it, _ = reloader(catalog)
        new.symlink_to(other)
        new.replace(link)
        assert catalog.find().translator.translate(SERVED).text == certified
        it.check(at_once=True)
        served = catalog.find()
        assert served.translator.translate(SERVED).text == tfexport.load(other, threads=1).translate(SERVED).text
        assert served.uncertified is not None
    finally:
        catalog.close()


def test_a_bundle_that_changes_is_loaded_when_its_files_are_settled(own: Catalog, own_bundle: Path) -> None:
    it, to = reloader(own)
    first = own.find()
    it.check()
    it.check()
    assert own.find() is first
    touch(own_bundle)
    it.check()
    assert own.find() is first  # somebody may still be writing
    with own.use() as held:
        it.check()
        second = own.find()
        assert second is not first
        assert held is first
        assert asyncio.run(held.translator.translate_async("de5")).hypotheses  # until its last request has ended
    it.check()
    assert own.find() is second
    assert metric(to, 'tfexport_reloads_total{model="own",outcome="loaded"}') == 1
    assert ask(to).status_code == 200


def test_a_bundle_that_is_damaged_leaves_the_old_one(own: Catalog, own_bundle: Path) -> None:
    it, to = reloader(own)
    first = own.find()
    weights = own_bundle / "weights.safetensors"
    whole = weights.read_bytes()
    (own_bundle / "new").write_bytes(whole[:-1])
    (own_bundle / "new").rename(weights)
    for _ in range(4):
        it.check()
    assert own.find() is first
    assert metric(to, 'tfexport_reloads_total{model="own",outcome="failed"}') == 1  # it is not tried again and again
    assert ask(to).status_code == 200
    it.check(at_once=True)  # unless somebody asks for it
    assert metric(to, 'tfexport_reloads_total{model="own",outcome="failed"}') == 2
    shutil.rmtree(own_bundle)
    for _ in range(4):
        it.check()
    assert own.find() is first
    assert metric(to, 'tfexport_reloads_total{model="own",outcome="failed"}') == 3  # a folder that is gone is told once


def test_a_bundle_whose_workers_do_not_answer_leaves_the_old_one(
    own: Catalog, own_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, to = reloader(own)
    first = own.find()
    touch(own_bundle)

    async def never(*_: Any, **__: Any) -> AsyncIterator[None]:
        await asyncio.sleep(60)
        raise AssertionError

    with monkeypatch.context() as patches:
        patches.setattr(catalogs.Model, "translate_ids_async", never)
        patches.setattr(catalogs.Served.warm_up, "__defaults__", (0.05,))
        it.check(at_once=True)
    assert own.find() is first
    assert metric(to, 'tfexport_reloads_total{model="own",outcome="failed"}') == 1
