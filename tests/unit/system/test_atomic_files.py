"""Files and folders are whole or not there."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from tfexport.system import atomic_files, file_locks
from tfexport.system.atomic_files import partial_folder, whole_file
from tfexport.system.file_locks import lock_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with whole_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["file"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write_half() -> None:
        with whole_file(path) as file:
            file.write(b"ne")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
def test_what_a_link_points_to_is_not_written_to(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    other.write_text("of somebody else")
    (tmp_path / "file.partial").symlink_to(other)
    with whole_file(path) as file:
        file.write(b"new")
    assert (path.read_text(), other.read_text(), path.is_symlink()) == ("new", "of somebody else", False)
    assert names(tmp_path) == ["file", "other"]


def test_a_name_is_on_the_disk_before_the_block_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    synced, replaced = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        synced(descriptor)

    def replace(source: Path, place: Path) -> Path:
        done.append("name")
        return replaced(source, place)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    with whole_file(tmp_path / "file") as file:
        file.write(b"new")
    assert done == ["file", "name", "folder"]


def test_folders_that_are_made_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(atomic_files, "sync_folder", synced.append)
    atomic_files.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert synced == [tmp_path, tmp_path / "a"]
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"exists|directory"):
        atomic_files.make_folder(tmp_path / "file")


def test_a_file_system_that_cannot_sync_folders_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int) -> None:
        def raised(descriptor: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", raised)

    fail(errno.EINVAL)
    atomic_files.sync_folder(tmp_path)
    fail(errno.EIO)
    if os.name != "nt":
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            atomic_files.sync_folder(tmp_path)


def test_where_no_folder_can_be_made_a_partial_folder_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, **_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "there is no such place", str(path))

    monkeypatch.setattr(Path, "mkdir", refused)  # as in /proc
    with pytest.raises(FileNotFoundError), partial_folder(tmp_path / "b"):
        pass


def test_a_signal_while_a_partial_folder_is_removed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, rmtree = [], shutil.rmtree

    def interrupted(path: Path, ignore_errors: bool) -> None:
        calls.append(path)
        if len(calls) == 1:
            (path / "one").unlink()
            raise KeyboardInterrupt
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(atomic_files.shutil, "rmtree", interrupted)

    def write() -> None:
        with partial_folder(tmp_path / "b") as folder:
            (folder / "one").touch()
            (folder / "two").touch()

    with pytest.raises(KeyboardInterrupt):
        write()
    assert names(tmp_path) == []


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    for name in (
        ".b.notes.partial",
        ".c.abcdefgh.partial",
        ".b.ABCDEFGH.partial",
        "b.abcdefgh.partial",
        ".b.abcdefgh.old",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / ".b.aaaaaaaa.partial").write_text("a file")
    (tmp_path / ".b.bbbbbbbb.partial").symlink_to(tmp_path / ".b.notes.partial")
    before = names(tmp_path)
    with partial_folder(tmp_path / "b"):
        pass
    assert names(tmp_path) == before


@pytest.mark.parametrize("state", ["locked", "removed"])
def test_a_folder_taken_for_abandoned_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    real, locks = Path.mkdir, list[int]()

    def make_and_lose(folder: Path, mode: int) -> None:
        real(folder, mode)
        if not locks:
            locks.append(lock_folder(folder))
            if state == "removed":
                shutil.rmtree(folder)

    monkeypatch.setattr(Path, "mkdir", make_and_lose)
    with partial_folder(tmp_path / "b") as folder:
        assert folder.exists()
        with pytest.raises(BlockingIOError):
            lock_folder(folder)
    os.close(locks[0])


@pytest.mark.parametrize("moment", ["mkdir", "lock"])
def test_a_signal_while_a_folder_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    real = Path.mkdir

    def interrupt(*arguments: object, **options: object) -> None:
        if moment == "mkdir":
            real(*arguments, **options)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(*((Path, "mkdir") if moment == "mkdir" else (atomic_files, "lock_folder")), interrupt)
    with pytest.raises(KeyboardInterrupt), partial_folder(tmp_path / "b"):
        pass
    assert names(tmp_path) == []


def test_without_locks_folders_are_made_and_none_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    (tmp_path / ".b.00000000.partial").mkdir()
    monkeypatch.setattr(file_locks.fcntl, "flock", refuse)
    with partial_folder(tmp_path / "b") as folder:
        assert names(tmp_path) == sorted([".b.00000000.partial", folder.name])
    assert names(tmp_path) == [".b.00000000.partial"]


def test_a_folder_that_was_moved_away_is_not_locked_by_its_old_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    real = file_locks.fcntl.flock

    def move_and_lock(descriptor: int, how: int) -> None:
        (tmp_path / "a").rename(tmp_path / "b")
        real(descriptor, how)

    monkeypatch.setattr(file_locks.fcntl, "flock", move_and_lock)
    with pytest.raises(FileNotFoundError):
        lock_folder(tmp_path / "a")
