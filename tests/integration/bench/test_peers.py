"""Other engines behind one way to decode: order, batches, forced lengths, and what they refuse."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import converters
from tests.support.fakes import EOS, Ids, ScriptedRuntime, constant_model, random_model, tiny_config
from tfexport.bench.peers import CTranslate2Peer, HuggingFacePeer, OptimumPeer, Peer, RuntimePeer, _Generator
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.decoding.search import SearchOptions, search
from tfexport.errors import RuntimeUnavailable, TfexportError
from tfexport.runtimes import load_runtime
from tfexport.runtimes.base import Capacity
from tfexport.verification.parity import random_sources

PACKAGES = {"ctranslate2": "ctranslate2", "hugging-face": "transformers"}
NAMES = ["ort-cpu", *PACKAGES]


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path) -> Bundle:
    return open_bundle(tiny_bundle)


@pytest.fixture(scope="module")
def sources(bundle: Bundle) -> list[list[int]]:
    """Of many lengths, in no order, some of them twice."""
    drawn = [source[: bundle.config.max_source_length] for source in random_sources(bundle.config, 15)]
    return [*drawn, *drawn[:3]]


@pytest.fixture(scope="module")
def load(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Peer]:
    """The peer of a name, from a folder that is written once."""
    folder = tmp_path_factory.mktemp("peers")
    writers = {"ctranslate2": converters.write_ctranslate2, "hugging-face": converters.write_hugging_face}
    peers: dict[str, Callable[..., Peer]] = {"ctranslate2": CTranslate2Peer, "hugging-face": HuggingFacePeer}

    def load(name: str, *arguments: Any) -> Peer:
        if name == "ort-cpu":
            return RuntimePeer(load_runtime("ort-cpu", bundle, threads=1))
        pytest.importorskip(PACKAGES[name], reason=f"it is not installed: pip install {PACKAGES[name]}")
        if not (folder / name).exists():
            writers[name](converters.canonical_model(bundle), folder / name)
        return peers[name](folder / name, *arguments)

    return load


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("beam", [1, 3])
def test_any_number_of_sources_comes_back_in_its_order(
    load: Callable[..., Peer], bundle: Bundle, sources: list[list[int]], name: str, beam: int
) -> None:
    peer, options = load(name), SearchOptions(beam=beam, length_penalty=0.0, max_length=15)
    alone = [
        hypotheses[0].ids
        for s in sources
        for hypotheses in search(load_runtime("ort-cpu", bundle, threads=1), [s], options)
    ]
    ends = [ids[-1] == bundle.config.eos_id for ids in alone]
    assert any(ends)
    assert not all(ends)
    for batch_size in (1, 4, len(sources), 1000):
        assert peer.decode(sources, options, batch_size) == alone
    assert peer.decode([], options, 4) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 9, 20])
def test_forced_lengths_are_exact(
    load: Callable[..., Peer], sources: list[list[int]], name: str, beam: int, tokens: int
) -> None:
    options = SearchOptions(beam=beam, min_length=tokens - 1, max_length=tokens)
    assert {len(ids) for ids in load(name).decode(sources, options, 5)} == {tokens}


@pytest.mark.parametrize("name", NAMES)
def test_the_model_s_own_limit_holds(load: Callable[..., Peer], sources: list[list[int]], name: str) -> None:
    assert max(len(ids) for ids in load(name).decode(sources, SearchOptions(max_length=1000), 5)) == 20


def test_workers_of_ctranslate2_share_the_batches(load: Callable[..., Peer], sources: list[list[int]]) -> None:
    options = SearchOptions(beam=2)
    alone, shared = load("ctranslate2"), load("ctranslate2", "float32", 1, 2)
    assert shared.decode(sources * 5, options, 3) == alone.decode(sources * 5, options, 3)


def test_ctranslate2_decodes_in_int8(load: Callable[..., Peer], sources: list[list[int]]) -> None:
    peer = load("ctranslate2", "int8")
    assert peer.name == "ctranslate2-int8"
    found = peer.decode(sources, SearchOptions(min_length=9, max_length=10), 4)
    assert {len(ids) for ids in found} == {10}


def test_hugging_face_decodes_in_another_precision(load: Callable[..., Peer], sources: list[list[int]]) -> None:
    peer: Any = load("hugging-face", 1, "bfloat16")
    assert str(peer._generator._model.dtype) == "torch.bfloat16"
    assert len(peer.decode(sources, SearchOptions(), 4)) == len(sources)


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


SOURCES: list[Ids] = [(5, EOS), (5, 6, 7, EOS), (8, EOS), (5, 6, 7, 8, 9, EOS), (7, 6, EOS)]


def test_batches_are_of_like_lengths_and_no_larger_than_allowed() -> None:
    runtime = Noted(constant_model([0.0, 0.0, 0.0, 1.0, 2.0]), tiny_config(tgt_vocab_size=5))
    RuntimePeer(runtime).decode(SOURCES, SearchOptions(max_length=2), 2)
    assert runtime.batches == [[6, 4], [3, 2], [2]]

    few = Noted(random_model(1, 9), tiny_config(tgt_vocab_size=9), capacity=Capacity(50, 50, rows=6))
    RuntimePeer(few).decode(SOURCES, SearchOptions(beam=2, max_length=2), 100)
    assert [len(batch) for batch in few.batches] == [3, 2]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_limit_for_each_source_is_refused(load: Callable[..., Peer], name: str) -> None:
    with pytest.raises(TfexportError, match="max_length_ratio"):
        load(name).decode([[4, 5]], SearchOptions(max_length_ratio=1.5), 1)


class NotedModel:
    """A model of Hugging Face that notes what `generate` is asked for."""

    config = SimpleNamespace(pad_token_id=1, eos_token_id=EOS)

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def generate(self, **asked: Any) -> Any:
        import torch

        self.asked.append(asked)
        return torch.tensor([[2, 9, EOS, 1, 1]] * len(asked["input_ids"]))


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


@pytest.mark.parametrize(
    ("peer", "package", "remedy"),
    [
        (CTranslate2Peer, "ctranslate2", "pip install ctranslate2"),
        (HuggingFacePeer, "transformers", "pip install torch transformers"),
        (OptimumPeer, "optimum", "pip install optimum-onnx onnxruntime"),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peer: Callable[..., Peer], package: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.onnxruntime", None)
    with pytest.raises(RuntimeUnavailable, match=f"{remedy}\\.$"):
        peer(tmp_path)


@pytest.mark.parametrize("content", [None, "{", "[]", json.dumps({"max_target_length": None}), "{}"])
@pytest.mark.parametrize(("peer", "package"), [(CTranslate2Peer, "ctranslate2"), (HuggingFacePeer, "transformers")])
def test_a_folder_of_another_kind_is_refused(
    tmp_path: Path, peer: Callable[..., Peer], package: str, content: str | None
) -> None:
    pytest.importorskip(package, reason=f"it is not installed: pip install {package}")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(TfexportError, match=r"has no model of benchmarks/converters\.py .* Write one there"):
        peer(tmp_path)
