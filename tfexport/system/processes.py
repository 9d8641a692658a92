"""This process and its CPUs."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

CPU_FACTS = Path("/proc/cpuinfo")
PR_SET_PDEATHSIG = 1
_M_MMAP_THRESHOLD = -3

RETURN_EVERY = 1.0
"""Minimum number of seconds between returns of freed memory. A return takes some milliseconds, and so does new memory."""

LARGE_BUFFER = 16 * 2**20
"""Minimum size in bytes of a buffer with its own mapping; see `map_large_buffers`."""

_returned = 0.0


def usable_cpus() -> int:
    """The number of CPUs that this process may use, which may be less than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The name of the processor's model."""
    try:
        match = re.search(r"^model name\s*: (.+)$", CPU_FACTS.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.processor()


INSTRUCTION_SETS = {
    **{"avx": "AVX", "fma": "FMA", "avx2": "AVX2", "avx_vnni": "AVX-VNNI", "avx512f": "AVX-512"},
    **{"avx512_vnni": "AVX-512 VNNI", "amx_int8": "AMX-INT8"},
    **{"asimd": "NEON", "asimddp": "NEON dot product", "i8mm": "I8MM", "sve": "SVE", "sve2": "SVE2"},
}
"""Instruction sets for matrix products: their names in Linux, and their usual names."""

APPLE_SETS = {
    **{"hw.optional.AdvSIMD": "NEON", "hw.optional.arm.FEAT_DotProd": "NEON dot product"},
    **{"hw.optional.arm.FEAT_I8MM": "I8MM", "hw.optional.avx1_0": "AVX", "hw.optional.fma": "FMA"},
    **{"hw.optional.avx2_0": "AVX2", "hw.optional.avx512f": "AVX-512", "hw.optional.avx512vnni": "AVX-512 VNNI"},
}


def instruction_sets() -> tuple[str, ...]:
    """This CPU's instruction sets for matrix products, such as `("AVX", "FMA", "AVX2")`; empty if they are unknown."""
    if platform.system() == "Darwin":
        return tuple(name for key, name in APPLE_SETS.items() if system_number(key) == 1)
    try:
        text = CPU_FACTS.read_text(encoding="utf-8")
    except OSError:
        return ()
    match = re.search(r"^(?:flags|Features)\s*: (.+)$", text, re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    return tuple(name for flag, name in INSTRUCTION_SETS.items() if flag in flags)


def system_number(key: str) -> int:
    """The value of a macOS `sysctl` number; 0 if it does not exist."""
    value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
    failed = ctypes.CDLL(None).sysctlbyname(key.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value


def cpu_identity() -> str:
    """The model and instruction sets of the processor, by which libraries choose their code."""
    try:
        first = CPU_FACTS.read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    telling = r"^(?:vendor_id|cpu family|model|model name|stepping|flags|Features|CPU \w+)\s*:.*$"
    return "\n".join(re.findall(telling, first, re.MULTILINE))


def end_with_parent() -> None:
    """Kill this process when its parent dies (Linux only). Otherwise a stopped or waiting process would stay for ever."""
    with suppress(OSError, AttributeError, TypeError):  # TypeError: on Windows None is no library
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_out_of_collections() -> None:
    """Exclude all current objects, except garbage, from garbage collections.

    A full collection visits every object of the process while nothing else runs. A server has hundreds of thousands of
    permanent objects of modules and schemas, and stopped for a tenth of a second every few seconds.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def map_large_buffers() -> None:
    """Give each new large buffer its own mapping, which returns to the system when the buffer is freed (glibc only).

    By default glibc puts ever larger buffers into its heap, once such a buffer was freed. Matrices of all sizes then leave
    gaps in the heap: the check of an exported base model took up to a gigabyte more in some runs than in others.
    """
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BUFFER)


def close_sockets(*, keep: int) -> None:
    """Close the sockets that this process inherited (Linux only). They would stay open when the parent closes them.

    The null device keeps their numbers in use, because an inherited object may close its own number again.

    Args:
        keep: a file descriptor that stays open.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for entry in list(Path("/proc/self/fd").glob("*")):
        with suppress(OSError):
            if int(entry.name) != keep and os.readlink(entry).startswith("socket:"):
                os.dup2(null, int(entry.name), inheritable=False)
    os.close(null)


def return_freed_memory(*, now: bool = False) -> None:
    """Return freed memory to the system, at once if `now`, else at most once a second (glibc only).

    By default glibc keeps much of it in pieces that may not fit later allocations. Over hours of batches of all sizes, a
    process would grow.
    """
    global _returned
    moment = time.monotonic()
    if not now and moment - _returned < RETURN_EVERY:
        return
    _returned = moment
    with suppress(OSError, AttributeError, TypeError):  # TypeError: on Windows None is no library
        ctypes.CDLL(None).malloc_trim(0)
