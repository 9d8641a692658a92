"""What a disk has after a loss of power: a model of the worst file system that POSIX allows.

What was written to a file is lost until the file is synced, and what happened to the names in a folder until the folder is.
Some of it may be there all the same, in any order.

A program runs with its calls watched (`Disk.watching`). Before and after each call that changes names or syncs, `Disk` notes
what is there and what would be left. Nothing of the program is replaced: it works on a real folder.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

Tree = dict[str, "bytes | Tree"]
"""The files and folders in a folder by their names."""

Content = bytes | dict[str, int]
"""Of a file, or of a folder: the numbers of what is in it, by the names."""

WATCHED = (
    "fsync",
    "rename",
    "replace",
    "unlink",
    "remove",
    "rmdir",
    "mkdir",
    "truncate",
    "ftruncate",
    "link",
    "symlink",
)
"""Functions of `os`. What else changes files is seen before or after one of these."""


@dataclass(frozen=True)
class Moment:
    """What is there at one moment, and what of it is on the disk, by the numbers of files and folders."""

    call: str
    """What happens next, or has happened."""
    root: int
    there: dict[int, Content]
    synced: dict[int, Content]

    def left(self, chosen: random.Random | None, *, names: bool = False) -> Tree:
        """What a loss of power leaves: only what was synced, or by chance more.

        Args:
            names: all names are there, and of the files only what was synced.
        """
        return self._tree(self.root, chosen, names)

    def _tree(self, number: int, chosen: random.Random | None, names: bool) -> Tree:
        now, before = self.there.get(number, {}), self.synced.get(number, {})
        entries = now if names or (chosen is not None and chosen.random() < 0.5) else before
        assert isinstance(entries, dict)
        tree: Tree = {}
        for name, inner in entries.items():
            is_folder = isinstance(self.there.get(inner, self.synced.get(inner)), dict)
            tree[name] = self._tree(inner, chosen, names) if is_folder else self._file(inner, chosen)
        return tree

    def _file(self, number: int, chosen: random.Random | None) -> bytes:
        before = self.synced.get(number, b"")
        now = self.there.get(number, before)  # a file that was removed has what it had
        assert isinstance(now, bytes)
        assert isinstance(before, bytes)
        # Some file systems know the new size of a file before they have its content.
        zeros = before[: len(now)] + bytes(max(0, len(now) - len(before)))
        return before if chosen is None else chosen.choice([before, now, zeros])


@dataclass
class Disk:
    """The disk under the folder `root`, on which everything is when it is made."""

    root: Path
    moments: list[Moment] = field(default_factory=list)
    _synced: dict[int, Content] = field(default_factory=dict)
    _open: dict[int, int] = field(default_factory=dict)
    """Descriptors of all that was ever seen: without them, its number might be given to another file."""

    def __post_init__(self) -> None:
        self._synced = self._look()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the moments of what runs in this block, in this process. The last one is after it."""
        with mock.patch.multiple(os, **{name: self._watched(name, getattr(os, name)) for name in WATCHED}):
            yield
        self._note("the end")
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        process = os.getpid()

        def call(*arguments: Any, **options: Any) -> Any:
            if os.getpid() != process:
                return function(*arguments, **options)
            about = f"{name}{tuple(map(str, arguments))}"
            self._note(f"before {about}")
            result = function(*arguments, **options)
            if name == "fsync":
                self._sync(arguments[0])
            self._note(f"after {about}")
            return result

        return call

    def _sync(self, descriptor: int) -> None:
        number = os.fstat(descriptor).st_ino
        there = self._look()
        if number in there:
            self._synced[number] = there[number]

    def _note(self, call: str) -> None:
        self.moments.append(Moment(call, self.root.stat().st_ino, self._look(), dict(self._synced)))

    def _look(self) -> dict[int, Content]:
        """All that is in `root` now."""
        found: dict[int, Content] = {}
        folders = [self.root]
        while folders:
            folder = folders.pop()
            names: dict[str, int] = {}
            found[folder.stat().st_ino] = names
            for entry in sorted(folder.iterdir()):
                facts = entry.lstat()
                names[entry.name] = facts.st_ino
                if facts.st_ino not in self._open:
                    self._open[facts.st_ino] = os.open(entry, os.O_PATH | os.O_NOFOLLOW)
                if stat.S_ISDIR(facts.st_mode):
                    folders.append(entry)
                else:
                    found[facts.st_ino] = entry.read_bytes()
        return found


@dataclass(frozen=True)
class Loss:
    """What one loss of power leaves."""

    call: str
    """Of its moment."""
    tree: Tree
    is_least: bool = False
    """It is what was synced, and nothing else: any later loss leaves as much."""
    is_over: bool = False
    """It is after the end."""


def losses(disk: Disk, seed: int, mixed: int = 4) -> Iterator[Loss]:
    """What losses of power leave, each once: at each moment what was synced alone, with all names as well, and `mixed` times
    with more, by chance. The last one is after the end, and has what was synced."""
    seen: set[str] = set()
    chosen = random.Random(seed)
    for moment in disk.moments:
        more = [moment.left(None, names=True), *(moment.left(chosen) for _ in range(mixed))]
        for tree in (least := moment.left(None), *more):
            key = repr(tree)
            if key not in seen:
                seen.add(key)
                yield Loss(moment.call, tree, is_least=tree is least)
    yield Loss("after the end", disk.moments[-1].left(None), is_least=True, is_over=True)


def write(tree: Tree, folder: Path) -> None:
    """Make `folder`, which is empty or missing, what `tree` says."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tree.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            write(content, folder / name)
