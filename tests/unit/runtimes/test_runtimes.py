"""The runtimes that there are: each has an extra that installs it, and a check of its availability."""

from __future__ import annotations

import tomllib

from makers.paths import ROOT
from tfexport.runtimes.availability import CHECKS
from tfexport.runtimes.known import RUNTIMES


def test_every_extra_that_is_named_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert {needs.extra for needs in RUNTIMES.values()} <= set(extras["project"]["optional-dependencies"])


def test_every_runtime_has_a_check_of_its_availability() -> None:
    assert CHECKS.keys() == RUNTIMES.keys()
