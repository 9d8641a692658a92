"""Alternatives after a forced beginning: against CTranslate2, on a bundle, and from the command line."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import command
from tests.support.searches import LIMIT, assert_same, model_of, sources_of, translated, without_eos
from tfexport.bundle.reader import open_bundle
from tfexport.decoding.batches import decode_all
from tfexport.runtimes import load_runtime
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions, Source, search

CASES = [
    {"alternatives": 3},
    {"alternatives": 5, "min_alternative_prob": 0.02},
    {"alternatives": 2, "length_penalty": 0.0},
    {"alternatives": 4, "min_length": 6},
    {"alternatives": 4, "max_length": 3},
]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_opennmt_has_the_alternatives_of_ctranslate2(number: int, beam: int, tmp_path: Path) -> None:
    """40 inputs for each of five settings, of another model each."""
    model, sources = model_of(number), sources_of(40, number)
    prefixes = [tuple(4 + (place * 7 + at) % 30 for at in range(place % 4)) for place in range(len(sources))]
    options = SearchOptions.for_profile("opennmt", **{"max_length": LIMIT, "beam": beam, **CASES[number]})
    wanted = translated(
        model,
        tmp_path / "ct2",
        sources,
        options,
        target_prefix=[[str(token) for token in prefix] for prefix in prefixes],
        num_hypotheses=options.alternatives,
        return_alternatives=True,
        min_alternative_expansion_prob=options.min_alternative_prob,
    )
    asked = [Source(ids, prefix=prefix) for ids, prefix in zip(sources, prefixes, strict=True)]
    found = [output for at in range(0, 40, 8) for output in search(TorchRuntime(model), asked[at : at + 8], options)]
    roomy = [place for place, prefix in enumerate(prefixes) if len(prefix) < options.max_length]
    assert len(roomy) >= 30
    ours = without_eos([found[place] for place in roomy])
    for outputs, theirs in zip(ours, [wanted[place] for place in roomy], strict=True):
        assert_same([outputs], [theirs])


@pytest.mark.parametrize("options", [{}, {"beam": 3}], ids=str)
def test_a_bundle_has_the_same_alternatives(tiny_bundle: Path, options: dict[str, Any]) -> None:
    bundle = open_bundle(tiny_bundle)
    ours, reference = (load_runtime(name, bundle, threads=1) for name in ("ort-cpu", "torch"))
    sources = [
        Source([2, 4 + line % 20, *[7] * (line % 5), 3], prefix=(5 + line, 9)[: line % 3], line=line)
        for line in range(12)
    ]
    asked = SearchOptions(alternatives=4, max_length=10, token_scores=True, **options)
    wanted = search(reference, sources, asked)
    for batch_size, workers in ((5, 1), (3, 2)):
        found = decode_all(ours, sources, asked, batch_size=batch_size, workers=workers)
        assert [[h.ids for h in one] for one in found] == [[h.ids for h in one] for one in wanted]
        for one, other in zip(itertools.chain(*found), itertools.chain(*wanted), strict=True):
            assert one.token_log_probs == pytest.approx(other.token_log_probs, abs=1e-4)
            assert one.score == pytest.approx(other.score, abs=1e-4)


def test_the_command_tells_alternatives(capsys: Any, monkeypatch: Any, tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("de5 de6\twört9\n\tx\nde9\n", encoding="utf-8")
    decode = ["decode", tiny_bundle, tmp_path / "in", "--threads", 1, "--prefix-column", "--max-length", 6]
    out, _ = command(capsys, monkeypatch, *decode, "--alternatives", 3)
    lines = [line.split("\t") for line in out.splitlines()]
    assert [len(line) for line in lines] == [3, 1, 3]
    assert len({words.split()[1] for words in lines[0]}) == 3
    assert all(words.startswith("wört9 ") for words in lines[0])
    fewer, _ = command(capsys, monkeypatch, *decode, "--alternatives", 3, "--min-alternative-prob", 0.999)
    assert [line.split("\t") for line in fewer.splitlines()] == [line[:1] for line in lines]
