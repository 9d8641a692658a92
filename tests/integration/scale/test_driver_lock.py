"""Two drivers on one output folder: the second is refused, and one that was killed holds nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="PyArrow is not installed: pip install 'tfexport[ray]'")

from makers.paths import ROOT
from tfexport.errors import TfexportError
from tfexport.scale import driver_lock
from tfexport.scale.driver_lock import claimed, only_driver
from tfexport.scale.storage import Place

DRIVER = """
import sys, time
from tfexport.scale.driver_lock import claimed, only_driver
from tfexport.scale.storage import Place
out = Place(sys.argv[2])
with only_driver(out, out / "_tfexport") if sys.argv[1] == "lock" else claimed(out, out / "_tfexport", 0.1):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def driver(kind: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, kind, str(folder)], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def out(tmp_path: Path) -> Place:
    return Place.of(str(tmp_path / "out"))


def hold(out: Place) -> None:
    with only_driver(out, out / "_tfexport"):
        pass


def claim(out: Place) -> None:
    with claimed(out, out / "_tfexport", 0.1):
        pass


def test_a_second_driver_is_refused_and_a_killed_one_holds_nothing(out: Place) -> None:
    with driver("lock", Path(out.uri)) as first:
        with pytest.raises(TfexportError, match=rf"another run writes to {out.uri} now, process {first.pid} on "):
            hold(out)
        first.send_signal(signal.SIGKILL)
        first.wait()
        hold(out)


def test_a_local_uri_is_the_folder_that_its_path_is(out: Place) -> None:
    with driver("lock", Path(out.uri)), pytest.raises(TfexportError, match="another run writes to"):
        hold(Place.of(f"file://{out.uri}"))


def test_claims_refuse_a_second_driver_and_a_killed_one_holds_nothing(out: Place) -> None:
    folder = out / "_tfexport" / "drivers"
    with driver("claim", Path(out.uri)) as first:
        with pytest.raises(TfexportError, match=rf"another run writes to {out.uri} now, process {first.pid} on "):
            claim(out)
        assert len(folder.names()) == 1
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert len(folder.names()) >= 1
        claim(out)
    assert folder.names() == []


def test_a_driver_whose_claim_was_removed_is_told(out: Place) -> None:
    with claimed(out, out / "_tfexport", 0.05) as check:
        check()
        folder = out / "_tfexport" / "drivers"
        (mine,) = folder.names()
        (folder / mine).remove()

        def check_for_a_while() -> None:
            for _ in range(200):
                time.sleep(0.02)
                check()

        with pytest.raises(TfexportError, match="was taken over by another run"):
            check_for_a_while()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_there_are_no_locks_there_are_claims(out: Place, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(driver_lock, "lock_file", refuse)
    with only_driver(out, out / "_tfexport"):
        assert len((out / "_tfexport" / "drivers").names()) == 1


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TfexportError, match=r"cannot write to .*Check the path"):
        hold(Place.of(str(tmp_path / "file" / "out")))
