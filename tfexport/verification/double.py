"""Run a module in float64 throughout, also where its code asks for float32.

Attention that computes its softmax in float32, or positions made in float32, differ from exact arithmetic by rounding alone.
That rounding would look like a small fault of the model, such as another epsilon.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


class InDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes in float64 what asks for a narrower type, and keeps the lines of code that asked."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: dict[str, None] = {}
        """`my_model.py, line 42` of each line that asks for a narrower type than float64, in order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _NARROW:
            self.places[_caller()] = None
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def _caller() -> str:
    """The innermost line that is not of PyTorch or tfexport."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_OWN):
            return f"{Path(frame.filename).name}, line {frame.lineno}"
    return "its code"


@contextmanager
def in_double() -> Iterator[InDouble]:
    """Within it every floating-point number is float64, except in tensors that were made before."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble() as mode:
            yield mode
    finally:
        torch.set_default_dtype(before)
