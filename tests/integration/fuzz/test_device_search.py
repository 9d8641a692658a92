"""Random searches on the device equal those on the host. `python -m fuzz.models.device_search` tries many more."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.models.device_search import check


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize("seed", range(10))
def test_random_searches_of_random_models(seed: int, tmp_path: Path) -> None:
    assert check(seed, 12, tmp_path) == []
