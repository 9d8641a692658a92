"""The gate that faults are to be found by: `tfexport export` and `tfexport parity` as a user calls them, in this process."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import typer
from typer.testing import CliRunner

from fuzz.faults.bases import Base
from tfexport.bundle.reader import CERTIFICATES
from tfexport.cli import app
from tfexport.contract import PRECISIONS
from tfexport.errors import TfexportError

ALL = tuple(PRECISIONS)


@dataclass(frozen=True)
class Answer:
    """What a command answered."""

    code: int
    """0 passed, 1 failed, 2 refused to run, 3 an exception."""
    output: str
    """Both streams, and the error."""
    seconds: float

    @property
    def passed(self) -> bool:
        return self.code == 0


def run(arguments: Sequence[str]) -> Answer:
    """A command of tfexport."""
    began = time.monotonic()
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, list(arguments))
    code, error = result.exit_code, ""
    if isinstance(result.exception, TfexportError):
        code, error = 2, f"error: {result.exception}\n"
    elif result.exception is not None and not isinstance(result.exception, SystemExit):
        code, error = 3, f"{type(result.exception).__name__}: {result.exception}\n"
    return Answer(code, result.output + error, time.monotonic() - began)


def export(base: Base, bundle: Path, precisions: Sequence[str], *flags: str) -> None:
    """Export a checkpoint, unchecked.

    Raises:
        RuntimeError: it cannot be exported.
    """
    told = ["--precision", ",".join(precisions), *base.export_flags, *flags]
    answer = run(["export", str(base.checkpoint), "-o", str(bundle), "--force", "--no-parity", *told])
    if not answer.passed:
        raise RuntimeError(answer.output)


def _takes(option: str) -> bool:
    """Whether `parity` has an option."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return any(option in parameter.opts for parameter in commands["parity"].params)


def parity(base: Base, bundle: Path, *flags: str) -> Answer:
    """`tfexport parity BUNDLE TEXT --checkpoint CKPT`, with the vocabularies where it takes them."""
    told = [*base.parity_flags]
    given = list(base.vocabulary_flags)
    while given:
        option = given.pop(0)
        value = [given.pop(0)] if given and not given[0].startswith("--") else []
        told += [option, *value] if _takes(option) else []
    return run(["parity", str(bundle), str(base.text), "--checkpoint", str(base.checkpoint), *told, *flags])


def certified(bundle: Path, precision: str) -> bool:
    """Whether there is a certificate of a precision."""
    path = bundle / CERTIFICATES
    entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return any(entry["precision"] == PRECISIONS[precision] for entry in entries)


@dataclass
class Prepared:
    """A clean bundle, and what the gate says of it."""

    base: Base
    bundle: Path
    alarms: dict[str, str] = field(default_factory=dict)
    """The precisions that the gate rejects though nothing is wrong, and what it says; faults are not measured in them."""
    told: frozenset[str] = frozenset()
    """The lines that bisecting prints of the clean bundle, without their numbers."""

    @property
    def usable(self) -> list[str]:
        return [precision for precision in ALL if precision not in self.alarms]

    def precision_flags(self) -> list[str]:
        """None where all precisions can be compared, as a user would call it."""
        return ["--precision", ",".join(self.usable)] if self.alarms else []


def without_numbers(line: str) -> str:
    return re.sub(r"[0-9]+(\.[0-9]+)?(e[-+][0-9]+)?", "#", line).strip()


def prepare(base: Base, bundle: Path, *, bisect: bool) -> Prepared:
    """Export a base in all precisions, and see that the gate passes it."""
    found = Prepared(base, bundle)
    export(base, bundle, ALL, "--alignments", "--shortlist")
    if not parity(base, bundle).passed:
        for precision in ALL:
            answer = parity(base, bundle, "--precision", precision)
            if not answer.passed:
                found.alarms[precision] = reason(answer)
    if bisect:
        told = parity(base, bundle, "--bisect", *found.precision_flags()).output
        found.told = frozenset(map(without_numbers, told.splitlines()))
    (bundle / CERTIFICATES).unlink(missing_ok=True)
    return found


def reason(answer: Answer) -> str:
    """The lines that say why."""
    lines = [line.strip() for line in answer.output.splitlines()]
    words = ("error", "FAILED", "departs", "off by", "not ", "differ", "beyond")
    said = [line for line in lines if any(word in line for word in words) and not line.startswith("note: certified")]
    return "; ".join(said[:3]) or f"exit code {answer.code}"


def copied(bundle: Path, place: Path) -> Path:
    """A copy of a bundle to plant a fault into."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(bundle, place)
    return place
