"""The stand-ins of CUDA, over which a rehearsal decodes."""

from __future__ import annotations

import sys
from collections.abc import Callable

MODULE = "benchmarks.cuda_dry.stand_in"


def use_stand_ins(say: Callable[[str], None]) -> None:
    """Let this process, which has not imported CUDA, meet the stand-ins, where they have been made."""
    try:
        from benchmarks.cuda_dry import stand_in
    except (OSError, ImportError) as error:
        say(f"note: no stand-ins of CUDA here, so ort-cuda is not rehearsed: {error}")
        return
    stand_in.use()


def have_stand_ins() -> bool:
    """Whether this process decodes over them: their module may be imported for other reasons."""
    module = sys.modules.get(MODULE)
    return module is not None and isinstance(sys.modules.get("cuda.bindings.runtime"), module.Cudart)
