"""Manifests of runs, and tries of shards whose worker ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="PyArrow is not installed: pip install 'tfexport[ray]'")

from tfexport.errors import TfexportError
from tfexport.scale.manifest import Manifest, Output
from tfexport.scale.row_function import Row
from tfexport.scale.shards import Input, Shard
from tfexport.scale.storage import Place
from tfexport.scale.tries import ROW_TRIES, WHOLE_TRIES, Tries, rows_of


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    (tmp_path / "in.txt").write_text("a\n", encoding="utf-8")
    inputs = [Input.of(Place.of(str(tmp_path / "in.txt")))]
    return Manifest("0" * 64, {"search": {"beam": 4, "suppress": (1, 2)}}, "text", 10, inputs)


@pytest.fixture
def output(tmp_path: Path) -> Output:
    return Output(Place.of(str(tmp_path / "out")), "text")


def test_a_run_is_resumed_as_it_was_begun(manifest: Manifest, output: Output) -> None:
    manifest.begin(output, resume=True)
    manifest.begin(output, resume=True)
    with pytest.raises(TfexportError, match=r"has a run already\. Add --resume"):
        manifest.begin(output, resume=False)


@pytest.mark.parametrize(
    ("change", "about"),
    [
        ({"bundle": "1" * 64}, "its bundle is another"),
        ({"options": {"search": {"beam": 5, "suppress": (1, 2)}}}, "search beam is 4, not 5"),
        ({"rows_per_shard": 11}, "rows_per_shard is 10, not 11"),
        ({"inputs": []}, "its number of inputs is 1, not 0"),
    ],
)
def test_another_run_is_refused(manifest: Manifest, output: Output, change: Any, about: str) -> None:
    manifest.begin(output, resume=False)
    with pytest.raises(TfexportError, match=about):
        replace(manifest, **change).begin(output, resume=True)


def test_a_changed_input_is_refused(manifest: Manifest, output: Output, tmp_path: Path) -> None:
    manifest.begin(output, resume=False)
    (tmp_path / "in.txt").write_text("b\nc\n", encoding="utf-8")
    changed = replace(manifest, inputs=[Input.of(manifest.inputs[0].place)])
    with pytest.raises(TfexportError, match=r"in\.txt was changed since"):
        changed.begin(output, resume=True)


def test_parts_without_a_manifest_are_refused(manifest: Manifest, output: Output) -> None:
    output.make()
    output.part(Shard(0, 0, 1)).write(b"a\n")
    with pytest.raises(TfexportError, match="parts of no run that is known"):
        manifest.begin(output, resume=True)


def test_what_killed_processes_left_is_no_part(output: Output) -> None:
    output.make()
    output.part(Shard(0, 0, 1)).write(b"a\n")
    (Path(output.folder.uri) / ".part-00000-000000000001-1.txt.ab.partial").touch()
    output.remove_partial()
    assert output.done() == {Shard(0, 0, 1)}
    assert output.folder.names() == [Shard(0, 0, 1).name("text")]


class Killed(BaseException):
    """The end of a process, which removes no marks."""


class Deadly:
    """Decodes, but for one row."""

    def __init__(self, deadly: object):
        self.deadly, self.single = deadly, 0

    def rows(self, values: Sequence[object], place: str, *, singly: bool = False) -> Iterator[Row]:
        self.single += singly
        for value in values:
            if value == self.deadly:
                raise Killed
            yield value if isinstance(value, Row) else Row("ok")


def test_a_row_that_ends_its_worker_is_set_aside(tmp_path: Path) -> None:
    def died(name: str) -> None:
        (tmp_path / name).touch()

    translator: Any = Deadly("b")
    for number in range(WHOLE_TRIES):
        died(f"shard-me-{number}")
        died(f"shard-other-{number}")
    for number in range(ROW_TRIES):
        with pytest.raises(Killed):
            rows_of(translator, ["a", "b", "c"], "", Tries(Place.of(str(tmp_path)), "me"))
        died(f"row-1-me-{number}")
        died(f"row-2-other-{number}")  # of a driver that was interrupted
    rows = rows_of(translator, ["a", "b", "c"], "", Tries(Place.of(str(tmp_path)), "me"))
    assert [row.status for row in rows] == ["ok", "worker_ended", "ok"]


def test_marks_are_there_while_a_shard_is_decoded_and_no_longer(tmp_path: Path) -> None:
    seen = []

    class Looks(Deadly):
        def rows(self, values: Sequence[object], place: str, *, singly: bool = False) -> Iterator[Row]:
            for row in super().rows(values, place, singly=singly):
                found = Tries(Place.of(str(tmp_path)), "me")
                seen.append((found.whole, dict(found.rows)))
                yield row

    looks: Any = Looks(None)
    rows_of(looks, ["a", "b"], "", Tries(Place.of(str(tmp_path)), "me"))
    assert seen == [(1, {}), (1, {})]
    for number in range(WHOLE_TRIES):
        (tmp_path / f"shard-me-{number}").touch()
    seen.clear()
    rows_of(looks, ["a", "b"], "", Tries(Place.of(str(tmp_path)), "me"))
    assert seen == [(WHOLE_TRIES, {0: 1}), (WHOLE_TRIES, {1: 1})]
    assert not Tries(Place.of(str(tmp_path)), "me").rows
