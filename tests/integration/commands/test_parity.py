"""`tfexport parity`: what passes, what fails, and what is certified."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from safetensors.numpy import load_file, save_file

from makers.references.tutorial import TutorialTransformer
from makers.tiny import (
    ENCODER,
    SRC_VOCAB,
    TGT_VOCAB,
    TinyCheckpoint,
    randomised,
    tiny_transformer,
)
from tests.support.commands import (
    SENTENCES,
    TEXT,
    Run,
    one_error,
)
from tfexport.verification.invariance import Arrangement, invariance


def change_consistently(bundle: Path) -> None:
    """Another weight, as a fault of the export would leave it: graphs, weights and manifest agree with each other."""
    path = bundle / "weights.safetensors"
    weights = load_file(path)
    weights["decoder.layers.0.feed_forward.hidden.weight"] *= 1.05
    save_file(weights, path, {"format": "pt"})
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["files"][path.name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def other_target_words() -> TutorialTransformer:
    return tiny_transformer(tgt_vocab=TGT_VOCAB + 4)


def another_layer() -> TutorialTransformer:
    model = TutorialTransformer(src_vocab=SRC_VOCAB, tgt_vocab=TGT_VOCAB, n_decoder_layers=2, **ENCODER)
    randomised(model)
    return model


def test_parity_passes(run: Run, tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(TEXT)
    arguments = (
        tmp_path / "in.txt",
        "--checkpoint",
        tiny_checkpoint.path,
        "--beam",
        "2",
        "--no-certify",
        "--threads",
        "1",
    )
    outcome = run("parity", tiny_bundle, *arguments)
    assert outcome.code == 0
    assert outcome.lines[0] == "ort-cpu in fp32 against PyTorch in fp32:"
    assert "  PASSED" in outcome.lines
    assert outcome.lines[-2:] == ["  13 graphs match their definition, value by value", "PASSED"]
    (told, note, other) = outcome.stderr.splitlines()
    assert "does not contain" in told
    assert told.endswith("not compared, unless --config FILE.json has it")
    assert note.startswith("note: the source tokenizer is not compared, because ")
    assert other.endswith("give it with --tgt-vocab")
    outcome = run("parity", tiny_bundle, *arguments, "--json", "--runtime", "torch", "--runtime", "ort-cpu")
    told = json.loads(outcome.stdout)
    assert told.keys() == {"passed", "reports", "expected", "mismatches", "graphs", "invariance"}
    assert told["passed"] is True
    assert told["mismatches"] == told["invariance"] == []
    assert all(graph["first"] is None and "values" not in graph for graph in told["graphs"])
    reports = told["reports"]
    assert [report["runtime"] for report in reports] == ["torch", "ort-cpu"]
    for report in reports:
        assert report["passed"]
        assert report["sentences"] == report["identical"] == len(SENTENCES)
        assert report["beam"] == 2


@pytest.mark.thorough
def test_parity_with_the_checkpoint_finds_what_the_bundle_cannot_tell(
    run: Run, own_bundle: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    change_consistently(own_bundle)
    assert run("parity", own_bundle, "-", "--threads", "1", stdin=TEXT).code == 0
    arguments = ("parity", own_bundle, "-", "--checkpoint", tiny_checkpoint.path, "--beam", "1", "--threads", "1")
    outcome = run(*arguments, stdin=TEXT)
    assert outcome.code == 1
    index = outcome.lines.index("  FAILED")
    assert re.match(
        r"    logits of step 1 are off by .*, .* is allowed \(PyTorch's own rounding is ", outcome.lines[index + 1]
    )
    weight = "decoder.layers.0.feed_forward.hidden.weight"
    assert (
        f"weights.safetensors: {weight} differs from the model's in 960 of 960 numbers, first in row 0" in outcome.lines
    )
    assert any(
        line.startswith("decoder_step.onnx: departs from PyTorch at decoder.layers.0.feed_forward.hidden/")
        for line in outcome.lines
    )
    outcome = run(*arguments, "--json", stdin=TEXT)
    assert outcome.code == 1
    told = json.loads(outcome.stdout)
    assert told["passed"] is False
    assert [found["file"] for found in told["mismatches"]] == ["weights.safetensors"]
    (report,) = told["reports"]
    assert not report["passed"]
    assert report["failures"]
    assert report["logits"]["max"] > 1e-3
    assert max(errors["max"] for errors in report["cross"].values()) < 1e-5  # the encoder was left alone


@pytest.mark.thorough
def test_parity_compares_settings_with_those_of_a_configuration(
    run: Run, own_bundle: Path, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    """A setting that the checkpoint does not tell, changed in the manifest in both of its places."""
    manifest = json.loads((own_bundle / "manifest.json").read_text())
    right = dict(manifest["source"]["given"])
    manifest["source"]["given"]["eos_id"] = manifest["config"]["eos_id"] = 9
    (own_bundle / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "config.json").write_text(json.dumps(right))
    arguments = ("parity", own_bundle, "-", "--checkpoint", tiny_checkpoint.path, "--beam", "1")
    outcome = run(*arguments, "--config", tmp_path / "config.json", stdin=TEXT)
    assert outcome.code == 1
    assert f"manifest.json: eos_id is 9, the checkpoint's is {right['eos_id']}" in outcome.lines
    outcome = run("parity", own_bundle, "-", "--config", tmp_path / "config.json", stdin=TEXT)
    assert outcome.code == 2
    assert "Give --checkpoint CKPT too" in outcome.stderr


def test_parity_asks_to_confirm_a_setting_that_the_checkpoint_contradicts(
    run: Run, own_bundle: Path, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    """With the advice of the message the bundle passes and is certified, without it neither."""
    manifest = json.loads((own_bundle / "manifest.json").read_text())
    manifest["source"]["given"]["source_eos"] = manifest["config"]["source_eos"] = False
    (own_bundle / "manifest.json").write_text(json.dumps(manifest))
    vocabularies = ("--src-vocab", tiny_checkpoint.src_vocab, "--tgt-vocab", tiny_checkpoint.tgt_vocab)
    arguments = ("parity", own_bundle, "-", "--checkpoint", tiny_checkpoint.path, *vocabularies, "--beam", "1")
    outcome = run(*arguments, stdin=TEXT)
    assert outcome.code == 1
    assert "certified" not in outcome.stderr
    (line,) = [line for line in outcome.lines if line.startswith("manifest.json: ")]
    assert line.startswith("manifest.json: source_eos is False, the checkpoint's own is True: ")
    (tmp_path / "config.json").write_text(line.partition("--config FILE.json with ")[2])
    outcome = run(*arguments, "--config", tmp_path / "config.json", stdin=TEXT)
    assert outcome.code == 0, outcome.stdout
    assert "certified in" in outcome.stderr


def test_parity_fails_for_a_fault_in_a_bundle_that_names_another_version(run: Run, own_bundle: Path) -> None:
    path = own_bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["versions"]["tfexport"] = "0.0.9"
    for graph in own_bundle.glob("*.onnx"):
        model = onnx.load(graph, load_external_data=False)
        model.producer_version = "0.0.9"
        if graph.name == "encoder.ort.onnx":
            model.graph.node[0].name = "another"
        onnx.save(model, graph)
        manifest["files"][graph.name]["sha256"] = hashlib.sha256(graph.read_bytes()).hexdigest()
    path.write_text(json.dumps(manifest))
    outcome = run("parity", own_bundle, "-", "--beam", "1", stdin=TEXT)
    assert outcome.code == 1
    assert outcome.lines[-1].startswith("FAILED")
    assert "It names tfexport 0.0.9 as its writer" in outcome.stdout
    assert "certified in" not in outcome.stderr


@pytest.mark.thorough
def test_parity_fails_for_a_file_alone(run: Run, own_bundle: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    """A row of a table that nothing decodes: outputs say nothing of it."""
    path = own_bundle / "weights.safetensors"
    weights = load_file(path)
    weights["encoder.positions.table"][19] += 1
    save_file(weights, path, {"format": "pt"})
    manifest = json.loads((own_bundle / "manifest.json").read_text())
    manifest["files"][path.name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (own_bundle / "manifest.json").write_text(json.dumps(manifest))
    arguments = ("parity", own_bundle, "-", "--checkpoint", tiny_checkpoint.path, "--beam", "1")
    outcome = run(*arguments, stdin=b"de4 de5 de6 de7 de8 de9 de10\n" * 3)
    assert outcome.code == 1
    assert "  PASSED" in outcome.lines
    assert outcome.lines[-1] == "FAILED: 3 of 13 graphs, 1 difference in the files"  # those that read a whole source
    assert "certified in" not in outcome.stderr


@pytest.mark.thorough
def test_parity_with_targets_and_in_all_arrangements(run: Run, tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in.de").write_bytes(b"de4 de5\nde6 de7 de8\n")
    (tmp_path / "out.en").write_bytes(b"en4 en5\nen6\n")
    arguments = [
        "parity",
        tiny_bundle,
        tmp_path / "in.de",
        "--targets",
        tmp_path / "out.en",
        "--beam",
        "2",
        "--float64",
    ]
    outcome = run(*arguments, "--invariance", "--no-certify")
    assert outcome.code == 0
    assert "  BLEU " in outcome.stdout
    assert "ort-cpu in fp32, beam 2: 2 sentences, compared with each alone" in outcome.stdout
    assert "  2 threads       2 with the same tokens" in outcome.stdout
    found = json.loads(run(*arguments, "--invariance", "--no-certify", "--json").stdout)
    assert found["reports"][0]["quality"][0].keys() == {"bleu", "chrf"}
    assert [way["identical"] for way in found["invariance"][0]["arrangements"]] == [2] * 5
    assert found["invariance"][0]["passed"] is True
    one_error(run(*arguments[:3], "--targets", tmp_path / "missing"))


@pytest.mark.thorough
def test_parity_without_input_compares_random_ids_and_says_so(run: Run, tiny_bundle: Path) -> None:
    outcome = run("parity", tiny_bundle, "--threads", "1")
    assert outcome.code == 0
    assert "random ids" in outcome.stderr


@pytest.mark.thorough
def test_parity_on_real_input_certifies_and_decode_asks_for_it(run: Run, own_bundle: Path) -> None:
    said = run("decode", own_bundle, stdin=TEXT).stderr
    assert (
        f"note: fp32 on ort-cpu was not compared with our reading on real text: tfexport parity {own_bundle} INPUT"
        in said
    )
    assert "certified" not in run("parity", own_bundle).stderr  # random ids certify nothing
    assert "certified" not in run("parity", own_bundle, "-", "--no-certify", stdin=TEXT).stderr
    assert not (own_bundle / "certificates.json").exists()
    assert "fp32 on ort-cpu" in run("parity", own_bundle, "-", stdin=TEXT).stderr
    (entry,) = json.loads((own_bundle / "certificates.json").read_text(encoding="utf-8"))
    assert [report["beam"] for report in entry["reports"]] == [1, 4]
    assert not entry["inputs"]["random"]
    assert "not compared" not in run("decode", own_bundle, stdin=TEXT).stderr


@pytest.mark.thorough
def test_parity_certifies_nothing_that_failed_in_any_way(
    run: Run, own_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "certified in" in run("parity", own_bundle, "-", stdin=TEXT).stderr
    assert "note: not certified: --tolerance" in run("parity", own_bundle, "-", "--tolerance", "1", stdin=TEXT).stderr
    short = run("parity", own_bundle, "-", "--beam", "1", "--max-length", "1", stdin=TEXT)
    assert "note: not certified: fewer than 10 steps" in short.stderr

    def leaky(*given: object, **options: object) -> object:
        return replace(invariance(*given, **options), arrangements=(Arrangement("padded", 1, 1, 0),))

    monkeypatch.setattr("tfexport.verification.invariance.invariance", leaky)
    outcome = run("parity", own_bundle, "-", "--invariance", stdin=TEXT)
    assert outcome.code == 1
    assert "certified" not in outcome.stderr
    assert (
        "was not compared with our reading on real text" in run("decode", own_bundle, stdin=TEXT).stderr
    )  # the earlier one is gone


def test_parity_says_at_once_that_a_page_has_no_place(run: Run, tiny_bundle: Path, tmp_path: Path) -> None:
    error = one_error(run("parity", tiny_bundle, "--report", tmp_path / "missing" / "x.html"))
    assert "there is no folder" in error


@pytest.mark.thorough
def test_parity_names_where_graphs_depart(run: Run, own_bundle: Path) -> None:
    clean = run("parity", own_bundle, "--bisect", "--beam", "1", "--json")
    found = json.loads(clean.stdout)["graphs"]
    files = {path.name for path in own_bundle.glob("*.onnx")}
    assert {graph["file"] for graph in found} == files
    assert {graph["file"] for graph in found if graph["with_kernels"]} <= {file for file in files if ".ort." in file}
    assert all(graph["first"] is None and len(graph["values"]) for graph in found)
    assert clean.code == 0
    told = run("parity", own_bundle, "--bisect", "--beam", "1")
    assert [line.split(": all ")[0] for line in told.lines if ": all " in line] == [
        f"{graph['file']}{' with kernels' if graph['with_kernels'] else ''}" for graph in found
    ]

    path = own_bundle / "beam_step.ort.onnx"
    model = onnx.load(path, load_external_data=False)
    norm = next(node for node in model.graph.node if node.name.startswith("decoder.layers.0.norms.1/"))
    for attribute in norm.attribute:
        attribute.f = 1e-2 if attribute.name == "epsilon" else attribute.f
    onnx.save(model, path)
    manifest = json.loads((own_bundle / "manifest.json").read_text())
    manifest["files"][path.name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (own_bundle / "manifest.json").write_text(json.dumps(manifest))
    outcome = run("parity", own_bundle, "-", "--beam", "1", stdin=TEXT)  # which does not decode with this graph
    assert outcome.code == 1
    assert f"beam_step.ort.onnx: departs from PyTorch at {norm.name}" in outcome.lines
    assert outcome.lines[-1].startswith("FAILED: 1 of ")
    assert outcome.lines[-1].endswith(" graphs, 1 difference in the files")
    assert "certified" not in outcome.stderr


@pytest.mark.thorough
def test_parity_in_half_precision(run: Run, half_bundle: Path) -> None:
    arguments = ("parity", half_bundle, "-", "--threads", "1", "--precision", "fp16", "--beam", "1", "--no-certify")
    outcome = run(*arguments, stdin=TEXT)
    assert outcome.code == 0
    assert outcome.lines[0] == "ort-cpu in fp16 against PyTorch in fp32:"
    assert "  PASSED" in outcome.lines
    (report,) = json.loads(run(*arguments, "--json", stdin=TEXT).stdout)["reports"]
    assert (report["precision"], report["passed"]) == ("float16", True)
    assert report["limits"] == {"top1": 0.99, "loss": 0.02, "furthest": 1.0, "kl": 0.001, "error": None}
    outcome = run(*arguments, "--tolerance", "1e-6", stdin=TEXT)
    assert outcome.code == 1
    assert "  PASSED" in outcome.lines  # the limit is that of the graphs, below float32
    assert "1.0e-06 is allowed" in outcome.stdout
    assert outcome.lines[-1].startswith("FAILED: ")
    assert outcome.lines[-1].endswith("graphs")


@pytest.mark.parametrize("other", [other_target_words, another_layer])
def test_parity_with_a_checkpoint_of_other_sizes_is_an_error(
    run: Run, tiny_bundle: Path, tmp_path: Path, other: Callable[[], TutorialTransformer]
) -> None:
    torch.save(other().state_dict(), tmp_path / "other.pt")
    outcome = run("parity", tiny_bundle, "-", "--checkpoint", tmp_path / "other.pt", "--threads", "1", stdin=TEXT)
    assert outcome.code == 2, outcome.stderr
    assert "error: " in outcome.stderr


def test_parity_of_a_manifest_without_a_source_is_an_error(
    run: Run, own_bundle: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    manifest = json.loads((own_bundle / "manifest.json").read_text())
    del manifest["source"]
    (own_bundle / "manifest.json").write_text(json.dumps(manifest))
    one_error(run("parity", own_bundle, "-", "--checkpoint", tiny_checkpoint.path, stdin=TEXT))


@pytest.mark.parametrize(
    ("flag", "module", "message"),
    [
        ("--report", "matplotlib.figure", "plots of a report need matplotlib"),
        ("--targets", "sacrebleu", "need sacrebleu"),
    ],
)
def test_a_missing_library_is_told_before_the_comparison(
    flag: str, module: str, message: str, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("tfexport.verification.parity.check", None)
    result = run("parity", tmp_path, flag, tmp_path / "file.html")
    assert message in one_error(result)
