"""Shortlists against CTranslate2, on a bundle, and from the command line."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers import converters
from tests.support.commands import command
from tests.support.searches import CONFIG, LIMIT, assert_same, model_of, sources_of, translated, without_eos
from tfexport.bundle.reader import open_bundle
from tfexport.decoding.batches import decode_all
from tfexport.decoding.shortlist import read_shortlist
from tfexport.runtimes import load_runtime
from tfexport.runtimes.outputs import IntArray
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions, Source, search


def random_lists(sources: Sequence[Sequence[int]], vocab: int, count: int, seed: int) -> list[IntArray]:
    random = np.random.default_rng(seed)
    special = [CONFIG.unk_id, CONFIG.bos_id, CONFIG.eos_id]
    return [np.unique([*special, *random.integers(4, vocab, count)]) for _ in sources]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("number", range(4))
def test_a_vmap_is_that_of_ctranslate2(number: int, beam: int, tmp_path: Path) -> None:
    """50 inputs of four models each; there the words of a batch are those of all its sentences, so it has one sentence."""
    pytest.importorskip("ctranslate2")
    model, sources = model_of(number), sources_of(50, number)
    random = np.random.default_rng(number)
    # Enough words for two beams: with fewer CTranslate2 fills up with what cannot come.
    lines = ["\t" + " ".join(map(str, 4 + random.permutation(33)[:8]))]
    for size, count in ((1, 15), (2, 120), (3, 1500)):
        for ngram in random.integers(4, 31, (count, size)):
            lines.append(f"{' '.join(map(str, ngram))}\t{random.integers(4, 37)} {random.integers(4, 37)}")
    (tmp_path / "vmap.txt").write_text("\n".join(lines) + "\n")
    shortlist = read_shortlist(tmp_path / "vmap.txt", CONFIG, None, None)
    rules: dict[str, Any] = {"min_length": 4, "suppress": (CONFIG.unk_id, CONFIG.bos_id)}  # which are in every list
    options = SearchOptions.for_profile("opennmt", beam=beam, nbest=beam, max_length=LIMIT, length_penalty=0.6, **rules)
    converters.write_ctranslate2(model, tmp_path / "ct2")
    shutil.copy(tmp_path / "vmap.txt", tmp_path / "ct2")
    theirs = {"suppress_sequences": [[str(token)] for token in options.suppress]}
    wanted = translated(model, tmp_path / "ct2", sources, options, use_vmap=True, max_batch_size=1, **theirs)
    given = [Source(source, candidates=shortlist.candidates(source)) for source in sources]
    found = [one for at in range(0, 50, 10) for one in search(TorchRuntime(model), given[at : at + 10], options)]
    assert_same(without_eos(found), wanted)
    unlisted = search(TorchRuntime(model), sources, options)
    assert sum(a[0].ids != b[0].ids for a, b in zip(found, unlisted, strict=True)) > 15


@pytest.mark.parametrize("options", [{}, {"beam": 4, "nbest": 4}, {"samples": 2}], ids=str)
def test_a_bundle_keeps_to_the_list(tiny_bundle: Path, options: dict[str, Any]) -> None:
    bundle = open_bundle(tiny_bundle)
    ours, reference = (load_runtime(name, bundle, threads=1) for name in ("ort-cpu", "torch"))
    plain = [[2, 4 + line % 20, *[7] * (line % 5), 3] for line in range(12)]
    lists = random_lists(plain, bundle.config.tgt_vocab_size, 9, seed=4)
    sources = [Source(ids, line=line, candidates=lists[line]) for line, ids in enumerate(plain)]
    asked = SearchOptions(max_length=10, token_scores=True, **options)
    wanted = search(reference, sources, asked)
    for batch_size, workers in ((5, 1), (3, 2)):
        found = decode_all(ours, sources, asked, batch_size=batch_size, workers=workers)
        assert [[h.ids for h in one] for one in found] == [[h.ids for h in one] for one in wanted]
        for listed, one, other in zip(lists, found, wanted, strict=True):
            for h, reference_h in zip(one, other, strict=True):
                assert set(h.ids) <= set(listed.tolist())
                assert h.token_log_probs == pytest.approx(reference_h.token_log_probs, abs=1e-4)


def test_the_command_takes_a_shortlist(capsys: Any, monkeypatch: Any, tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("de5 de6\nde9\nde30 de4 de4\n")
    (tmp_path / "list").write_text("wört9\nwört10\n", encoding="utf-8")
    (tmp_path / "vmap").write_text("\twört20\nde9\twört21\n", encoding="utf-8")
    (tmp_path / "lex").write_text("wört9 de5 0.5\nwört10 de5 0.1\nwört11 de9 1\n", encoding="utf-8")
    decode = ["decode", tiny_bundle, tmp_path / "in", "--threads", 1, "--max-length", 6, "--beam", 2]

    def words_of(*flags: object) -> list[set[str]]:
        out, _ = command(capsys, monkeypatch, *decode, *flags)
        streamed, _ = command(capsys, monkeypatch, *decode, *flags, "--stream")
        assert streamed == out
        return [set(line.split()) - {"<unk>", "<sos>"} for line in out.splitlines()]

    assert all(found <= {"wört9", "wört10"} for found in words_of("--shortlist", tmp_path / "list"))
    vmap = words_of("--shortlist", tmp_path / "vmap")
    assert all(found <= {"wört20", *(["wört21"] if line == 1 else [])} for line, found in enumerate(vmap))
    lexicon = words_of("--shortlist", tmp_path / "lex", "--shortlist-first", 4, "--shortlist-best", 1)
    assert [found - {"<pad>"} <= {word} for found, word in zip(lexicon, ["wört9", "wört11", ""], strict=True)] == [
        True
    ] * 3
    out, err = command(capsys, monkeypatch, *decode, "--shortlist", tmp_path / "nowhere")
    assert (out, "cannot read the shortlist" in err) == ("", True)
