"""Weights that a file stores in parts, or in a form that no layer reads: weight norm, pruning, int8, sparse tensors.

A weight is computed from its parts as torch computes it, with the same function. Other forms are refused by name, with what
to save instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfexport.errors import CheckpointError
from tfexport.models.formats.pickles import InertObject

_PARAMETRIZED = re.compile(r"(?P<layer>.*)\bparametrizations\.(?P<name>\w+)\.(?P<part>.+)")
_NORMED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_QUANTIZED = re.compile(r"(.*?)\b_packed_params(\..+)?")


def require_floats(path: Path, entries: Mapping[str, Any]) -> None:
    """Check the entries of a state_dict for forms of weights that are not tensors of floating-point numbers.

    Raises:
        CheckpointError: an entry is quantized, sparse, a NumPy array, or another kind of tensor than plain ones.
    """
    for name, value in entries.items():
        of = value.of if isinstance(value, InertObject) else ""
        if _QUANTIZED.fullmatch(name) or of == "torch._utils._rebuild_qtensor":
            raise CheckpointError(
                f"{path} was quantized by torch.ao.quantization: {name} is not a floating-point weight. Give the checkpoint "
                "from before the quantization; tfexport quantizes it with --precision int8."
            )
        is_sparse = isinstance(value, Tensor) and value.layout != torch.strided
        if is_sparse or of == "torch._utils._rebuild_sparse_tensor":
            raise CheckpointError(f"{path} has a sparse tensor, {name}. {_save('tensor.to_dense()')}")
        if of.endswith("multiarray._reconstruct") and "." in name:  # names without dots are results of the training
            raise CheckpointError(f"{path} has a NumPy array, {name}. {_save('torch.as_tensor(tensor)')}")
        if of.startswith(("torch._utils._rebuild_", "torch._tensor._rebuild_")):
            kind = of.rpartition("_rebuild_")[2]
            raise CheckpointError(
                f"{path} has a tensor of a kind that is not read ({kind}), {name}. Save it as a plain tensor of "
                "floating-point numbers."
            )
        if ".lora_A." in name:
            raise CheckpointError(
                f"{path} has LoRA adapters, such as {name}. Merge them into the weights before you save them: "
                "model.merge_and_unload() of peft returns the model without adapters."
            )


def _save(tensor: str) -> str:
    """The advice to save a state_dict whose values are this expression."""
    return (
        f"Save plain tensors: torch.save({{name: {tensor} for name, tensor in model.state_dict().items()}}, 'ckpt.pt')."
    )


def whole_weights(path: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights, with those that are stored in parts computed as torch computes them.

    Raises:
        CheckpointError: a weight has parts of another kind than weight norm and pruning.
    """
    made = dict(weights)
    for name in weights:
        if (match := _PARAMETRIZED.fullmatch(name)) and name in made:
            _join_parametrized(path, made, match)
    for name in weights:
        base = name[:-2]
        if name.endswith("_g") and f"{base}_v" in made and base not in made and name in made:
            made[base] = _normed(path, base, made.pop(name), made.pop(f"{base}_v"))
        base = name.removesuffix("_orig")
        if base == name or name not in made or base in made:
            continue
        if f"{base}_mask" in made:  # torch.nn.utils.prune
            original, mask = made.pop(name), made.pop(f"{base}_mask")
            if original.shape != mask.shape:
                raise CheckpointError(
                    f"{path} has {name} of {list(original.shape)} and a mask of {list(mask.shape)}. Check that the file is "
                    "complete."
                )
            made[base] = mask.to(dtype=original.dtype) * original
        elif f"{base}_u" in made:
            raise CheckpointError(_refusal(path, base, "spectral norm", "torch.nn.utils.remove_spectral_norm"))
    return made


def _join_parametrized(path: Path, made: dict[str, Tensor], match: re.Match[str]) -> None:
    """Replace the parts of a weight of `torch.nn.utils.parametrizations.weight_norm` by the weight."""
    prefix, weight = f"{match['layer']}parametrizations.{match['name']}.", f"{match['layer']}{match['name']}"
    parts = {name.removeprefix(prefix) for name in made if name.startswith(prefix)}
    if parts != {"original0", "original1"} or weight in made:
        raise CheckpointError(
            _refusal(path, weight, "a parametrization", "torch.nn.utils.parametrize.remove_parametrizations")
        )
    made[weight] = _normed(path, weight, made.pop(f"{prefix}original0"), made.pop(f"{prefix}original1"))


def _normed(path: Path, name: str, magnitude: Tensor, direction: Tensor) -> Tensor:
    """`direction` with the norms `magnitude`, as `torch.nn.utils.weight_norm` computes it in every step."""
    shapes = {-1: torch.Size(())}  # one norm for the whole weight
    for dim, size in enumerate(direction.shape):
        shapes[dim] = torch.Size(size if axis == dim else 1 for axis in range(direction.dim()))
    fitting = [dim for dim, shape in shapes.items() if shape == magnitude.shape]
    # Other shapes and types could stop the process: torch's function does not check them.
    are_plain = (
        direction.dtype == magnitude.dtype
        and direction.dtype in _NORMED
        and min(direction.numel(), direction.dim()) > 0
    )
    if not fitting or not are_plain:
        raise CheckpointError(
            f"{path} has two parts of {name}, {list(magnitude.shape)} and {list(direction.shape)}, which are not those of "
            "torch.nn.utils.weight_norm. Save the weight itself: remove the parametrization first."
        )
    return torch._weight_norm(direction.contiguous(), magnitude.contiguous(), fitting[0])


def _refusal(path: Path, weight: str, kind: str, remedy: str) -> str:
    return (
        f"{path} has {weight} in parts, of {kind} that is not computed. Call {remedy}(layer"
        f"{', name' if 'parametrize' in remedy else ''}) for each layer that has one, and save the state_dict again."
    )
