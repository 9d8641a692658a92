"""Runs without Ray: their manifests, what is written in which order, and attempts at shards whose worker ended."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="PyArrow is not installed: pip install 'tfexport[ray]'")

from pyarrow import fs

from tfexport.commands import corpus as commands
from tfexport.errors import TfexportError
from tfexport.scale import run as runs
from tfexport.scale import storage
from tfexport.scale.attempts import Attempts, rows_of
from tfexport.scale.manifest import Manifest, RunFolder, Task
from tfexport.scale.options import ClusterOptions, CorpusOptions, TextColumn
from tfexport.scale.records import Record, read_record
from tfexport.scale.row_function import Row
from tfexport.scale.shards import Input, Shard
from tfexport.scale.storage import Place


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    (tmp_path / "in.txt").write_text("a\n", encoding="utf-8")
    inputs = [Input.of(Place.of(str(tmp_path / "in.txt")))]
    return Manifest("0" * 64, {"search": {"beam": 4, "suppress": (1, 2)}}, "text", 10, inputs)


@pytest.fixture
def output(tmp_path: Path) -> RunFolder:
    return RunFolder(Place.of(str(tmp_path / "out")), "text")


def test_a_run_is_resumed_as_it_was_begun(manifest: Manifest, output: RunFolder) -> None:
    manifest.begin(output, resume=True)
    output.part(Shard(0, 0, 1)).write(b"a\n")
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
def test_another_run_is_refused(manifest: Manifest, output: RunFolder, change: Any, about: str) -> None:
    manifest.begin(output, resume=False)
    output.part(Shard(0, 0, 1)).write(b"a\n")
    with pytest.raises(TfexportError, match=about):
        replace(manifest, **change).begin(output, resume=True)


def test_a_changed_input_is_refused(manifest: Manifest, output: RunFolder, tmp_path: Path) -> None:
    manifest.begin(output, resume=False)
    output.part(Shard(0, 0, 1)).write(b"a\n")
    (tmp_path / "in.txt").write_text("b\nc\n", encoding="utf-8")
    changed = replace(manifest, inputs=[Input.of(manifest.inputs[0].place)])
    with pytest.raises(TfexportError, match=r"in\.txt was changed since"):
        changed.begin(output, resume=True)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_without_parts_is_replaced(manifest: Manifest, output: RunFolder, resume: bool, damaged: bool) -> None:
    manifest.begin(output, resume=False)
    if damaged:
        output.manifest.write(b"{")
    attempts = output.attempts / Shard(0, 0, 1).name("text")
    attempts.make()
    stale = [output.record(Shard(0, 0, 1)), output.summary, attempts / "shard-me-0"]
    for place in stale:
        place.write(b"{}")
    other = replace(manifest, rows_per_shard=11)
    other.begin(output, resume=resume)
    assert json.loads(output.manifest.read())["rows_per_shard"] == 11
    assert [place for place in stale if place.stamp() is not None] == []
    output.record(Shard(0, 0, 1)).write(b"{}")  # its folder is there


def test_parts_without_a_manifest_are_refused(manifest: Manifest, output: RunFolder) -> None:
    output.make()
    output.part(Shard(0, 0, 1)).write(b"a\n")
    with pytest.raises(TfexportError, match="parts of no run that is known"):
        manifest.begin(output, resume=True)


def test_what_killed_processes_left_is_no_part(output: RunFolder) -> None:
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

    def rows(self, values: Sequence[object], position: str, *, singly: bool = False) -> Iterator[Row]:
        self.single += singly
        for value in values:
            if value == self.deadly:
                raise Killed
            yield value if isinstance(value, Row) else Row("ok")


def test_a_row_that_ends_its_worker_is_set_aside(tmp_path: Path) -> None:
    def died(name: str) -> None:
        (tmp_path / name).touch()

    def decoded() -> list[Row]:
        return rows_of(translator, ["a", "b", "c"], "", Attempts(Place.of(str(tmp_path)), "me"))

    translator: Any = Deadly("b")
    for number in range(2):
        with pytest.raises(Killed):
            decoded()
        died(f"shard-me-{number}")
        died(f"shard-other-{number}")
    assert translator.single == 0
    for number in range(3):
        with pytest.raises(Killed):
            decoded()
        died(f"row-1-me-{number}")
        died(f"row-2-other-{number}")  # of a driver that was interrupted
    assert translator.single == 3
    rows = decoded()
    assert [row.status for row in rows] == ["ok", "worker_ended", "ok"]
    assert "the worker ended 3 times" in rows[1].message


def test_marks_are_there_while_a_shard_is_decoded_and_no_longer(tmp_path: Path) -> None:
    seen = []

    class Looks(Deadly):
        def rows(self, values: Sequence[object], position: str, *, singly: bool = False) -> Iterator[Row]:
            for row in super().rows(values, position, singly=singly):
                attempts = Attempts(Place.of(str(tmp_path)), "me")
                seen.append((attempts.shard, dict(attempts.rows)))
                yield row

    looks: Any = Looks(None)
    rows_of(looks, ["a", "b"], "", Attempts(Place.of(str(tmp_path)), "me"))
    assert seen == [(1, {}), (1, {})]
    for number in range(2):
        (tmp_path / f"shard-me-{number}").touch()
    seen.clear()
    rows_of(looks, ["a", "b"], "", Attempts(Place.of(str(tmp_path)), "me"))
    assert seen == [(2, {0: 1}), (2, {1: 1})]
    assert not Attempts(Place.of(str(tmp_path)), "me").rows


class Upper:
    """What is computed: text in capitals."""

    reads = ("text",)

    def __init__(self, bundle: Path):
        pass

    @classmethod
    def for_text(cls, options: Any) -> Any:
        return options

    def rows(self, values: Sequence[Any], position: str, *, singly: bool = False) -> Iterator[Row]:
        for value in values:
            text = value.decode() if isinstance(value, bytes) else value
            yield value if isinstance(value, Row) else Row("ok", "", (text.upper(),))

    def line(self, row: Row) -> str:
        return "".join(row.results)


class Corpus:
    """A run over five rows in three shards, in this process, without Ray.

    Args:
        folder: of its input and output.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        (folder / "in.txt").write_text("a\nb\nc\nd\ne\n", encoding="utf-8")
        kind: Any = Upper
        self.folder, self.task = folder / "out", Task(kind, folder, {})
        inputs = [Input.of(Place.of(str(folder / "in.txt")))]
        self.manifest = Manifest("0" * 64, {}, "text", 2, inputs)
        self.output = RunFolder(Place.of(str(self.folder)), "text")
        self.manifest.begin(self.output, resume=True)
        self.lost: set[int] = set()
        """First rows of the shards that get lost on the way; of the last, which has no rows, their total."""
        self.at_start: list[str] = []
        """What lay in the folder when the first shard was read."""
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
        monkeypatch.setattr(runs, "_actors", lambda *_: ACTORS)
        # It visits all objects of the process, which are many here, and keeps them for good.
        monkeypatch.setattr(runs, "leave_out_of_collections", lambda: None)
        monkeypatch.setattr(runs, "_dataset", lambda *given: given[-1])
        monkeypatch.setattr(runs, "_results", self.computed)

    def computed(self, done: Mapping[Shard, str] = MappingProxyType({})) -> Iterator[Any]:
        """What comes out of Ray."""
        self.at_start = [path.name for path in self.folder.rglob("*")]
        writer = runs.ShardWriter(self.manifest, self.output, self.task, runs.Driver.of(self.output))
        for table in runs.read_files({"file": [0]}, self.manifest, done):
            if table["first"][0].as_py() not in self.lost:
                yield from writer(table).to_pylist()

    def actor(self) -> tuple[runs.ShardWriter, Iterator[Any]]:
        """An actor of this run, and the shards of its input."""
        writer = runs.ShardWriter(self.manifest, self.output, self.task, runs.Driver.of(self.output))
        return writer, runs.read_files({"file": [0]}, self.manifest, {})

    def run(self) -> list[Shard]:
        """The shards that were done."""
        return [done.shard for done in runs.run(self.manifest, self.output, self.task, ClusterOptions())]

    def lines(self) -> list[str]:
        """Of the output."""
        return "".join(path.read_text(encoding="utf-8") for path in sorted(self.folder.glob("part-*"))).split()

    @property
    def summary(self) -> Any:
        path = Path(self.output.summary.uri)
        return json.loads(path.read_bytes()) if path.exists() else None


ACTORS = 4
SHARDS = [Shard(0, 0, 2), Shard(0, 2, 2), Shard(0, 4, 1)]
WHOLE = {"rows": 5, "parts": 3, "statuses": {"ok": 5}}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    return Corpus(tmp_path, monkeypatch)


def test_a_run_leaves_its_output_and_a_summary(corpus: Corpus) -> None:
    assert corpus.run() == SHARDS
    assert (corpus.lines(), corpus.summary) == ([*"ABCDE"], WHOLE)
    assert corpus.run() == SHARDS  # read from what was counted
    assert corpus.summary == WHOLE


@pytest.mark.parametrize(("asked", "found"), [(None, 3), (9, 9)])
def test_as_many_actors_as_asked_for_or_as_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, found: int
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(cluster_resources=lambda: {"CPU": 7.0}))
    task: Any = SimpleNamespace(options={"threads": 2})
    assert runs._actors(ClusterOptions(actors=asked), task) == found


@pytest.mark.parametrize("error", ["", "it broke"])
def test_ray_data_is_let_go_before_a_run_ends(corpus: Corpus, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    ended = []

    def results(done: Mapping[Shard, str]) -> Iterator[Any]:
        try:
            for row in corpus.computed(done):
                yield {**row, "error": error}
        finally:
            ended.append(True)

    monkeypatch.setattr(runs, "_results", results)
    given = runs.run(corpus.manifest, corpus.output, corpus.task, ClusterOptions())
    if error:
        with pytest.raises(TfexportError, match=error) as caught:
            next(given)
        assert caught.tb is not None  # it keeps what the run has left
    else:
        next(given)
        given.close()
    assert ended == [True]


def test_an_interrupted_run_ends_before_its_cluster(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def computed(*_: Any) -> Iterator[runs.Done]:
        try:
            yield runs.Done(SHARDS[0], {"ok": 2})
        finally:
            ended.append("run")

    def interrupted(items: Iterator[Any], *_: Any, **__: Any) -> Iterator[Any]:
        yield next(items)
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run", computed)
    monkeypatch.setattr("tfexport.scale.cluster.disconnect", lambda: ended.append("cluster"))
    monkeypatch.setattr(commands, "with_progress", interrupted)
    monkeypatch.setattr(Manifest, "of", lambda *_: corpus.manifest)
    places = [str(corpus.folder.parent / "in.txt")], str(corpus.folder)
    options = TextColumn(), CorpusOptions(), ClusterOptions()
    with pytest.raises(KeyboardInterrupt) as caught:
        commands._run(corpus.task, *places, *options, resume=True, about="")
    assert caught.tb is not None  # it keeps what the command has left
    assert ended == ["run", "cluster"]


@pytest.mark.parametrize(
    ("lost", "about"),
    [
        (0, "input 0 has rows 0 and 2, which do not meet"),
        (2, "input 0 has rows 2 and 4, which do not meet"),
        (4, "input 0 has 5 rows, its parts 4"),
        (5, "input 0 was not read"),
    ],
)
def test_a_shard_that_got_lost_is_an_error_at_the_end(corpus: Corpus, lost: int, about: str) -> None:
    corpus.lost = {lost}
    with pytest.raises(TfexportError, match=rf"the output is not complete: {about}.*Run it again with --resume"):
        corpus.run()
    assert corpus.summary is None
    corpus.lost = set()
    corpus.run()
    assert (corpus.lines(), corpus.summary) == ([*"ABCDE"], WHOLE)


@pytest.mark.parametrize("writes", range(7))
def test_a_run_goes_on_whenever_it_ended(corpus: Corpus, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """Its process ends after so many files, of which each shard has two: also a part has its record then."""
    write, written = Place.write, []

    def ends(place: Place, content: bytes, before: Any = lambda: None) -> None:
        def last() -> None:
            before()
            if len(written) == writes:
                raise Killed

        write(place, content, last)
        written.append(place)

    with monkeypatch.context() as patch:
        patch.setattr(Place, "write", ends)
        with pytest.raises(Killed):
            corpus.run()
    assert len(corpus.lines()) == min(5, writes // 2 * 2)
    assert corpus.run() == SHARDS
    assert (corpus.lines(), corpus.summary) == ([*"ABCDE"], WHOLE)


def test_a_part_that_cannot_be_written_is_an_error_and_no_part(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Place.write

    def full(place: Place, content: bytes, **given: Any) -> None:
        if place.uri.endswith(SHARDS[1].name("text")):
            raise OSError(28, "No space left on device")
        write(place, content, **given)

    with monkeypatch.context() as patch:
        patch.setattr(Place, "write", full)
        with pytest.raises(TfexportError, match=r"cannot write .*: No space left on device\. Make room, then go on"):
            corpus.run()
    assert corpus.output.done() == {SHARDS[0]}
    assert corpus.run() == SHARDS
    assert corpus.summary == WHOLE


def test_a_shard_that_is_written_has_no_attempts_any_more(corpus: Corpus) -> None:
    attempts = Path(corpus.output.attempts.uri)
    left = attempts / SHARDS[1].name("text") / "shard-0"  # by a worker that ended
    left.parent.mkdir(parents=True)
    left.touch()
    for _ in corpus.computed():
        assert [path for path in attempts.rglob("*") if SHARDS[0].name("text") in str(path)] == []
    assert list(attempts.iterdir()) == []
    left.parent.mkdir()
    left.touch()  # the worker ended when the part was written
    writer, shards = corpus.actor()
    next(shards)
    writer(next(shards))
    assert list(attempts.iterdir()) == []


def test_a_part_that_is_there_is_left_alone(corpus: Corpus) -> None:
    shards = list(runs.read_files({"file": [0]}, corpus.manifest, {}))
    Record(SHARDS[0], {"ok": 2}, "", "").write(corpus.output, lambda: None)
    corpus.output.part(SHARDS[0]).write(b"by another actor\n")
    writer = runs.ShardWriter(corpus.manifest, corpus.output, corpus.task, runs.Driver.of(corpus.output))
    assert writer(shards[0])["statuses"].to_pylist() == ['{"ok": 2}']
    assert corpus.output.part(SHARDS[0]).read() == b"by another actor\n"


SUMS = b'"sha256": "", "input_sha256": ""'


@pytest.mark.parametrize(
    "content",
    [
        *(
            None,
            b"",
            b"7",
            b"{",
            b"[]",
            b"{}",
            b"{%s}" % SUMS,
            b'{"statuses": {"ok": 2}}',
            b'{"statuses": 2, %s}' % SUMS,
        ),
        *(b'{"statuses": {"ok": %s}, %s}' % (count, SUMS) for count in (b"5", b"null", b'"x"')),
        b'{"statuses": {"ok": 2}, "sha256": 7, "input_sha256": ""}',
    ],
)
def test_a_part_without_its_record_is_written_again(corpus: Corpus, content: bytes | None) -> None:
    corpus.run()
    corpus.output.record(SHARDS[1]).remove()
    corpus.output.part(SHARDS[1]).write(b"of another run\n")
    if content is not None:
        corpus.output.record(SHARDS[1]).write(content)
    corpus.output.summary.remove()
    assert sorted(corpus.run()) == SHARDS
    assert (corpus.lines(), corpus.summary) == ([*"ABCDE"], WHOLE)


def test_a_record_with_other_counts_than_rows_is_damaged(corpus: Corpus) -> None:
    corpus.run()
    record = Path(corpus.output.record(SHARDS[1]).uri)
    record.write_bytes(record.read_bytes().replace(b'"ok": 2', b'"ok": 3'))
    assert sorted(corpus.run()) == SHARDS
    assert corpus.summary == WHOLE


def rewrite(path: Path, content: bytes) -> None:
    """Change a file, which keeps its size and time."""
    before = path.stat()
    assert len(content) == before.st_size
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def cut(path: Path) -> None:
    os.truncate(path, 1)


def damage(path: Path) -> None:
    rewrite(path, bytes(path.stat().st_size))


@pytest.mark.parametrize("change", [cut, damage])
def test_a_damaged_part_is_written_again(
    corpus: Corpus, caplog: pytest.LogCaptureFixture, change: Callable[[Path], None]
) -> None:
    corpus.run()
    part = Path(corpus.output.part(SHARDS[1]).uri)
    change(part)
    with caplog.at_level(logging.WARNING):
        assert sorted(corpus.run()) == SHARDS
    assert [record.getMessage() for record in caplog.records] == [
        f"warning: {part} is damaged: its sha256 differs. Its rows are computed again."
    ]
    assert (corpus.lines(), corpus.summary) == ([*"ABCDE"], WHOLE)
    caplog.clear()
    assert corpus.run() == SHARDS
    assert caplog.records == []


def test_a_damaged_part_that_was_not_written_again_stays_damaged_for_the_next_run(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.run()
    cut(Path(corpus.output.part(SHARDS[1]).uri))
    with monkeypatch.context() as patch:
        patch.setattr(runs, "_results", lambda _: (row for row in ()))
        with pytest.raises(TfexportError, match="was not read"):
            corpus.run()
    corpus.run()
    assert (corpus.lines(), corpus.summary) == ([*"ABCDE"], WHOLE)


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("content", [b"x\nb\nc\nd\ne\n", b"a\nb\nc\nd\nx\n"])
def test_an_input_with_the_same_size_and_time_and_other_content_is_refused(
    corpus: Corpus, content: bytes, lost: int
) -> None:
    corpus.run()
    for shard in SHARDS[:lost]:
        corpus.output.part(shard).remove()
    path = corpus.folder.parent / "in.txt"
    rewrite(path, content)
    with pytest.raises(TfexportError) as caught:
        corpus.run()
    assert str(caught.value) == (
        f"{path} has other content than the finished parts were made of, with the same size and time. Restore it, or begin "
        "anew in another folder."
    )
    rewrite(path, b"a\nb\nc\nd\ne\n")
    assert sorted(corpus.run()) == SHARDS
    assert (corpus.lines(), corpus.summary) == ([*"ABCDE"], WHOLE)


def test_parts_and_inputs_of_a_store_are_verified_too(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pytest.importorskip("fsspec.implementations.memory", reason="fsspec is not installed")
    store = fs.PyFileSystem(fs.FSSpecHandler(memory.MemoryFileSystem()))
    monkeypatch.setattr(storage, "_file_system", lambda uri: (store, uri.partition("://")[2].rstrip("/")))
    bucket = Place.of("memory://bucket")
    bucket.make()
    source = bucket / "in.txt"
    source.write(b"a\nb\nc\nd\ne\n")
    corpus.manifest = replace(corpus.manifest, inputs=[Input.of(source)])
    corpus.output = RunFolder(bucket / "out", "text")
    corpus.manifest.begin(corpus.output, resume=False)
    assert corpus.run() == SHARDS
    corpus.output.part(SHARDS[0]).write(b"A")
    assert sorted(corpus.run()) == SHARDS
    assert [corpus.output.part(shard).read() for shard in SHARDS] == [b"A\nB\n", b"C\nD\n", b"E\n"]
    source.write(b"a\nb\nc\nd\nx\n")
    monkeypatch.setattr(Place, "stamp", lambda place: corpus.manifest.inputs[0].stamp)  # times of a second, say
    with pytest.raises(TfexportError, match=r"memory://bucket/in\.txt has other content"):
        corpus.run()


def test_an_input_that_changes_during_a_run_is_an_error_at_its_end(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def results(_: Any) -> Iterator[Any]:
        """Ray reads a file again when it has lost a worker."""
        yield next(first := corpus.computed())
        first.close()
        rewrite(corpus.folder.parent / "in.txt", b"a\nb\nx\ny\nz\n")
        yield from list(corpus.computed())[1:]

    monkeypatch.setattr(runs, "_results", results)
    with pytest.raises(TfexportError, match=r"in\.txt was changed while it was read\. Begin anew"):
        corpus.run()
    assert corpus.summary is None
    monkeypatch.setattr(runs, "_results", corpus.computed)
    with pytest.raises(TfexportError, match="has other content than the finished parts"):
        corpus.run()


def test_a_part_that_cannot_be_read_is_named(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus.run()

    def fails(_: Place) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Place, "sha256", fails)
    with pytest.raises(
        TfexportError, match=r"cannot read .*part-.*: Permission denied\. Check your access, or remove it"
    ):
        corpus.run()


def test_a_part_of_another_run_is_named(corpus: Corpus) -> None:
    corpus.run()
    corpus.output.part(Shard(0, 1, 2)).write(b"x\ny\n")
    with pytest.raises(TfexportError, match="input 0 has rows 2 and 1, which do not meet"):
        corpus.run()
    assert corpus.output.part(Shard(0, 1, 2)).read() == b"x\ny\n"


@pytest.mark.parametrize("gpus", [0.1, 0.2, 0.3, 0.7, 1.0, 2.0])
def test_actors_fill_gpus(gpus: float) -> None:
    """Also where the quotient of floats is less than the number of actors."""
    for actors in range(1, 200):
        assert runs._room({"CPU": 1000.0, "GPU": actors * gpus}, 1, gpus, may_grow=False) == actors


def test_an_actor_of_a_run_that_was_replaced_writes_nothing(corpus: Corpus) -> None:
    writer, shards = corpus.actor()
    assert writer(next(shards))["error"].to_pylist() == [""]
    corpus.output.part(SHARDS[0]).remove()
    replace(corpus.manifest, rows_per_shard=300).begin(corpus.output, resume=False)
    (error,) = writer(next(shards))["error"].to_pylist()
    assert error == f"another run has begun in {corpus.output.folder.uri}. Give another folder."
    assert corpus.output.done() == set()


def test_a_part_that_is_ready_when_another_run_has_begun_does_not_replace_its_part(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Record(SHARDS[0], {"empty": 2}, "a", "b")
    writer, shards = corpus.actor()
    write = Place.write

    def replaced(place: Place, content: bytes, before: Any = lambda: None) -> None:
        """The other run writes the same part while this one is on its way to the disk."""
        if place != corpus.output.part(SHARDS[0]):
            write(place, content, before)
            return

        def meanwhile() -> None:
            monkeypatch.setattr(Place, "write", write)
            replace(corpus.manifest, options={"beam": 7}).begin(corpus.output, resume=False)
            other.write(corpus.output, lambda: None)
            place.write(b"of the other run\n")
            before()

        write(place, content, meanwhile)

    monkeypatch.setattr(Place, "write", replaced)
    (error,) = writer(next(shards))["error"].to_pylist()
    assert error.startswith("another run has begun")
    assert corpus.output.part(SHARDS[0]).read() == b"of the other run\n"
    assert read_record(corpus.output, SHARDS[0]) == other
    assert [name for name in corpus.output.folder.names() if name.startswith(".")] == []


def test_a_run_that_begins_while_a_record_is_written_keeps_its_own(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, shards = corpus.actor()
    write = Place.write

    def replaced(place: Place, content: bytes, before: Any = lambda: None) -> None:
        if place == corpus.output.record(SHARDS[0]):
            monkeypatch.setattr(Place, "write", write)
            write(place, content, before)
            replace(corpus.manifest, options={"beam": 7}).begin(corpus.output, resume=False)
        else:
            write(place, content, before)

    monkeypatch.setattr(Place, "write", replaced)
    (error,) = writer(next(shards))["error"].to_pylist()
    assert error.startswith("another run has begun")
    assert corpus.output.done() == set()


def test_a_run_that_is_complete_leaves_no_attempts(corpus: Corpus) -> None:
    corpus.run()
    left = Path(corpus.output.attempts.uri, SHARDS[1].name("text"), "shard-0")
    left.parent.mkdir(parents=True)
    left.touch()
    corpus.run()
    assert not Path(corpus.output.attempts.uri).exists()


def test_what_was_left_half_written_is_removed_before_anything_is_read(corpus: Corpus) -> None:
    name = f".{SHARDS[0].name('text')}.ab.partial"
    left = [corpus.folder / name, corpus.folder / "_tfexport" / "done" / name]
    for path in left:
        path.touch()
    corpus.run()
    assert name not in corpus.at_start
    assert [path for path in left if path.exists()] == []
