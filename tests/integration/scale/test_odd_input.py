"""Odd input: files without rows, a row of 10 MB, a full disk, files that change. What Ray calls runs here without Ray."""

from __future__ import annotations

import gzip
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow", reason="PyArrow is not installed: pip install 'tfexport[ray]'")

from pyarrow import parquet  # noqa: E402

import tfexport  # noqa: E402
from makers.tiny import SRC_VOCAB  # noqa: E402
from tfexport.scale import Translator  # noqa: E402
from tfexport.scale.manifest import Manifest, RunFolder, Task  # noqa: E402
from tfexport.scale.options import CorpusOptions, TextColumn  # noqa: E402
from tfexport.scale.records import recorded  # noqa: E402
from tfexport.scale.run import Driver, ShardWriter, inputs_of, read_files  # noqa: E402
from tfexport.scale.storage import Place, inputs  # noqa: E402

LINES = [" ".join(f"de{4 + (n * 7 + place * 3) % (SRC_VOCAB - 4)}" for place in range(1 + n % 9)) for n in range(40)]
LARGE = "de5 " * 2_500_000
"""10 MB."""


class Corpus:
    """A run over files, whose steps are called one by one.

    Args:
        given: paths and globs.
    """

    def __init__(self, bundle: Path, given: list[Path], folder: Path, rows_per_shard: int = 16):
        found = inputs_of(inputs([str(path) for path in given]), {"--text-column": TextColumn().text_column})
        self.output = RunFolder(Place.of(str(folder)), found[0].format)
        task = Task(Translator, bundle, {"max_length": 12, "text_column": "text", "threads": 1})
        corpus = CorpusOptions(rows_per_shard=rows_per_shard)
        self.manifest = Manifest.of(task, corpus, found, self.output.format)
        self.manifest.begin(self.output, resume=False)
        self.writer = ShardWriter(self.manifest, self.output, task, Driver.of(self.output))

    def shards(self) -> Iterator[Any]:
        done = {record.shard: record.input_sha256 for record in recorded(self.output)}
        for table in read_files({"file": range(len(self.manifest.inputs))}, self.manifest, done):
            yield from self.writer(table).to_pylist()

    def rows(self) -> list[dict[str, Any]]:
        """Of the output, after a run without errors."""
        assert [shard["error"] for shard in self.shards() if shard["error"]] == []
        parts = [self.output.part(shard) for shard in sorted(self.output.done())]
        if self.output.format == "parquet":
            return [row for part in parts for row in parquet.read_table(part.path).to_pylist()]
        lines = [line for part in parts for line in part.read().splitlines()]
        return [json.loads(line) if self.output.format == "jsonl" else {"text": line.decode()} for line in lines]


def write(path: Path, lines: list[str]) -> None:
    if path.suffix == ".parquet":
        parquet.write_table(pa.table({"text": pa.array(lines, pa.string())}), path)
        return
    content = "".join(json.dumps({"text": line}) + "\n" if ".jsonl" in path.name else f"{line}\n" for line in lines)
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())


@pytest.fixture(scope="module")
def wanted(tiny_bundle: Path) -> list[str]:
    return [one.text for one in tfexport.load(tiny_bundle, threads=1).translate(LINES, max_length=12)]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("ending", ["txt", "txt.gz", "jsonl", "parquet"])
def test_files_without_rows(tiny_bundle: Path, wanted: list[str], tmp_path: Path, ending: str) -> None:
    for name, lines in (("a", []), ("b", LINES), ("c", [])):
        write(tmp_path / f"{name}.{ending}", lines)
    corpus = Corpus(tiny_bundle, [tmp_path / f"*.{ending}"], tmp_path / "out")
    assert [row["text"] for row in corpus.rows()] == wanted
    ends = [shard["file"] for shard in corpus.shards() if not shard["rows"]]
    assert ends == [0, 1, 2]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("ending", ["txt", "jsonl", "parquet"])
def test_a_row_of_10_mb_is_marked(tiny_bundle: Path, wanted: list[str], tmp_path: Path, ending: str) -> None:
    write(tmp_path / f"a.{ending}", [*LINES[:20], LARGE, *LINES[20:]])
    rows = Corpus(tiny_bundle, [tmp_path / f"a.{ending}"], tmp_path / "out").rows()
    assert [row["text"] for row in rows] == [*wanted[:20], "", *wanted[20:]]
    if ending != "txt":
        assert rows[20]["status"] == "too_long"
        assert rows[20]["input_text"] == LARGE


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file grows beyond a size: writing fails as on a full disk, and needs no rights to bring about."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_and_the_run_goes_on(tiny_bundle: Path, wanted: list[str], tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", LINES)
    corpus = Corpus(tiny_bundle, [tmp_path / "a.jsonl"], tmp_path / "out")
    assert corpus.writer._function is not None  # what a runtime writes when it loads is not of this test
    with full_disk(1000):
        errors = [shard["error"] for shard in corpus.shards() if shard["error"]]
    assert len(errors) == 3
    assert all(error.startswith(f"cannot write {tmp_path / 'out' / 'part-'}") for error in errors)
    assert all(error.endswith("Make room, then go on with --resume.") for error in errors)
    assert list((tmp_path / "out").rglob("*.partial")) == []
    assert corpus.output.done() == set()
    assert [row["text"] for row in corpus.rows()] == wanted


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("ending", ["txt", "jsonl", "parquet"])
def test_a_file_that_changes_while_it_is_read_is_an_error(tiny_bundle: Path, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    write(path, LINES)
    corpus = Corpus(tiny_bundle, [path], tmp_path / "out")
    shards = corpus.shards()
    assert next(shards)["error"] == ""
    write(path, [*LINES, "de5"])
    (last,) = shards
    assert "was changed while it was read. Begin anew" in last["error"]
