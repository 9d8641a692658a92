"""Compares the weights of a checkpoint with those of the user's module, and puts other weights in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


def prefix_in(user_module: nn.Module, names: Sequence[str]) -> str | None:
    """The prefix of the names of the weights in the user's module; None if some are missing."""
    state = user_module.state_dict(keep_vars=True)
    for key in state:
        if key.endswith(names[0]) and all(key.removesuffix(names[0]) + name in state for name in names):
            return key.removesuffix(names[0])
    return None


def disturbed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`weights` with seeded random numbers from 0 to 0.5 added to each vector.

    Norms and biases that are still ones and zeros after training would hide an exchange. Positive values, such as a
    variance, stay positive, and several names of one tensor still share a tensor.
    """
    random = torch.Generator().manual_seed(0)
    made: dict[tuple[int, int], Tensor] = {}
    changed = dict(weights)
    for name, tensor in weights.items():
        if tensor.dim() == 1 and tensor.is_floating_point():
            noise = torch.rand(tensor.shape, generator=random) / 2
            changed[name] = made.setdefault((tensor.data_ptr(), len(tensor)), (tensor.float() + noise).to(tensor.dtype))
    return changed


def differing_weights(user_module: nn.Module, weights: Mapping[str, Tensor]) -> list[str] | None:
    """Names of weights for which the user's module has other numbers; None if it has other names."""
    prefix = prefix_in(user_module, list(weights))
    if prefix is None:
        return None
    state = user_module.state_dict()
    return [
        name
        for name, tensor in weights.items()
        if state[prefix + name].shape != tensor.shape or not torch.equal(state[prefix + name].float(), tensor.float())
    ]
