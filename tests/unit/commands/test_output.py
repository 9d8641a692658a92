"""Output files are whole or not there, and what an interrupted run has left can be gone on with."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tfexport.commands.output import refuse_to_replace, writing
from tfexport.errors import TfexportError
from tfexport.system import ending

ABOUT = {"bundle": "x", "search": {"beam": 1}}


def begun(path: Path, content: bytes, about: object = ABOUT) -> None:
    """What a killed run leaves."""
    path.with_name(f"{path.name}.partial").write_bytes(content)
    path.with_name(f"{path.name}.partial.json").write_text(json.dumps(about), encoding="utf-8")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_takes_its_name_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("before\n", encoding="utf-8")
    with writing(path, ABOUT) as out:
        print("one", file=out.file, flush=True)
        assert path.read_text(encoding="utf-8") == "before\n"
        assert names(tmp_path) == ["out", "out.partial", "out.partial.json"]
    assert path.read_text(encoding="utf-8") == "one\n"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("left", "done"),
    [(b"", 0), (b"one\n", 1), (b"one\ntwo\n", 2), (b"one\ntw", 1), (b"one", 0), (b"one\n\n\n", 3), (b"\xc3", 0)],
)
def test_what_was_left_is_gone_on_with_after_its_last_whole_line(tmp_path: Path, left: bytes, done: int) -> None:
    path = tmp_path / "out"
    begun(path, left)
    with writing(path, ABOUT, resume=True) as out:
        assert out.done == done
        print("next", file=out.file)
    assert path.read_bytes() == b"".join(left.splitlines(keepends=True)[:done]) + b"next\n"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(("left", "done"), [(2, 0), (3, 3), (5, 3), (6, 6), (8, 6)])
def test_windows_that_are_not_whole_are_decoded_again(tmp_path: Path, left: int, done: int) -> None:
    """Lines that met other lines in a batch than without the interruption would have other last digits."""
    path = tmp_path / "out"
    lines = [b"%d\n" % number for number in range(9)]
    begun(path, b"".join(lines[:left]) + b"cu")
    with writing(path, ABOUT, resume=True, window=3) as out:
        assert out.done == done
        print("next", file=out.file)
    assert path.read_bytes() == b"".join(lines[:done]) + b"next\n"
    begun(path, b"of another\n", {**ABOUT, "bundle": "y"})
    with pytest.raises(TfexportError, match="begun with another"), writing(path, ABOUT, resume=True, window=3):
        pass


def test_lines_of_something_else_are_not_added_to(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for about in ({**ABOUT, "bundle": "y"}, [], None, {"bundle": "x"}):
        begun(path, b"one\n", about)
        with pytest.raises(TfexportError, match="begun with another"), writing(path, ABOUT, resume=True):
            pass
        assert path.with_name("out.partial").read_bytes() == b"one\n"
    path.with_name("out.partial.json").unlink()
    with pytest.raises(TfexportError, match="begun with another"), writing(path, ABOUT, resume=True):
        pass


def test_nothing_to_go_on_with_is_told_and_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with writing(tmp_path / "out", ABOUT, resume=True) as out:
        assert out.done == 0
    assert "there is nothing to resume in" in capsys.readouterr().err
    with pytest.raises(TfexportError, match="only a file can be resumed"), writing(None, ABOUT, resume=True):
        pass


def test_a_failure_keeps_what_was_there_and_what_is_done(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("before\n", encoding="utf-8")

    def fill_the_disk() -> None:
        with writing(path, ABOUT) as out:
            print("one", file=out.file)
            raise OSError(28, os.strerror(28))

    with pytest.raises(TfexportError, match=r"No space left.*lines done so far"):
        fill_the_disk()
    assert path.read_text(encoding="utf-8") == "before\n"
    assert path.with_name("out.partial").read_text(encoding="utf-8") == "one\n"


@pytest.mark.parametrize("ended", [KeyboardInterrupt(), SystemExit(143)])
def test_who_interrupts_is_told_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ended: BaseException
) -> None:
    def interrupt() -> None:
        with writing(tmp_path / "out", ABOUT) as out:
            print("one", file=out.file)
            raise ended

    with pytest.raises(type(ended)):
        interrupt()
    assert f"are in {tmp_path / 'out.partial'}; --resume continues after them" in capsys.readouterr().err
    assert (tmp_path / "out.partial").read_text(encoding="utf-8") == "one\n"


def test_what_is_read_is_not_replaced(tmp_path: Path) -> None:
    source, link, other, bundle = (tmp_path / name for name in ("in", "link", "other", "bundle"))
    source.write_text("text\n", encoding="utf-8")
    other.write_text("text\n", encoding="utf-8")
    link.symlink_to(source)
    for output, inputs in ((source, (source,)), (link, (None, source)), (source, (other, link))):
        with pytest.raises(TfexportError, match=r"is read, and would be replaced .* Give another file with -o"):
            refuse_to_replace(output, *inputs, bundle=bundle)
    refuse_to_replace(other, source, None, bundle=bundle)
    refuse_to_replace(tmp_path / "new", source, bundle=bundle)
    refuse_to_replace(None, source, bundle=bundle)


@pytest.mark.parametrize("suffix", [".partial", ".partial.json"])
def test_what_is_read_is_not_taken_for_what_a_killed_run_left(tmp_path: Path, suffix: str) -> None:
    source = tmp_path / f"out{suffix}"
    source.write_text("text\n", encoding="utf-8")
    with pytest.raises(TfexportError, match=f"out{suffix} is read, and would be replaced"):
        refuse_to_replace(tmp_path / "out", None, source, bundle=tmp_path / "bundle")


def test_files_of_the_bundle_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}", encoding="utf-8")
    with pytest.raises(TfexportError, match=r"file is a file of the bundle, and would be replaced"):
        refuse_to_replace(tmp_path / "file", bundle=tmp_path)
    refuse_to_replace(tmp_path / "results.txt", bundle=tmp_path)


def written_although_asked_to_end(path: Path, number: int) -> None:
    with writing(path, ABOUT) as output:
        output.file.write("a\n")
        with suppress(BaseException):  # as finalisers do
            ending.end(number, None)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_whose_exception_was_lost_ends_the_output_before_it_has_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, raised: type[BaseException]
) -> None:
    with pytest.raises(raised):
        written_although_asked_to_end(tmp_path / "out", number)
    assert (ending.taken(), ending.taken()) == (number, None)
    assert names(tmp_path) == ["out.partial", "out.partial.json"]
    assert "--resume continues after them" in capsys.readouterr().err
