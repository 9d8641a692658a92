"""`tfexport classify`, from lines to lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from makers.tiny import HINTS, PAD, SPECIALS, SRC_VOCAB, tiny_classifier
from tfexport.bundle.reader import MANIFEST, file_sha256, open_bundle
from tfexport.cli import app
from tfexport.decoding.classify import Classified, classify, read_labels
from tfexport.decoding.line_reader import Reader
from tfexport.errors import BundleError, RuntimeUnavailable, TfexportError
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.formats.native import Tokenizers
from tfexport.runtimes import load_classifier
from tfexport.text.tokenizers import word_tokenizer

CLASSES = 5


def by_class(result: Classified) -> dict[int, float]:
    return {found.class_: found.probability for found in result.classes}


def sentences(count: int = 60) -> list[list[int]]:
    """Random ids of all lengths that the model takes, in no order of lengths."""
    random = np.random.default_rng(0)
    return [random.integers(PAD + 1, SRC_VOCAB, random.integers(1, 21)).tolist() for _ in range(count)]


def lines_of(ids: list[list[int]]) -> list[bytes]:
    return [" ".join(map(str, line)).encode() + b"\n" for line in ids]


def results(bundle: Path, lines: list[bytes], runtime: str = "ort-cpu", **options: Any) -> list[Classified]:
    opened = open_bundle(bundle)
    model = load_classifier(runtime, opened, threads=1)
    return list(classify(model, Reader.of(opened, None), lines, **options))


@pytest.mark.parametrize("runtime", ["ort-cpu", "torch"])
def test_classes_and_probabilities_are_those_of_the_naive_model(classifier_bundle: Path, runtime: str) -> None:
    model, ids = tiny_classifier(), sentences()
    found = results(classifier_bundle, lines_of(ids), runtime, top=CLASSES, batch_size=7)
    assert [result.line for result in found] == list(range(1, len(ids) + 1))
    assert len({result.classes[0][0] for result in found}) > 1
    for line, result in zip(ids, found, strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([line]))[0].double().softmax(0)
        order = [one.class_ for one in result.classes]
        assert order == wanted.argsort(descending=True).tolist()
        assert [one.probability for one in result.classes] == pytest.approx(wanted[order].tolist(), abs=1e-5)


@pytest.mark.parametrize("runtime", ["ort-cpu", "torch"])
def test_what_a_line_gives_does_not_depend_on_its_batch(classifier_bundle: Path, runtime: str) -> None:
    lines = lines_of(sentences())
    one = results(classifier_bundle, lines, runtime, top=2, batch_size=1)
    for options in ({"batch_size": 32}, {"batch_size": 5, "window": 8}):
        for alone, together in zip(one, results(classifier_bundle, lines, runtime, top=2, **options), strict=True):
            assert [one.class_ for one in alone.classes] == [one.class_ for one in together.classes]
            assert [one.probability for one in alone.classes] == pytest.approx(
                [one.probability for one in together.classes], abs=1e-6
            )


def test_lines_that_cannot_be_read_are_marked_in_their_place(classifier_bundle: Path) -> None:
    lines = [b"4 5\n", b"\n", b"4 \xff\n", b"99\n", b"4 " * 21, b"4 1 5\n", b"7"]
    found = results(classifier_bundle, lines, window=3)
    statuses = ["ok", "empty", "invalid_utf8", "invalid_ids", "too_long", "invalid_ids", "ok"]
    assert [result.status for result in found] == statuses
    assert [bool(result.classes) for result in found] == [status == "ok" for status in statuses]
    assert found[0].classes == results(classifier_bundle, [b"4 5"])[0].classes


def test_a_line_is_answered_before_the_next_is_read(classifier_bundle: Path) -> None:
    def lines() -> Any:
        yield b"4 5 6\n"
        raise AssertionError("it was read ahead")

    opened = open_bundle(classifier_bundle)
    model = load_classifier("ort-cpu", opened, threads=1)
    assert next(classify(model, Reader.of(opened, None), lines(), window=1)).status == "ok"


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_half_precision_gives_nearly_the_same(tmp_path: Path, precision: Any) -> None:
    torch.save(tiny_classifier().state_dict(), tmp_path / "c.pt")
    bundle = open_bundle(
        export(load_checkpoint(tmp_path / "c.pt", HINTS), tmp_path / "b", precisions=(precision,), gate=None).directory
    )
    reader, lines = Reader.of(bundle, None), lines_of(sentences())
    wanted = list(classify(load_classifier("ort-cpu", bundle, threads=1), reader, lines, top=CLASSES))
    for runtime in ("ort-cpu", "torch"):
        model = load_classifier(runtime, bundle, precision=precision, threads=1)
        for one, other in zip(wanted, classify(model, reader, lines, top=CLASSES), strict=True):
            assert by_class(one) == pytest.approx(by_class(other), abs=0.02)


def test_numbers_that_are_none_are_refused(classifier_bundle: Path) -> None:
    bundle = open_bundle(classifier_bundle)

    class Broken:
        name, config = "ort-cpu", bundle.config
        capacity = load_classifier("ort-cpu", bundle, threads=1).capacity

        def logits(self, src_ids: Any, src_len: Any) -> Any:
            return np.full((len(src_ids), CLASSES), np.nan, dtype=np.float32)

    with pytest.raises(TfexportError, match="not finite"):
        list(classify(Broken(), Reader.of(bundle, None), [b"4 5"]))


# --- labels and output


def test_labels_are_one_a_class(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    path.write_bytes(b"\xef\xbb\xbfsport\r\nold\tnews\nmusic\n")
    assert read_labels(path, 3) == ["sport", "old news", "music"]
    for content, message in ((b"a\nb\n", "2 labels, the model 3"), (b"a\n\nb\n", "2 labels"), (b"\xff\n", "UTF-8")):
        path.write_bytes(content)
        with pytest.raises(TfexportError, match=message):
            read_labels(path, 3)


# --- the command


@pytest.fixture(scope="module")
def worded_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The classifier with words."""
    folder = tmp_path_factory.mktemp("worded")
    torch.save(tiny_classifier().state_dict(), folder / "c.pt")
    words = {word: index for index, word in enumerate([*SPECIALS, *(f"w{n}" for n in range(len(SPECIALS), SRC_VOCAB))])}
    tokenizers = Tokenizers(word_tokenizer(words), None)
    return export(load_checkpoint(folder / "c.pt", HINTS, tokenizers=tokenizers), folder / "b", gate=None).directory


def test_the_command_classifies_text(worded_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("a\nb\nc\nd\ne\n")
    text = tmp_path / "in.txt"
    text.write_bytes(b"w4 w5 w6\n\nw7 nothing\n\xff\n")
    outcome = CliRunner().invoke(
        app, ["classify", str(worded_bundle), str(text), "--labels", str(tmp_path / "labels.txt")]
    )
    assert outcome.exit_code == 0
    lines = outcome.stdout.splitlines()
    assert [line.partition("\t")[0] in set("abcde") for line in lines] == [True, False, True, False]
    assert "line 4: invalid_utf8" in outcome.stderr
    outcome = CliRunner().invoke(
        app, ["classify", str(worded_bundle), str(text), "--top", "9", "--output-format", "jsonl"]
    )
    records = [json.loads(line) for line in outcome.stdout.splitlines()]
    assert [record["status"] for record in records] == ["ok", "empty", "ok", "invalid_utf8"]
    assert sum(entry["probability"] for entry in records[0]["classes"]) == pytest.approx(1, abs=1e-5)
    # With bos and eos, as the tutorial reads text.
    [wanted] = results(worded_bundle, [b"w4 w5 w6"], top=CLASSES)
    with torch.no_grad():
        naive = tiny_classifier()(torch.tensor([[2, 4, 5, 6, 3]]))[0].softmax(0)
    assert by_class(wanted) == pytest.approx(dict(enumerate(naive.tolist())), abs=1e-5)


def test_classes_are_written_to_a_file_that_is_whole_and_can_be_gone_on_with(
    classifier_bundle: Path, tmp_path: Path
) -> None:
    text, out, partial = (tmp_path / name for name in ("in", "out", "out.partial"))
    text.write_bytes(b"".join(lines_of(sentences(40))))

    def classified(*flags: object) -> Any:
        given = ["classify", classifier_bundle, text, "--batch-size", 1, "--threads", 1, *flags]
        return CliRunner().invoke(app, list(map(str, given)))

    printed = classified().stdout
    assert len(printed.splitlines()) == 40
    assert classified("-o", out).stdout == ""
    assert out.read_text() == printed
    # What a killed run leaves: two windows and a piece of the third.
    about = {"bundle": file_sha256(classifier_bundle / MANIFEST), "runtime": "ort-cpu", "precision": None}
    about |= {"input": [str(text), "ids"], "output": ["text", 1, None]}
    (tmp_path / "out.partial.json").write_text(json.dumps(about))
    partial.write_text("".join(printed.splitlines(keepends=True)[:34]) + "3\t0.1")
    refused = classified("-o", out, "--resume", "--top", 2)
    assert "begun with another output" in str(refused.exception)
    assert classified("-o", out, "--resume").exit_code == 0
    assert out.read_text() == printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"name": "tensorrt"}, RuntimeUnavailable, "does not classify"),
        ({"name": "ort-cpu", "precision": "int8"}, RuntimeUnavailable, "fp32, fp16 and bf16"),
        ({"name": "ort-cpu", "precision": "float16"}, BundleError, "no fp16 encoder_classifier"),
    ],
)
def test_what_cannot_classify_is_refused(
    classifier_bundle: Path, options: dict[str, Any], error: type[TfexportError], message: str
) -> None:
    name = options.pop("name")
    with pytest.raises(error, match=message):
        load_classifier(name, open_bundle(classifier_bundle), **options)


def test_a_translation_bundle_is_refused(tiny_bundle: Path) -> None:
    with pytest.raises(BundleError, match="translation model, which has no classes"):
        load_classifier("ort-cpu", open_bundle(tiny_bundle))
