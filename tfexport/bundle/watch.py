"""A bundle that is changed while it is decoded from.

ONNX Runtime leaves weights in their file and reads them when it needs them. A bundle that is replaced, as `export` does it,
leaves the files that were loaded as they are. Files that are written into would change what is computed, unnoticed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from tfexport.bundle.reader import MANIFEST
from tfexport.errors import BundleError, TfexportError

Item = TypeVar("Item")


class Watch:
    """The files of a bundle as they were before they were verified."""

    def __init__(self, directory: Path, files: Sequence[BinaryIO]):
        self._directory = directory
        self._files = [(file, _content_of(file)) for file in files]

    def loaded(self) -> None:
        """Call this when a runtime has loaded what was verified.

        Raises:
            BundleError: what it has loaded may be of another bundle, which came to the place meanwhile.
        """
        self._check()
        for file, _ in self._files:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
                    continue
            raise BundleError(f"{self._directory} was replaced while it was loaded. Run again.")

    def over(self, results: Iterator[Item]) -> Iterator[Item]:
        """Pass results on that were computed from unchanged files.

        Raises:
            BundleError: the next one perhaps was not.
        """
        try:
            for result in results:
                self._check()
                yield result
        except TfexportError:
            self._check()  # a worker that reads a file which was cut is ended by the system
            raise

    def _check(self) -> None:
        for file, content in self._files:
            if _content_of(file) != content:
                raise BundleError(
                    f"{file.name} was written to while it was in use. Export to another folder, or with --force, which "
                    "replaces a bundle as a whole; then run again."
                )


@contextmanager
def watched(directory: Path) -> Iterator[Watch]:
    """Watch a bundle, from before it is opened."""
    with ExitStack() as stack:
        files = []
        for path in [directory / MANIFEST, *sorted(directory.glob("*.safetensors"))]:
            if path.is_file():
                with suppress(OSError):  # who reads it tells
                    files.append(stack.enter_context(path.open("rb")))
        yield Watch(directory, files)


def _content_of(file: BinaryIO) -> tuple[int, int]:
    """What changes when somebody writes into a file, and not when it is renamed or removed."""
    about = os.fstat(file.fileno())
    return about.st_size, about.st_mtime_ns
