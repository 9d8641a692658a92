"""A bundle that is replaced while it is decoded from changes nothing; one that is written into is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from makers.tiny import HEADS, IDS, SRC_VOCAB, TinyCheckpoint
from tfexport.bundle.reader import open_bundle
from tfexport.bundle.watch import watched
from tfexport.errors import BundleError, TfexportError
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint

LINES = [" ".join(str(4 + (k * 7 + i) % (SRC_VOCAB - 4)) for i in range(1 + k % 17)) for k in range(900)]
BEGUN = 500
"""Lines that a decode gets before something happens, which are several windows; the others come after it."""


@pytest.fixture(scope="module")
def other_bundle(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same model with other weights, which decodes otherwise."""
    folder = tmp_path_factory.mktemp("other")
    weights = torch.load(tiny_checkpoint.path, weights_only=True)
    torch.save({name: weight.flip(0) for name, weight in weights.items()}, folder / "other.pt")
    return export(
        load_checkpoint(folder / "other.pt", {"n_heads": HEADS, **IDS}), folder / "other", gate=None
    ).directory


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[int, str, list[str]]]:
    """Decode LINES in a process of its own, with something that happens when it has begun; returns code, stderr, lines."""

    def run(bundle: Path, happens: Callable[[], object], workers: int) -> tuple[int, str, list[str]]:
        output = tmp_path_factory.mktemp("out") / "out"
        command = [sys.executable, "-m", "tfexport", "decode", str(bundle), "-o", str(output), "--input-format", "ids"]
        command += ["--output-format", "ids", "--threads", "1", "--batch-size", "4", "--workers", str(workers)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            process.stdin.write("".join(f"{line}\n" for line in LINES[:BEGUN]))
            process.stdin.flush()
            partial = output.with_name("out.partial")
            while process.poll() is None and not (partial.exists() and partial.stat().st_size):
                os.sched_yield()
            happens()
            _, said = process.communicate("".join(f"{line}\n" for line in LINES[BEGUN:]), timeout=60)
        written = output if output.exists() else partial
        return process.returncode, said, written.read_text(encoding="utf-8").splitlines()

    return run


@pytest.fixture(scope="module")
def whole(decode: Callable[..., tuple[int, str, list[str]]], tiny_bundle: Path) -> list[str]:
    """The lines when nothing happens."""
    code, said, lines = decode(tiny_bundle, lambda: None, 1)
    assert code == 0, said
    assert len(lines) == len(LINES)
    return lines


def replace(place: Path, other: Path) -> None:
    """As `export --force` does."""
    new = shutil.copytree(other, place.with_name("new"))
    place.rename(place.with_name("old"))
    new.rename(place)
    shutil.rmtree(place.with_name("old"))


@pytest.mark.thorough
def test_the_other_bundle_decodes_otherwise(
    decode: Callable[..., tuple[int, str, list[str]]], other_bundle: Path, whole: list[str]
) -> None:
    assert decode(other_bundle, lambda: None, 1)[2] != whole


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 2])
def test_a_bundle_that_is_replaced_meanwhile_changes_nothing(
    decode: Callable[..., tuple[int, str, list[str]]],
    own_bundle: Path,
    other_bundle: Path,
    whole: list[str],
    workers: int,
) -> None:
    code, said, lines = decode(own_bundle, lambda: replace(own_bundle, other_bundle), workers)
    assert code == 0, said
    assert lines == whole


@pytest.mark.thorough
@pytest.mark.parametrize(("workers", "cut"), [(1, False), (2, False), (2, True)])
def test_weights_that_are_written_into_are_told_before_a_line_of_them(
    decode: Callable[..., tuple[int, str, list[str]]],
    own_bundle: Path,
    other_bundle: Path,
    whole: list[str],
    workers: int,
    cut: bool,
) -> None:
    def write_into() -> None:
        content = (other_bundle / "weights.safetensors").read_bytes()
        with (own_bundle / "weights.safetensors").open("r+b") as file:
            file.write(content)
            file.truncate(100 if cut else len(content))

    code, said, lines = decode(own_bundle, write_into, workers)
    assert code == 2, said
    assert "weights.safetensors was written to while it was in use" in said
    assert lines == whole[: len(lines)]
    assert len(lines) < len(LINES)


def test_a_bundle_that_is_replaced_before_it_is_loaded_is_not_decoded_from(
    own_bundle: Path, other_bundle: Path
) -> None:
    with watched(own_bundle) as watch:
        open_bundle(own_bundle)
        watch.loaded()
        replace(own_bundle, other_bundle)
        with pytest.raises(BundleError, match="replaced while it was being loaded"):
            watch.loaded()
        shutil.rmtree(own_bundle)
        with pytest.raises(BundleError, match="replaced while it was being loaded"):
            watch.loaded()
        assert list(watch.over(iter([1, 2]))) == [1, 2]


def test_errors_of_others_stay_what_they_are(own_bundle: Path) -> None:
    def failing() -> object:
        yield 1
        raise TfexportError("no")

    with watched(own_bundle) as watch, pytest.raises(TfexportError, match=r"^no$"):
        list(watch.over(failing()))  # type: ignore[arg-type]


def test_no_bundle_is_told_by_who_opens_it(tmp_path: Path) -> None:
    with watched(tmp_path / "missing"), pytest.raises(BundleError, match="is not a bundle"):
        open_bundle(tmp_path / "missing")
