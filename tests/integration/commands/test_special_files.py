"""Pipes and devices in the place of files: refused at once where a file is read whole, read where lines are."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from tests.support.commands import TEXT, Run, TinyCheckpoint, last_error, wanted_text
from tfexport.bundle.reader import CERTIFICATES, MANIFEST

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no such files")


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A pipe that nobody writes into."""
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize(
    "arguments",
    [
        "inspect {file}",
        "inspect {file} --family tutorial",
        "inspect {checkpoint} --config {file}",
        "export {checkpoint} --heads 3 --src-vocab {file} --tgt-vocab {file}",
        "export {checkpoint} --heads 3 --src-vocab {src} --tgt-vocab {src} --src-bpe {file}",
        "decode {bundle} --shortlist {file}",
        "decode {bundle} --replace-unk --unk-dictionary {file} --runtime torch",
        "decode {file}",
        "parity {bundle} --checkpoint {file}",
    ],
)
def test_a_file_that_is_read_whole_is_a_regular_one(
    run: Run, tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint, pipe: Path, arguments: str
) -> None:
    for file in (pipe, Path("/dev/zero")):
        words = arguments.format(
            file=file, checkpoint=tiny_checkpoint.path, bundle=tiny_bundle, src=tiny_checkpoint.src_vocab
        )
        assert run(*words.split()).code == 2


@pytest.mark.parametrize("name", [".spm", ".model", ".yml", ".txt", ".json"])
def test_vocabularies_of_every_kind_are_regular_files(
    run: Run, tiny_checkpoint: TinyCheckpoint, tmp_path: Path, name: str
) -> None:
    file = tmp_path / f"vocabulary{name}"
    file.symlink_to("/dev/zero")
    flags = ["--heads", "3", "--src-vocab", file, "--tgt-vocab", file]
    assert "not a regular file" in last_error(run("export", tiny_checkpoint.path, *flags))


@pytest.mark.parametrize("name", ["pipe.pt", "pipe.npz", "pipe.safetensors", "model.npz", "config.json", "config.yaml"])
def test_checkpoints_and_their_folders_are_regular_files(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "of").mkdir()
    os.mkfifo(tmp_path / "of" / name)
    for path in (tmp_path / "of", tmp_path / "of" / name):
        assert last_error(run("inspect", path))


def test_every_file_of_a_bundle_is_a_regular_one(run: Run, own_bundle: Path, tmp_path: Path) -> None:
    for path in sorted(own_bundle.iterdir()):
        if path.name == CERTIFICATES:
            continue
        kept = Path(shutil.move(path, tmp_path / "kept"))
        os.mkfifo(path)
        message = last_error(run("decode", own_bundle))
        assert "not a regular file" in message or MANIFEST in message
        path.unlink()
        shutil.move(kept, path)


def test_certificates_are_a_regular_file(run: Run, own_bundle: Path) -> None:
    (own_bundle / CERTIFICATES).unlink(missing_ok=True)
    os.mkfifo(own_bundle / CERTIFICATES)
    done = run("decode", own_bundle, "--workers", "1", stdin=TEXT)
    assert "not a regular file" in done.stderr


def test_lines_come_from_pipes(run: Run, tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint, pipe: Path) -> None:
    writer = threading.Thread(target=pipe.write_bytes, args=[TEXT])
    writer.start()
    done = run("decode", tiny_bundle, pipe, "--workers", "1")
    writer.join()
    assert done.stdout == wanted_text(tiny_checkpoint)


def test_a_line_without_an_end_is_marked_and_ends_the_run(
    run: Run, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfexport.system.input_files.ENDLESS_LINE", 1 << 21)
    done = run("decode", tiny_bundle, "/dev/zero", "--workers", "1")
    assert (done.code, done.stdout) == (2, "\n")
    assert "line 1: too_long: more than" in done.stderr
    assert "error: line 1 of /dev/zero has more than 2 MiB." in done.stderr
