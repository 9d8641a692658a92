"""Files and folders are whole or not there, whatever ends the process that writes them."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tfexport.bundle import writer
from tfexport.bundle.reader import open_bundle
from tfexport.bundle.writer import new_bundle
from tfexport.errors import BundleError
from tfexport.system.atomic_files import exchange, partial_folder, whole_file

FORK = multiprocessing.get_context("fork")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def killed(work: Callable[[], object]) -> None:
    """Do `work` in a process of its own, which has to end with a SIGKILL."""
    process = FORK.Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def end_here(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- files


@pytest.mark.parametrize("moment", ["write", "fsync"])
def test_a_killed_process_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    if moment == "fsync":
        monkeypatch.setattr(os, "fsync", end_here)

    def write() -> None:
        with whole_file(path) as file:
            file.write(b"ne")
            file.flush()
            if moment == "write":
                end_here()

    killed(write)
    monkeypatch.undo()
    assert path.read_text() == "old"
    with whole_file(path) as file:
        file.write(b"new")
    assert path.read_text() == "new"
    assert names(tmp_path) == ["file"]


# --- folders


def test_a_folder_that_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    def write() -> None:
        with partial_folder(tmp_path / "b") as folder:
            (folder / "part").write_text("half")
            end_here()

    killed(write)
    (left,) = names(tmp_path)
    assert left.startswith(".b.")
    with partial_folder(tmp_path / "b") as folder:
        assert names(tmp_path) == [folder.name]
    assert names(tmp_path) == []


def test_a_folder_that_a_live_process_writes_stays(tmp_path: Path) -> None:
    holding = (
        "import sys, pathlib; from tfexport.system.atomic_files import partial_folder\n"
        "with partial_folder(pathlib.Path(sys.argv[1])) as folder:\n"
        "    print(folder, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holding, str(tmp_path / "b")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        theirs = Path(process.stdout.readline().strip())
        with partial_folder(tmp_path / "b") as ours:
            assert names(tmp_path) == sorted([ours.name, theirs.name])
        assert theirs.exists()
        process.stdin.close()
    assert names(tmp_path) == []


# --- bundles


def refill(tiny_bundle: Path, place: Path, *, mark: str, force: bool = True) -> None:
    """Write a whole bundle to a place; `mark` tells it from others."""
    with new_bundle(place, force=force) as folder:
        shutil.copytree(tiny_bundle, folder, dirs_exist_ok=True)
        (folder / "mark").write_text(mark)


def can_exchange(folder: Path) -> bool:
    for name in ("one", "other"):
        (folder / name).mkdir()
    done = exchange(folder / "one", folder / "other")
    for name in ("one", "other"):
        (folder / name).rmdir()
    return done


@pytest.mark.parametrize(("moment", "there"), [("before", "old"), ("after", "new")])
def test_a_kill_while_a_bundle_is_replaced_leaves_one_of_both(
    tmp_path: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, moment: str, there: str
) -> None:
    if not can_exchange(tmp_path):
        pytest.skip("this file system cannot exchange two names")
    place = tmp_path / "b"
    refill(tiny_bundle, place, mark="old")

    def exchange_and_end(one: Path, other: Path) -> bool:
        if moment == "after":
            exchange(one, other)
        end_here()
        return True

    monkeypatch.setattr(writer, "exchange", exchange_and_end)
    killed(lambda: refill(tiny_bundle, place, mark="new"))
    monkeypatch.undo()
    open_bundle(place)
    assert (place / "mark").read_text() == there
    refill(tiny_bundle, place, mark="newer")
    assert (place / "mark").read_text() == "newer"
    assert names(tmp_path) == ["b"]


def test_a_bundle_is_replaced_where_names_cannot_be_exchanged(
    tmp_path: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "exchange", lambda *_: False)
    for mark in ("old", "new"):
        refill(tiny_bundle, tmp_path / "b", mark=mark)
        assert (tmp_path / "b" / "mark").read_text() == mark
    assert names(tmp_path) == ["b"]


def test_a_failed_exchange_leaves_the_old_one(
    tmp_path: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refill(tiny_bundle, tmp_path / "b", mark="old")

    def fail(*_: object) -> bool:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(writer, "exchange", fail)
    with pytest.raises(BundleError, match="Input/output error"):
        refill(tiny_bundle, tmp_path / "b", mark="new")
    assert (tmp_path / "b" / "mark").read_text() == "old"
    assert names(tmp_path) == ["b"]


@pytest.mark.thorough
@pytest.mark.parametrize("force", [False, True])
def test_exports_that_end_in_the_same_moment_leave_one_whole_bundle(
    tmp_path: Path, tiny_bundle: Path, force: bool
) -> None:
    """Without --force one of them wins, and the others are told; with it all do, one after the other."""
    writers = 4

    def write(place: Path, index: int, barrier: object, results: object) -> None:
        try:
            with new_bundle(place, force=force) as folder:
                shutil.copytree(tiny_bundle, folder, dirs_exist_ok=True)
                (folder / "mark").write_text(str(index))
                barrier.wait(30)  # type: ignore[attr-defined]
            results.put((index, ""))  # type: ignore[attr-defined]
        except BundleError as error:
            results.put((index, str(error)))  # type: ignore[attr-defined]

    for turn in range(10):
        place = tmp_path / f"b{turn}"
        barrier, results = FORK.Barrier(writers), FORK.Queue()
        processes = [FORK.Process(target=write, args=(place, i, barrier, results)) for i in range(writers)]
        for process in processes:
            process.start()
        told = dict(results.get(timeout=30) for _ in processes)
        for process in processes:
            process.join(30)
        won = [index for index, error in told.items() if not error]
        open_bundle(place)
        assert int((place / "mark").read_text()) in won
        assert len(won) == (writers if force else 1)
        assert all("exists. Replace it with --force" in error for error in told.values() if error)
    assert names(tmp_path) == [f"b{turn}" for turn in range(10)]
