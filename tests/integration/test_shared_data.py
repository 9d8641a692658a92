"""The real checkpoint and the real data, where they lie beside the repository; elsewhere these tests are skipped."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from makers.paths import SHARED
from makers.references.decode import greedy
from makers.references.tutorial import TutorialTransformer
from makers.tiny import BOS, EOS
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.commands.demo import embedded_checkpoint
from tfexport.contract import Precision
from tfexport.decoding.line_reader import Reader, read_pairs
from tfexport.decoding.translate import Writer, translate
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.formats.native import Tokenizers
from tfexport.runtimes import load_runtime
from tfexport.runtimes.base import Runtime
from tfexport.runtimes.ort import ort_cpu_portable
from tfexport.runtimes.ort_cpu.runtime import OrtCpuRuntime
from tfexport.search.search import SearchOptions, search
from tfexport.text.vocabularies import read_vocabulary
from tfexport.verification.parity import check

TUTORIAL = SHARED / "checkpoints" / "tutorial-de-en"
MULTI30K = SHARED / "data" / "multi30k"

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        not (TUTORIAL.is_dir() and MULTI30K.is_dir()),
        reason="the tutorial checkpoint and Multi30k do not lie in ../shared (they are no part of this repository)",
    ),
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    vocabularies = Tokenizers(
        read_vocabulary(TUTORIAL / "src_vocab.json", lowercase=True, spacy_language="de"),
        read_vocabulary(TUTORIAL / "tgt_vocab.json"),
    )
    checkpoint = load_checkpoint(TUTORIAL / "model.pt", {"n_heads": 8}, tokenizers=vocabularies)
    directory = tmp_path_factory.mktemp("tutorial") / "bundle"
    return open_bundle(export(checkpoint, directory, precisions=("float16", "int8")).directory)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The embedded default."""
    directory = tmp_path_factory.mktemp("embedded") / "bundle"
    checkpoint = load_checkpoint(embedded_checkpoint(), {})
    return open_bundle(export(checkpoint, directory, precisions=["float16", "int8"], gate=None).directory)


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Any]]:
    """What the tutorial's own code decodes greedily, one sentence at a time, without a cache."""
    lines = (TUTORIAL / "greedy.test_2016_flickr.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_all_greedy_outputs_are_those_of_the_tutorial(bundle: Bundle, expected: list[dict[str, Any]]) -> None:
    lines = [" ".join(map(str, record["src"])).encode() for record in expected]
    reader = Reader.of(bundle, "ids")
    options = SearchOptions(max_length=50)
    results = list(translate(load_runtime("ort-cpu", bundle, threads=1), reader, lines, options))
    assert len(results) == len(expected) == 1000
    wrong = [r.line for r, record in zip(results, expected, strict=True) if list(r.hypotheses[0].ids) != record["out"]]
    assert wrong == []


def test_text_has_the_ids_of_the_tutorial(bundle: Bundle, expected: list[dict[str, Any]]) -> None:
    pytest.importorskip("spacy", reason="the spacy extra is not installed")
    reader = Reader.of(bundle, "text")
    lines = (MULTI30K / "test_2016_flickr.de").read_bytes().splitlines()
    sources, _ = read_pairs(lines, None, reader, lambda _: None)
    assert sources == [record["src"] for record in expected]


@pytest.fixture(scope="module")
def sources(expected: list[dict[str, Any]]) -> list[list[int]]:
    return [record["src"] for record in expected]


def outputs(runtime: Runtime, sources: list[list[int]], beam: int, *, batch: int = 32) -> list[tuple[int, ...]]:
    """The best hypothesis of each source, so many decoded together."""
    options = SearchOptions(beam=beam, max_length=50)
    batches = (sources[start : start + batch] for start in range(0, len(sources), batch))
    return [hypotheses[0].ids for part in batches for hypotheses in search(runtime, part, options)]


def test_beams_on_the_cpu_are_those_of_the_portable_graphs_and_of_pytorch(
    bundle: Bundle, sources: list[list[int]]
) -> None:
    runtime = load_runtime("ort-cpu", bundle, threads=1)
    assert isinstance(runtime, OrtCpuRuntime)
    found = outputs(runtime, sources[:96], beam=4)
    assert found == outputs(ort_cpu_portable(bundle, threads=1), sources[:96], beam=4)
    assert found[:32] == outputs(load_runtime("torch", bundle, threads=1), sources[:32], beam=4)
    wide = sources[200:216]
    assert outputs(runtime, wide, beam=12) == outputs(ort_cpu_portable(bundle, threads=1), wide, beam=12)


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize(("precision", "count"), [("float32", 160), ("int8", 320)])
def test_sentences_alone_have_the_tokens_that_they_have_in_batches_of_32(
    bundle: Bundle, sources: list[list[int]], precision: Precision, count: int, beam: int
) -> None:
    runtime = load_runtime("ort-cpu", bundle, precision=precision, threads=1)
    together, alone = (outputs(runtime, sources[:count], beam, batch=batch) for batch in (32, 1))
    different = [index for index, (one, other) in enumerate(zip(together, alone, strict=True)) if one != other]
    assert different == []


def test_parity_on_the_real_checkpoint(bundle: Bundle, expected: list[dict[str, Any]]) -> None:
    lines = [" ".join(map(str, record["src"])).encode() for record in expected[::8]]
    (report,) = check(
        bundle.directory,
        lines,
        ["ort-cpu"],
        checkpoint=TUTORIAL / "model.pt",
        max_length=50,
        precisions=("float32",),
        input_format="ids",
        threads=1,
        say=lambda _: None,
    ).reports
    assert report.identical == report.sentences == 125
    assert report.cross_max <= 1e-4
    assert report.logits.error <= 1e-4
    assert report.passed


def test_parity_in_float16_on_the_real_checkpoint(bundle: Bundle, expected: list[dict[str, Any]]) -> None:
    """What `LIMITS` allows beyond what was measured is not used up."""
    lines = [" ".join(map(str, record["src"])).encode() for record in expected[::8]]
    (report,) = check(
        bundle.directory,
        lines,
        ["ort-cpu"],
        checkpoint=TUTORIAL / "model.pt",
        max_length=50,
        precisions=("float16",),
        input_format="ids",
        threads=1,
        say=lambda _: None,
    ).reports
    assert report.passed
    assert report.steps > 1_400  # of 125 sentences
    assert report.top1_agree >= 0.9995 * report.steps
    assert 1e-4 < report.logits.error < 0.05
    assert report.identical >= 0.98 * report.sentences


def bleu(bundle: Bundle, precision: Precision, beam: int = 1) -> float:
    """Of test_2016_flickr."""
    sacrebleu = pytest.importorskip("sacrebleu", reason="the train extra is not installed")
    lines = (MULTI30K / "test_2016_flickr.de").read_bytes().splitlines()
    references = (MULTI30K / "test_2016_flickr.en").read_text(encoding="utf-8").splitlines()
    runtime = load_runtime("ort-cpu", bundle, precision=precision, threads=1)
    writer = Writer.of(bundle, "text")
    results = translate(runtime, Reader.of(bundle, "text"), lines, SearchOptions(beam=beam))
    return float(sacrebleu.corpus_bleu([writer.line(result) for result in results], [references]).score)


def test_float16_translates_the_test_set_as_float32_does(embedded: Bundle) -> None:
    assert bleu(embedded, "float16") == pytest.approx(bleu(embedded, "float32"), abs=0.1)


def test_float32_and_int8_translate_the_test_set(embedded: Bundle) -> None:
    exact, rounded = (bleu(embedded, precision, beam=4) for precision in ("float32", "int8"))
    assert exact >= 36.0
    assert rounded >= exact - 0.2  # it is 0.3 better
    assert rounded != exact  # two runtimes were compared, not one with itself


def test_greedy_reproduces_the_output_of_the_real_tutorial_checkpoint() -> None:
    model = TutorialTransformer(
        src_vocab=7853, tgt_vocab=5893, d_model=256, n_heads=8, d_ffn=512, n_encoder_layers=3, n_decoder_layers=3
    )
    model.load_state_dict(torch.load(TUTORIAL / "model.pt", weights_only=True))
    model.eval()
    lines = (TUTORIAL / "greedy.test_2016_flickr.jsonl").read_text(encoding="utf-8").splitlines()[:20]
    for line in map(json.loads, lines):
        assert greedy(model, line["src"], bos=BOS, eos=EOS, max_length=50) == line["out"]
