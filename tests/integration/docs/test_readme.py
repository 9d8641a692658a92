"""The README and the pages are true: their commands run, and the contract's table is the contract."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.contract_table import markdown_table
from tests.support.paths import ROOT
from tests.support.references.tutorial import TutorialTransformer
from tests.support.tiny import SPECIALS, randomised
from tfexport.models.checkpoints.load import FAMILIES

README, CHECKPOINTS, DECODING, ATTENTION, SPEED, CONTRACT = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in (
        "README.md",
        *(f"docs/{page}.md" for page in ("checkpoints", "decoding", "attention", "speed", "contract")),
    )
)
COMMANDS = [
    line
    for page in (README, CHECKPOINTS, DECODING, ATTENTION, SPEED)
    for block in re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)
    for line in block.splitlines()
    if line.startswith("tfexport ")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the README's commands name."""
    folder = tmp_path_factory.mktemp("newcomer")
    words = SPECIALS + [f"w{index}" for index in range(26)]
    for name in ("src_vocab.json", "tgt_vocab.json"):
        (folder / name).write_text(json.dumps(words))
    model = TutorialTransformer(
        src_vocab=30, tgt_vocab=30, d_model=32, n_heads=8, d_ffn=40, n_encoder_layers=1, n_decoder_layers=1,
        max_len=20, pad_id=1,
    )  # fmt: skip
    torch.save(randomised(model).state_dict(), folder / "ckpt.pt")
    (folder / "input.txt").write_text("w4 w5 w6\nw9\nw3 w2 w1 w20\n")
    (folder / "ids.txt").write_text("2 4 5 6 3\n2 9 3\n")
    for name in ("train", "val"):
        for language, word in (("de", "ein Hund läuft"), ("en", "a dog runs")):
            (folder / f"{name}.{language}").write_text("".join(f"{word} {index}\n" for index in range(40)))
    return folder


def test_there_are_commands() -> None:
    assert {shlex.split(command)[1] for command in COMMANDS} == {
        "inspect",
        "export",
        "parity",
        "probe",
        "bench",
        "build",
        "decode",
        "score",
        "attend",
        "train",
    }


@pytest.mark.parametrize("number", range(len(COMMANDS)), ids=lambda number: COMMANDS[number][:60])
def test_commands_run_in_their_order(folder: Path, number: int) -> None:
    command = [sys.executable, "-m", "tfexport", *shlex.split(COMMANDS[number])[1:]]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    if "-o output.txt" in COMMANDS[number]:
        assert len((folder / "output.txt").read_text().splitlines()) == 3


def test_contract_table_is_generated() -> None:
    shown = re.search(r"<!-- contract: .*? -->\n(.*?)\n<!-- end of contract -->", CONTRACT, flags=re.DOTALL)
    assert shown is not None
    assert shown[1] == markdown_table()


def test_every_family_is_listed() -> None:
    for family in FAMILIES:
        assert f"| `{family.name}` |" in CHECKPOINTS


def test_every_status_is_listed() -> None:
    from typing import get_args

    from tfexport.decoding.line_reader import Status

    for status in get_args(Status):
        assert f"| `{status}` |" in README
