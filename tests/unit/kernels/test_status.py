"""Kernels never disappear silently: each state has a reason, and decoding without them prints one note."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path

import pytest

from tfexport import kernels
from tfexport.errors import TfexportError
from tfexport.kernels import Status, note_if_missing, status, status_of
from tfexport.runtimes.availability import kernels_status

OWN = Path(kernels.__file__).parent
NO_COMPILER = {
    "built": False,
    "reason": "no-compiler",
    "message": "there was no C++ compiler (g++ was not found)",
    "details": [],
}


def write_record(folder: Path, **changes: object) -> None:
    (folder / kernels.RECORD).write_text(json.dumps({**NO_COMPILER, **changes}))


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A folder with the library of this machine."""
    library = kernels.status_of(OWN).path
    if library is None:
        pytest.skip("the kernels were not built here")
    shutil.copy(library, tmp_path / kernels.LIBRARY)
    return tmp_path


def test_a_library_that_works_is_ready(built: Path) -> None:
    write_record(built, built=True)
    found = status_of(built)
    assert (found.state, found.reason, found.path) == ("ready", "", built / kernels.LIBRARY)
    assert found.build["built"]


@pytest.mark.parametrize(
    ("record", "reason", "remedy"),
    [
        (
            {},
            "they were not built: there was no C++ compiler (g++ was not found)",
            "Install GCC 12 or newer, or Clang.",
        ),
        (
            {"reason": "compiler-too-old", "message": "the compiler, GCC 11.4.0, is older than GCC 12"},
            "they were not built: the compiler, GCC 11.4.0, is older than GCC 12",
            "Install GCC 12 or newer, or Clang.",
        ),
        (
            {"reason": "compile-error", "message": "the compiler failed: rows.h:3: error: no memory"},
            "they were not built: the compiler failed: rows.h:3: error: no memory",
            "Report it with the output of tfexport version --json",
        ),
    ],
)
def test_a_build_that_failed_says_why(tmp_path: Path, record: dict[str, object], reason: str, remedy: str) -> None:
    write_record(tmp_path, **record)
    found = status_of(tmp_path)
    assert (found.state, found.reason, found.path) == ("not-built", reason, None)
    assert found.remedy.startswith(remedy)


@pytest.mark.parametrize("content", [None, "", "[]", "{", "\xff"])
def test_a_folder_without_a_record_was_not_built(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / kernels.RECORD).write_text(content, encoding="latin-1")
    assert status_of(tmp_path) == Status("not-built", "they were not built", "Install tfexport again.")


def test_a_library_that_is_damaged_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / kernels.LIBRARY).write_bytes(b"no library")
    found = status_of(tmp_path)
    assert found.state == "cannot-load"
    assert "cannot be loaded: " in found.reason
    assert found.remedy == "Install tfexport again."


def test_a_library_of_another_version_is_left_out(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an update of the sources alone: its operators are for other graphs."""
    monkeypatch.setattr(kernels, "FORMAT", kernels.FORMAT + 1)
    found = status_of(built)
    assert found.state == "other-format"
    assert f"bundle format {kernels.FORMAT - 1}, not {kernels.FORMAT}" in found.reason
    assert found.remedy == "Install tfexport again."
    write_record(built)
    found = status_of(built)
    assert found.reason.endswith("could not be built again: there was no C++ compiler (g++ was not found)")
    assert found.remedy.startswith("Install GCC 12")


def test_without_onnxruntime_nothing_is_loaded(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert status_of(built).state == "no-onnxruntime"


def test_the_environment_switches_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.SWITCH, raising=False)
    here = status()
    monkeypatch.setenv(kernels.SWITCH, "0")
    assert (status().state, status().reason) == ("disabled", "TFEXPORT_KERNELS=0 is set")
    assert status().path == here.path
    assert kernels.library() is None
    assert kernels.instruction_sets() == ()
    monkeypatch.setenv(kernels.SWITCH, "1")
    assert status() == here


def test_the_library_says_which_instruction_sets_it_uses() -> None:
    if kernels.library() is None:
        pytest.skip("the kernels were not built here")
    found = set(kernels.instruction_sets())
    assert found & {"SSE2", "AVX2", "AVX-512", "NEON"}
    assert kernels.has_products() == (found != {"SSE2"})


def test_the_environment_names_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    path = kernels.library()
    if path is None:
        pytest.skip("the kernels were not built here")
    names = kernels.supported_instruction_sets(path)
    used = []
    for name in names:
        monkeypatch.setenv(kernels.ISA, name)
        used.append(kernels.instruction_sets())
    assert len({*used}) == len(names)
    monkeypatch.setenv(kernels.ISA, "")
    assert kernels.instruction_sets() == used[0]
    monkeypatch.setenv(kernels.ISA, "mmx")
    assert status().state == "no-such-isa"
    assert kernels_status()["instruction_sets"] == []
    with pytest.raises(
        TfexportError, match=f"TFEXPORT_ISA is 'mmx', and .*{names[-1]}. Set TFEXPORT_ISA to one of these"
    ):
        kernels.library()


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine for kernels, on which there was no compiler."""
    monkeypatch.delenv(kernels.SWITCH, raising=False)
    found = Status("not-built", "they were not built: there was no C++ compiler", "Install GCC.")
    monkeypatch.setattr(kernels, "status", lambda: found)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(kernels, "_noted", False)


@pytest.mark.usefixtures("absent")
def test_one_note_says_that_kernels_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            note_if_missing()
    (record,) = caplog.records
    assert record.getMessage() == (
        "note: decoding without tfexport's kernels, as they were not built: there was no C++ compiler. This is slower, and "
        "a few outputs may differ from those with kernels, in int8 and int4. Install GCC."
    )


@pytest.mark.usefixtures("absent")
@pytest.mark.parametrize(("system", "machine"), [("Windows", "AMD64"), ("Linux", "riscv64"), ("Linux", "armv7l")])
def test_no_note_where_there_are_no_kernels_for_the_machine(
    system: str, machine: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with caplog.at_level(logging.WARNING):
        note_if_missing()
    assert not caplog.records


def test_no_note_where_kernels_are_in_use(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "status", lambda: Status("ready"))
    monkeypatch.setattr(kernels, "_noted", False)
    with caplog.at_level(logging.WARNING):
        note_if_missing()
    assert not caplog.records
