"""Arithmetic that is identified by its values."""

from __future__ import annotations

import torch

from tfexport.models.live.fits import affine


def test_one_factor_is_exact_also_for_a_feature_that_is_nearly_the_same_for_all_tokens() -> None:
    states = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    states[:, 0] = 1 + 1e-9 * states[:, 0]
    fit = affine(states, 0.35 * states)
    assert fit is not None
    assert bool((fit.bias == 0).all())
    torch.testing.assert_close(fit.factor, torch.full_like(fit.factor, 0.35), rtol=1e-14, atol=0)


def test_a_factor_of_one_is_exactly_one_in_spite_of_rounding() -> None:
    states = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fit = affine(states, states * (1 + 2.0**-50))
    assert fit is not None
    assert fit.is_identity
