"""The base of the modes here that see every ATen operation."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that leaves PyTorch's compiler alone. By default each one imports it (3 s) and is slower."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
