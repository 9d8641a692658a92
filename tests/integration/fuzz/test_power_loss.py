"""What a loss of power leaves of files, folders and output lines. `make power-loss` does this with whole commands."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fuzz.crashes.disk import Disk, Loss, losses, write
from fuzz.crashes.power_loss import Figures, lose_power
from tfexport.bundle import writer
from tfexport.bundle.reader import MANIFEST
from tfexport.bundle.writer import new_bundle
from tfexport.commands.output import writing
from tfexport.system import atomic_files
from tfexport.system.atomic_files import whole_file

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are held by descriptors that Linux has")

ABOUT = {"bundle": "x"}
LINES = [f"line {number}\n" for number in range(4)]


def problems_of(folder: Path, command: Callable[[], object], check: Callable[[Path, Loss], list[str]]) -> list[str]:
    figures = Figures()
    lose_power(folder, command, check, figures, mixed=8)
    assert figures.calls
    assert figures.losses > 2
    return figures.problems


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


# --- the disk


def left_by(folder: Path, command: Callable[[], object]) -> list[Any]:
    disk = Disk(folder)
    with disk.watching():
        command()
    return [loss.tree for loss in losses(disk, seed=0, mixed=0)]


def test_what_was_not_synced_is_lost_or_empty(folder: Path) -> None:
    def command() -> None:
        (folder / "partial").write_bytes(b"new")
        (folder / "partial").replace(folder / "file")

    (folder / "file").write_bytes(b"old")
    found = left_by(folder, command)
    assert {"file": b""} in found
    assert found[-1] == {"file": b"old"}
    assert {"file": b"new"} not in found


def test_what_was_synced_is_there(folder: Path) -> None:
    def command() -> None:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_bytes(b"new")
        atomic_files.sync_tree(folder)
        (folder / "inner" / "file").unlink()

    found = left_by(folder, command)
    assert {"inner": {"file": b"new"}} in found
    assert found[-1] == {"inner": {"file": b"new"}}


def test_a_file_has_zeros_where_only_its_size_is_known(folder: Path) -> None:
    def command() -> None:
        (folder / "file").write_bytes(b"new")
        (folder / "other").mkdir()

    disk = Disk(folder)
    with disk.watching():
        command()
    assert any(loss.tree.get("file") == bytes(3) for loss in losses(disk, seed=0, mixed=16))


def test_a_tree_is_written(folder: Path) -> None:
    write({"a": {"b": b"c"}, "d": b""}, folder)
    assert (folder / "a" / "b").read_bytes() == b"c"
    assert (folder / "d").read_bytes() == b""


# --- files, output lines, bundles


def test_a_file_is_the_old_one_or_the_new_one(folder: Path) -> None:
    def command() -> None:
        with whole_file(folder / "file") as file:
            file.write(b"new")

    def check(place: Path, loss: Loss) -> list[str]:
        found = (place / "file").read_bytes()
        return [] if found == b"new" or (found == b"old" and not loss.is_over) else [f"the file has {found!r}"]

    (folder / "file").write_bytes(b"old")
    assert problems_of(folder, command, check) == []


def decode(folder: Path, *, resume: bool) -> None:
    with writing(folder / "out", ABOUT, resume=resume, window=2) as out:
        for line in LINES[out.done :]:
            out.file.write(line)


def output_problems(place: Path, loss: Loss) -> list[str]:
    output, notes = place / "out", place / "out.partial.json"
    if loss.is_over and not output.exists():
        return ["the file is not there"]
    if not output.exists():
        decode(place, resume=notes.exists() and json.loads(notes.read_bytes()) == ABOUT)
    return [] if output.read_text() == "".join(LINES) else [f"the file has {output.read_text()!r}"]


BEGINNINGS = {
    "nothing": {},
    "notes of another run": {"out.partial": b"", "out.partial.json": b'{"bundle": "y"}'},
    "lines of this run": {"out.partial": b"line 0\nline 1\nli", "out.partial.json": json.dumps(ABOUT).encode()},
}


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_lines_are_whole_or_can_be_gone_on_with(folder: Path, beginning: str) -> None:
    write({**BEGINNINGS[beginning]}, folder)
    command = lambda: decode(folder, resume=beginning == "lines of this run")  # noqa: E731
    assert problems_of(folder, command, output_problems) == []


def make_bundle(folder: Path, number: str) -> None:
    with new_bundle(folder / "bundle", force=True) as partial:
        (partial / "weights").write_text(number, encoding="utf-8")
        content = json.dumps({"format": number, "graphs": [], "files": []})
        (partial / MANIFEST).write_text(content, encoding="utf-8")


def bundle_problems(place: Path, loss: Loss) -> list[str]:
    bundle = place / "bundle"
    found = [json.loads((bundle / MANIFEST).read_text())["format"], (bundle / "weights").read_text()]
    return [] if found == ["2", "2"] or (found == ["1", "1"] and not loss.is_over) else [f"the bundle is {found}"]


def test_a_bundle_is_the_old_one_or_the_new_one(folder: Path) -> None:
    make_bundle(folder, "1")
    assert problems_of(folder, lambda: make_bundle(folder, "2"), bundle_problems) == []


def test_a_first_bundle_is_whole_or_not_there(folder: Path) -> None:
    def check(place: Path, loss: Loss) -> list[str]:
        return bundle_problems(place, loss) if (place / "bundle").exists() or loss.is_over else []

    assert problems_of(folder, lambda: make_bundle(folder, "2"), check) == []


# --- without what is promised


def test_names_that_are_not_synced_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (atomic_files, writer):
        monkeypatch.setattr(module, "sync_folder", lambda folder: None)
    make_bundle(folder, "1")
    assert problems_of(folder, lambda: make_bundle(folder, "2"), bundle_problems)


def test_content_that_is_not_synced_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = SimpleNamespace(**{**vars(os), "fsync": lambda descriptor: None})
    monkeypatch.setattr("tfexport.commands.output.os", without)
    write({**BEGINNINGS["notes of another run"]}, folder)
    assert problems_of(folder, lambda: decode(folder, resume=False), output_problems)
