"""Detection of changes to a bundle during decoding.

ONNX Runtime keeps the weights in their file and reads them on demand. `export` replaces a bundle as a whole, which leaves
the loaded files unchanged. A write into a loaded file would silently change the results.
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
    """The state of a bundle's files before their verification."""

    def __init__(self, directory: Path, files: Sequence[BinaryIO]):
        self._directory = directory
        self._files = [(file, _content_of(file)) for file in files]

    def loaded(self) -> None:
        """Call this after a runtime has loaded the verified files.

        Raises:
            BundleError: the bundle was replaced meanwhile, so the runtime may have loaded another one.
        """
        self._check()
        for file, _ in self._files:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
                    continue
            raise BundleError(f"{self._directory} was replaced while it was being loaded. Run again.")

    def over(self, results: Iterator[Item]) -> Iterator[Item]:
        """Yield results that were computed from unchanged files.

        Raises:
            BundleError: a file may have changed before the next result.
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
                with suppress(OSError):  # the reader of the file raises the error
                    files.append(stack.enter_context(path.open("rb")))
        yield Watch(directory, files)


def _content_of(file: BinaryIO) -> tuple[int, int]:
    """Values that change when a program writes into a file, but not when the file is renamed or removed."""
    about = os.fstat(file.fileno())
    return about.st_size, about.st_mtime_ns
