"""Commands, run within this process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from makers.processes import ENVIRONMENT
from makers.references.decode import greedy
from makers.references.tutorial import TutorialTransformer
from makers.tiny import (
    BOS,
    EOS,
    TinyCheckpoint,
)
from tfexport.__main__ import main

SENTENCES = {"de5 de6": [5, 6], "de9": [9], "de10 nothing de12": [10, 0, 12], "de30 de4 de4 de7": [30, 4, 4, 7]}
TEXT = "".join(f"{sentence}\n" for sentence in SENTENCES).encode()

IMPORTED = """
import json, sys
from tfexport.__main__ import main
for arguments in {arguments}:
    sys.argv = ["tfexport", *arguments]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, stop.code
print(json.dumps([name for name in sys.modules if "." not in name]), file=sys.stderr)
"""

NOT_FOR_DECODING = {"torch", "onnx", "onnx_ir", "lightning", "safetensors", "cuda", "tensorrt", "tensorrt_rtx"}
HEAVY = NOT_FOR_DECODING | {"numpy", "onnxruntime", "tokenizers", "spacy", "sacrebleu"}


def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[str, str]:
    monkeypatch.setattr("sys.argv", ["tfexport", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    assert caught.value.code == (2 if "error: " in err else 0), err
    return out, err


@dataclass(frozen=True)
class Outcome:
    code: int
    raw: bytes
    stderr: str

    @property
    def stdout(self) -> str:
        return self.raw.decode("utf-8")

    @property
    def lines(self) -> list[str]:
        return self.stdout.split("\n")[:-1]


Run = Callable[..., Outcome]


def one_error(outcome: Outcome) -> str:
    """The only line on stderr, where nothing but an error may be."""
    assert outcome.code == 2, outcome.stderr
    assert outcome.raw == b""
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def naive_ids(model: TutorialTransformer, ids: list[int], *, max_length: int = 20) -> list[int]:
    return greedy(model, [BOS, *ids, EOS], bos=BOS, eos=EOS, max_length=max_length)


def naive_text(model: TutorialTransformer, ids: list[int]) -> str:
    return " ".join(f"wört{index}" for index in naive_ids(model, ids) if index != EOS)


def wanted_text(checkpoint: TinyCheckpoint) -> str:
    return "".join(f"{naive_text(checkpoint.model, ids)}\n" for ids in SENTENCES.values())


def last_error(outcome: Outcome) -> str:
    """The only line on stderr, of a command that had something to say before."""
    assert outcome.code == 2, outcome.stderr
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(".")
    return line


def modules_after(*commands: list[str], stdin: bytes = b"") -> tuple[set[str], bytes]:
    """The modules that a fresh process has imported after `commands`, and its output."""
    script = IMPORTED.format(arguments=[[str(argument) for argument in command] for command in commands])
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, input=stdin, capture_output=True, env=ENVIRONMENT, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return set(json.loads(done.stderr.splitlines()[-1])), done.stdout
