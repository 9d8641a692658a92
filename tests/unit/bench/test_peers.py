"""Other engines behind one way to decode: how batches are formed and what is given to them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fakes import EOS, Ids, ScriptedRuntime, constant_model, random_model, tiny_config
from tfexport.bench.peers import RuntimePeer, _Generator
from tfexport.runtimes.base import Capacity
from tfexport.search.search import SearchOptions

SOURCES: list[Ids] = [(5, EOS), (5, 6, 7, EOS), (8, EOS), (5, 6, 7, 8, 9, EOS), (7, 6, EOS)]


class Noted(ScriptedRuntime):
    """Notes the lengths of the sources of each batch."""

    def __init__(self, *arguments: Any, capacity: Capacity | None = None):
        super().__init__(*arguments)
        self.batches: list[list[int]] = []
        if capacity is not None:
            self.capacity = capacity

    def encode(self, src_ids: Any, src_len: Any, *, beam: int = 1, attention: bool = False) -> Any:
        self.batches.append(src_len.tolist())
        return super().encode(src_ids, src_len, beam=beam, attention=attention)


class NotedModel:
    """A model of Hugging Face that notes what `generate` is asked for."""

    config = SimpleNamespace(pad_token_id=1, eos_token_id=EOS)

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def generate(self, **asked: Any) -> Any:
        import torch

        self.asked.append(asked)
        return torch.tensor([[2, 9, EOS, 1, 1]] * len(asked["input_ids"]))


def test_batches_are_of_like_lengths_and_no_larger_than_allowed() -> None:
    runtime = Noted(constant_model([0.0, 0.0, 0.0, 1.0, 2.0]), tiny_config(tgt_vocab_size=5))
    RuntimePeer(runtime).decode(SOURCES, SearchOptions(max_length=2), 2)
    assert runtime.batches == [[6, 4], [3, 2], [2]]

    few = Noted(random_model(1, 9), tiny_config(tgt_vocab_size=9), capacity=Capacity(50, 50, rows=6))
    RuntimePeer(few).decode(SOURCES, SearchOptions(beam=2, max_length=2), 100)
    assert [len(batch) for batch in few.batches] == [3, 2]


def test_hugging_face_is_given_padded_sources_and_only_the_options_of_its_search() -> None:
    model = NotedModel()
    generator = _Generator(model, limit=30)
    assert generator.decode([(5, EOS), (6, 7, EOS)], SearchOptions(), 2) == [(9, EOS)] * 2
    (asked,) = model.asked
    assert asked.pop("input_ids").tolist() == [[6, 7, EOS], [5, EOS, 1]]
    assert asked.pop("attention_mask").tolist() == [[1, 1, 1], [1, 1, 0]]
    assert asked == {"num_beams": 1, "do_sample": False, "max_new_tokens": 30}

    generator.decode([(5,) * 7, (6,) * 3], SearchOptions(beam=4, min_length=3, max_length=8, length_penalty=0.9), 1)
    asked = model.asked[-1]
    # The slope of log(((5 + length) / 6) ** 0.9) over log(length) at the mean length 5.
    assert asked["length_penalty"] == pytest.approx(0.9 * 5 / 10)
    assert (asked["num_beams"], asked["min_new_tokens"], asked["max_new_tokens"]) == (4, 3, 8)
