"""Helpers of the torch modes that see every ATen operation."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that leaves PyTorch's compiler alone. By default each one imports it (3 s) and is slower."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def line_of_user() -> str:
    """The innermost line that runs now outside PyTorch and tfexport, such as `my_code.py, line 41`; empty if none does."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARIES):
            return f"{Path(name).name}, line {frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
