"""Every option of a search against brute force, as in tests/unit/search/test_options.py, on an exported bundle whose
probabilities are those of the original model, run anew for each token."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from makers.tiny import TinyCheckpoint
from tests.unit.search.test_options import (  # noqa: F401
    Ids,
    Subject,
    test_a_wide_beam_lists_the_best_of_all_outputs,
    test_alternatives_are_the_best_outputs_with_each_of_the_likeliest_words,
    test_greedy_search_takes_the_best_token_of_each_step,
    test_samples_are_where_the_random_number_falls,
    test_the_subjects_try_the_rules,
)
from tfexport.bundle.reader import open_bundle
from tfexport.runtimes import load_runtime


@pytest.fixture(scope="module")
def subject(tiny_checkpoint: TinyCheckpoint, tiny_bundle: Path) -> Subject:
    @cache
    def logits(source: Ids, tokens: Ids) -> NDArray[Any]:
        with torch.no_grad():
            found = tiny_checkpoint.model(torch.tensor([source]), torch.tensor([[2, *tokens]]))
        return np.asarray(found[0, -1].numpy())

    runtime = load_runtime("ort-cpu", open_bundle(tiny_bundle), threads=1)
    return Subject(runtime, logits, (9, 30, 35, 12), 2, 3, [(2, 5, 6, 3), (2, 9, 3), (2, 30, 4, 4, 7, 3)])
