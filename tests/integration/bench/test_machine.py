"""The facts of the machine that stand beside measurements."""

from __future__ import annotations

import numpy as np

from tfexport.bench import machine


def test_the_facts_of_the_machine_are_json() -> None:
    found = machine.facts()
    assert found["cpus"] >= 1
    assert found["versions"]["numpy"] == np.__version__
    assert {"date", "cpu", "command", "python", "system", "last_level_cache_bytes"} <= set(found)
