"""Steps of beam search without Python between two runs of the step graph but one call of the kernels' library.

`kernels/beams.h` ranks the continuations of a step, and moves the inputs of the step graph on. It has the same results as
the search in NumPy, to the last bit.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfexport import kernels
from tfexport.runtimes.base import Ahead
from tfexport.runtimes.ort_cpu.bound_graphs import StepGraph
from tfexport.runtimes.outputs import Continuations, IntArray


class _Beams(ctypes.Structure):
    """`Beams` of kernels/beams.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("sentences", "places", "beam", "width", "slots", "best", "candidates")),
        *((name, ctypes.c_int64) for name in ("eos", "banned_size", "ends_size")),
        *((name, ctypes.c_void_p) for name in ("place", "banned", "ends", "best_log_probs", "best_ids", "log_probs")),
        *((name, ctypes.c_void_p) for name in ("tokens", "position", "slot", "mask")),
        *((f"candidate_{name}", ctypes.c_void_p) for name in ("log_probs", "parents", "tokens")),
    )


class _Functions(NamedTuple):
    """Functions of the library. They take microseconds, so they keep the interpreter's lock."""

    begin: Callable[..., Any]
    advance: Callable[..., int]


@functools.cache
def _functions(library: str) -> _Functions | None:
    loaded = ctypes.PyDLL(library)
    try:
        begin, advance = loaded.tfexport_begin_beams, loaded.tfexport_advance_beams
    except AttributeError:  # an older library, in a source tree
        return None
    begin.argtypes, begin.restype = (ctypes.c_void_p,), None
    advance.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
    return _Functions(begin, advance)


def available() -> bool:
    """Whether the kernels' library is there."""
    path = kernels.library()
    return path is not None and _functions(str(path)) is not None


def run_steps(
    step: StepGraph,
    request: Ahead,
    steps: int,
    *,
    beam: int,
    places: IntArray,
    slot: IntArray,
    mask: NDArray[np.bool_],
) -> Continuations:
    """Run up to `steps` steps, at least one; fewer if a hypothesis ends.

    Args:
        step: the graph of one or of `beam` hypotheses of each sentence. Its tokens and positions are set.
        places: the places of the live sentences, [sentences].
        slot: the next free slot of each place, [places]; changes.
        mask: the slots that each hypothesis sees, [places, 1, beam, slots]; changes. The step graph reads it, unless it
            computes one hypothesis of each sentence.

    Returns:
        The continuations of each step, [steps, sentences, candidates].
    """
    functions = _functions(str(kernels.library()))
    assert functions is not None
    assert request.log_probs is not None
    shape = (steps, len(places), request.candidates)
    log_probs, parents, tokens = np.empty(shape), np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
    best_log_probs, best_ids = step.bind_best(request.candidates + len(request.banned[0]))
    arrays = (
        *(places, np.array(request.banned[0], dtype=np.int64), np.array(request.end_ids, dtype=np.int64)),
        *(best_log_probs, best_ids, np.array(request.log_probs), step.tokens, step.position),
        *(slot, mask, log_probs, parents, tokens),
    )
    beams = _Beams(
        *(len(places), len(slot), beam, step.tokens.shape[1], mask.shape[3], best_ids.shape[1], request.candidates),
        *(step.config.eos_id, len(request.banned[0]), len(request.end_ids)),
        *(array.__array_interface__["data"][0] for array in arrays),
    )
    address = ctypes.addressof(beams)
    if step.tokens.shape[1] == beam:
        functions.begin(address)
    count, stops = 0, 0
    while not stops:
        step.binding.run()
        count += 1
        stops = functions.advance(address, count - 1, count == steps)
    if stops < 0:
        raise MemoryError
    return Continuations(log_probs[:count], parents[:count], tokens[:count])
