"""Finds the lines where Python code reads values that depend on the tokens, such as `if src[0, 0] == 5`.

What such code decides is not part of the data flow. The comparison sees it only for the sequences that it tries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tfexport.models.dispatch import DispatchMode, line_of_user
from tfexport.models.live.recording import Call, plain_operations
from tfexport.models.live.tape import MADE

_SHAPED_BY_VALUES = frozenset(
    (
        "nonzero",
        "masked_select",
        "_unique",
        "_unique2",
        "unique_consecutive",
        "unique_dim",
        "bincount",
        "repeat_interleave",
    )
)
"""Operations whose values are seen in the shape of their result."""
_READS_MEMORY = frozenset(("tolist", "numpy", "__array__", "__repr__", "__format__", "__dlpack__", "__reduce_ex__"))
"""Methods that read the memory of a tensor, which is no operation."""


class _Reads(DispatchMode):
    """A mode that notes the lines that read values of tensors that depend on the ids."""

    def __init__(self, *ids: Tensor):
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: dict[str, None] = {}
        self.is_paused = False
        # Tensors are kept, so that no other gets the address of their memory.
        self._dependent: dict[int, Tensor] = {tensor.untyped_storage()._cdata: tensor for tensor in ids}

    def depends(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the ids."""
        return tensor.untyped_storage()._cdata in self._dependent

    def add(self, tensor: Tensor, result: Tensor) -> None:
        """Let a result depend on the ids if a tensor does."""
        if self.depends(tensor):
            self._dependent[result.untyped_storage()._cdata] = result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and self.depends(leaf)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not read or self.is_paused:
            return result
        selects = name == "index" and any(tensor.dtype == torch.bool for tensor in read)  # as many rows as are true
        if not made or name in _SHAPED_BY_VALUES or selects:
            self.lines[line_of_user()] = None
        elif name not in MADE:
            self._dependent |= {tensor.untyped_storage()._cdata: tensor for tensor in made}
        return result


class _MemoryReads(TorchFunctionMode):
    """A mode that notes the lines that read the memory of tensors, and leaves out checks that PyTorch makes itself."""

    def __init__(self, reads: _Reads):
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS_MEMORY and self._reads.depends(args[0]):
            self._reads.lines[line_of_user()] = None
        if func is torch._C._nn.one_hot:
            return self._one_hot(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _one_hot(self, tensor: Tensor, num_classes: int = -1) -> Tensor:
        """`one_hot`, which checks the range of ids. Without a number of classes, its shape depends on them."""
        reads = self._reads
        if num_classes < 0 and reads.depends(tensor):
            reads.lines[line_of_user()] = None
        reads.is_paused = True
        try:
            result = torch.nn.functional.one_hot(tensor, num_classes)
        finally:
            reads.is_paused = False
        reads.add(tensor, result)
        return result


def lines_that_read_tokens(call: Call, src_ids: Tensor, tgt_ids: Tensor) -> list[str]:
    """The lines of the user's code, such as `my_code.py, line 41`, that read values that depend on the ids in Python."""
    with plain_operations(), _Reads(src_ids, tgt_ids) as reads, _MemoryReads(reads):
        call(src_ids, tgt_ids)
    return list(reads.lines)
