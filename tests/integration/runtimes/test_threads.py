"""One loaded bundle, many threads: the tokens and scores, to the last bit, of one call after the other."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from makers.tiny import SRC_VOCAB
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.decoding.line_reader import Reader
from tfexport.decoding.translate import translate
from tfexport.runtimes import load_runtime
from tfexport.runtimes.base import Runtime
from tfexport.runtimes.ort import ort_cpu_portable
from tfexport.runtimes.workspace import Workspace
from tfexport.search.search import SearchOptions, search

THREADS = 8
"""More than CPUs, so that they are interrupted in the middle of what they do."""

RUNTIMES: dict[str, Callable[[Bundle], Runtime]] = {
    "ort-cpu fp32": lambda bundle: load_runtime("ort-cpu", bundle, threads=1),
    "ort-cpu int8": lambda bundle: load_runtime("ort-cpu", bundle, precision="int8", threads=1),
    "ort-cpu, two threads": lambda bundle: load_runtime("ort-cpu", bundle, threads=2),
    "portable graphs": lambda bundle: ort_cpu_portable(bundle, threads=1),
    "torch": lambda bundle: load_runtime("torch", bundle, threads=1),
}


@pytest.fixture(autouse=True)
def impatient_threads() -> Iterator[None]:
    """Python lets another thread run after 10 microseconds instead of 5 milliseconds, of which a call here needs one."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", RUNTIMES)
def test_calls_at_once_give_what_calls_one_by_one_give(quantized_bundle: Path, name: str) -> None:
    runtime = RUNTIMES[name](open_bundle(quantized_bundle))
    random = np.random.default_rng(0)
    calls = [
        (
            [random.integers(4, SRC_VOCAB, int(n)).tolist() for n in random.integers(1, 21, 1 + index % 6)],
            SearchOptions(beam=1 + index % 4, nbest=1 + index % 4),
        )
        for index in range(2 * THREADS)
    ]
    alone = [search(runtime, *call) for call in calls]
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(2):
            together = list(pool.map(lambda call: search(runtime, *call), calls))
            assert together == alone


@pytest.mark.parametrize("name", ["ort-cpu fp32", "portable graphs"])
def test_texts_at_once_give_what_texts_one_by_one_give(quantized_bundle: Path, name: str) -> None:
    bundle = open_bundle(quantized_bundle)
    runtime, reader = RUNTIMES[name](bundle), Reader.of(bundle, None)
    random = np.random.default_rng(1)
    texts = [
        [" ".join(f"de{word}" for word in random.integers(4, SRC_VOCAB, 1 + line % 7)).encode() for line in range(9)]
        for _ in range(THREADS)
    ]

    def results(number: int) -> list[Any]:
        return list(translate(runtime, reader, texts[number], SearchOptions(beam=1 + number % 3), batch_size=3))

    alone = [results(number) for number in range(THREADS)]
    assert len({str(line.hypotheses) for lines in alone for line in lines}) > THREADS
    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(results, range(THREADS))) == alone


def test_the_decoding_loop_is_in_one_thread_at_a_time(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory, its bound tensors and a GPU's stream are there once. The calls are slow, so that threads would meet."""
    inside, most = 0, 0
    call = Workspace.call

    def slow(self: Workspace, *arguments: Any) -> Any:
        bound = call(self, *arguments)

        def run() -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            time.sleep(0.001)
            bound()
            inside -= 1

        return run

    monkeypatch.setattr(Workspace, "call", slow)
    runtime = ort_cpu_portable(open_bundle(tiny_bundle), threads=1)
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(lambda beam: search(runtime, [[5, 6], [7]], SearchOptions(beam=beam, max_length=5)), [1, 2, 3, 4])
        )
    assert most == 1
