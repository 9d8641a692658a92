"""The plan of a day on a GPU: its stages, their limits, what is kept of them, and how a day goes on after an end."""

from __future__ import annotations

import importlib.util
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_day import runner, summary
from benchmarks.gpu_day.plan import GRACE, MINUTES, STAGES, Stage, UnknownStage, chosen, stages
from benchmarks.gpu_day.runner import Outcome
from benchmarks.gpu_day.state import FILE, State
from makers.paths import ROOT

FAKES = (Stage("one", "the first", 10), Stage("two", "the second", 20), Stage("three", "the third", 10))


class Clock:
    """Time that passes only when a stage takes it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Machine:
    """Stages that end as `ends` says, by their names; it notes what ran and under which limit."""

    def __init__(self, clock: Clock, **ends: Any):
        self.clock, self.ends, self.ran = clock, ends, []  # type: tuple[Clock, dict[str, Any], list[tuple[str, float]]]
        self.seen: dict[str, str] = {}

    def __call__(self, stage: Stage, seconds: float) -> Outcome:
        self.ran.append((stage.name, seconds))
        end = self.ends.get(stage.name, 1.0)
        if isinstance(end, BaseException):
            raise end
        if isinstance(end, Outcome):
            self.clock.now += end.seconds
            return end
        if end > seconds:
            self.clock.now += seconds
            return Outcome(None, seconds)
        self.clock.now += end
        return Outcome(0, end)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.ran]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def day(
    folder: Path, machine: Machine, *, seconds: float = 1000, rehearsal: bool = False, **more: Any
) -> tuple[bool, State]:
    state = State(folder, rehearsal=rehearsal)
    more = {"stages": FAKES, "say": lambda _: None, **more}
    fakes = more.pop("stages")
    good = runner.run(fakes, state, machine, seconds=seconds, clock=machine.clock, **more)
    return good, state


def statuses(state: State) -> list[str]:
    return [state.status(stage.name) for stage in FAKES]


def test_the_limits_of_all_stages_and_what_ending_them_takes_fit_into_the_day() -> None:
    assert sum(stage.limit + GRACE for stage in STAGES) <= MINUTES * 60
    assert all(GRACE < stage.least < stage.limit <= 600 for stage in STAGES)


def test_every_stage_is_a_command() -> None:
    for stage in stages(rehearsal=True):
        assert importlib.util.find_spec(stage.module) is not None


def test_the_readme_lists_the_stages_with_their_limits() -> None:
    lines = (ROOT / "benchmarks" / "gpu_day" / "README.md").read_text(encoding="utf-8").splitlines()
    table = [line.split("|")[1:3] for line in lines if line.startswith("| `") and line.split("|")[2].strip().isdigit()]
    assert [(name.strip(" `"), int(limit)) for name, limit in table] == [(stage.name, stage.limit) for stage in STAGES]


def test_a_rehearsal_has_a_stage_that_hangs_before_others() -> None:
    names = [stage.name for stage in stages(rehearsal=True)]
    assert names.index("hang") < len(names) - 2
    assert [name for name in names if name != "hang"] == [stage.name for stage in stages(rehearsal=False)]


def test_stages_are_chosen_by_their_names() -> None:
    assert chosen(FAKES) == FAKES
    assert chosen(FAKES, first="two") == FAKES[1:]
    assert chosen(FAKES, only="two") == FAKES[1:2]
    with pytest.raises(UnknownStage, match=r"no stage 'four'. Give one of: one, two, three"):
        chosen(FAKES, only="four")


def test_stages_run_in_their_order_under_their_limits(tmp_path: Path, clock: Clock) -> None:
    machine = Machine(clock)
    good, state = day(tmp_path, machine)
    assert good
    assert machine.ran == [("one", 10), ("two", 20), ("three", 10)]
    assert statuses(state) == ["ran"] * 3
    assert state.stages["one"]["seconds"] == 1.0


def test_a_failure_a_stop_and_what_cannot_start_change_nothing_for_the_next(tmp_path: Path, clock: Clock) -> None:
    ends = {"one": Outcome(-11, 2.0, "last words"), "two": 99.0}
    good, state = day(tmp_path, Machine(clock, **ends))
    assert not good
    assert statuses(state) == ["failed", "timed out", "ran"]
    assert state.stages["one"]["reason"] == "signal 11: last words"
    assert "stopped after 20 s" in state.stages["two"]["reason"]
    _, state = day(tmp_path / "other", Machine(clock, one=OSError("no such program")))
    assert statuses(state) == ["failed", "ran", "ran"]
    assert state.stages["one"]["reason"] == "it could not be started: no such program"


def test_the_state_is_on_the_disk_while_a_stage_runs(tmp_path: Path, clock: Clock) -> None:
    def look(stage: Stage, seconds: float) -> Outcome:
        saved = json.loads((tmp_path / FILE).read_text())["stages"]
        assert saved[stage.name]["status"] == "running"
        assert all(saved[name]["status"] == "ran" for name in saved if name != stage.name)
        return Outcome(0, 1.0)

    state = State(tmp_path, rehearsal=False)
    assert runner.run(FAKES, state, look, seconds=1000, say=lambda _: None, clock=clock)


@pytest.mark.parametrize("end", [SystemExit(143), KeyboardInterrupt()])
def test_a_day_that_is_ended_goes_on_with_the_stage_that_ran(tmp_path: Path, clock: Clock, end: BaseException) -> None:
    with pytest.raises(type(end)):
        day(tmp_path, Machine(clock, two=end))
    assert statuses(State(tmp_path, rehearsal=False)) == ["ran", "interrupted", "not run"]
    machine = Machine(clock)
    good, state = day(tmp_path, machine)
    assert good
    assert machine.names == ["two", "three"]
    assert statuses(state) == ["ran"] * 3


def test_a_day_that_was_killed_goes_on_with_the_stage_that_ran(tmp_path: Path, clock: Clock) -> None:
    state = State(tmp_path, rehearsal=False)
    state.note("one", "ran")
    state.note("two", "running")
    machine = Machine(clock)
    day(tmp_path, machine)
    assert machine.names == ["two", "three"]


def test_what_has_failed_is_run_again_only_when_it_is_asked_for(tmp_path: Path, clock: Clock) -> None:
    day(tmp_path, Machine(clock, one=Outcome(1, 1.0)))
    machine = Machine(clock)
    good, _ = day(tmp_path, machine)
    assert (good, machine.ran) == (False, [])
    good, state = day(tmp_path, machine, stages=chosen(FAKES, only="one"), again=True)
    assert (good, machine.names) == (True, ["one"])
    assert statuses(state) == ["ran"] * 3


def test_a_stage_gets_what_is_left_or_waits_for_the_next_call(tmp_path: Path, clock: Clock) -> None:
    machine = Machine(clock, one=9.0)
    good, state = day(tmp_path, machine, seconds=9 + GRACE + 11)
    assert not good
    assert machine.ran == [("one", 10), ("three", 10)]  # of its 20 seconds `two` would have had 11
    assert statuses(state) == ["ran", "not run", "ran"]
    assert "11 s were left, it needs 12" in state.stages["two"]["reason"]
    machine = Machine(clock)
    good, _ = day(tmp_path, machine, seconds=GRACE + 15)
    assert good
    assert machine.ran == [("two", 15)]


def test_a_rehearsal_is_never_taken_for_a_run(tmp_path: Path, clock: Clock) -> None:
    hanging = (*FAKES[:1], Stage("hang", "it hangs", 5, hangs=True), *FAKES[1:])
    machine = Machine(clock, hang=1000.0)
    good, state = day(tmp_path, machine, rehearsal=True, stages=hanging)
    assert good
    assert statuses(state) == ["rehearsed"] * 3
    assert state.status("hang") == "timed out"
    text = summary.markdown(summary.collect(hanging, state, tmp_path))
    assert "A rehearsal without a GPU" in text
    assert "| ran |" not in text
    good, _ = day(tmp_path / "other", Machine(clock), rehearsal=True, stages=hanging)
    assert not good  # a stage that is to hang and does not


def result(folder: Path, name: str, found: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps(found))


def test_the_summary_says_what_became_of_every_stage(tmp_path: Path) -> None:
    state = State(tmp_path, rehearsal=False)
    for name, status in {"smoke": "ran", "tests": "failed", "export": "timed out", "speed": "interrupted"}.items():
        state.note(name, status, reason=f"why {name}", seconds=3.2, limit=10)
    record = summary.collect(STAGES, state, tmp_path)
    lines = summary.markdown(record).splitlines()
    for name, status in {"smoke": "ran", "tests": "failed", "export": "timed out", "speed": "interrupted"}.items():
        (line,) = [line for line in lines if line.startswith(f"| {name} |")]
        assert f"| {status} | 3 of 10 | why {name} |" in line
    (line,) = [line for line in lines if line.startswith("| profile |")]
    assert "| not run |" in line


ROW = {"runtime": "ort-cuda", "precision": "fp16", "batch": 1, "beam": 4, "error": None}
SPREAD = {"median": 1234.5, "p10": 1000.0, "p90": 2000.0}
FOUND: dict[str, tuple[Any, str]] = {
    "environment": (
        {
            **{
                "date": "today",
                "commit": "abc",
                "python": "3.12.1",
                "cpu": "a CPU",
                "cpus": 16,
                "versions": {"torch": "2"},
            },
            **{"torch": {"gpu": {"name": "NVIDIA H100"}}, "gpu": {"clocks.sm": "1980 MHz"}},
        },
        "| clocks.sm | 1980 MHz |",
    ),
    "smoke": (
        {
            **{"bundle": "exported here", "sentences": 8},
            "rows": [
                {"precision": "fp32", "beam": None, "error": "no library", "passed": False},
                {
                    **{"precision": "fp16", "beam": 4, "error": None, "passed": True, "identical": 7, "steps": 90},
                    **{"top1_agree": 89, "logits_error": 0.01, "logits_own": 1e-6, "attention": ["flash_fwd_kernel"]},
                },
            ],
        },
        "| fp16 | 4 | 7 of 8 | 89 of 90 | 1.0e-02 | 1.0e-06 | yes |",
    ),
    "tests": (
        {
            "marks": "gpu",
            "counts": {"passed": 3, "failed": 1},
            "reasons": {"failed: test_a": "assert 1", "skipped: b": "x"},
        },
        "| test_a | assert 1 |",
    ),
    "export": (
        {
            **{
                "checkpoint_mb": 240.0,
                "export": {"code": 0, "seconds": 31.0, "last_line": ""},
                "bundle": {"mb": 500.0},
            },
            "ctranslate2": {"error": None, "seconds": 2.0},
        },
        "CTranslate2's converter: 2 s.",
    ),
    "speed": (
        {
            **{"ratio_to": "torch-cuda", "trials": {"ctranslate2": {"code": -11, "said": "it crashed"}}},
            "rows": [{**ROW, "tokens_per_second": SPREAD, "step_ms": None, "ratio": None}, {**ROW, "error": "broken"}],
        },
        "- ctranslate2 was left out: it crashed",
    ),
    "profile": (
        {
            "rows": [
                {
                    **{"precision": "fp16", "batch": 1, "beam": 1, "error": None, "by": "torch.profiler", "nodes": 225},
                    **{"node_us": 1.9, "gap_us": 0.6, "step_us": 600.0, "busy_us": 400.0, "host_us": 30.0},
                    "kernels": [{"name": "gemm", "a_step": 25, "us_a_step": 75.5}],
                }
            ]
        },
        "| fp16 | 1 | 1 | 225 | 1.9 | 0.6 | 600 | 400 | 30 |  |  | torch.profiler |",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_summary_shows_results(tmp_path: Path, name: str) -> None:
    found, line = FOUND[name]
    result(tmp_path, name, found)
    text = summary.markdown(summary.collect(STAGES, State(tmp_path, rehearsal=False), tmp_path))
    assert line in text.splitlines()
    assert "cannot be shown" not in text


@pytest.mark.parametrize("name", ["speed", "profile"])
def test_a_rehearsal_shows_no_times(tmp_path: Path, name: str) -> None:
    result(tmp_path, name, FOUND[name][0])
    told = {
        rehearsal: summary.markdown(summary.collect(STAGES, State(tmp_path, rehearsal=rehearsal), tmp_path))
        for rehearsal in (True, False)
    }
    number = {"speed": "1234 (1000 to 2000)", "profile": "| 600 |"}[name]
    assert number in told[False]
    assert number not in told[True]
    assert "| rehearsed |" in told[True]


@pytest.mark.parametrize("name", [*FOUND, "compiled", "compiled-tests"])
@pytest.mark.parametrize(
    "found", [{"rows": [{}]}, {"rows": []}, {"export": {}}, {"trials": 3}, {"reasons": {"x": "y"}}]
)
def test_results_of_a_stage_that_was_stopped_anywhere_end_no_summary(tmp_path: Path, name: str, found: Any) -> None:
    result(tmp_path, name, found)
    (tmp_path / "tests.json").write_text("{ half a fi")
    record = summary.collect(STAGES, State(tmp_path, rehearsal=False), tmp_path)
    summary.write(record, tmp_path)
    assert json.loads((tmp_path / summary.JSON).read_text())["stages"]
    with tarfile.open(tmp_path / summary.ARCHIVE) as archive:
        assert {"summary.md", "summary.json", f"{name}.json"} <= set(archive.getnames())


def test_a_summary_is_written_after_each_stage_and_at_the_end(tmp_path: Path, clock: Clock) -> None:
    calls: list[int] = []
    day(tmp_path, Machine(clock), saved=lambda: calls.append(1))
    assert len(calls) == len(FAKES) + 1


def test_the_last_line_of_a_log_is_the_last_that_says_something(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert runner.last_line(log) == ""
    log.write_bytes(b"first\n" + b"x" * 9000 + b"\n  RuntimeError: \xff broken  \n\n")
    assert runner.last_line(log) == "RuntimeError: \ufffd broken"


def test_ort_cuda_is_faster_than_every_peer_wherever_both_were_measured() -> None:
    """The changelog says so of the recorded day, by medians."""
    day = json.loads((ROOT / "benchmarks" / "results" / "gpu_day.json").read_text(encoding="utf-8"))
    found = {stage["name"]: stage["found"] for stage in day["stages"]}
    compared = set()
    for name in ("speed", "compiled"):
        rates = {
            (row["runtime"], row["precision"], row["batch"], row["beam"]): row["tokens_per_second"]["median"]
            for row in found[name]["rows"]
            if row["tokens_per_second"]
        }
        for (runtime, *setting), rate in rates.items():
            own = rates.get(("ort-cuda", *setting))
            if runtime != "ort-cuda" and own is not None:
                compared.add(runtime)
                assert rate < own, (runtime, setting)
    assert compared >= {"ctranslate2", "hugging-face", "torch-cuda-compiled"}
