"""Graphs for shortlists: they compute what PyTorch does, decode as masked logits do, and cost other bundles nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from makers.ort_bundles import CONFIG, ONE_CHANGE, random_model, random_sources, write_bundle
from makers.tiny import TinyCheckpoint
from tests.support.commands import command
from tests.support.graph_checks import self_check
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.config import ModelConfig
from tfexport.contract import Precision
from tfexport.decoding.batches import decode_all
from tfexport.errors import TfexportError
from tfexport.exporter.graphs import write_graphs
from tfexport.exporter.weights import write_quantized, write_weights
from tfexport.runtimes import load_runtime
from tfexport.runtimes.ort_cpu.shortlist import FEWEST
from tfexport.search.search import Hypothesis, SearchOptions, Source, search
from tfexport.shortlist_contract import SHORTLIST_PRECISIONS, shortlist_graphs_of

WIDE = CONFIG.replace(tgt_vocab_size=1500, output_bias=True, max_target_length=30)
"""More words than `FEWEST`, so that some are not even gathered."""


OUTPUTS = [
    changes
    for changes in ONE_CHANGE
    if not changes or {"tie_output", "output_bias", "tgt_vocab_size", "n_heads", "max_source_length"} & set(changes)
]
"""What concerns the output layer, or which steps there are."""


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    ("changes", "precision"),
    [(changes, SHORTLIST_PRECISIONS[index % 2]) for index, changes in enumerate(OUTPUTS)],
    ids=str,
)
def test_they_compute_what_pytorch_computes(tmp_path: Path, changes: dict[str, Any], precision: Precision) -> None:
    config = CONFIG.replace(**changes)
    model = random_model(config)
    write_weights(model, "float32", tmp_path)
    if precision != "float32":
        write_quantized(model, precision, tmp_path)
    written = write_graphs(config, precision, tmp_path, shortlist=True)
    graphs = [graph for graph in written if graph.role.startswith("shortlist")]
    assert {graph.role for graph in graphs} >= {"shortlist", "shortlist_beam_step"}
    assert 0 < self_check(model, graphs, tmp_path) < 1


def test_the_self_check_finds_a_projection_of_other_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tfexport.graph_checks import cases_ort

    model = random_model(WIDE)
    write_weights(model, "float32", tmp_path)
    graphs = [g for g in write_graphs(WIDE, "float32", tmp_path, shortlist=True) if g.role.startswith("shortlist")]
    listed = cases_ort._listed
    monkeypatch.setattr(cases_ort, "_listed", lambda model, graph, ids: listed(model, graph, np.roll(ids, 1)))
    for graph in graphs:
        with pytest.raises(TfexportError, match="departs from PyTorch at "):
            self_check(model, [graph], tmp_path)


def test_other_graphs_are_the_same_with_them_and_without(tmp_path: Path) -> None:
    model = random_model(CONFIG)
    for name, shortlist in (("with", True), ("without", False)):
        write_bundle(model, tmp_path / name, ("float32", "int8"), shortlist=shortlist)
    plain = {path.name: path.read_bytes() for path in (tmp_path / "without").iterdir() if path.name != "manifest.json"}
    more = {path.name: path.read_bytes() for path in (tmp_path / "with").iterdir() if path.name != "manifest.json"}
    assert {name: more[name] for name in plain} == plain
    assert sorted(set(more) - set(plain)) == sorted(
        graph.file for precision in SHORTLIST_PRECISIONS for graph in shortlist_graphs_of(CONFIG, precision)
    )
    assert len(set(more) - set(plain)) == 6


def test_a_projection_that_stays_in_float32_has_none(tmp_path: Path) -> None:
    model = random_model(CONFIG)
    write_weights(model, "float32", tmp_path)
    write_quantized(model, "int8", tmp_path, ["output"])
    written = write_graphs(CONFIG, "int8", tmp_path, ["output"], shortlist=True)
    assert not any(graph.role.startswith("shortlist") for graph in written)
    assert shortlist_graphs_of(CONFIG, "int4") == shortlist_graphs_of(CONFIG, "float16") == ()


# --- decoding


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(random_model(WIDE), tmp_path_factory.mktemp("wide"), ("float32", "int8"), shortlist=True)


def listed_sources(config: ModelConfig, count: int, words: int) -> list[Source]:
    random = np.random.default_rng(3)
    sources = random_sources(config, random.integers(1, 20, count).tolist())
    return [
        # Of other lengths: so sentences leave their batch one after the other.
        Source(ids, most=2 + line % 9, line=line, candidates=random.permutation(config.tgt_vocab_size)[: words + line])
        for line, ids in enumerate(sources)
    ]


def ids_of(found: Sequence[Sequence[Hypothesis]]) -> list[list[tuple[int, ...]]]:
    return [[hypothesis.ids for hypothesis in hypotheses] for hypotheses in found]


SEARCHES: list[dict[str, Any]] = [
    {},
    {"beam": 4, "nbest": 4},
    {"beam": 3, "no_repeat_ngram": 2, "repetition_penalty": 1.2},
    {"samples": 2, "top_p": 0.9},
    {"alternatives": 3},
    {"beam": 270, "max_length": 2},
    {"beam": 4, "profile": "opennmt", "min_length": 3},
]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("precision", SHORTLIST_PRECISIONS)
@pytest.mark.parametrize("given", SEARCHES, ids=str)
def test_they_find_what_masked_logits_give(wide: Bundle, precision: Precision, given: dict[str, Any]) -> None:
    masked, gathered = (
        load_runtime("ort-cpu", wide, precision=precision, threads=1, shortlist=shortlist)
        for shortlist in (False, True)
    )
    assert [runtime.capabilities.shortlists for runtime in (masked, gathered)] == [False, True]
    options = SearchOptions(**{"max_length": 8, "token_scores": True, **given})
    sources = listed_sources(WIDE, 12, 60)
    sources[3] = Source(sources[3].ids, line=3)  # every word may come
    sources[4] = Source(sources[4].ids, (7, 9), 7, line=4, candidates=np.array([1400, 5]))
    sources = sources[:2] if options.beam > 100 else sources
    wanted, found = (decode_all(runtime, sources, options, batch_size=5) for runtime in (masked, gathered))
    assert ids_of(found) == ids_of(wanted)
    for one, other in zip(found, wanted, strict=True):
        for hypothesis, same in zip(one, other, strict=True):
            assert hypothesis.token_log_probs == pytest.approx(same.token_log_probs, abs=1e-4)
    if options.beam > 100:
        return
    unlisted = [Source(source.ids, source.prefix, source.most, line=source.line) for source in sources]
    assert ids_of(search(gathered, unlisted, options)) == ids_of(search(masked, unlisted, options)) != ids_of(wanted)


@pytest.mark.parametrize("precision", SHORTLIST_PRECISIONS)
@pytest.mark.parametrize("beam", [1, 4])
def test_neighbours_change_no_token(wide: Bundle, precision: Precision, beam: int) -> None:
    """Whatever their lists are: a batch gathers from 512 to all words; nor do workers, which have the graphs by then."""
    runtime = load_runtime("ort-cpu", wide, precision=precision, threads=1, shortlist=True)
    options = SearchOptions(beam=beam, nbest=beam, max_length=12)
    sources = listed_sources(WIDE, 16, 90)
    alone = [search(runtime, [source], options)[0] for source in sources]
    for batch_size, workers in ((4, 1), (16, 1), (3, 2)):
        together = decode_all(runtime, sources, options, batch_size=batch_size, workers=workers)
        assert ids_of(together) == ids_of(alone)
        for one, other in zip(together, alone, strict=True):
            assert [h.score for h in one] == pytest.approx([h.score for h in other], abs=1e-5)
    every = [set(np.concatenate([source.candidates]).tolist()) for source in sources]  # type: ignore[list-item]
    assert len(set.union(*every)) > FEWEST > max(map(len, every))


def test_attention_is_told_by_graphs_without_a_shortlist(tmp_path: Path) -> None:
    bundle = write_bundle(random_model(CONFIG), tmp_path, alignments=True, shortlist=True)
    sources = [
        Source(source.ids, source.prefix, 6, candidates=source.candidates) for source in listed_sources(CONFIG, 6, 9)
    ]
    masked, gathered = (load_runtime("ort-cpu", bundle, threads=1, shortlist=listed) for listed in (False, True))
    options = SearchOptions(beam=2, attention=True)
    wanted, found = (
        decode_all(runtime, sources, options, batch_size=3, workers=workers)
        for runtime, workers in ((masked, 1), (gathered, 2))
    )
    assert ids_of(found) == ids_of(wanted)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one[0].attention, other[0].attention, atol=1e-6)  # type: ignore[arg-type]


# --- the commands


def test_a_bundle_is_exported_with_them_and_decodes_by_them(
    capsys: Any, monkeypatch: Any, tiny_checkpoint: TinyCheckpoint, tiny_bundle: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    out, _ = command(
        capsys,
        monkeypatch,
        *("export", tiny_checkpoint.path, *tiny_checkpoint.flags, "-o", bundle, "--shortlist", "--no-parity"),
    )
    assert "exported" in out
    roles = {graph["role"] for graph in json.loads((bundle / "manifest.json").read_text())["graphs"]}
    assert {"shortlist", "shortlist_decoder_step", "shortlist_beam_step"} <= roles
    (tmp_path / "in").write_text("de5 de6\nde9\nde30 de4 de4\n")
    (tmp_path / "vmap").write_text("\twört20 wört7\nde9\twört21\nde4 de4\twört30\n", encoding="utf-8")
    for flags in ([], ["--beam", 3, "--nbest", 3], ["--workers", 2]):
        asked = [tmp_path / "in", "--threads", 1, "--shortlist", tmp_path / "vmap", *flags]
        found, notes = command(capsys, monkeypatch, "decode", bundle, *asked)
        wanted, told = command(capsys, monkeypatch, "decode", tiny_bundle, *asked)
        assert found == wanted
        assert ("written by export --shortlist" in notes, "written by export --shortlist" in told) == (False, True)


def test_a_classifier_has_none(tmp_path: Path, classifier_bundle: Path) -> None:
    assert shortlist_graphs_of(open_bundle(classifier_bundle).config) == ()
