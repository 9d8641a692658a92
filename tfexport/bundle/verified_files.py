"""Ensures that a runtime loads the files of a bundle that were verified.

Libraries load files by path, and may map them, so the sha256 of the bytes that they load cannot be computed. Instead, each
verified file is kept with its state: device, inode, size, and times of the last write and change. `VerifiedFiles.loading`
compares the states before and after a load. A certificate names the sha256 of files, so it holds for what was loaded.

Protected: a file that is replaced, removed or written to between its verification and the end of a load, also with the same
size and time of the last write; and a folder or link that is replaced in this time. The load fails, and names the reason.

Not protected:

- Writes into a file after its load, which change what a library has mapped. `bundle/watch.py` detects them in `decode`.
- Two renames of a folder during one load, to another bundle and back.
- A write in the same tick of the file system's clock as the write before it (a few milliseconds), or one that a network file
  system reports late.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tfexport.errors import BundleError, ReplacedBundleError
from tfexport.system.regular_files import open_regular


class State(NamedTuple):
    """The state of a file in its file system. It changes when the file is written to or replaced."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, about: os.stat_result) -> State:
        return cls(about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)


@dataclass
class VerifiedFiles:
    """The verified files of a bundle. Several threads may load them at once."""

    directory: Path = Path()
    sums: Mapping[str, str] = field(default_factory=dict)
    """The sha256 of each file, by name."""
    _states: dict[str, State] = field(default_factory=dict)
    """The state of each file immediately before its bytes were verified."""

    def verify(self, name: str, remedy: str) -> None:
        """Compare the sha256 of a file.

        Args:
            remedy: what the user can do if it differs.

        Raises:
            BundleError: the file is missing, altered or outside the bundle.
        """
        pure = PurePosixPath(name)
        if pure.name != name or name in ("", ".", ".."):
            raise BundleError(f"{self.directory} names {name!r}, which is outside the bundle. Do not use this bundle.")
        path = self.directory / name
        try:
            with open_regular(path) as file:
                state = State.of(os.fstat(file.fileno()))
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, ValueError) as error:  # ValueError: not a valid file name
            raise BundleError(
                f"{path} cannot be read: {getattr(error, 'strerror', None) or error}. {remedy}"
            ) from error
        if sha256 != self.sums[name]:
            raise BundleError(f"{path} is not what was exported (its sha256 differs). {remedy}")
        self._states[name] = state

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Load verified files in this block. A file whose state has changed before it, such as a copy, is verified again.

        Raises:
            ReplacedBundleError: a file has other content, or was replaced or written to during the block.
        """
        for name, state in list(self._states.items()):
            if self._state(name) != state:
                try:
                    self.verify(name, "")
                except BundleError:
                    raise self._replaced() from None
        before = dict(self._states)  # another thread may verify a file again meanwhile
        try:
            yield
        except Exception:
            self._require(before)  # the better reason
            raise
        self._require(before)

    def _require(self, before: Mapping[str, State]) -> None:
        """Raises ReplacedBundleError if a file, also one that was verified since, has another state."""
        if any(self._state(name) != state for name, state in {**self._states, **before}.items()):
            raise self._replaced()

    def _state(self, name: str) -> State | None:
        try:
            return State.of(os.stat(self.directory / name))
        except OSError:
            return None

    def _replaced(self) -> ReplacedBundleError:
        return ReplacedBundleError(
            f"{self.directory} was replaced, written to or removed after it was opened. Load it again."
        )
