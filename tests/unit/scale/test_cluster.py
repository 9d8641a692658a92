"""How long Ray's scheduling loop rests between two rounds."""

from __future__ import annotations

from itertools import chain, repeat

import pytest

from tfexport.scale.cluster import LAST_SHARDS, MOST_REST, Rhythm


def rests(gaps: list[float]) -> list[float]:
    """The rest after each shard, with these seconds between two."""
    rhythm, now, found = Rhythm(), 100.0, []
    for gap in gaps:
        now += gap
        found.append(rhythm.rest(now))
    return found


def test_the_loop_rests_for_half_the_time_between_two_shards() -> None:
    found = rests([0.3] * 20)
    assert found[:LAST_SHARDS] == [0.0] * LAST_SHARDS
    assert found[LAST_SHARDS:] == pytest.approx([0.15] * (20 - LAST_SHARDS))


def test_the_rest_is_short_after_shards_that_are_and_never_long() -> None:
    found = rests([*[60.0] * 20, *[0.01] * LAST_SHARDS])
    assert found[19] == MOST_REST
    assert found[-1] == pytest.approx(0.005)


def test_shards_that_come_in_groups_count_one_by_one() -> None:
    assert rests(list(chain.from_iterable(repeat([0.8, 0.0, 0.0, 0.0], 5))))[-1] == pytest.approx(0.1)
