"""The host's time in a search whose steps cost nothing: what a GPU would wait for.

    python -m benchmarks.search.host_time [--out benchmarks/results/search_host.json]

A script stands in for the model: it tells random tokens, an end now and then, and in each sentence one in the end. On the
host the search ranks them step by step; ahead, the script tells what ONNX Runtime's CPU provider ranked before. Both decode
the same sentences, in turns. Times are CPU time, divided by the steps that the longest sentence takes: the median of some
searches, and the least of them. Of a search ahead there are

- all of the host's work, from the source ids to the hypotheses, without the stand-in of the device,
- what a GPU waits for: the rest is done while a launch is under way. A GPU that is done earlier waits longer,
- what it waits for between two launches. The others of these come once: before the first launch, and after the last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from benchmarks.machine import machine
from tfexport.config import ModelConfig
from tfexport.contract import Role
from tfexport.graph_contract import SEARCH_GRAPHS
from tfexport.graphs import portable
from tfexport.runtimes.base import AHEAD
from tfexport.runtimes.buckets import Buckets
from tfexport.runtimes.device import Call, DeviceTensor, HostDevice, host_array
from tfexport.runtimes.device_search import DeviceSearch
from tfexport.runtimes.loop import LoopRuntime
from tfexport.runtimes.ort import OrtExecutable
from tfexport.search.search import Hypothesis, SearchOptions, search, search_steps

BATCHES, BEAMS = (1, 32, 256), (1, 4)
ROUNDS, WARM = 30, 3
BEST_TOKENS = 17
LONGEST = 64

Tensors = Mapping[str, DeviceTensor]


class Script:
    """What the steps of a batch tell: for each position the best tokens of each row, and their log-probabilities."""

    def __init__(self, config: ModelConfig, batch: int, beam: int):
        random = np.random.default_rng(3)
        shape = (LONGEST + AHEAD, batch * beam, BEST_TOKENS)
        self.log_probs = np.sort(-random.exponential(3, shape).astype(np.float32), axis=2)[..., ::-1].copy()
        first = random.integers(4, config.tgt_vocab_size - BEST_TOKENS, (*shape[:2], 1))
        self.ids = first + np.arange(BEST_TOKENS)
        ends = np.repeat(random.integers(16, 26, batch), beam)
        is_over = np.arange(shape[0])[:, None] >= ends
        places = np.where(
            is_over, 0, random.integers(0, 4 * BEST_TOKENS, shape[:2])
        )  # mostly the end is not among the best
        step, row = np.nonzero(places < BEST_TOKENS)
        self.ids[step, row, places[step, row]] = config.eos_id
        self.log_probs[..., 0] = np.where(is_over, -0.001, self.log_probs[..., 0])
        self.searched: dict[int, dict[str, Any]] = {}
        """What was ranked after each position."""


class TimedDevice(HostDevice):
    """The host's memory, and how long the host worked for the device and beside it.

    Attributes:
        seconds: the CPU time of launches, which a GPU would take off the host.
        meanwhile: that of the host between the begin of a launch and the wait for it.
        between: that between the end of a launch and the begin of the next.
    """

    def __init__(self) -> None:
        super().__init__()
        self.start()

    def start(self) -> None:
        """A search is to begin."""
        self.seconds = self.meanwhile = self.between = 0.0
        self._begun: float | None = None
        self._ended: float | None = None

    def capture(self, enqueue: Call) -> Call:
        def launch() -> None:
            start = time.thread_time()
            self.between += 0.0 if self._ended is None else start - self._ended
            enqueue()
            self._begun = time.thread_time()
            self.seconds += self._begun - start

        return launch

    def synchronize(self) -> None:
        if self._begun is not None:
            self._ended = time.thread_time()
            self.meanwhile += self._ended - self._begun
            self._begun = None


class Played:
    """A graph that does nothing but to write what the script has for its position.

    Args:
        write: called with the position and the arrays of the tensors.
    """

    records = True

    def __init__(self, write: Callable[[int, dict[str, Any]], None]):
        self.position = 0
        self._write = write

    def bind(self, tensors: Tensors, *, record: bool = True) -> Call:
        arrays = {name: host_array(tensor) for name, tensor in tensors.items()}

        def run() -> None:
            self._write(self.position, arrays)
            self.position += 1

        return run


class ScriptedGraphs:
    """Graphs without a model. The first search ranks with `searcher`; later ones tell what it found."""

    precision = "float32"
    position_dtype = "int32"
    has_beam_step = True
    flat = False

    def __init__(self, script: Script, searcher: Callable[[Role], OrtExecutable]):
        self.device = TimedDevice()
        self.buckets = Buckets((LONGEST,), BATCHES, (32,), shrink=2, least_batch=max(BATCHES))
        self.script, self.played = script, False
        self.encoder = self.select_rows = Played(lambda position, arrays: None)
        self.told = Played(self._tell)
        self._searcher = searcher
        self.search = DeviceSearch(self.device, self._load, lambda: [])
        self.ranked: list[Played] = []

    def start(self) -> None:
        """A search is to begin."""
        self.device.start()
        self.told.position = 0
        for ranked in self.ranked:
            ranked.position = 0

    def _tell(self, position: int, arrays: dict[str, Any]) -> None:
        if not self.played:
            arrays["best.log_probs"][:] = self.script.log_probs[position]
            arrays["best.ids"][:] = self.script.ids[position]

    def _load(self, role: Role) -> Played:
        real, outputs = self._searcher(role), _outputs(role)

        def write(position: int, arrays: dict[str, Any]) -> None:
            if self.played:
                for name, array in self.script.searched[position].items():
                    arrays[name][:] = array
                return
            tensors = {name: _tensor(array) for name, array in arrays.items()}
            real.bind(tensors)()
            self.script.searched[position] = {name: arrays[name].copy() for name in outputs}

        self.ranked.append(Played(write))
        return self.ranked[-1]

    def step(self, cache: int, *, attention: bool = False) -> Played:
        return self.told

    def beam_step(self) -> Played:
        return self.told


def _outputs(role: Role) -> list[str]:
    """What the host reads of the outputs of a search graph."""
    (graph,) = (graph for graph in SEARCH_GRAPHS if graph.role == role)
    return [tensor.name for tensor in graph.outputs if tensor.name.startswith("candidates") or role == "greedy_search"]


def _tensor(array: Any) -> DeviceTensor:
    return DeviceTensor(array.ctypes.data, array.shape, array.dtype.name)


def measure(config: ModelConfig, batch: int, beam: int, searcher: Callable[[Role], OrtExecutable]) -> dict[str, Any]:
    """Microseconds of a step on the host, and ahead."""
    graphs: Any = ScriptedGraphs(Script(config, batch, beam), searcher)
    runtime, options = LoopRuntime("scripted", config, graphs), SearchOptions(beam=beam, max_length=LONGEST)
    sources = [[5] * 20] * batch

    def on_host() -> list[list[Hypothesis]]:
        graphs.start()
        steps = search_steps(runtime, sources, options)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return list(end.value)

    def ahead() -> list[list[Hypothesis]]:
        graphs.start()
        return search(runtime, sources, options)

    wanted = on_host()
    steps = graphs.told.position
    assert ahead() == wanted, "what runs ahead finds something else"
    found: dict[str, list[float]] = {"host": [], "ahead": [], "waits": [], "between": []}
    for number in range(WARM + ROUNDS):
        graphs.played = False
        host = _seconds(on_host)
        graphs.played = True
        own = _seconds(ahead) - graphs.device.seconds
        if number >= WARM:  # launches are recorded by then
            measured = host, own, own - graphs.device.meanwhile, graphs.device.between
            for name, seconds in zip(found, measured, strict=True):
                found[name].append(seconds / steps * 1e6)
    assert ahead() == wanted
    return {"batch": batch, "beam": beam, "steps": steps, **{name: _summed(times) for name, times in found.items()}}


def _seconds(run: Callable[[], Any]) -> float:
    """The CPU time of a call."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def _summed(times: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(times), 1), "least": round(min(times), 1)}


def table(record: Mapping[str, Any]) -> tuple[Sequence[str], list[list[str]]]:
    """The head and the rows of a record: microseconds of a step."""
    head = (
        "beam",
        "sentences",
        "host chooses each token",
        "ahead, all host time",
        "a GPU waits for",
        "of that, between two",
    )
    names = ("host", "ahead", "waits", "between")
    return head, [
        [str(row["beam"]), str(row["batch"]), *(f"{row[name]['median']:.1f}" for name in names)]
        for row in record["rows"]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args()
    from benchmarks.cuda_dry.workload import model_config  # needs a CUDA runtime, which a reader of the table has not

    # Caches of a real size would be zeroed here, which a GPU does by itself.
    config = replace(model_config("tiny"), d_model=2, n_heads=1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:

        def searcher(role: Role) -> OrtExecutable:
            (graph,) = (graph for graph in SEARCH_GRAPHS if graph.role == role)
            file = Path(folder) / graph.file
            stored: Any = None  # these graphs have no weights
            ir.save(portable.emit(graph, config, stored), file)
            return OrtExecutable(file, HostDevice(), threads=1)

        for beam in BEAMS:
            for batch in BATCHES:
                rows.append(measure(config, batch, beam, searcher))
                print(rows[-1], flush=True)
    if options.out:
        record = {"machine": machine("cpu"), "rows": rows}
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
