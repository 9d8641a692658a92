"""Certificates hold for the files, the library and the device that were compared, and for nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tfexport.bundle.reader import CERTIFICATES, GENERATION_CONFIG, Bundle, open_bundle
from tfexport.errors import BundleError
from tfexport.graph_checks.rounding import RULE
from tfexport.verification import certificates
from tfexport.verification.certificates import (
    certify,
    files_of,
    library_of,
    missing,
    read_certificates,
    settings_of,
    write_certificates,
)

INPUTS = {"sha256": "0" * 64, "sentences": 3, "random": False}


def stamp(bundle: Bundle, runtime: str = "ort-cpu", precision: Any = "float32") -> None:
    write_certificates(bundle, [certify(bundle, runtime, precision, [{"beam": 1}], INPUTS, "bundle")])


@pytest.fixture
def stamped(own_bundle: Path) -> Bundle:
    bundle = open_bundle(own_bundle)
    stamp(bundle)
    return bundle


def test_a_bundle_without_one_says_so(own_bundle: Path) -> None:
    bundle = open_bundle(own_bundle)
    assert read_certificates(bundle) == []
    assert missing(bundle, "ort-cpu", "float32") == "fp32 on ort-cpu was not compared with our reading on real text"
    assert missing(bundle, "torch", "float32") is None  # it is what others are compared with
    assert missing(bundle, "torch", "float16") is not None


def test_it_holds_for_what_was_compared_and_for_nothing_else(stamped: Bundle) -> None:
    assert missing(stamped, "ort-cpu", "float32") is None
    assert missing(stamped, "ort-cpu", "int8") == "int8 on ort-cpu was not compared with our reading on real text"
    (found,) = read_certificates(stamped)
    assert found.inputs == INPUTS
    assert found.library == library_of("ort-cpu")
    assert set(found.files) == {
        *(f"{role}.ort.onnx" for role in ("encoder", "decoder_step", "greedy_step", "beam_step")),
        "weights.safetensors",
        "source_tokenizer.json",
        "target_tokenizer.json",
    }
    assert found.rule == RULE
    assert open_bundle(stamped.directory).files == stamped.files  # it is no part of the manifest


def test_it_does_not_hold_for_another_library_or_device(stamped: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "version", lambda package: "9.9")
        reason = missing(stamped, "ort-cpu", "float32")
        assert reason is not None
        assert "this is onnxruntime 9.9" in reason
    with monkeypatch.context() as patch:
        patch.setattr(certificates.kernels, "library", lambda: None)
        reason = missing(stamped, "ort-cpu", "float32")
        assert reason is not None
        assert " with kernels " in reason
        assert reason.endswith(certificates.library_of("ort-cpu"))
    monkeypatch.setattr(certificates, "cpu_name", lambda: "another processor")
    reason = missing(stamped, "ort-cpu", "float32")
    assert reason is not None
    assert reason.endswith("this is another processor")
    stamp(stamped)
    assert missing(stamped, "ort-cpu", "float32") is None
    monkeypatch.undo()
    assert missing(stamped, "ort-cpu", "float32") is None  # that of the other processor did not replace it


def test_it_does_not_hold_for_a_bundle_that_was_changed(stamped: Bundle) -> None:
    changed = dict(stamped.files)
    changed["encoder.ort.onnx"] = "0" * 64
    other = Bundle(**{**vars(stamped), "files": changed})
    assert missing(other, "ort-cpu", "float32") == "fp32 on ort-cpu was compared before the bundle was changed"
    changed = {**stamped.files, "encoder.onnx": "0" * 64}  # which this runtime does not read
    assert missing(Bundle(**{**vars(stamped), "files": changed}), "ort-cpu", "float32") is None
    for name in ("source_tokenizer.json", GENERATION_CONFIG):
        changed = {**stamped.files, name: "0" * 64}
        assert missing(Bundle(**{**vars(stamped), "files": changed}), "ort-cpu", "float32") is not None


def rewritten(bundle: Bundle, change: Callable[[dict[str, Any]], None]) -> Bundle:
    """The bundle with another manifest, and the same files."""
    path = bundle.directory / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    change(manifest)
    path.write_text(json.dumps(manifest), encoding="utf-8")
    return open_bundle(bundle.directory)


def other_config(manifest: dict[str, Any]) -> None:
    manifest["config"]["eos_id"] = 5


def other_graphs(manifest: dict[str, Any]) -> None:
    graphs = manifest["graphs"]
    one, other = (next(g for g in graphs if g["file"] == f"{name}_step.ort.onnx") for name in ("beam", "decoder"))
    one["file"], other["file"] = other["file"], one["file"]


def other_tokenizers(manifest: dict[str, Any]) -> None:
    sides = manifest["tokenizers"]
    sides["source"], sides["target"] = sides["target"], sides["source"]


@pytest.mark.parametrize("change", [other_config, other_graphs, other_tokenizers])
def test_it_does_not_hold_for_a_manifest_that_says_otherwise(
    stamped: Bundle, change: Callable[[dict[str, Any]], None]
) -> None:
    """The files are the same, and read in another way."""
    other = rewritten(stamped, change)
    assert files_of(other, "ort-cpu", "float32") == files_of(stamped, "ort-cpu", "float32")
    reason = "fp32 on ort-cpu was compared before the bundle was changed"
    assert missing(other, "ort-cpu", "float32") == reason
    stamp(other)
    assert missing(other, "ort-cpu", "float32") is None


def test_it_holds_for_what_the_manifest_says_of_its_making(stamped: Bundle) -> None:
    other = rewritten(stamped, lambda manifest: manifest["source"].update(notes=["another"]))
    assert settings_of(other) == settings_of(stamped)
    assert missing(other, "ort-cpu", "float32") is None


@pytest.mark.parametrize("fields", [{"rule": RULE - 1}, {"rule": RULE + 1}])
def test_it_does_not_hold_under_the_rule_of_another_version(stamped: Bundle, fields: dict[str, int]) -> None:
    path = stamped.directory / CERTIFICATES
    (entry,) = json.loads(path.read_text(encoding="utf-8"))
    for name in ("rule", *(["settings"] if not fields else [])):  # which earlier versions did not write
        del entry[name]
    path.write_text(json.dumps([{**entry, **fields}]), encoding="utf-8")
    reason = missing(stamped, "ort-cpu", "float32")
    assert reason is not None
    assert reason.startswith("fp32 on ort-cpu was compared under the rule of another version")
    stamp(stamped)
    assert missing(stamped, "ort-cpu", "float32") is None
    assert len(read_certificates(stamped)) == 1


def test_a_failure_takes_an_earlier_one_away(stamped: Bundle) -> None:
    write_certificates(stamped, [], [("ort-cpu", "float32")])
    assert read_certificates(stamped) == []


def test_one_for_the_same_is_replaced_and_others_stay(stamped: Bundle) -> None:
    stamp(stamped, "torch", "float16")
    stamp(stamped)
    about = [
        c.about.split(" equals our reading of tiny.pt (unconfirmed: n_heads 3, ") for c in read_certificates(stamped)
    ]
    assert [(what, len(rest)) for what, *rest in about] == [("fp16 on torch", 1), ("fp32 on ort-cpu", 1)]
    assert [path.name for path in stamped.directory.glob("*certificates*")] == [CERTIFICATES]


def test_a_file_that_is_none_is_told(stamped: Bundle) -> None:
    for content in ("{", "[1]", '[{"runtime": "x"}]', "[" * 10_000):
        (stamped.directory / CERTIFICATES).write_text(content, encoding="utf-8")
        with pytest.raises(BundleError, match=r"certificates\.json cannot be read.* Remove it"):
            missing(stamped, "ort-cpu", "float32")


def test_a_folder_that_cannot_be_written_is_told(stamped: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (stamped.directory / CERTIFICATES).read_bytes()

    def refused(self: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refused)
    with pytest.raises(BundleError, match=r"cannot write .* --no-certify"):
        stamp(stamped)
    assert (stamped.directory / CERTIFICATES).read_bytes() == before
    assert len(list(stamped.directory.glob("*partial*"))) == 0


def test_files_of_each_runtime(half_bundle: Path) -> None:
    bundle = open_bundle(half_bundle)
    assert "encoder.fp16.onnx" in files_of(bundle, "ort-cpu", "float16")
    on_cuda = files_of(bundle, "ort-cuda", "float16")
    assert {"encoder.fp16.ort-cuda.onnx", "beam_step.fp16.ort-cuda.onnx", "select_rows.fp16.onnx"} <= on_cuda.keys()
    assert {"beam_search.fp16.onnx", "greedy_search.fp16.onnx", "best_tokens.fp16.onnx"} <= on_cuda.keys()
    assert not [name for name in on_cuda if "lengths" in name]
    both = {"weights.safetensors", "weights.fp16.safetensors", "weights.bf16.safetensors"}
    tokenizers = {"source_tokenizer.json", "target_tokenizer.json"}
    assert files_of(bundle, "tensorrt", "float16").keys() == both | tokenizers
    assert files_of(bundle, "torch", "float32").keys() == both | tokenizers


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("runtime", ["ort-cpu"]),
        ("precision", {}),
        ("files", {"weights.safetensors": ["0"]}),
        ("files", []),
        ("settings", 5),
        ("rule", [1]),
        ("library", None),
        ("device", {}),
        ("date", 5),
        ("reference", {}),
        ("inputs", 7),
        ("reports", 7),
        ("reports", [7]),
    ],
)
def test_a_certificate_of_other_types_is_none(stamped: Bundle, field: str, value: Any) -> None:
    """Nobody vouches for the file: it is not trusted, and a new comparison replaces it."""
    path = stamped.directory / CERTIFICATES
    (entry,) = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps([{**entry, field: value}]), encoding="utf-8")
    assert read_certificates(stamped) == []
    assert missing(stamped, "ort-cpu", "float32") == "fp32 on ort-cpu was not compared with our reading on real text"
    stamp(stamped)
    assert missing(stamped, "ort-cpu", "float32") is None
