"""No n-gram of a source comes in its output."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.support.fakes import ScriptedRuntime, random_model, tiny_config
from tfexport.search.rules.encoder_no_repeat_ngram import EncoderNoRepeatNgram
from tfexport.search.search import SearchOptions, search


@pytest.mark.parametrize(
    ("n", "banned"),
    [(1, [{5, 6, 2}, {6}]), (2, [{6}, {6}]), (3, [{2}, set()]), (4, [set(), set()]), (9, [set(), set()])],
)
def test_what_would_end_an_ngram_of_the_source_is_banned(n: int, banned: list[set[int]]) -> None:
    allowed = np.ones((2, 7), dtype=bool)
    history = np.array([[1, 5] if n == 2 else [5, 6], [1, 6]])
    rule = EncoderNoRepeatNgram(encoder_no_repeat_ngram=n)
    rule.ban(allowed, history, [(5, 6, 2), (6, 6, 9)])  # the target has no id 9
    assert [{*np.flatnonzero(~row).tolist()} for row in allowed] == banned


@pytest.mark.parametrize("options", [{}, {"beam": 3, "nbest": 3}, {"samples": 2}], ids=str)
def test_sentences_of_a_batch_have_their_own_source(options: dict[str, Any]) -> None:
    sources = [(5, 6, 3, 4, 5, 2), (4, 4, 6, 6, 3, 3, 2), (3, 6, 5, 2)]
    asked = SearchOptions(max_length=9, encoder_no_repeat_ngram=2, **options)
    differs = False
    for seed in range(5):
        runtime = ScriptedRuntime(random_model(seed, 7), tiny_config(tgt_vocab_size=7))
        together = search(runtime, sources, asked)
        for source, outputs in zip(sources, together, strict=True):
            for hypothesis in outputs:
                assert not {*pairwise(source)} & {*pairwise(hypothesis.ids)}
        plain = search(runtime, sources, SearchOptions(max_length=9, **options))
        differs |= [h.ids for one in plain for h in one] != [h.ids for one in together for h in one]
    assert differs
