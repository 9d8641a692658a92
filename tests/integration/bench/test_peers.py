"""Other engines behind one way to decode: order, batches, forced lengths, and what they refuse."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import converters
from tfexport.bench.peers import CTranslate2Peer, HuggingFacePeer, OptimumPeer, Peer, RuntimePeer
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.errors import RuntimeUnavailable, TfexportError
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions, search
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


@pytest.mark.sampled(every=4)
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


@pytest.mark.sampled(every=5)
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


@pytest.mark.parametrize("name", PACKAGES)
def test_a_limit_for_each_source_is_refused(load: Callable[..., Peer], name: str) -> None:
    with pytest.raises(TfexportError, match="max_length_ratio"):
        load(name).decode([[4, 5]], SearchOptions(max_length_ratio=1.5), 1)


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
    with pytest.raises(TfexportError, match=r"has no model of benchmarks/peers/converters\.py .* Write one there"):
        peer(tmp_path)
