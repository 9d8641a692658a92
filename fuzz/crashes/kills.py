"""Ends export, decode and train at random moments, again and again, and checks after each time that nothing was lost.

    python -m fuzz.crashes.kills [--kills 200] [--seed 0] [--jobs 2] [--only export,decode,train]

The commands are real ones, in processes of their own. Most of the signals are SIGKILL, some SIGTERM and SIGINT. Half of
them come at a time drawn from the whole life of the command, half within milliseconds after a file was written to.

export  at the place of the bundle is nothing, the old bundle or the new one, whole; the next export succeeds and removes
        what was left beside it
decode  the file is not there, or whole; its lines so far are those of an uninterrupted decode; --resume completes it
train   what lies in the folder is whole; --resume ends with the model and the measurements of an uninterrupted training

Figures are printed. The exit code is 1 where something was lost.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from fuzz.crashes.killed_command import AFTER, BEFORE, WRITING, Figures, KilledCommand, completed
from tfexport.bundle.reader import MANIFEST, open_bundle
from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.formats import native
from tfexport.models.transformer import Transformer
from tfexport.text.vocabularies import read_vocabulary

# --- export


class Export(KilledCommand):
    """Exports two checkpoints to one place, in turn: over the bundle of the other one, or where there is nothing."""

    name = "export"

    def __init__(self, folder: Path, life: float, chosen: random.Random, sources: Sequence[tuple[Path, bytes]]):
        """`sources` are checkpoints and the manifests of their bundles."""
        super().__init__(folder, life, chosen)
        self.place, self.sources = folder / "bundle", list(sources)
        self._before: bytes | None = None

    def arguments(self) -> list[object]:
        self.sources.reverse()
        if self.chosen.random() < 0.4:
            shutil.rmtree(self.place, ignore_errors=True)
        self._before = self._manifest()
        return self._command()

    def _command(self) -> list[object]:
        return ["export", self.sources[0][0], "-o", self.place, *["--force"] * self.place.exists()]

    def _manifest(self) -> bytes | None:
        """Of the bundle that is there, verified; None where there is nothing."""
        if not self.place.exists():
            return None
        open_bundle(self.place)
        return (self.place / MANIFEST).read_bytes()

    def written(self) -> list[Path]:
        folders = self._left()
        return [*folders, *(path for folder in folders for path in self._within(folder)), self.place / MANIFEST]

    def _left(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if path.name.startswith(".")]

    def _within(self, folder: Path) -> list[Path]:
        try:
            return list(folder.iterdir())
        except FileNotFoundError:
            return []

    def is_done(self) -> bool:
        try:
            return (self.place / MANIFEST).read_bytes() == self.sources[0][1]
        except FileNotFoundError:
            return False

    def check(self, number: signal.Signals | None) -> list[str]:
        wanted = self.sources[0][1]
        allowed = {self._before: "the old bundle" if self._before else "nothing", wanted: "the new bundle"}
        problems, left = [], self._left()
        try:
            there = self._manifest()
            if there not in allowed:
                problems.append("something else is at the place of the bundle")
            elif number is not None:
                self.figures.found[f"{allowed[there]} at its place"] += 1
        except TfexportError as error:
            problems.append(str(error))
            shutil.rmtree(self.place)
        if number is not None and number is not signal.SIGKILL and left:
            problems.append(f"left {[path.name for path in left]} though it could clean up")
        self.figures.found["folders left beside it, removed by the next export"] += len(left)
        if number is None:
            return problems
        try:
            completed(*self._command())
            if self._manifest() != wanted:
                problems.append("the next export made another bundle")
        except (TfexportError, RuntimeError) as error:
            problems.append(f"the next export: {error}")
        if self._left():
            problems.append(f"the next export left {[path.name for path in self._left()]}")
        return problems


# --- decode


class Decode(KilledCommand):
    """Decodes a file, killed and resumed until it is whole. Some begin where another decode was interrupted."""

    name = "decode"

    def __init__(self, folder: Path, life: float, chosen: random.Random, command: Sequence[object], whole: bytes):
        """`whole` is what `command` writes when nothing ends it."""
        super().__init__(folder, life, chosen)
        self.command, self.whole = command, whole
        self.output = folder / "out"
        self.partial, self.notes = folder / "out.partial", folder / "out.partial.json"
        self._begin()

    def _begin(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()
        if self.chosen.random() < 0.5:
            self.partial.touch()  # another decode, which was killed before its first line
            self.notes.write_text('{"bundle": "another one"}', encoding="utf-8")

    def _of_others(self) -> bool:
        """Whether the notes are still those of another decode."""
        return self.notes.exists() and b"another one" in self.notes.read_bytes()

    def arguments(self) -> list[object]:
        return [*self.command, "-o", self.output, *["--resume"] * (not self._of_others())]

    def written(self) -> list[Path]:
        return [self.partial, self.notes, self.folder / "out.partial.json.partial", self.output]

    def is_done(self) -> bool:
        return self.output.exists()

    def check(self, number: signal.Signals | None) -> list[str]:
        problems = []
        if self.partial.exists() and not self._of_others():
            lines = self.partial.read_bytes()
            lines = lines[: lines.rfind(b"\n") + 1]
            if not self.whole.startswith(lines):
                problems.append("the lines so far are not those of an uninterrupted decode")
            self.figures.found["lines kept"] += lines.count(b"\n")
        if number is None and not self.output.exists():
            try:
                completed(*self.arguments())
            except RuntimeError as error:
                problems.append(str(error))
        if self.output.exists():
            same = self.output.read_bytes() == self.whole
            problems += [] if same else ["the file is not that of an uninterrupted decode"]
            self.figures.found["files completed, the same byte for byte"] += same
        if self.output.exists() or problems:
            self._begin()
        return problems


# --- train


class Train(KilledCommand):
    """Trains, killed and resumed until it is done."""

    name = "train"
    FILES = ("run.json", "best.ckpt", "last.ckpt", "metrics.csv", "model.safetensors")

    def __init__(self, folder: Path, life: float, chosen: random.Random, command: Sequence[object], whole: Path):
        """`whole` is what `command` writes when nothing ends it."""
        super().__init__(folder, life, chosen)
        self.command, self.whole, self.run_folder = command, whole, folder / "run"
        self._steps = 0
        self._left: list[Path] = []

    def arguments(self) -> list[object]:
        self._left = list(self.run_folder.glob("*.partial"))
        resumes = (self.run_folder / "last.ckpt").exists() or self.chosen.random() < 0.5
        return [*self.command, "-o", self.run_folder, *["--resume"] * resumes]

    def written(self) -> list[Path]:
        return [self.run_folder / f"{file}{suffix}" for file in self.FILES for suffix in (".partial", "")]

    def is_done(self) -> bool:
        return self._is_whole("metrics.csv") and self._is_whole("model.safetensors")

    def _is_whole(self, file: str) -> bool:
        try:
            return (self.run_folder / file).read_bytes() == (self.whole / file).read_bytes()
        except FileNotFoundError:
            return False

    def check(self, number: signal.Signals | None) -> list[str]:
        problems = self._damages()
        left = [path for path in self.run_folder.glob("*.partial") if path not in self._left]
        self.figures.found["files half-written"] += len(left)
        if left and number is not None and number is not signal.SIGKILL:
            problems.append(f"left {[path.name for path in left]} though it could clean up")
        if number is None and not self.is_done():
            try:
                completed(*self.arguments())
            except RuntimeError as error:
                problems.append(str(error))
            for file in ("metrics.csv", "model.safetensors"):
                if not self._is_whole(file):
                    problems.append(f"{file} is not that of an uninterrupted training")
        if number is None or self.is_done():
            self.figures.found["trainings completed, the same bit for bit"] += not problems
            shutil.rmtree(self.run_folder, ignore_errors=True)
            self._steps = 0
        return problems

    def _damages(self) -> list[str]:
        """What is damaged or was lost."""
        problems, steps = [], 0
        readers: dict[str, Callable[[Path], object]] = {
            "run.json": lambda path: json.loads(path.read_bytes()),
            "best.ckpt": lambda path: torch.load(path, weights_only=True),
            "last.ckpt": lambda path: torch.load(path, weights_only=True)["global_step"],
            "model.safetensors": lambda path: load_checkpoint(path, {}),
        }
        for file, reader in readers.items():
            if (self.run_folder / file).exists():
                try:
                    found = reader(self.run_folder / file)
                except Exception as error:  # whatever it is, the file is damaged
                    problems.append(f"{file} cannot be read: {error}")
                else:
                    steps = found if isinstance(found, int) else steps
        if steps < self._steps:
            problems.append(f"the checkpoint is of {steps} steps, it was of {self._steps}")
        self._steps = steps
        measured = self.run_folder / "metrics.csv"
        if measured.exists() and not (self.whole / "metrics.csv").read_bytes().startswith(measured.read_bytes()):
            problems.append(f"the measurements are not those of an uninterrupted training:\n{measured.read_text()}")
        if measured.exists() and len(measured.read_bytes().splitlines()) <= self._steps // self._steps_of_an_epoch():
            problems.append(f"measurements of an epoch are lost:\n{measured.read_text()}")
        return problems

    def _steps_of_an_epoch(self) -> int:
        return int((self.whole / "metrics.csv").read_text(encoding="utf-8").splitlines()[1].split(",")[1])


# --- all of them

WORDS = {"Mann": "man", "Frau": "woman", "Hund": "dog", "Kind": "child", "Haus": "house", "Baum": "tree"}
VERBS = {"sieht": "sees", "ruft": "calls", "malt": "paints"}
PAIRS = [f"{s} {v} {o}\t{WORDS[s]} {VERBS[v]} {WORDS[o]}" for s in WORDS for v in VERBS for o in WORDS]


def write_checkpoint(path: Path, seed: int) -> Path:
    """A random model with words."""
    vocabulary = path.with_suffix(".json")
    words = ["<unk>", "<pad>", "<sos>", "<eos>", *(f"word{index}" for index in range(27))]
    vocabulary.write_text(json.dumps(words), encoding="utf-8")
    torch.manual_seed(seed)
    config = ModelConfig(
        d_model=64,
        n_heads=4,
        d_ff=128,
        n_encoder_layers=2,
        n_decoder_layers=2,
        src_vocab_size=len(words),
        tgt_vocab_size=len(words),
        max_source_length=24,
        max_target_length=24,
        unk_id=0,
        pad_id=1,
        bos_id=2,
        eos_id=3,
    )
    tokenizers = native.Tokenizers(read_vocabulary(vocabulary), read_vocabulary(vocabulary))
    native.save(path, Transformer(config).state_dict(), config, tokenizers, torch.float32)
    return path


def prepared(
    folder: Path, kills: int, seed: int, names: Sequence[str], pool: ThreadPoolExecutor
) -> list[KilledCommand]:
    """What is to be killed, after uninterrupted runs that tell how it is to end."""
    checkpoints = [write_checkpoint(folder / f"{name}.safetensors", index) for index, name in enumerate("ab")]
    bundles = [folder / "a", folder / "b"]
    text, held_out = folder / "train.tsv", folder / "held_out.tsv"
    text.write_text("\n".join(PAIRS) + "\n", encoding="utf-8")
    held_out.write_text("\n".join(PAIRS[::9]) + "\n", encoding="utf-8")
    train = ["train", "--tsv", text, "--val-tsv", held_out, "--preset", "tiny", "--vocabulary", "word", "--epochs", 6]
    train += ["--batch-tokens", 96, "--max-length", 16, "--accelerator", "cpu", "--min-frequency", 1]
    training = pool.submit(completed, *train, "-o", folder / "whole")
    exports = [pool.submit(completed, "export", *pair) for pair in zip(checkpoints, ["-o"] * 2, bundles, strict=True)]
    exported = max(export.result() for export in exports)
    sources = [(path, (bundle / MANIFEST).read_bytes()) for path, bundle in zip(checkpoints, bundles, strict=True)]
    chosen = random.Random(seed)
    lines = [" ".join(f"word{chosen.randrange(27)}" for _ in range(chosen.randint(1, 18))) for _ in range(8000)]
    (folder / "in").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    # JSON lines have their number: what a random model says of two lines may be the same.
    decode = ["decode", bundles[0], folder / "in", "--output-format", "jsonl", "--threads", 1, "--batch-size", 4]
    decode += ["--max-length", 16, "--workers"]
    # The number of workers decides which lines share a batch, and so the last digits of scores.
    decoded = [completed(*decode, workers, "-o", folder / f"out{workers}") for workers in (1, 2)]
    whole, trained = [(folder / f"out{workers}").read_bytes() for workers in (1, 2)], training.result()

    makers: dict[str, Callable[[Path, random.Random, int], KilledCommand]] = {
        "train": lambda place, own, index: Train(place, trained, own, train, folder / "whole"),
        "export": lambda place, own, index: Export(place, exported, own, sources),
        "decode": lambda place, own, index: Decode(place, decoded[index], own, [*decode, index + 1], whole[index]),
    }
    # With few kills, completing what the commands began takes most of the time.
    each = 2 if kills >= 20 * len(names) else 1
    return [
        makers[name](folder / f"{name}{index}", random.Random(f"{seed} {name} {index}"), index)
        for index in range(each)
        for name in names
    ]


def print_figures(name: str, figures: Figures) -> None:
    total = sum(figures.kills.values())
    print(f"{name}: {total} kills ({figures.aimed} aimed at a write) in {figures.seconds:.0f} s")
    for number in sorted({number for number, _ in figures.kills}):
        stages = ", ".join(f"{figures.kills[number, stage]} {stage}" for stage in (BEFORE, WRITING, AFTER))
        print(f"  {number:<8} {stages}")
    for what, count in sorted(figures.found.items()):
        print(f"  {count:,} {what}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Ends export, decode and train at random moments.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="commands at once")
    parser.add_argument("--only", default="export,decode,train")
    options = parser.parse_args(arguments)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell does to what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    names = [name for name in ("train", "export", "decode") if name in options.only.split(",")]
    began, by_name = time.monotonic(), {name: Figures() for name in names}
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        commands = prepared(Path(temporary), options.kills, options.seed, names, pool)
        shares = [
            options.kills * (i + 1) // len(commands) - options.kills * i // len(commands) for i in range(len(commands))
        ]
        for command, figures in zip(
            commands, pool.map(lambda command, share: command.run(share), commands, shares), strict=True
        ):
            by_name[command.name] += figures
    for name, figures in by_name.items():
        print_figures(name, figures)
    kills = sum(sum(figures.kills.values()) for figures in by_name.values())
    problems = sum(len(figures.problems) for figures in by_name.values())
    print(f"{kills} kills, {problems} problems; seed {options.seed}; {time.monotonic() - began:.0f} s")
    return 1 if problems or kills < options.kills else 0


if __name__ == "__main__":
    sys.exit(main())
