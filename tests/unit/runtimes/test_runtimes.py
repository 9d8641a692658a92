"""Names of runtimes and of the extras that install them."""

from __future__ import annotations

import tomllib

from tests.support.paths import ROOT
from tfexport.runtimes import RUNTIMES


def test_every_extra_that_is_named_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(RUNTIMES.values()) <= set(extras["project"]["optional-dependencies"])
