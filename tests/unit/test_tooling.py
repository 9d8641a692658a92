"""What contributors and GitHub run is what the Makefile runs, in the same versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
FORMS = ("bug", "checkpoint", "wrong_tokens")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_hooks_run_the_versions_of_the_constraints() -> None:
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line
    )
    hooks = read(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    used = {package for hook in hooks for package in hook.get("additional_dependencies", [])}
    assert {package.split("==")[0] for package in used} == {"ruff", "pre-commit-hooks", "check-jsonschema"}
    for package in used:
        name, version = package.split("==")
        assert pinned.get(name, version) == version
    assert "ruff" in pinned


def test_hooks_run_every_check_of_the_makefile() -> None:
    """Tests aside, which take too long for a commit."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    checks = set(re.findall(r"^\t\$\(VENV\)/bin/(ruff check|ruff format|mypy|lint-imports)\b", makefile, re.MULTILINE))
    assert {"ruff check", "ruff format", "mypy"} <= checks
    hooks = read(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    run = {re.sub(r"^\.venv/bin/", "", hook["entry"]).split(" --")[0] for hook in hooks}
    assert checks <= run


def test_github_runs_what_ci_runs() -> None:
    (job,) = read(GITHUB / "workflows/ci.yml")["jobs"].values()
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    python = next(step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", ""))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={python}"


def test_every_issue_asks_for_the_version() -> None:
    for form in FORMS:
        fields = {field["id"]: field for field in read(GITHUB / f"ISSUE_TEMPLATE/{form}.yml")["body"] if "id" in field}
        assert fields["version"]["attributes"]["label"] == "Output of `tfexport version --json`"
        assert fields["version"]["validations"]["required"]


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = read(ROOT / "CITATION.cff")
    for field in ("version", "license"):
        assert citation[field] == project[field]
    assert citation["title"] == project["name"]
