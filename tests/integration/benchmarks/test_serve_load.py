"""The load test of HTTP servers: its models, its client and its plot."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.serve import OURS, report
from benchmarks.serve.models import model_of, widened
from makers.ort_bundles import random_model
from makers.serving_bundle import write_bundle
from tfexport.config import ModelConfig

SMALL: dict[str, Any] = {
    **{"d_model": 32, "n_heads": 2, "d_ff": 48, "n_encoder_layers": 1, "n_decoder_layers": 2},
    **{"src_vocab_size": 30, "tgt_vocab_size": 40, "max_source_length": 12, "max_target_length": 12},
    **{"unk_id": 0, "pad_id": 1, "bos_id": 2, "eos_id": 3, "embedding_scale": 32**0.5},
}
POST_NORM = ModelConfig(**SMALL, positions="learned", output_bias=True)
TIED = {"tie_source_target": True, "tie_output": True}
PRE_NORM = ModelConfig(**{**SMALL, "src_vocab_size": 40}, **TIED, norm_first=True, final_norm=True)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("config", [POST_NORM, PRE_NORM])
def test_a_model_of_the_base_size_computes_what_the_small_one_does(config: ModelConfig) -> None:
    small = random_model(config, seed=3).eval()
    large_config, weights = widened(config, small.state_dict())
    large = model_of(large_config, weights)
    assert (large_config.d_model, large_config.n_decoder_layers) == (512, 6)
    source, target = torch.randint(4, 30, (2, 9)), torch.randint(4, 30, (2, 7))
    with torch.no_grad():
        wanted, found = (model(source, torch.tensor([9, 6]), target) for model in (small, large))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


@contextmanager
def _server(answer: Any) -> Iterator[str]:
    """The address of a server in a thread."""
    web = pytest.importorskip("aiohttp.web", reason="aiohttp is not installed")
    loop, started, address = asyncio.new_event_loop(), threading.Event(), list[str]()

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address.append(site.name)
        started.set()

    thread = threading.Thread(target=lambda: (loop.run_until_complete(serve()), loop.run_forever()))
    thread.start()
    try:
        assert started.wait(10)
        yield address[0] + "/"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def test_latency_counts_from_when_a_request_was_due() -> None:
    pytest.importorskip("mlperf_loadgen", reason="LoadGen is not installed: pip install mlcommons-loadgen")
    from aiohttp import web

    from benchmarks.serve.client import offer

    seen: list[bytes] = []

    async def answer(request: Any) -> Any:
        seen.append(await request.read())
        if len(seen) == 1:
            threading.Event().wait(1.0)  # the whole server stands still: those who come meanwhile wait too
        return web.Response(status=503 if len(seen) == 3 else 200)

    with _server(answer) as url:
        found = offer(url, [b"one", b"two"], rate=100, seconds=1.5)
    assert set(seen) == {b"one", b"two"}
    assert found.requests == len(seen)
    assert found.failed == 1
    assert found.p50 > 0.2  # half of them came in the second that the server stood still
    assert found.longest > 0.9


def test_a_stream_is_measured_to_its_first_token() -> None:
    pytest.importorskip("mlperf_loadgen", reason="LoadGen is not installed: pip install mlcommons-loadgen")
    from aiohttp import web

    from benchmarks.serve.client import offer

    async def answer(request: Any) -> Any:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(2):
            await response.write(b"event: step\n\n")
            await asyncio.sleep(0.3)
        await response.write_eof()
        return response

    with _server(answer) as url:
        found = offer(url, [b"one"], rate=20, seconds=1, streams=True)
    assert found.failed == 0
    assert found.first_p50 is not None
    assert found.first_p50 < found.p50 - 0.2


@pytest.mark.thorough
def test_a_run_that_is_ended_leaves_no_server(tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil", reason="psutil is not installed")
    pytest.importorskip("mlperf_loadgen", reason="LoadGen is not installed: pip install mlcommons-loadgen")
    (tmp_path / "models").mkdir()
    write_bundle(tmp_path / "models")
    (tmp_path / "models" / "bundle").rename(tmp_path / "models" / "small")
    script = (
        "import sys; from pathlib import Path; from benchmarks.serve import __main__ as test; "
        "test.prepare = lambda folder: [folder / 'small']; test.saturate = lambda *_: 1.0; "
        "test.offline.seconds_of = lambda *_: 1.0; sys.exit(test.main())"
    )
    flags = ["--folder", str(tmp_path / "models"), "--systems", OURS, "--seconds", "60", "--only", "small, int8"]
    command = [sys.executable, "-c", script, *flags, "--out", str(tmp_path / "out.json")]
    ended = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert ended.stderr is not None
    assert "closed loop" in ended.stderr.readline()  # the server is there, and stopped
    children = psutil.Process(ended.pid).children(recursive=True)
    ended.terminate()
    assert ended.wait(60) == 128 + signal.SIGTERM
    assert children
    assert not psutil.wait_procs(children, timeout=20)[1]


def test_the_plot_is_written(tmp_path: Path) -> None:
    runs = [
        {"model": model, "precision": "int8", "system": system, "rate": rate, "limit": 0.2, "stream": False}
        | {"p50": rate / 1e4, "p99": rate / 1e3}
        for model in ("small", "base")
        for system in (OURS, "another")
        for rate in (100.0, 200.0)
    ]
    report.plot(runs, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
