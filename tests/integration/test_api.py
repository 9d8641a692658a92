"""`tfexport.load` and what it gives: the numbers of the commands, from Python."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import tfexport
from makers.tiny import EOS, HEADS, HINTS, MAX_LENGTH, TinyCheckpoint, tiny_classifier, tiny_transformer
from tfexport.cli import app
from tfexport.errors import BundleError, RuntimeUnavailable, TfexportError
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.formats.native import Tokenizers
from tfexport.models.transformer import Transformer
from tfexport.text.tokenizers import word_tokenizer
from tfexport.verification.gate import DecodingGate

TEXTS = ["de4 de5 de6", "de9", "de17 de20 de11 de8 de29", "de4"]


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> tfexport.Model:
    return tfexport.load(tiny_bundle, threads=1)


def decoded(bundle: Path, texts: list[str], *flags: str) -> list[dict]:
    """The records of `tfexport decode`."""
    lines = "".join(f"{text}\n" for text in texts)
    command = ["decode", str(bundle), "--output-format", "jsonl", "--workers", "1", *flags]
    done = CliRunner().invoke(app, command, input=lines.encode())
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_translations_are_those_of_the_command(model: tfexport.Model, tiny_bundle: Path) -> None:
    texts = [*TEXTS, "", "de4 " * (MAX_LENGTH + 1)]
    found = model.translate(texts, beam=3, nbest=2, token_scores=True)
    flags = ["--beam", "3", "--nbest", "2", "--token-scores"]
    for result, record in zip(found, decoded(tiny_bundle, texts, *flags), strict=True):
        assert result.status == record["status"]
        assert result.message == record.get("message", "")
        assert len(result.hypotheses) == len(record["hypotheses"])
        for output, wanted in zip(result.hypotheses, record["hypotheses"], strict=True):
            assert (output.text, list(output.tokens), list(output.ids)) == (
                wanted["text"],
                wanted["tokens"],
                wanted["ids"],
            )
            assert output.finished == wanted["finished"]
            assert output.score == pytest.approx(wanted["score"], abs=1e-6)
            assert list(output.token_log_probs) == pytest.approx(wanted["token_log_probs"], abs=1e-6)
    assert {result.status for result in found} >= {"empty", "too_long"}
    assert len(found[0].hypotheses) == 2


def test_one_string_gives_one_translation_whose_string_is_its_text(model: tfexport.Model) -> None:
    one, (other,) = model.translate(TEXTS[0], beam=2), model.translate(TEXTS[:1], beam=2)
    assert one == other
    assert str(one) == one.text == one.hypotheses[0].text
    assert one.score == one.hypotheses[0].score
    assert one.text.startswith("wört")
    nothing = model.translate("")
    assert (str(nothing), nothing.status) == ("", "empty")
    with pytest.raises(TfexportError, match="status"):
        _ = nothing.score


def test_a_string_that_is_not_unicode_is_marked(model: tfexport.Model) -> None:
    bad, good = model.translate(["de4 \udc80", "de4"])
    assert (bad.status, bad.hypotheses) == ("invalid_utf8", ())
    assert good.hypotheses


def test_outputs_begin_with_what_they_are_told(model: tfexport.Model) -> None:
    for result in model.translate([*TEXTS, "de4\tde5"], prefix="wört7", beam=2):
        assert result.text.split()[0] == "wört7"
    several = model.translate(TEXTS[:2], prefix=["wört7", "wört8 wört9"])
    assert [result.text.split()[:2][-1] for result in several][1] == "wört9"
    assert several[0].hypotheses[0].ids == model.translate(TEXTS[0], prefix="wört7").hypotheses[0].ids
    with pytest.raises(TfexportError, match="more lines"):
        model.translate(TEXTS, prefix=["wört7"])
    with pytest.raises(TfexportError, match="one prefix"):
        model.translate(TEXTS[0], prefix=["wört7"])  # type: ignore[call-overload]


def test_tokens_are_not_split_again(model: tfexport.Model) -> None:
    assert model.translate([["de4", "de5"], ["de9"]]) == model.translate(["de4 de5", "de9"])
    assert [result.line for result in model.translate(["de9", "", "de4"])] == [1, 2, 3]
    assert str(model.translate("de9").hypotheses[0]) == model.translate("de9").text


def test_iterate_takes_lists_of_tokens(model: tfexport.Model) -> None:
    tokens = [["de4", "de5"], ["de9"]]
    wanted = model.translate(tokens)
    assert list(model.iterate(tokens)) == list(model.iterate(iter(tokens))) == wanted
    assert list(model.iterate(tokens, prefix="wört7")) == model.translate(tokens, prefix="wört7")
    with pytest.raises(TfexportError, match=r"texts has .de4.\. Give strings or lists of tokens, not both"):
        list(model.iterate([["de9"], "de4"]))


def test_a_bundle_that_decodes_otherwise_is_not_exported(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(gate: DecodingGate, folder: Path, model: Transformer) -> None:
        assert gate.tolerance == 0.5
        raise TfexportError("it decodes otherwise")

    monkeypatch.setattr(DecodingGate, "check_bundle", refuse)
    about = {"heads": HEADS, "src_vocab": tiny_checkpoint.src_vocab, "tgt_vocab": tiny_checkpoint.tgt_vocab}
    with pytest.raises(TfexportError, match="it decodes otherwise"):
        tfexport.export(tiny_checkpoint.path, tmp_path / "b", tolerance=0.5, **about)
    assert list(tmp_path.iterdir()) == []
    assert tfexport.export(tiny_checkpoint.path, tmp_path / "b", parity=False, **about).closest == {}


def test_wrong_arguments_are_named(model: tfexport.Model, tiny_bundle: Path) -> None:
    for call, message in (
        (lambda: model.translate(TEXTS, num_beams=4), r"'num_beams'. Did you mean 'beam'"),
        (lambda: model.translate(TEXTS, max_new_tokens=4), r"'max_new_tokens'. Did you mean 'max_length'"),
        (lambda: model.translate(TEXTS, batchsize=4), r"Did you mean 'batch_size'"),
        (lambda: model.translate(TEXTS, shortlist="words.txt"), "shortlist is 'words.txt'"),
        (lambda: model.translate(TEXTS, prefix=[1, 2, 3, 4]), "prefix is 1"),
        (lambda: model.translate(TEXTS, workers="2"), "workers is '2'"),
        (lambda: model.translate(TEXTS, max_batch_tokens=0), "max_batch_tokens is 0"),
        (lambda: model.translate(TEXTS, replace_unk="yes"), "replace_unk is 'yes'"),
        (lambda: model.iterate("de4"), "texts is 'de4'"),
        (lambda: model.stream(5), "text is 5"),
        (lambda: model.score([1], ["a"]), "texts is 1"),
        (lambda: model.read_shortlist(5), "path is 5"),
        (lambda: model.translate(TEXTS, workers=10**6), "workers is 1000000. Give at most"),
        (lambda: model.translate_ids([[2, 3]], prefix="a"), "'prefix' is not an option of this function"),
        (lambda: model.token_ids(5), "tokens is 5"),
        (lambda: model.iterate(5), "texts is 5"),
        (lambda: model.iterate(TEXTS, prefix=5), "prefix is 5"),
        (lambda: tfexport.load(tiny_bundle, threads=10**6), "threads is 1000000. Give at most"),
        (lambda: tfexport.inspect(None), "checkpoint is None"),
        (lambda: tfexport.export(5), "checkpoint is 5"),
        (lambda: tfexport.export("a.pt", 5), "directory is 5"),
        (lambda: tfexport.export("a.pt", precision=None), "precision is None"),
        (lambda: tfexport.export("a.pt", force="yes"), "force is 'yes'"),
        (lambda: tfexport.export("a.pt", tolerance=-1), "tolerance is -1"),
        (lambda: tfexport.parity(None), "bundle is None"),
        (lambda: tfexport.parity(tiny_bundle, 5), "texts is 5"),
        (lambda: tfexport.parity(tiny_bundle, [5]), "texts is 5"),
        (lambda: tfexport.parity(tiny_bundle, TEXTS, targets=5), "targets is 5"),
        (lambda: tfexport.parity(tiny_bundle, TEXTS, runtimes=[]), "runtimes is \\[\\]"),
        (lambda: tfexport.parity(tiny_bundle, TEXTS, checkpoint=5), "checkpoint is 5"),
        (lambda: tfexport.load(None), "directory is None"),
        (lambda: tfexport.load(tiny_bundle, shortlist="yes"), "shortlist is 'yes'"),
    ):
        with pytest.raises(TfexportError, match=message):
            call()  # type: ignore[no-untyped-call]


def test_ids_need_no_vocabulary(model: tfexport.Model) -> None:
    assert model.translate_ids([[2, 4, 5, 6, 3]], beam=2) == [model.translate("de4 de5 de6", beam=2)]
    assert model.translate_ids([[2, 999, 3]])[0].status == "invalid_ids"
    for given in (np.array([[2, 9, 3]]), torch.tensor([[2, 9, 3]]), [torch.tensor([2, 9, 3])]):
        assert model.translate_ids(given) == [model.translate("de9")]


@pytest.mark.parametrize("options", [{}, {"beam": 3}, {"samples": 1, "seed": 4}], ids=str)
def test_streamed_tokens_are_those_of_the_translation(model: tfexport.Model, options: dict) -> None:
    for text in TEXTS:
        steps = list(model.stream(text, prefix="wört7", **options))
        (wanted,) = model.translate(text, prefix="wört7", token_scores=True, **options).hypotheses
        assert tuple(step.id for step in steps) == wanted.ids
        assert "".join(step.text for step in steps) == wanted.text
        assert [step.log_prob for step in steps] == pytest.approx(list(wanted.token_log_probs), abs=1e-5)
    with pytest.raises(TfexportError, match="empty"):
        list(model.stream(""))
    with pytest.raises(TfexportError, match="one output"):
        list(model.stream(TEXTS[0], beam=2, nbest=2))


def test_a_shortlist_says_which_words_may_come(model: tfexport.Model, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("wört5\nwört6\nwört7\n", encoding="utf-8")
    listed = model.read_shortlist(tmp_path / "words.txt")
    for result in model.translate(TEXTS, shortlist=listed, beam=2):
        assert {*result.hypotheses[0].text.split()} <= {"wört5", "wört6", "wört7", "<unk>"}
    found = [step.text for step in model.stream(TEXTS[0], shortlist=listed)]
    assert "".join(found) == model.translate(TEXTS[0], shortlist=listed).text != model.translate(TEXTS[0]).text


def test_classes_have_probabilities_and_names(classifier_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(TfexportError, match="vocabulary"):
        tfexport.load_classifier(classifier_bundle).classify(["de4"])
    bundle = tmp_path / "words"
    torch.save(tiny_classifier().state_dict(), tmp_path / "classifier.pt")
    words = word_tokenizer({f"de{index}": index for index in range(31)} | {"<unk>": 31 - 1})
    loaded = load_checkpoint(tmp_path / "classifier.pt", HINTS, tokenizers=Tokenizers(words, None))
    export(loaded, bundle, gate=None)
    (tmp_path / "labels.txt").write_text("a\nb\nc\nd\ne\n")
    classifier = tfexport.load_classifier(bundle, labels=tmp_path / "labels.txt", threads=1)
    found = classifier.classify(["de4 de5", "", "de9"], top=5)
    assert [result.status for result in found] == ["ok", "empty", "ok"]
    assert sum(one.probability for one in found[0].classes) == pytest.approx(1)
    assert classifier.labels == ["a", "b", "c", "d", "e"]
    one = classifier.classify("de4 de5", top=5)
    assert one == found[0]
    assert [found.label for found in one.classes] == ["abcde"[found.class_] for found in one.classes]
    assert classifier.classify([["de4", "de5"]], top=5) == classifier.classify_ids([[2, 4, 5, 3]], top=5) == [one]
    assert tfexport.load_classifier(bundle, threads=1).classify("de4 de5").classes[0].label is None
    with pytest.raises(TfexportError, match="texts is None"):
        classifier.classify(None)  # type: ignore[call-overload]
    for wrong in ("de4", ["de4"]):
        with pytest.raises(TfexportError, match=r"list|above 0"):
            classifier.classify(wrong, top=0)


def test_scores_are_those_that_decoding_told(model: tfexport.Model) -> None:
    found = [result for result in model.translate(TEXTS, token_scores=True) if result.hypotheses[0].finished]
    assert found
    for text, result in zip(TEXTS, model.translate(TEXTS, token_scores=True), strict=True):
        (output,) = result.hypotheses
        if output.finished:
            scored = model.score(text, output.text)
            assert scored.hypotheses[0].ids == output.ids
            assert scored.hypotheses[0].ids[-1] == EOS
            assert scored.hypotheses[0].log_prob == pytest.approx(output.log_prob, abs=1e-4)
    with pytest.raises(TfexportError, match="more lines"):
        model.score(TEXTS, TEXTS[:1])
    with pytest.raises(TfexportError, match="two strings"):
        model.score(TEXTS, "de4")  # type: ignore[call-overload]


def test_sentences_stream_and_their_number_costs_nothing(model: tfexport.Model) -> None:
    def endless():
        while True:
            yield from TEXTS

    found = list(islice(model.iterate(endless(), batch_size=2), 40))
    assert found == model.translate(TEXTS) * 10


@pytest.mark.parametrize("prefix", [None, "wört9"])
def test_a_translation_does_not_wait_for_the_next_sentence(model: tfexport.Model, prefix: str | None) -> None:
    came = threading.Semaphore(0)

    def live():
        for text in TEXTS:
            yield text
            assert came.acquire(timeout=60), "a translation waits for the next sentence"

    found = []
    for translation in model.iterate(live(), prefix=prefix):
        found.append(translation.hypotheses[0].ids)
        came.release()
    assert found == [translation.hypotheses[0].ids for translation in model.translate(TEXTS, prefix=prefix)]


def test_an_iteration_can_be_closed_while_its_source_is_silent(model: tfexport.Model) -> None:
    silent = threading.Event()

    def live():
        yield TEXTS[0]
        silent.wait()

    translations = model.iterate(live())
    next(translations)
    translations.close()
    silent.set()


def test_workers_and_callers_at_once_change_nothing(model: tfexport.Model) -> None:
    wanted = model.translate(TEXTS * 4, beam=2)
    assert model.translate(TEXTS * 4, beam=2, workers=2, batch_size=3) == wanted
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: model.translate(text, beam=2), TEXTS * 4)) == wanted


def test_a_bundle_that_is_replaced_is_never_mixed_with_the_new_one(own_bundle: Path, tmp_path: Path) -> None:
    loaded = tfexport.load(own_bundle, threads=1)
    greedy = loaded.translate(TEXTS)
    torch.save(tiny_transformer(seed=5).state_dict(), tmp_path / "other.pt")
    export(load_checkpoint(tmp_path / "other.pt", HINTS), own_bundle, force=True, gate=None)
    assert loaded.translate(TEXTS) == greedy
    with pytest.raises(BundleError, match="replaced"):
        loaded.translate(TEXTS, beam=2)  # whose graph is not loaded yet
    shutil.rmtree(own_bundle)
    assert loaded.translate(TEXTS) == greedy


def test_suppressed_tokens_are_named_by_the_vocabulary(model: tfexport.Model) -> None:
    first = model.translate(TEXTS[0]).hypotheses[0].tokens[0]
    (forbidden,) = model.token_ids(first)
    assert forbidden not in model.translate(TEXTS[0], suppress=(forbidden,)).hypotheses[0].ids
    assert model.translate(TEXTS[0], suppress=first) == model.translate(TEXTS[0], suppress=(forbidden,))
    with pytest.raises(TfexportError, match="no-such-word"):
        model.token_ids("no-such-word")
    with pytest.raises(TfexportError, match="suppressed"):
        model.translate(TEXTS[0], suppress=(10**6,))


def test_a_model_says_what_it_is(model: tfexport.Model, quantized_bundle: Path) -> None:
    assert model.config.max_source_length == MAX_LENGTH
    assert "ort-cpu, fp32" in repr(model)
    int8 = tfexport.load(quantized_bundle, precision="int8", threads=1)
    assert int8.precision == "int8"
    assert int8.translate(TEXTS)[0].hypotheses


def test_the_torch_runtime_gives_the_same(model: tfexport.Model, tiny_bundle: Path) -> None:
    other = tfexport.load(tiny_bundle, runtime="torch", threads=1)
    assert [result.hypotheses[0].ids for result in other.translate(TEXTS, beam=2)] == [
        result.hypotheses[0].ids for result in model.translate(TEXTS, beam=2)
    ]


def test_what_cannot_be_used_is_told(model: tfexport.Model, tiny_bundle: Path, classifier_bundle: Path) -> None:
    with pytest.raises(TfexportError, match="nbest 3"):
        model.translate(TEXTS, beam=2, nbest=3)
    with pytest.raises(TfexportError, match="above 0"):
        model.translate(TEXTS, batch_size=0)
    for wrong in ({"early_stopping": "nevr", "profile": "hf"}, {"profile": "foo"}):
        with pytest.raises(TfexportError, match=r"nevr|foo"):
            model.translate(TEXTS, **wrong)
    with pytest.raises(TfexportError, match="threads"):
        tfexport.load(tiny_bundle, threads=0)
    with pytest.raises(TfexportError, match="num_beams"):
        model.translate(TEXTS, num_beams=2)
    with pytest.raises(TfexportError, match="fp8"):
        tfexport.load(tiny_bundle, precision="fp8")
    with pytest.raises(TfexportError, match="one precision"):
        tfexport.load(tiny_bundle, precision="fp32,int8")
    with pytest.raises(RuntimeUnavailable, match="no runtime"):
        tfexport.load(tiny_bundle, runtime="cpu")
    with pytest.raises(BundleError):
        tfexport.load(tiny_bundle / "missing")
    with pytest.raises(BundleError):
        tfexport.load(classifier_bundle)


def test_wrong_search_options_are_named(model: tfexport.Model) -> None:
    with pytest.raises(TfexportError, match=r"'beam_size'\. Did you mean 'beam'"):
        model.translate(TEXTS, beam_size=4)
    with pytest.raises(TfexportError, match=r"beam is '4'\. Give a whole number"):
        model.translate(TEXTS, beam="4")
    with pytest.raises(TfexportError, match="beam is 0, not between 1 and 65536"):
        model.translate(TEXTS, beam=0)


def test_early_stopping_is_written_as_in_transformers(model: tfexport.Model) -> None:
    options = {"profile": "hf", "beam": 4, "nbest": 4, "length_penalty": 3.0}
    texts = [f"de{4 + index % 26} de{4 + 7 * index % 26}" for index in range(60)]
    found = {stop: model.translate(texts, early_stopping=stop, **options) for stop in (True, False, "true", "false")}
    assert found[True] == found["true"] != found[False] == found["false"]


def test_importing_the_package_loads_nothing() -> None:
    heavy = ["numpy", "onnxruntime", "torch"]
    code = f"import sys, tfexport; tfexport.__version__; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert set(tfexport.__all__) <= set(dir(tfexport))
    assert tfexport.TfexportError is TfexportError
    with pytest.raises(AttributeError):
        _ = tfexport.nothing
