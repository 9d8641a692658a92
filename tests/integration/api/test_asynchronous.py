"""`translate_async` over real bundles: many calls at once, in threads and processes, give what `translate` gives."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfexport
from makers.scheduling import drive, problems
from makers.serving_bundle import write_bundle
from makers.tiny import SRC_VOCAB
from tfexport.api.loaded import MOST_SETUPS
from tfexport.bundle.reader import Bundle
from tfexport.runtimes import load_runtime
from tfexport.runtimes.ort_cpu.greedy_state import GreedyState
from tfexport.scheduling.usage import Usage, current

LINES = [" ".join(f"de{4 + (n * 7 + place * 3) % (SRC_VOCAB - 4)}" for place in range(1 + n % 9)) for n in range(24)]
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"scores": False},
    {"beam": 3, "nbest": 2},
    {"samples": 2, "seed": 5},
    {"no_repeat_ngram": 2, "token_scores": True},
    {"prefix": "wört4"},
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(tmp_path_factory.mktemp("serving"))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_random_requests_get_what_each_would_get_alone(bundle: Bundle, precision: str) -> None:
    """To the last bit: tokens, scores, attention and what was streamed. `fuzz.server.scheduler` does so with many more."""
    runtime = load_runtime("ort-cpu", bundle, precision=precision, threads=1)  # type: ignore[arg-type]
    _, answers = drive(runtime, 3, 50, vocab=50, max_length=24, attention=True, workers=2)
    assert [found for answer in answers for found in problems(runtime, answer)] == []
    assert sum(answer.outputs is not None for answer in answers) > 35


def test_a_place_that_keeps_its_position_is_found(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the state: a sentence that joins goes on behind the keys and values of who was there before."""
    put = GreedyState.put

    def keeps(self: GreedyState, places: Any, other: GreedyState) -> None:
        put(self, places, other)
        self._filled[places] = 1
        self._longest = int(self._filled.max())

    runtime = load_runtime("ort-cpu", bundle, threads=1)
    monkeypatch.setattr(GreedyState, "put", keeps)
    _, answers = drive(runtime, 3, 50, vocab=50, max_length=24)
    assert any(problems(runtime, answer) for answer in answers)


@pytest.fixture(
    params=[{}, {"workers": 2, "worker_kind": "threads"}, {"workers": 2}], ids=["alone", "threads", "processes"]
)
def model(request: pytest.FixtureRequest, quantized_bundle: Path) -> Iterator[tfexport.Model]:
    with tfexport.load(quantized_bundle, threads=1).serve(slots=16, **request.param) as loaded:
        yield loaded


def told(found: list[tfexport.Translation]) -> list[Any]:
    return [(one.status, one.message, [hypothesis.ids for hypothesis in one.hypotheses], one.text) for one in found]


def test_calls_at_once_give_what_translate_gives(model: tfexport.Model) -> None:
    asked = [(line, {"max_length": 12, **kind}) for kind in KINDS for line in LINES]

    async def calls() -> list[tfexport.Translation]:
        return await asyncio.gather(*(model.translate_async(line, **kind) for line, kind in asked))

    assert told(asyncio.run(calls())) == told([model.translate(line, **kind) for line, kind in asked])
    assert model.serving_metrics()["finished"] == len(asked)


def test_a_list_keeps_its_order_and_says_what_cannot_be_read(model: tfexport.Model) -> None:
    lines = [LINES[3], "", LINES[4], " ".join(["de5"] * 100)]
    found = asyncio.run(model.translate_async(lines, max_length=12))
    assert told(found) == told(model.translate(lines, max_length=12))
    assert [one.line for one in found] == [1, 2, 3, 4]
    assert asyncio.run(model.translate_async([])) == []


def test_steps_are_those_of_stream(model: tfexport.Model) -> None:
    async def steps(**options: Any) -> list[int]:
        return [step.id async for step in model.stream_async(LINES[5], max_length=12, **options)]

    for options in ({}, {"beam": 3}):
        assert asyncio.run(steps(**options)) == [step.id for step in model.stream(LINES[5], max_length=12, **options)]


def test_a_task_that_is_cancelled_leaves(model: tfexport.Model) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(model.translate_async(LINES * 4))
        while not model.serving_metrics()["live_rows"]:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await model.translate_async(LINES[0])

    asyncio.run(cancelled())
    metrics = model.serving_metrics()
    assert (metrics["cancelled"], metrics["queued"], metrics["live_rows"]) == (1, 0, 0)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"beem": 2}, "beam"),
        ({"beam": 2, "samples": 1}, "does not use a beam"),
        ({"batch_size": 3}, "not an option of this"),
    ],
)
def test_options_are_checked_as_in_translate(quantized_bundle: Path, options: dict[str, Any], error: str) -> None:
    with (
        tfexport.load(quantized_bundle, threads=1) as model,
        pytest.raises(tfexport.TfexportError, match=error),
    ):
        asyncio.run(model.translate_async("de4", **options))


def test_a_worker_process_that_ends_is_replaced(quantized_bundle: Path) -> None:
    before = set(children())
    with tfexport.load(quantized_bundle, threads=1).serve(workers=2, worker_kind="processes") as model:
        (server,) = set(children()) - before

        async def calls() -> list[tfexport.Translation]:
            tasks = [asyncio.create_task(model.translate_async(line, beam=4)) for line in LINES * 3]
            while not model.serving_metrics()["live_rows"] or len(children(server)) < 2:
                await asyncio.sleep(0)
            os.kill(children(server)[0], signal.SIGKILL)
            return await asyncio.gather(*tasks)

        found = asyncio.run(calls())
        while not model.serving_metrics()["restarts"] or len(children(server)) < 2:
            time.sleep(0.01)
        assert told(found) == told(model.translate(LINES * 3, beam=4))
        workers = children(server)
        # They give way to the process that takes requests.
        assert all(os.getpriority(os.PRIO_PROCESS, worker) > os.getpriority(os.PRIO_PROCESS, 0) for worker in workers)
    assert not Path(f"/proc/{server}").exists()
    assert all(has_ended(worker) for worker in workers)


def test_a_worker_that_was_stopped_does_not_hold_up_the_end(quantized_bundle: Path) -> None:
    before = set(children())
    model = tfexport.load(quantized_bundle, threads=1).serve(workers=2, worker_kind="processes")
    (server,) = set(children()) - before
    assert asyncio.run(model.translate_async(LINES[0])).hypotheses
    stopped = children(server)[0]
    os.kill(stopped, signal.SIGSTOP)
    closing = threading.Thread(target=model.close, daemon=True)
    closing.start()
    closing.join(20)
    is_over = not closing.is_alive()
    if not is_over:
        os.kill(stopped, signal.SIGKILL)
    assert is_over
    assert has_ended(stopped)


def test_a_deadline_holds_where_workers_have_stopped(quantized_bundle: Path) -> None:
    before = set(children())
    with tfexport.load(quantized_bundle, threads=1).serve(workers=1, worker_kind="processes") as model:
        (server,) = set(children()) - before
        assert asyncio.run(model.translate_async(LINES[0])).hypotheses
        os.kill(children(server)[0], signal.SIGSTOP)
        try:
            with pytest.raises(tfexport.DeadlineError):
                asyncio.run(model.translate_async(LINES[0], timeout=0.1))
        finally:
            os.kill(children(server)[0], signal.SIGCONT)


def test_calls_tell_what_they_decoded(quantized_bundle: Path) -> None:
    async def calls(model: tfexport.Model) -> tuple[Usage, Usage]:
        async def counted(count: int) -> Usage:
            usage = Usage()
            current.set(usage)
            await model.translate_async(LINES[:count])
            return usage

        one, other = await asyncio.gather(*(asyncio.create_task(counted(count)) for count in (3, 5)))
        return one, other

    with tfexport.load(quantized_bundle, threads=1) as model:
        found = asyncio.run(calls(model))
        for usage, count in zip(found, (3, 5), strict=True):
            ids = [one.hypotheses[0].ids for one in model.translate(LINES[:count])]
            assert (usage.sentences, usage.tokens) == (count, sum(map(len, ids)))
            assert usage.source_tokens == sum(len(line.split()) + 2 for line in LINES[:count])  # with bos and eos


def test_models_with_processes_of_their_own_close_in_any_order(quantized_bundle: Path) -> None:
    """Who is forked later has the earlier one's sockets too, so that these do not end with their owner."""
    first, second = (tfexport.load(quantized_bundle, threads=1).serve(worker_kind="processes") for _ in range(2))
    first.close()
    assert told([asyncio.run(second.translate_async(LINES[0]))]) == told([second.translate(LINES[0])])
    second.close()


def test_a_closed_model_says_so(quantized_bundle: Path) -> None:
    model = tfexport.load(quantized_bundle, threads=1)
    asyncio.run(model.translate_async("de4"))
    with pytest.raises(tfexport.TfexportError, match="has started"):
        model.serve()
    model.close()
    model.close()
    with pytest.raises(tfexport.TfexportError, match="was closed"):
        asyncio.run(model.translate_async("de4"))


def children(of: int | None = None) -> list[int]:
    """The child processes of a process, the oldest first."""
    found = Path(f"/proc/{of or os.getpid()}/task").glob("*/children")
    return sorted(int(number) for path in found for number in path.read_text().split())


def has_ended(process: int) -> bool:
    """Whether a process ends within a moment."""
    for _ in range(500):
        if not Path(f"/proc/{process}").exists():
            return True
        time.sleep(0.01)
    return False


def test_setups_are_kept_but_not_those_with_lists(tiny_bundle: Path) -> None:
    """A client that sends other lists with each request fills no memory, and takes no place from the usual requests."""
    model = tfexport.load(tiny_bundle, threads=1)
    for index in range(MOST_SETUPS + 50):
        model.search_options(bad_words=[[4 + index % 10, 5 + index // 10]])
    assert model._kept_setup.cache_info().currsize == 0
    for index in range(MOST_SETUPS + 50):
        model.search_options(beam=4, length_penalty=index / 1000)
        model.search_options(beam=3)
    kept = model._kept_setup.cache_info()
    assert kept.currsize == MOST_SETUPS
    assert kept.hits == MOST_SETUPS + 49  # of the one that comes again and again
