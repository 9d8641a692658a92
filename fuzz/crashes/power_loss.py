"""Runs export, decode and train, loses power after every call that matters, and checks that nothing was lost.

    python -m fuzz.crashes.power_loss [--seed 0] [--mixed 4] [--only export,decode,train]

What a loss of power leaves is computed (`disk.py`): what was synced alone; all names, and of the files what was synced;
and by chance more. It is put where the command works, and checked:

export  at the place of the bundle is nothing, the old bundle or the new one, whole; the next export succeeds
decode  the file is not there, or whole; decoding it again, with --resume where that is the same run, gives the same bytes
train   no epoch is lost whose checkpoint was written; --resume gives the model and the measurements of an uninterrupted
        training

When a command has ended, its result is on the disk. Figures are printed. The exit code is 1 where something was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch

from fuzz.crashes.disk import Disk, Loss, losses, write
from fuzz.crashes.kills import PAIRS, write_checkpoint
from tfexport.__main__ import main as tfexport_main
from tfexport.bundle.reader import MANIFEST, open_bundle
from tfexport.errors import TfexportError

EXPORTS = 12
"""What is left beside a bundle is removed by the next export; that takes seconds, so not after every loss."""

Check = Callable[[Path, Loss], list[str]]
"""What is wrong in a folder after a loss of power; it may change the folder."""


@dataclass
class Figures:
    """What happened to one command."""

    calls: int = 0
    losses: int = 0
    found: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def tfexport(*arguments: object) -> None:
    """Run a command in this process.

    Raises:
        RuntimeError: it failed.
    """
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["tfexport", *map(str, arguments)]),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(said),
    ):
        try:
            tfexport_main()
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"{arguments[0]} failed with {stop.code}: {said.getvalue()[-500:]}") from None


def lose_power(
    folder: Path, command: Callable[[], object], check: Check, figures: Figures, *, seed: int = 0, mixed: int = 4
) -> None:
    """Run `command`, which works in `folder`, once; then check what every loss of power would have left there."""
    began = time.monotonic()
    disk = Disk(folder)
    with disk.watching():
        command()
    figures.calls += sum(moment.call.startswith("before ") for moment in disk.moments)
    for loss in losses(disk, seed, mixed):
        figures.losses += 1
        figures.problems += [f"{loss.call}: {problem}" for problem in _problems(folder, loss, check)]
    figures.seconds += time.monotonic() - began


def _problems(folder: Path, loss: Loss, check: Check) -> list[str]:
    shutil.rmtree(folder)
    write(loss.tree, folder)
    try:
        return check(folder, loss)
    except (RuntimeError, TfexportError, OSError, ValueError) as error:
        return [" ".join(str(error).split())]


# --- export


def export(work: Path, seed: int, mixed: int) -> Figures:
    """To a place with nothing, then over another bundle."""
    figures = Figures()
    first, second = [write_checkpoint(work / f"{name}.safetensors", index) for index, name in enumerate("ab")]
    folder = work / "export"
    for checkpoint in (first, second):
        before = _manifest(folder / "bundle")
        folder.mkdir(exist_ok=True)
        command = ["export", checkpoint, "-o", folder / "bundle", *["--force"] * (before is not None)]
        tfexport("export", checkpoint, "-o", work / "wanted", "--force")
        wanted = _manifest(work / "wanted")
        assert wanted is not None
        left = iter(range(EXPORTS))

        def check(
            place: Path,
            loss: Loss,
            before: bytes | None = before,
            wanted: bytes = wanted,
            left: Iterator[int] = left,
            checkpoint: Path = checkpoint,
        ) -> list[str]:
            there = _manifest(place / "bundle")
            names = {before: "the old bundle" if before else "nothing", wanted: "the new bundle"}
            if there not in names or (loss.is_over and there != wanted):
                return ["something else is at the place of the bundle"]
            figures.found[f"{names[there]} at its place"] += 1
            beside = [path for path in place.iterdir() if path.name != "bundle"]
            if beside and next(left, None) is not None:
                tfexport("export", checkpoint, "-o", place / "bundle", "--force")
                figures.found["next exports, which removed what was left"] += 1
                if _manifest(place / "bundle") != wanted or len(list(place.iterdir())) > 1:
                    return ["the next export left something else"]
            return []

        lose_power(folder, lambda: tfexport(*command), check, figures, seed=seed, mixed=mixed)  # noqa: B023
    return figures


def _manifest(place: Path) -> bytes | None:
    """Of the bundle that is there, verified; None where there is nothing."""
    if not place.exists():
        return None
    open_bundle(place)
    return (place / MANIFEST).read_bytes()


# --- decode


def decode(work: Path, seed: int, mixed: int) -> Figures:
    """Where there is nothing, and going on with a run that was killed."""
    figures = Figures()
    bundle, text, folder = work / "bundle", work / "in", work / "decode"
    tfexport("export", write_checkpoint(work / "c.safetensors", 2), "-o", bundle)
    text.write_text("".join(f"word{index % 27} word{index % 7}\n" for index in range(300)), encoding="utf-8")
    again = ["decode", bundle, text, "--output-format", "jsonl", "--threads", 1, "--workers", 1, "--batch-size", 2]
    again += ["-o", folder / "out"]
    folder.mkdir()
    tfexport(*again)
    whole = (folder / "out").read_bytes()
    lines = whole.splitlines(keepends=True)

    def check(place: Path, loss: Loss) -> list[str]:
        output = place / "out"
        if output.exists() and output.read_bytes() != whole:
            return ["the file is not that of an uninterrupted decode"]
        if loss.is_over and not output.exists():
            return ["the file is not there though the command has ended"]
        figures.found["whole files"] += output.exists()
        if not output.exists():
            resumes = (place / "out.partial.json").exists()
            if not resumes:
                (place / "out.partial").unlink(missing_ok=True)  # as the error of a decode without --resume asks for
            tfexport(*again, *["--resume"] * resumes)
            figures.found["runs resumed" if resumes else "runs begun again"] += 1
        return [] if output.read_bytes() == whole else ["decoding again gives another file"]

    notes = _notes_of(lambda: tfexport(*again), folder)
    killed = {"out.partial": b"".join(lines[:70])[:-3], "out.partial.json": notes}
    beginnings: list[tuple[dict[str, bytes], list[str]]] = [({}, []), (killed, ["--resume"])]
    for beginning, flags in beginnings:
        shutil.rmtree(folder)
        write({**beginning}, folder)
        lose_power(folder, lambda: tfexport(*again, *flags), check, figures, seed=seed, mixed=mixed)  # noqa: B023
    return figures


def _notes_of(command: Callable[[], object], folder: Path) -> bytes:
    """What a decode writes of itself into the file beside its lines."""
    shutil.rmtree(folder)
    folder.mkdir()
    disk = Disk(folder)
    with disk.watching():
        command()
    trees = (moment.left(None) for moment in disk.moments)
    return next(notes for tree in trees if isinstance(notes := tree.get("out.partial.json"), bytes))


# --- train


def train(work: Path, seed: int, mixed: int) -> Figures:
    """From the beginning."""
    figures = Figures()
    text, held_out, folder = work / "train.tsv", work / "held_out.tsv", work / "train" / "run"
    text.write_text("\n".join(PAIRS) + "\n", encoding="utf-8")
    held_out.write_text("\n".join(PAIRS[::9]) + "\n", encoding="utf-8")
    command = ["train", "--tsv", text, "--val-tsv", held_out, "--preset", "tiny", "--vocabulary", "word", "--epochs", 3]
    command += ["--batch-tokens", 96, "--max-length", 16, "--accelerator", "cpu", "--min-frequency", 1, "-o", folder]
    tfexport(*command)
    whole = {name: (folder / name).read_bytes() for name in ("metrics.csv", "model.safetensors")}
    steps = 0

    def check(place: Path, loss: Loss) -> list[str]:
        nonlocal steps
        run, problems = place / "run", []
        if (run / "run.json").exists():
            json.loads((run / "run.json").read_bytes())
        has = (run / "last.ckpt").exists()
        now = int(torch.load(run / "last.ckpt", weights_only=True)["global_step"]) if has else 0
        figures.found["losses with a checkpoint"] += has
        if now < steps:
            problems.append(f"the checkpoint is of {now} steps, it was of {steps}")
        steps = now if loss.is_least else steps
        if loss.is_over:
            missing = [name for name, content in whole.items() if _content(run / name) != content]
            problems += [f"{missing} are not there though the command has ended"] if missing else []
        tfexport(*command, "--resume")
        figures.found["trainings completed, the same bit for bit"] += 1
        other = [name for name, content in whole.items() if _content(run / name) != content]
        return problems + ([f"{other} are not those of an uninterrupted training"] if other else [])

    shutil.rmtree(folder.parent)
    folder.parent.mkdir()
    lose_power(folder.parent, lambda: tfexport(*command), check, figures, seed=seed, mixed=mixed)
    return figures


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


# --- all of them

COMMANDS = {"export": export, "decode": decode, "train": train}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Loses power after every call of export, decode and train.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed", type=int, default=4, help="states by chance at each moment")
    parser.add_argument("--only", default=",".join(COMMANDS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    total, problems, began = 0, 0, time.monotonic()
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory() as work:
            figures = COMMANDS[name](Path(work), options.seed, options.mixed)
        total, problems = total + figures.losses, problems + len(figures.problems)
        print(f"{name}: {figures.calls} calls, {figures.losses} losses of power in {figures.seconds:.0f} s")
        for what, count in sorted(figures.found.items()):
            print(f"  {count:,} {what}")
        for problem in figures.problems:
            print(f"  PROBLEM {problem}", flush=True)
    print(f"{total} losses of power, {problems} problems; seed {options.seed}; {time.monotonic() - began:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
