"""The manifest of a run: everything that its output depends on. Only an equal run can resume it.

OUT/part-00000-000000000000-16384.parquet   a shard, under its name when it is complete
OUT/_tfexport/run.json                      the manifest
OUT/_tfexport/done/part-….json              the record of a part; see `records.py`
OUT/_tfexport/attempts/part-…/              markers of attempts at a shard; see `attempts.py`
OUT/_tfexport/summary.json                  the summary of a complete run
OUT/_tfexport/driver…                       the driver that writes; see `driver_lock.py`
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyarrow import ArrowException

from tfexport.bundle.reader import MANIFEST, file_sha256
from tfexport.errors import TfexportError
from tfexport.scale.options import CorpusFormat, CorpusOptions
from tfexport.scale.row_function import RowFunction
from tfexport.scale.shards import Input, Shard
from tfexport.scale.storage import Place

VERSION = 1


@dataclass(frozen=True)
class Task:
    """The function of a run. It is sent to actors, and each actor loads it."""

    kind: type[RowFunction]
    bundle: Path
    """The folder of the bundle, on every machine."""
    options: Mapping[str, Any]
    """The options of the function, with the names of its columns."""

    def load(self) -> RowFunction:
        """Raises: TfexportError: the bundle or an option cannot be used."""
        function: Any = self.kind
        return function(self.bundle, **self.options)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Manifest:
    """The manifest of a run."""

    bundle: str
    """The sha256 of the bundle's manifest, which has the sha256 of each file of the bundle."""
    options: Mapping[str, Any]
    """The options that the output depends on, JSON-ready."""
    output_format: CorpusFormat
    rows_per_shard: int
    inputs: Sequence[Input]

    @classmethod
    def of(cls, task: Task, corpus: CorpusOptions, inputs: Sequence[Input], format: CorpusFormat) -> Manifest:
        """The manifest of a run, after checks of its bundle and options.

        Args:
            format: the format of the output.

        Raises:
            TfexportError: the bundle or an option cannot be used.
        """
        about = {"task": task.kind.__name__.lower(), **task.kind.described(task.bundle, task.options)}
        return cls(file_sha256(task.bundle / MANIFEST), about, format, corpus.rows_per_shard, inputs)

    def record(self) -> dict[str, Any]:
        """The manifest as an object of JSON."""
        inputs = [{"uri": file.place.uri, "format": file.format, **asdict(file.stamp)} for file in self.inputs]
        return {"version": VERSION, "bundle": self.bundle, "options": dict(self.options)} | {
            "output_format": self.output_format,
            "rows_per_shard": self.rows_per_shard,
            "inputs": inputs,
        }

    def begin(self, output: RunFolder, *, resume: bool) -> None:
        """Write the manifest, or compare it with the manifest in the folder. A run without any part is replaced.

        Raises:
            TfexportError: the folder has another run, or this run without `resume`, or parts and no manifest.
        """
        record = json.loads(json.dumps(self.record()))
        if not output.done():
            try:
                output.remove_state()
                output.make()
                output.manifest.write(json.dumps(record, indent=1).encode())
            except (ArrowException, OSError) as error:
                about = getattr(error, "strerror", None) or error
                raise TfexportError(
                    f"cannot write {output.manifest.uri}: {about}. Make room, or give another folder."
                ) from error
            return
        if output.manifest.stamp() is None:
            raise TfexportError(f"{output.folder.uri} has parts of no run that is known. Give an empty folder.")
        if not resume:
            raise TfexportError(
                f"{output.folder.uri} has a run already. Add --resume to go on with it, or give another folder."
            )
        try:
            before = json.loads(output.manifest.read())
        except ValueError as error:
            raise TfexportError(f"{output.manifest.uri} is damaged. Begin anew in another folder.") from error
        if differences := _differences(before, record):
            raise TfexportError(
                f"{output.folder.uri} has another run: {'; '.join(differences[:5])}. Continue that run, or give another "
                "folder."
            )


@dataclass(frozen=True)
class RunFolder:
    """The output folder of a run."""

    folder: Place
    format: CorpusFormat

    @property
    def own(self) -> Place:
        """The folder of all files that are not parts."""
        return self.folder / "_tfexport"

    @property
    def manifest(self) -> Place:
        return self.own / "run.json"

    @property
    def summary(self) -> Place:
        return self.own / "summary.json"

    @property
    def attempts(self) -> Place:
        return self.own / "attempts"

    def part(self, shard: Shard) -> Place:
        return self.folder / shard.name(self.format)

    def record(self, shard: Shard) -> Place:
        """The file with the record of a part; see `records.py`."""
        return self.own / "done" / f"{shard.name(self.format)}.json"

    def make(self) -> None:
        for folder in (self.folder, self.own, self.own / "done", self.attempts):
            folder.make()

    def done(self) -> set[Shard]:
        """The shards that are complete."""
        return {shard for name in self.folder.names() if (shard := Shard.parse(name)) is not None}

    def remove_state(self) -> None:
        """Remove the records, attempts and summary of a run without parts."""
        for place in (self.summary, self.own / "done", self.attempts):
            place.remove()

    def remove_partial(self) -> None:
        """Remove the unfinished files of killed processes. Nothing may write meanwhile."""
        for folder in (self.folder, self.own, self.own / "done"):
            for name in folder.names():
                if name.startswith(".") and name.endswith(".partial"):
                    (folder / name).remove()


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> list[str]:
    """The differences of two records, in words."""
    differences = []
    for name in [*before, *(name for name in now if name not in before)]:
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            differences += _differences(old, new, f"{where}{name} ")
        elif name == "inputs" and isinstance(old, list) and isinstance(new, list):
            differences += _different_inputs(old, new)
        elif name == "bundle":
            differences.append("its bundle is another")
        else:
            differences.append(f"its {where}{name} is {old!r}, not {new!r}")
    return differences


def _different_inputs(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[str]:
    if len(old) != len(new):
        return [f"its number of inputs is {len(old)}, not {len(new)}"]
    changed = [(before, now) for before, now in zip(old, new, strict=True) if before != now]
    if [file["uri"] for file in old] != [file["uri"] for file in new]:
        return [f"its input is {before['uri']}, not {now['uri']}" for before, now in changed]
    return [f"its input {before['uri']} was changed since" for before, _ in changed]
