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
"""Seconds after which freed memory is given back again; it takes some milliseconds, and so does touching it anew."""

LARGE_BUFFER = 16 * 2**20
"""Bytes from which a buffer gets a map of its own, see `map_large_buffers`."""

_returned = 0.0


def usable_cpus() -> int:
    """CPUs that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's model, as it calls itself."""
    try:
        found = re.search(r"^model name\s*: (.+)$", CPU_FACTS.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor()


INSTRUCTION_SETS = {
    **{"avx": "AVX", "fma": "FMA", "avx2": "AVX2", "avx_vnni": "AVX-VNNI", "avx512f": "AVX-512"},
    **{"avx512_vnni": "AVX-512 VNNI", "amx_int8": "AMX-INT8"},
    **{"asimd": "NEON", "asimddp": "NEON dot product", "i8mm": "I8MM", "sve": "SVE", "sve2": "SVE2"},
}
"""Of those that matrix products use, the names that Linux has and the usual ones."""

APPLE_SETS = {
    **{"hw.optional.AdvSIMD": "NEON", "hw.optional.arm.FEAT_DotProd": "NEON dot product"},
    **{"hw.optional.arm.FEAT_I8MM": "I8MM", "hw.optional.avx1_0": "AVX", "hw.optional.fma": "FMA"},
    **{"hw.optional.avx2_0": "AVX2", "hw.optional.avx512f": "AVX-512", "hw.optional.avx512vnni": "AVX-512 VNNI"},
}


def instruction_sets() -> tuple[str, ...]:
    """This CPU's instruction sets for matrix products, such as `("AVX", "FMA", "AVX2")`; empty where they are not known."""
    if platform.system() == "Darwin":
        return tuple(name for key, name in APPLE_SETS.items() if system_number(key) == 1)
    try:
        text = CPU_FACTS.read_text(encoding="utf-8")
    except OSError:
        return ()
    found = re.search(r"^(?:flags|Features)\s*: (.+)$", text, re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    return tuple(name for flag, name in INSTRUCTION_SETS.items() if flag in flags)


def system_number(key: str) -> int:
    """A number that macOS has by this name (`sysctl`); 0 where it has none."""
    value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
    failed = ctypes.CDLL(None).sysctlbyname(key.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value


def cpu_identity() -> str:
    """What programs that choose code by the processor look at: its model and its instruction sets."""
    try:
        first = CPU_FACTS.read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    telling = r"^(?:vendor_id|cpu family|model|model name|stepping|flags|Features|CPU \w+)\s*:.*$"
    return "\n".join(re.findall(telling, first, re.MULTILINE))


def end_with_parent() -> None:
    """Let this process be killed when its parent dies, on Linux: it may be stopped or waiting, and would stay for ever."""
    with suppress(OSError, AttributeError, TypeError):  # TypeError: on Windows None is no library
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_out_of_collections() -> None:
    """Leave all objects that are there now out of garbage collections, but for those that are garbage.

    A full collection visits every object of the process while nothing else runs. In a server these are hundreds of
    thousands, of modules and schemas, which stay for ever: it stopped for a tenth of a second every few seconds.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def map_large_buffers() -> None:
    """Let each large buffer have a map of its own from now on, which goes back to the system when it is freed; for glibc.

    By itself glibc puts ever larger buffers into its heap, once such a buffer was freed. Matrices of all sizes that come and
    go leave gaps there: the check of an exported base model took up to a gigabyte more in some runs than in others.
    """
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BUFFER)


def close_sockets(*, keep: int) -> None:
    """Close the sockets that this process has from its parent, on Linux: each would stay open when the parent closes it.

    Their numbers stay taken, by the null device: an object of the parent's that is still here may close its own once more.

    Args:
        keep: a file descriptor that stays.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for entry in list(Path("/proc/self/fd").glob("*")):
        with suppress(OSError):
            if int(entry.name) != keep and os.readlink(entry).startswith("socket:"):
                os.dup2(null, int(entry.name), inheritable=False)
    os.close(null)


def return_freed_memory(*, now: bool = False) -> None:
    """Give freed memory back to the system, at once if `now`, else once a second at most, where the C library is glibc.

    By itself glibc keeps much of it, in pieces that what is asked for next may not fit into: over hours of batches of all
    sizes a process would grow.
    """
    global _returned
    moment = time.monotonic()
    if not now and moment - _returned < RETURN_EVERY:
        return
    _returned = moment
    with suppress(OSError, AttributeError, TypeError):  # TypeError: on Windows None is no library
        ctypes.CDLL(None).malloc_trim(0)
