"""The commands of the README and of the documentation run, page by page, in the order in which a reader types them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from makers.paths import ROOT
from makers.references.tutorial import TutorialTransformer
from makers.servers import Running, serving
from makers.tiny import SPECIALS, randomised
from tfexport.cli import app

pytestmark = pytest.mark.thorough

FROM_NOTHING = ("README.md", "docs/start.md", "docs/guides/train.md")
"""Pages that begin with an export. The others begin with a bundle."""
SIZES = {
    "src_vocab": 30, "tgt_vocab": 30, "d_model": 32, "n_heads": 8, "d_ffn": 40, "n_encoder_layers": 1,
    "n_decoder_layers": 1, "max_len": 20, "pad_id": 1,
}  # fmt: skip
CODE = f"""
from makers.references.tutorial import TutorialTransformer


def build():
    return TutorialTransformer(**{SIZES})
"""
SERVE, SEND = "tfexport serve ", ("curl localhost:8080/", "curl -N localhost:8080/")
EXPORT = "export ckpt.pt --heads 8 --src-vocab src_vocab.json --tgt-vocab tgt_vocab.json"


def commands_of(page: Path) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    return [line for line in lines if line.startswith(("tfexport ", *SEND))]


COMMANDS = {
    str(page.relative_to(ROOT)): commands
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if (commands := commands_of(page))
}


def run(command: str) -> str:
    """A command line of tfexport, without its first word, in this process; returns what it printed."""
    done = CliRunner().invoke(app, shlex.split(command), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


class Server:
    """The server that the commands of a page start, and to which they send requests: that of the last `tfexport serve`."""

    def __init__(self, log: Path):
        self._log, self._ends = log, ExitStack()
        self._running: Running | None = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def start(self, command: str) -> Running:
        """`tfexport serve ...`; the one before it ends. It listens on a free port."""
        self._ends.close()
        self._running = self._ends.enter_context(serving(self._log, *shlex.split(command.removeprefix(SERVE))))
        return self._running

    def send(self, command: str) -> bytes:
        """`curl localhost:8080/...`; returns the answer, whose status is no error."""
        running = self._running or self.start("tfexport serve de-en=ckpt")
        words = shlex.split(command.replace("localhost:8080", f"127.0.0.1:{running.port}"))
        done = subprocess.run([*words, "--fail-with-body", "--silent", "--max-time", "60"], capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that commands name: a checkpoint of the tutorial's code, its vocabularies, and text."""
    folder = tmp_path_factory.mktemp("newcomer")
    words = SPECIALS + [f"w{index}" for index in range(26)]
    for name in ("src_vocab.json", "tgt_vocab.json"):
        (folder / name).write_text(json.dumps(words))
    (folder / "my_code.py").write_text(CODE)
    weights = randomised(TutorialTransformer(**SIZES)).state_dict()
    torch.save(weights, folder / "ckpt.pt")
    torch.save({**weights, "crit.weight": torch.ones(3), "loss_scale": torch.ones(1)}, folder / "last.ckpt")
    (folder / "input.txt").write_text("w4 w5 w6\nw9\nw3 w2 w1 w20\n")
    (folder / "output.txt").write_text("w5 w6\nw8 w9 w10\nw3\n")
    (folder / "glossary.tsv").write_text("w4\tw7\nw9\tw8\tforbidden\n")
    (folder / "phrases.txt").write_text("w5\tw6 w7\n\nw8\n")
    (folder / "prefixes.txt").write_text("w5\nw6 w7\n\n")
    (folder / "keys.txt").write_text("website  3f0c1d2e4b5a69788796a5b4c3d2e1f0\n")
    (folder / "ids.txt").write_text("2 4 5 6 3\n2 9 3\n")
    for name in ("train", "val"):
        for language, word in (("de", "ein Hund läuft"), ("en", "a dog runs")):
            (folder / f"{name}.{language}").write_text("".join(f"{word} {index}\n" for index in range(40)))
    return folder


@pytest.fixture(scope="module")
def with_bundle(newcomer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the bundle `ckpt`."""
    folder = Path(shutil.copytree(newcomer, tmp_path_factory.mktemp("bundle") / "files"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(f"{EXPORT} --precision fp32,int8 --alignments --shortlist")
    return folder


def test_every_command_is_on_a_page() -> None:
    used = {
        shlex.split(command)[1]
        for commands in COMMANDS.values()
        for command in commands
        if command.startswith("tfexport ")
    }
    assert used >= {
        "inspect",
        "export",
        "parity",
        "probe",
        "bench",
        "build",
        "triton",
        "decode",
        "score",
        "attend",
        "train",
        "serve",
    }


@pytest.mark.parametrize("page", COMMANDS)
def test_commands_of_a_page_run(
    page: str, newcomer: Path, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = newcomer if page in FROM_NOTHING else request.getfixturevalue("with_bundle")
    folder = Path(shutil.copytree(files, tmp_path / "files"))
    monkeypatch.chdir(folder)
    if any(command.startswith("tfexport corpus") for command in COMMANDS[page]):
        pytest.importorskip("ray.data", reason="Ray Data is not installed: pip install 'tfexport[ray]'")
        write_news(folder / "news")
    with Server(tmp_path / "server.log") as server:
        for command in COMMANDS[page]:
            run_one(command, folder, server)


def write_news(folder: Path) -> None:
    """A corpus of two files."""
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir()
    for name, texts in (("a", ["w4 w5 w6", "w9"]), ("b", ["w3 w2"])):
        parquet.write_table(pa.table({"de": texts}), folder / f"{name}.parquet")


def run_one(command: str, folder: Path, server: Server) -> None:
    """A command of a page, and what it must have given."""
    if command.startswith(SERVE):
        server.start(command)
        return
    if command.startswith(SEND):
        answer = server.send(command).decode()
        streamed = re.findall(r"^data: (.*)$", answer, re.MULTILINE)
        assert bool(streamed) == ("-N" in command)
        assert all("error" not in json.loads(one) for one in streamed or [answer])
        return
    if command.startswith("tfexport corpus"):  # Ray keeps the streams of a process for longer than a command runs here
        module = [sys.executable, "-m", "tfexport", *shlex.split(command)[1:]]
        done = subprocess.run(module, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return
    printed = run(command.removeprefix("tfexport "))
    if "-o output.txt" in command:
        assert len((folder / "output.txt").read_text().splitlines()) == 3
    elif command.startswith("tfexport decode") and "--stream" not in command and " -o " not in command:
        assert len(printed.splitlines()) == len((folder / shlex.split(command)[3]).read_text().splitlines())
