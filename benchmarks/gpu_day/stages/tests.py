"""tests/gpu in a process of their own, each outcome kept as soon as it is there."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks.gpu_day.stage import Task, main
from benchmarks.gpu_day.unpack import ROOT

QUICK = "gpu and not compiles"


class Outcomes:
    """A plugin of pytest that writes down how each test ended."""

    def __init__(self, task: Task):
        self._task = task
        self._counts: dict[str, int] = {"passed": 0, "failed": 0, "skipped": 0}
        self._reasons: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._counts[report.outcome] += 1
        if report.outcome != "passed":
            self._reasons[f"{report.outcome}: {report.nodeid}"] = self._reason(report)
        self._task.found |= {"counts": self._counts, "reasons": self._reasons, "last": report.nodeid}
        self._task.save()

    @staticmethod
    def _reason(report: pytest.TestReport) -> str:
        found: Any = report.longrepr
        text = found[2] if isinstance(found, tuple) else str(getattr(found, "reprcrash", None) or found)
        return text.strip()[-500:]


def run_tests(task: Task, marks: str) -> bool:
    """Run tests/gpu with these marks; whether none failed."""
    task.found["marks"] = marks
    folder = str(ROOT / "tests" / "gpu")
    cache = ["-p", "no:cacheprovider", "--basetemp", str(task.work / "pytest")]
    return pytest.main(["-m", marks, "-v", "-rs", *cache, folder], plugins=[Outcomes(task)]) == pytest.ExitCode.OK


def run(task: Task) -> bool:
    """The tests that compile nothing."""
    return run_tests(task, QUICK)


if __name__ == "__main__":
    sys.exit(main(run))
