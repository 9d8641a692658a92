"""The number of connections, where the system limits open files."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tfexport.serving.server import OTHER_FILES, allow_connections

resource: Any = pytest.importorskip("resource")


@pytest.mark.parametrize(
    ("hard", "fitting"), [(resource.RLIM_INFINITY, 4096), (100_000, 4096), (OTHER_FILES + 44, 44), (10, 1)]
)
def test_connections_that_do_not_fit_are_not_promised(
    hard: int, fitting: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.append(given))
    with caplog.at_level(logging.INFO, logger="tfexport.serving"):
        logging.getLogger("tfexport").propagate = True
        assert allow_connections(4096) == fitting
    assert ("limit of open files" in caplog.text) == (fitting < 4096)
    assert limits == ([] if hard == 10 else [(min(4096 + OTHER_FILES, hard if hard > 0 else 10**9), hard)])
