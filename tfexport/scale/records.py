"""Records of the parts of a run: the number of rows of each status, and the checksums by which a resumed run checks parts
and inputs.

OUT/_tfexport/done/part-….json   the record of a part, written immediately before the part takes its name

A record has the sha256 of the part and of its whole input file, because a file may keep its size and time when its content
changes.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pyarrow import ArrowException

from tfexport.errors import TfexportError
from tfexport.scale.manifest import RunFolder
from tfexport.scale.shards import Shard

_log = logging.getLogger(__name__)

AT_ONCE = 16
"""The number of files that are read at once, because object stores answer slowly."""


@dataclass(frozen=True)
class Done:
    """A shard that was written."""

    shard: Shard
    statuses: Mapping[str, int]
    """The number of rows of each status."""


@dataclass(frozen=True)
class Record(Done):
    """The record of a part."""

    sha256: str
    """The sha256 of the part."""
    input_sha256: str
    """The sha256 of the whole input file."""

    def write(self, output: RunFolder, before: Callable[[], None]) -> None:
        """Write the record; see `Place.write`."""
        content = {"statuses": self.statuses, "sha256": self.sha256, "input_sha256": self.input_sha256}
        output.record(self.shard).write(json.dumps(content).encode(), before=before)


def read_record(output: RunFolder, shard: Shard) -> Record | None:
    """The record of a part; None if it is missing or damaged."""
    try:
        content = json.loads(output.record(shard).read())
        statuses = {str(status): int(count) for status, count in content["statuses"].items()}
        # Interned, because a file has as many equal sums as it has parts.
        record = Record(shard, statuses, content["sha256"], sys.intern(content["input_sha256"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if sum(statuses.values()) == shard.rows else None


def recorded(output: RunFolder) -> Iterator[Record]:
    """The readable records of all parts."""
    shards = sorted(output.done())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from (record for record in pool.map(lambda shard: read_record(output, shard), shards) if record)


def verified(output: RunFolder) -> Iterator[Record]:
    """The records of undamaged parts. It reads all parts.

    It removes the records of damaged parts, so that the run makes these parts again.

    Raises:
        TfexportError: a part cannot be read.
    """

    def is_as_written(record: Record) -> bool:
        part = output.part(record.shard)
        try:
            sha256 = part.sha256()
        except (ArrowException, OSError) as error:
            about = getattr(error, "strerror", None) or error
            raise TfexportError(f"cannot read {part.uri}: {about}. Check your access, or remove it.") from error
        if sha256 == record.sha256:
            return True
        _log.warning("warning: %s is damaged: its sha256 differs. Its rows are computed again.", part.uri)
        output.record(record.shard).remove()
        return False

    records = list(recorded(output))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from (record for record, whole in zip(records, pool.map(is_as_written, records), strict=True) if whole)


def changed_inputs(records: Iterable[Record]) -> list[int]:
    """The numbers of inputs that changed while they were read: the records of their parts have different checksums."""
    sums: dict[int, set[str]] = {}
    for record in records:
        sums.setdefault(record.shard.file, set()).add(record.input_sha256)
    return sorted(file for file, values in sums.items() if len(values) > 1)
