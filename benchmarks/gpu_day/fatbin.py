"""Machine code for one GPU architecture: the rest of a library's `.nv_fatbin` section becomes zeros, which compress well.

A section is a row of containers: a header, then members, each the code of the container's kernels for one architecture (a
cubin) or PTX, which a driver compiles. Members that stay are moved to the front of their container, and its size is made
smaller, so that a loader sees them alone. The layout is not documented by NVIDIA; it is that of CUDA 11 to 13.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC = 0xBA55ED50
CONTAINER = struct.Struct("<IHHQ")
"""Magic, version, bytes of this header, bytes of all members."""
MEMBER = struct.Struct("<HHIQ")
"""Kind, version, bytes of this header, bytes of the code."""
ARCHITECTURE = 28
"""Offset of the architecture, such as 90, in the header of a member."""
PTX, CUBIN = 1, 2


class NoFatbin(Exception):
    """A library has no machine code for GPUs that can be found."""


@dataclass(frozen=True)
class Thinned:
    """What was left of a library."""

    containers: int
    before: int
    after: int
    """Bytes of the members of all containers."""
    without: int
    """Containers with nothing for the architecture, which were left as they are."""


def section(path: Path) -> tuple[int, int]:
    """Offset and size of `.nv_fatbin` in an ELF file.

    Raises:
        NoFatbin: there is none, or no `readelf` to look for it.
    """
    try:
        done = subprocess.run(["readelf", "-S", "-W", str(path)], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoFatbin(f"{path.name}: readelf of binutils is needed: {error}") from error
    for line in done.stdout.splitlines():
        words = line.partition("]")[2].split()
        if words and words[0] == ".nv_fatbin":
            return int(words[3], 16), int(words[4], 16)
    raise NoFatbin(f"{path.name} has no section .nv_fatbin")


def members(data: bytes | bytearray, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Kind, architecture, offset and size of each member between two offsets.

    Raises:
        NoFatbin: there is something else.
    """
    while start < end:
        kind, _, header, size = MEMBER.unpack_from(data, start)
        if header < MEMBER.size or start + header + size > end:
            raise NoFatbin(f"what stands at {start:#x} is no member of a container: the layout is another one")
        (architecture,) = struct.unpack_from("<I", data, start + ARCHITECTURE)
        yield kind, architecture, start, header + size
        start += header + size


def containers(data: bytes | bytearray, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Offset of each container, and where its members begin and end."""
    while start + CONTAINER.size <= end:
        magic, _, header, size = CONTAINER.unpack_from(data, start)
        if magic != MAGIC:
            start += 8  # what lies between containers is padding
            continue
        yield start, start + header, start + header + size
        start += header + size


def wanted(found: list[tuple[int, int, int, int]], architecture: int) -> list[tuple[int, int, int, int]]:
    """Of the members of a container those that a GPU of `architecture` may use.

    Machine code runs on its own and on later minor versions: the newest of these. PTX where there is no such code.
    """
    runs = [a for kind, a, _, _ in found if kind == CUBIN and a // 10 == architecture // 10 and a <= architecture]
    if runs:
        return [member for member in found if member[0] == CUBIN and member[1] == max(runs)]
    return [member for member in found if member[0] == PTX and member[1] <= architecture]


def thin(data: bytearray, start: int, size: int, architecture: int) -> Thinned:
    """Leave only the code for `architecture` in a section of `data`, which keeps its length."""
    count = before = after = without = 0
    for place, first, end in list(containers(data, start, start + size)):
        kept = wanted(list(members(data, first, end)), architecture)
        count, before = count + 1, before + end - first
        if not kept:
            without, after = without + 1, after + end - first
            continue
        content = b"".join(bytes(data[offset : offset + length]) for _, _, offset, length in kept)
        data[first:end] = content + bytes(end - first - len(content))
        struct.pack_into("<Q", data, place + 8, len(content))
        after += len(content)
    return Thinned(count, before, after, without)


def thin_file(source: Path, target: Path, architecture: int) -> Thinned:
    """Write `source` to `target` with the code for `architecture` alone.

    Raises:
        NoFatbin: it has no such code that can be found.
    """
    start, size = section(source)
    data = bytearray(source.read_bytes())
    found = thin(data, start, size, architecture)
    if not found.containers:
        raise NoFatbin(f"{source.name}: no container of GPU code was found in .nv_fatbin")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    target.chmod(source.stat().st_mode & 0o777)
    return found
