"""`tfexport bench` over contestants whose seconds are scripted: nothing here looks at how long something took."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cpu import growth
from benchmarks.cpu import matrix as cpu_matrix
from benchmarks.cpu import report as cpu_report
from tests.support.fakes import ScriptedRuntime, ScriptedState, echo_model, random_model, tiny_config
from tfexport.bench import peers, worker
from tfexport.bench.contestants import Contestant, Failed, ProcessLayout, contestants_of, setups
from tfexport.bench.machine import Peaks
from tfexport.bench.peers import RuntimePeer
from tfexport.bench.plan import Cell, Plan, random_sources
from tfexport.bench.report import cell_lines
from tfexport.bench.rows import Attempt, percentiles, ratios, spread
from tfexport.bench.run import Bench, climb
from tfexport.bench.worker import Profile, Session
from tfexport.errors import TfexportError
from tfexport.search.search import SearchOptions, search

CONFIG = tiny_config(max_target_length=64)
SOURCES = [[3, 4, 5], [6, 7], [8], [9, 10, 11, 12]]
PEAKS = {n: Peaks(n, {1: 1e9}, {"float32": 1e9, "int8": 1e9}) for n in (1, 2)}

Seconds = Callable[[ProcessLayout, Mapping[str, Any]], float]


class Scripted:
    """Stands for all processes: answers as bench/worker.py does, with the seconds that `seconds` tells."""

    def __init__(
        self, seconds: Seconds, *, tokens: Mapping[str, int] | None = None, failing: Mapping[str, str] | None = None
    ):
        self.seconds, self.tokens, self.failing = seconds, tokens or {}, failing or {}
        self.asked: list[tuple[str, str, Mapping[str, Any]]] = []
        """Contestant, configuration and request of everything that was asked."""
        self.closed: list[ProcessLayout] = []

    def hire(self, setup: ProcessLayout) -> ScriptedHandle:
        return ScriptedHandle(self, setup)

    def decodes(self) -> list[tuple[str, str]]:
        return [(name, about) for name, about, request in self.asked if request["command"] == "decode"]


class ScriptedHandle:
    def __init__(self, script: Scripted, setup: ProcessLayout):
        self.script, self.setup = script, setup

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name = self.setup.contestant.name
        self.script.asked.append((name, self.setup.about, request))
        if request["command"] == self.script.failing.get(name):
            raise Failed(f"{name} is broken.")
        if request["command"] == "load":
            return {"seconds": 0.5, "versions": {"numpy": "2"}}
        seconds = self.script.seconds(self.setup, request)
        if request["command"] == "profile":
            parts = {"encode": 0.1 * seconds, "step": 0.5 * seconds, "select": 0.0}
            return {"seconds": seconds, "parts": parts, "steps": [0.001, 0.003]}
        lengths = [self.script.tokens.get(name, request["max_length"])] * len(request["sources"])
        answer = {"seconds": seconds, "lengths": lengths, "memory": 2**20}
        return (
            {**answer, "outputs": [[name == "liar", *[1] * (n - 1)] for n in lengths]}
            if request.get("outputs")
            else answer
        )

    def close(self) -> None:
        self.script.closed.append(self.setup)


def names(*given: str) -> list[Contestant]:
    return [Contestant(name, Path("bundle")) for name in given]


def measured(script: Scripted, plan: Plan, *given: str) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = []
    Bench(CONFIG, SOURCES, names(*given), plan, PEAKS, script.hire, lambda text: None).run(cells.append)
    return cells


def row(cell: Mapping[str, Any], name: str) -> dict[str, Any]:
    (found,) = (one for one in cell["rows"] if one["contestant"] == name)
    return found


def one_cell(**changes: Any) -> Plan:
    return Plan(**{"threads": (2,), "batches": (2,), "tokens": 5, "rounds": 4, **changes})


# What is tried, and what counts


def test_the_best_configuration_of_each_contestant_counts() -> None:
    fast = {"2 x 1": 1.0, "1 x 2": 1.5, "2 x 1 MKL": 2.0, "1 x 2 oneDNN": 4.0, "2 x 1 oneDNN": 3.0, "1 x 2 MKL": 2.5}
    script = Scripted(lambda setup, request: fast[setup.about])
    (cell,) = measured(script, one_cell(), "ort-cpu", "ctranslate2")
    own, theirs = row(cell, "ort-cpu"), row(cell, "ctranslate2")
    assert own["configuration"] == "2 x 1"
    assert (theirs["configuration"], theirs["workers"], theirs["threads_of_each"], theirs["mkl"]) == (
        "2 x 1 MKL",
        2,
        1,
        True,
    )
    assert [trial["configuration"] for trial in theirs["trials"]] == [
        "2 x 1 oneDNN",
        "1 x 2 oneDNN",
        "2 x 1 MKL",
        "1 x 2 MKL",
    ]
    assert own["tokens_per_second"]["median"] == 4 * 5 / 1.0
    assert own["sentences_per_second"]["median"] == 4.0
    assert theirs["ratio"] == {"median": 2.0, "p10": 2.0, "p90": 2.0}
    assert own["ratio"] is None


def test_of_two_close_configurations_the_one_that_is_faster_in_the_rounds_counts() -> None:
    def seconds(setup: ProcessLayout, request: Mapping[str, Any]) -> float:
        trial = request.get("outputs", False)
        return {"2 x 1": 1.0 if trial else 3.0, "1 x 2": 1.09 if trial else 2.0}[setup.about]

    (cell,) = measured(Scripted(seconds), one_cell(), "ort-cpu")
    assert row(cell, "ort-cpu")["configuration"] == "1 x 2"
    assert row(cell, "ort-cpu")["seconds"] == [2.0] * 4

    def farther(setup: ProcessLayout, request: Mapping[str, Any]) -> float:
        return seconds(setup, request) + 0.02 * (setup.about == "1 x 2")

    script = Scripted(farther)
    (cell,) = measured(script, one_cell(), "ort-cpu")
    assert row(cell, "ort-cpu")["configuration"] == "2 x 1"


def test_rounds_are_interleaved_and_another_one_begins_each_time() -> None:
    script = Scripted(lambda setup, request: 1.0)
    measured(script, one_cell(threads=(1,), rounds=3), "ort-cpu", "torch", "optimum")
    in_rounds = [name for name, _, request in script.asked if request["command"] == "decode" and "repeats" in request]
    assert in_rounds == ["ort-cpu", "torch", "optimum", "torch", "optimum", "ort-cpu", "optimum", "ort-cpu", "torch"]
    # Two decodes of each before: one for warm-up, one that is the trial.
    assert script.decodes()[:6] == [(name, "1 x 1") for name in ("ort-cpu", "torch", "optimum") for _ in range(2)]


def test_what_is_very_slow_runs_in_few_rounds_and_says_so() -> None:
    slow = {"ort-cpu": 1.0, "torch": 21.0, "optimum": 19.0}
    script = Scripted(lambda setup, request: slow[setup.contestant.name])
    (cell,) = measured(script, one_cell(threads=(1,), rounds=6), "torch", "optimum", "ort-cpu")
    found = row(cell, "torch")
    assert found["seconds"] == [21.0, None, None, 21.0, None, None]
    assert (found["rounds"], found["fewer_rounds"]) == (2, True)
    assert found["ratios"] == [21.0, 21.0]
    assert (row(cell, "optimum")["rounds"], row(cell, "optimum")["fewer_rounds"]) == (6, False)
    assert "in 2 rounds" in "\n".join(cell_lines(cell, 5))
    trials = [name for name, _, request in script.asked if request.get("outputs")]
    assert trials.count("torch") == 1  # no second decode for time


def test_the_best_batch_is_looked_for_uphill_from_the_middle() -> None:
    times = {8: 5.0, 16: 2.0, 32: 3.0, 64: 4.0, 128: 1.0}
    asked: list[int] = []

    def seconds(size: int) -> float:
        asked.append(size)
        return times[size]

    assert climb([8, 16, 32, 64, 128], seconds) == 16
    assert set(asked) == {8, 16, 32, 64}  # 128 is not looked at
    assert climb([8, 16, 32, 64, 128], lambda size: -size) == 128
    assert climb([8], seconds) == 8


def test_each_contestant_has_its_own_best_batch() -> None:
    best = {"ort-cpu": 128, "torch": 8}
    script = Scripted(lambda setup, request: 1 + abs(request["batch_size"] - best[setup.contestant.name]) / 100)
    (cell,) = measured(script, one_cell(threads=(1,), batches=(None,)), "ort-cpu", "torch")
    assert {one["contestant"]: one["batch"] for one in cell["rows"]} == best
    assert cell["sentences"] == 128
    assert cell["about"] == "fp32, 1 thread, each one's best batch, beam 1"


def test_all_threads_are_shared_out_in_every_way() -> None:
    (one,) = names("ort-cpu")
    assert [setup.about for setup in setups(one, "float32", 6)] == ["6 x 1", "3 x 2", "2 x 3", "1 x 6"]
    (other,) = names("hugging-face")
    assert [setup.about for setup in setups(other, "float32", 6)] == ["1 x 6"]
    environments = [setup.environment() for setup in setups(names("ctranslate2")[0], "int8", 2)]
    assert [(found["CT2_USE_MKL"], found["OMP_NUM_THREADS"]) for found in environments] == [
        *(("0", "1"), ("0", "2"), ("1", "1"), ("1", "2")),
    ]


# What goes wrong is a row


@pytest.mark.parametrize("command", ["load", "decode"])
def test_what_cannot_run_is_a_row_with_its_reason(command: str) -> None:
    script = Scripted(lambda setup, request: 1.0, failing={"ctranslate2": command})
    cells = measured(script, one_cell(beams=(1, 2)), "ort-cpu", "ctranslate2", "torch")
    for cell in cells:
        assert [one["contestant"] for one in cell["rows"]] == ["ort-cpu", "ctranslate2", "torch"]
        found = row(cell, "ctranslate2")
        assert found["reason"] == "ctranslate2 is broken."
        assert found["tokens_per_second"] is found["ratio"] is found["floor"] is None
        assert row(cell, "torch")["reason"] is None
        assert "ctranslate2: not measured: ctranslate2 is broken." in "\n".join(cell_lines(cell, 5))
    loads = [about for name, about, request in script.asked if (name, request["command"]) == ("ctranslate2", "load")]
    # What could not be loaded is not loaded again for the second cell.
    assert len(loads) == (4 if command == "load" else 8)
    assert {setup.contestant.name for setup in script.closed} == {"ort-cpu", "ctranslate2", "torch"}


def test_what_fails_in_a_round_is_a_row_with_its_reason_and_the_others_go_on() -> None:
    def seconds(setup: ProcessLayout, request: Mapping[str, Any]) -> float:
        if setup.contestant.name == "torch" and "repeats" in request:
            raise Failed("out of memory.")
        return 1.0

    (cell,) = measured(Scripted(seconds), one_cell(threads=(1,)), "ort-cpu", "torch")
    assert row(cell, "torch")["reason"] == "out of memory."
    assert row(cell, "torch")["tokens_per_second"] is None
    assert row(cell, "ort-cpu")["seconds"] == [1.0] * 4


def test_without_our_own_there_are_no_ratios_but_rows() -> None:
    script = Scripted(lambda setup, request: 1.0, failing={"ort-cpu": "load"})
    (cell,) = measured(script, one_cell(), "ort-cpu", "torch")
    assert row(cell, "torch")["ratio"] is row(cell, "torch")["identical"] is None
    assert row(cell, "torch")["tokens_per_second"]["median"] == 20


def test_forced_lengths_are_enforced() -> None:
    script = Scripted(lambda setup, request: 1.0, tokens={"torch": 4})
    (cell,) = measured(script, one_cell(), "ort-cpu", "torch")
    assert row(cell, "torch")["reason"] == "it returned outputs of [4] tokens instead of 5."
    requests = [request for _, _, request in script.asked if request["command"] in ("decode", "profile")]
    assert {(request["min_length"], request["max_length"]) for request in requests} == {(4, 5)}

    (cell,) = measured(script, one_cell(tokens=None, max_length=7, sentences=3), "ort-cpu", "torch")
    assert row(cell, "torch")["reason"] is None
    assert row(cell, "torch")["tokens_per_second"]["median"] == 3 * 4
    assert row(cell, "ort-cpu")["tokens_per_second"]["median"] == 3 * 7
    assert row(cell, "torch")["identical"] == 0


# Numbers


def test_ratios_are_taken_round_by_round() -> None:
    assert ratios([4.0, None, 9.0, 5.0], [2.0, 1.0, 3.0, None]) == [2.0, 3.0]
    assert spread([1.0, 2.0, 3.0, 4.0, 11.0]) == {"median": 3.0, "p10": pytest.approx(1.4), "p90": pytest.approx(8.2)}
    assert spread([]) is percentiles([]) is None
    assert percentiles([0.001, 0.003]) == {
        "p50": pytest.approx(2.0),
        "p90": pytest.approx(2.8),
        "p99": pytest.approx(2.98),
        "count": 2,
    }


def test_a_ratio_is_of_the_same_round() -> None:
    """Both are slow in the same rounds, when something else runs: the ratio stays what it is."""
    rounds = {name: itertools.cycle([1.0, 10.0, 100.0, 2.0]) for name in ("ort-cpu", "torch")}

    def seconds(setup: ProcessLayout, request: Mapping[str, Any]) -> float:
        name = setup.contestant.name
        return (3.0 if name == "torch" else 1.0) * (next(rounds[name]) if "repeats" in request else 1.0)

    (cell,) = measured(Scripted(seconds), one_cell(threads=(1,)), "ort-cpu", "torch")
    assert row(cell, "torch")["ratio"] == {"median": 3.0, "p10": 3.0, "p90": 3.0}


def test_a_record_has_every_number_and_is_json() -> None:
    script = Scripted(lambda setup, request: 1.0)
    cells = measured(
        script, one_cell(precisions=("float32", "int8"), threads=(1, 2), batches=(2, 1), beams=(2, 1)), "ort-cpu"
    )
    order = [(cell["precision"], cell["threads"], cell["batch"], cell["beam"]) for cell in cells]
    assert order == list(itertools.product(("float32", "int8"), (1, 2), (1, 2), (1, 2)))
    found = json.loads(json.dumps(cells[-1], allow_nan=False))
    assert found["sentences"] == 4
    assert found["source_lengths"] == [3, 2, 1, 4]
    own = row(found, "ort-cpu")
    assert own["lengths"] == [5] * 4
    assert own["memory_mib"] == 1.0
    assert (own["load_seconds"], own["versions"]) == (0.5, {"numpy": "2"})
    assert own["latency_ms"]["p50"] == 1000.0
    assert own["latency_ms"]["count"] == len(own["call_seconds"]) == 3
    assert own["step_ms"] == {"p50": 2.0, "p90": pytest.approx(2.8), "p99": pytest.approx(2.98), "count": 2}
    # The rest of what two workers had: 2 * 1 s - 0.1 s - 0.5 s.
    assert own["parts"] == {"encode": 0.1, "step": 0.5, "select": 0.0, "rest": pytest.approx(1.4)}
    assert own["times_floor"] == pytest.approx(1.0 / own["floor"]["seconds"])
    assert own["floor"]["tokens_per_second"] == pytest.approx(20 / own["floor"]["seconds"])
    assert {"reason", "configuration", "batch", "trials", "seconds", "ratio", "identical", "rounds"} <= set(own)


def test_short_decodes_are_repeated_in_a_round() -> None:
    script = Scripted(lambda setup, request: 0.06)
    measured(script, one_cell(threads=(1,)), "ort-cpu")
    assert {request["repeats"] for _, _, request in script.asked if "repeats" in request} == {5}
    assert sum(bool(request.get("outputs")) for _, _, request in script.asked) == 3  # the trial too, once


def test_a_stream_gives_every_worker_a_batch() -> None:
    plan = Plan(tokens=5)
    assert len(plan.stream(SOURCES, Cell("float32", 4, 8, 1))) == 32
    assert plan.stream(SOURCES, Cell("float32", 1, 1, 1)) == SOURCES
    assert plan.stream(SOURCES, Cell("float32", 1, 6, 1)) == [*SOURCES, *SOURCES[:2]]
    assert len(Plan(tokens=None).stream(SOURCES, Cell("float32", 1, 1, 1))) == 64
    assert len(Plan(tokens=None, sentences=7).stream(SOURCES, Cell("float32", 1, 1, 1))) == 7


def test_calls_for_latency_have_one_batch_each_and_go_through_the_sentences() -> None:
    script = Scripted(lambda setup, request: 0.5)
    measured(script, one_cell(threads=(1,), rounds=1), "ort-cpu")
    calls = [request["sources"] for _, _, request in script.asked if request["command"] == "decode"][-5:]
    assert calls == [SOURCES[:2], SOURCES[2:], SOURCES[:2], SOURCES[2:], SOURCES[:2]]


def test_random_sentences_have_no_special_ids_but_their_own() -> None:
    config = tiny_config(src_vocab_size=6, max_source_length=9, source_bos=True)
    found = random_sources(config, 200)
    assert {len(source) for source in found} == {6, 7, 8, 9}
    assert {index for source in found for index in source[1:-1]} == {3, 4, 5}
    assert {(source[0], source[-1]) for source in found} == {(config.bos_id, config.eos_id)}


@pytest.mark.parametrize("changes", [{"threads": (0,)}, {"rounds": 0}, {"tokens": 0}, {"sentences": 0}])
def test_a_plan_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TfexportError, match="at least 1"):
        Plan(**changes)


def test_more_tokens_than_the_model_has_positions_are_refused() -> None:
    with pytest.raises(TfexportError, match="at most 64 tokens"):
        measured(Scripted(lambda setup, request: 1.0), one_cell(tokens=65), "ort-cpu")


# The worker and its process


def test_a_profile_counts_what_one_method_calls_of_another_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr("tfexport.bench.worker.time.perf_counter", lambda: float(next(clock)))
    runtime = ScriptedRuntime(echo_model(100), CONFIG)
    before = ScriptedRuntime.step, ScriptedState.select
    profile = Profile()
    with profile.watching(runtime, ScriptedState):
        search(runtime, [[5, 6, 7], [8]], SearchOptions(max_length=9))
    assert (ScriptedRuntime.step, ScriptedState.select) == before
    # The clock goes on by one with each look at it. `best` calls `step`, which does not look.
    assert profile.steps == [1.0] * 4
    assert profile.parts == {"encode": 1.0, "step": 4.0, "select": 1.0}


@pytest.mark.parametrize("workers", [1, 2])
def test_our_peer_gives_results_in_the_order_of_the_sources(workers: int) -> None:
    sources = [[3 + index] * (1 + index % 5) for index in range(9)]
    options = SearchOptions(max_length=6)
    wanted = [
        search(ScriptedRuntime(random_model(1, 20), tiny_config(tgt_vocab_size=20)), [s], options)[0][0].ids
        for s in sources
    ]
    peer = RuntimePeer(ScriptedRuntime(random_model(1, 20), tiny_config(tgt_vocab_size=20)), workers)
    assert peer.decode(sources, options, 2) == wanted


def test_what_fails_in_the_worker_is_answered() -> None:
    answer = Session().answer({"command": "decode", **REQUEST})
    assert list(answer) == ["error"]
    request = {
        "command": "load",
        "contestant": "ctranslate2",
        "path": "x",
        "precision": "float16",
        "workers": 1,
        "threads": 1,
    }
    assert Session().answer(request) == {
        "error": "this benchmark runs CTranslate2 in fp32 and int8. Give --precision fp32,int8."
    }
    for name in ("hugging-face", "optimum"):
        assert (
            ". Give --precision fp32."
            in Session().answer({**request, "contestant": name, "precision": "int8"})["error"]
        )


# The command


def test_contestants_are_read(tmp_path: Path) -> None:
    found = contestants_of(Path("b"), ["torch", f"optimum={tmp_path}"], ["optimum=/venv/bin/python"])
    assert [(one.name, one.path) for one in found] == [
        ("ort-cpu", Path("b")),
        ("torch", Path("b")),
        ("optimum", tmp_path),
    ]
    assert found[2].python == Path("/venv/bin/python")
    assert found[0].python == Path(sys.executable)
    wrong = [
        (["marian"], [], "no contestant called 'marian'"),
        (["torch=x"], [], "no contestant called"),
        (["optimum"], [], "Give a name and a path"),
        (["optimum=/nowhere"], [], "benchmarks/peers/converters.py"),
        ([], ["optimum=x"], "does not take part"),
    ]
    for beside, pythons, message in wrong:
        with pytest.raises(TfexportError, match=message):
            contestants_of(Path("b"), beside, pythons)


def test_attempts_that_were_not_in_the_rounds_did_not_run() -> None:
    attempt = Attempt(ProcessLayout(names("torch")[0], "float32", 1, 1), 8)
    assert not attempt.ran
    attempt.seconds = [None, 2.0, 4.0]
    assert attempt.ran
    assert attempt.median == 3.0
    assert attempt.takes_part(5, 2) == [0, 1, 2, 3, 4]
    attempt.slow = True
    assert attempt.takes_part(5, 2) == [0, 2]
    assert attempt.takes_part(1, 2) == [0]


# The matrix and the growth


def matrix() -> list[dict[str, Any]]:
    """Cells of two models; in one a peer is missing."""
    seconds = {"ort-cpu": 1.0, "ctranslate2": 4.0, "torch": 3.0}
    machine = {"cpu": "some CPU", "cpus": 2, "date": "2026-01-01T00:00:00", "python": "3.11"}
    found = []
    for model, failing in (("one", {}), ("two", {"torch": "load"})):
        script = Scripted(
            lambda setup, request, model=model: seconds[setup.contestant.name] / (4 if model == "two" else 1),
            failing=failing,
        )
        cells = measured(script, one_cell(threads=(1,), batches=(1, None), rounds=1), "ort-cpu", "ctranslate2", "torch")
        for cell in cells:
            if model == "two":  # other ratios, also one below 1
                cell["rows"][1]["ratio"] = dict.fromkeys(("median", "p10", "p90"), 2.0 if cell["batch"] else 0.5)
            part = "forced" if cell["batch"] else "mixed"
            found.append({"model": model, "part": part, **cell, "run": {"machine": machine, "peaks": []}})
    return found


def test_the_matrix_is_summed_up_by_geometric_mean_and_minimum() -> None:
    cells = matrix()
    assert cpu_report.geometric_mean([1.0, 4.0, 2.0]) == pytest.approx(2.0)
    assert cpu_report.present(cells) == ["ctranslate2", "torch"]
    count, mean, least = cpu_report.summary(cells, "ctranslate2") or (0, 0, 0)
    assert (count, least) == (4, 0.5)
    assert mean == pytest.approx((4 * 4 * 2 * 0.5) ** 0.25)
    assert cpu_report.summary(cells, "optimum") is None
    text = cpu_report.markdown(cells)
    assert "| fp32 | forced | 2.83 (2.00, 2) | 3.00 (3.00, 1) |" in text
    assert "| two | mixed | fp32 | 1 | best | 1 | 2,560 | 0.50 " in text
    assert {line for cell in cells for line in cpu_report.missing(cell)} == {"two, fp32: torch: torch is broken."}


def test_the_matrix_is_written_and_read_and_drawn(tmp_path: Path) -> None:
    cells = matrix()
    cpu_matrix.write(list(reversed(cells)), tmp_path / "cpu.json")
    record = json.loads((tmp_path / "cpu.json").read_text())
    assert len(record["runs"]) == 1
    assert [cell["model"] for cell in record["cells"]] == ["one", "one", "two", "two"]
    again = cpu_matrix.read(tmp_path / "cpu.json")
    assert {cpu_matrix.key_of(cell) for cell in again} == {cpu_matrix.key_of(cell) for cell in cells}
    assert cpu_report.markdown(again) == cpu_report.markdown(cells)
    assert cpu_matrix.main(["--out", str(tmp_path)]) == 0
    assert (tmp_path / "cpu.md").read_text() == cpu_report.markdown(cells)
    assert (tmp_path / "cpu.png").read_bytes()[1:4] == b"PNG"
    assert cpu_matrix.main(["--out", str(tmp_path / "none")]) == 2


def test_cells_are_chosen_by_their_parts() -> None:
    name = "emb, forced, fp32, 1 thread, batch 8, beam 1"
    assert cpu_matrix.wanted(name, None)
    assert cpu_matrix.wanted(name, ["int8", "emb, batch 8"])
    assert not cpu_matrix.wanted(name, ["emb, int8"])
    assert not cpu_matrix.wanted(name, ["batch 1"])


def test_growth_changes_one_number_at_a_time() -> None:
    points = list(growth.points_of(growth.parse([])))
    for sweep, point in points:
        changed = {name for name, value in vars(growth.Point()).items() if getattr(point, name) != value}
        assert changed <= {sweep}
    assert {sweep: max(getattr(p, sweep) for s, p in points if s == sweep) for sweep in growth.SWEEPS} == {
        "batch": 256,
        "source": 256,
        "tokens": 512,
        "vocabulary": 64000,
    }


def test_the_own_search_may_have_the_rules_of_another_engine() -> None:
    for profile, length_penalty in (("tfexport", 0.6), ("opennmt", 1.0)):
        request = Plan(profile=profile, tokens=None).request("decode", [[5]], 8, 4)  # type: ignore[arg-type]
        options = worker._options(json.loads(json.dumps(request)))
        assert (options.profile, options.beam, options.length_penalty) == (profile, 4, length_penalty)
    assert peers._plain_power(options, [[5] * 9]) == 1.0  # of length ** A already
    assert peers._plain_power(SearchOptions(length_penalty=1.0), [[5] * 5]) == 0.5


REQUEST = {"batch_size": 1, "beam": 1, "min_length": 0, "max_length": 3, "sources": [[1], [2]]}


@pytest.fixture(autouse=True)
def few_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that a test can name them."""
    monkeypatch.setattr("tfexport.bench.plan.FEWEST_SENTENCES", 4)
