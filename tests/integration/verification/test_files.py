"""What of a bundle's files is not as its model says: weights, tokenizers and settings; clean bundles have nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from makers.ort_bundles import CONFIG, random_model, write_bundle
from makers.tiny import TinyCheckpoint
from tfexport import contract
from tfexport.bundle.reader import Bundle, file_sha256, open_bundle
from tfexport.bundle.writer import write_manifest
from tfexport.contract import SCREENING_FILE, Precision
from tfexport.exporter.graphs import write_graphs
from tfexport.exporter.weights import write_variant, write_weights
from tfexport.models.formats.native import Tokenizers
from tfexport.models.transformer import Transformer
from tfexport.system.version import version
from tfexport.text.vocabularies import read_vocabulary
from tfexport.verification.files import (
    Mismatch,
    config_mismatches,
    graph_specs,
    manifest_mismatches,
    tokenizer_mismatches,
    weights_mismatches,
)
from tfexport.verification.parity import check, check_graphs

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], None]
PRECISIONS: tuple[Precision, ...] = tuple(contract.PRECISIONS.values())
MODEL = CONFIG.replace(tgt_vocab_size=1030, n_encoder_layers=1, n_decoder_layers=1, output_bias=True)
"""So many words that they are screened, and the least of the rest."""


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_model(MODEL, seed=5)


@pytest.fixture(scope="module")
def clean(model: Transformer, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Of `model` in every precision, screened, with all graphs. Not to be changed."""
    folder = tmp_path_factory.mktemp("clean") / "bundle"
    folder.mkdir()
    graphs = []
    for precision in PRECISIONS:
        write_variant(model, precision, folder)
        graphs += write_graphs(model.config, precision, folder, alignments=True, shortlist=True)
    write_manifest(folder, model.config, graphs, {"source": {"sha256": "", "family": "native", "given": {}}})
    return open_bundle(folder)


@pytest.fixture
def changed(clean: Bundle, tmp_path: Path) -> Callable[[str, Change], Bundle]:
    """A copy of the clean bundle with a change to one weights file, whose manifest has its new checksum."""

    def make(file: str, change: Change) -> Bundle:
        folder = Path(shutil.copytree(clean.directory, tmp_path / "changed"))
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / file).items()}
        change(tensors)
        save_file(tensors, folder / file, {"format": "pt"})
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][file] = {"sha256": file_sha256(folder / file), "bytes": (folder / file).stat().st_size}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return open_bundle(folder)

    return make


# --- clean bundles


def test_a_clean_bundle_has_no_mismatch(clean: Bundle, model: Transformer) -> None:
    assert {name for name in clean.files if name.endswith(".safetensors")} == {
        SCREENING_FILE,
        *(contract.weights_file(precision) for precision in PRECISIONS),
    }
    assert weights_mismatches(clean, model) == []
    assert manifest_mismatches(clean) == []
    assert config_mismatches(clean, model.config) == []


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "changes", [{"tie_output": True}, {"tgt_vocab_size": 31, "tie_source_target": True}, {"n_heads": 6}]
)
def test_clean_bundles_of_other_models(tmp_path: Path, changes: Mapping[str, Any]) -> None:
    model = random_model(CONFIG.replace(**changes))
    bundle = write_bundle(model, tmp_path / "bundle", ("float32", "int8", "int4"))
    assert weights_mismatches(bundle, model) == manifest_mismatches(bundle) == []


@pytest.mark.thorough
def test_clean_bundles_that_an_export_wrote(
    half_bundle: Path, quantized_bundle: Path, aligned_bundle: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    checkpoint = tiny_checkpoint.load()
    model = checkpoint.build_model()
    for directory in (half_bundle, quantized_bundle, aligned_bundle):
        bundle = open_bundle(directory)
        assert weights_mismatches(bundle, model) == manifest_mismatches(bundle) == []
        assert config_mismatches(bundle, checkpoint.config) == []
        assert tokenizer_mismatches(bundle, checkpoint.tokenizers) == ([], [])


def test_a_bundle_with_modules_in_float32_has_no_mismatch(tmp_path: Path) -> None:
    """The tensors of what stays in float32 are not in the quantized file."""
    model = random_model(CONFIG)
    write_weights(model, "float32", tmp_path)
    graphs = write_graphs(model.config, "float32", tmp_path)
    for precision, keep in (("int8", ["output", "cross"]), ("float16", ["decoder.layers.0.feed_forward.hidden"])):
        write_variant(model, precision, tmp_path, keep)  # type: ignore[arg-type]
        graphs += write_graphs(model.config, precision, tmp_path, keep)  # type: ignore[arg-type]
    write_manifest(tmp_path, model.config, graphs, {"source": {"sha256": "", "family": "native", "given": {}}})
    assert weights_mismatches(open_bundle(tmp_path), model) == []


def test_bounds_of_screening_may_differ_in_the_last_bit(changed: Callable[..., Bundle], model: Transformer) -> None:
    """They are sums, which another CPU adds up in another order."""

    def other_sums(tensors: Tensors) -> None:
        for name in ("screening.norm", "screening.error"):
            tensors[name] = torch.nextafter(tensors[name], torch.tensor(torch.inf))

    assert weights_mismatches(changed(SCREENING_FILE, other_sums), model) == []


# --- weights that are other ones


def swapped(name: str) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[name][[1, 2]] = tensors[name][[2, 1]].clone()

    return change


def put(name: str, row: int, number: float) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[name][row] = number

    return change


def last_bit(name: str) -> Change:
    def change(tensors: Tensors) -> None:
        number = tensors[name].view(-1)[-1:]
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[number.element_size()]
        number.view(kind)[:] ^= 1

    return change


TABLE, WEIGHT = "encoder.positions.table", "decoder.layers.0.feed_forward.output"
LOST = [
    ("weights.safetensors", swapped("encoder.tokens.weight"), "encoder.tokens.weight differs", 1),
    ("weights.safetensors", swapped(TABLE), f"{TABLE} differs", 1),
    ("weights.safetensors", put("decoder.tokens.weight", 7, 0.0), "decoder.tokens.weight differs", 7),
    ("weights.safetensors", put("output_weight", 1029, float("nan")), "output_weight differs", 1029),
    ("weights.safetensors", put(TABLE, 19, float("inf")), f"{TABLE} differs", 19),
    ("weights.safetensors", last_bit(f"{WEIGHT}.weight"), f"{WEIGHT}.weight differs", 23),
    ("weights.fp16.safetensors", swapped("decoder.tokens.weight"), "decoder.tokens.weight differs", 1),
    ("weights.fp16.safetensors", put(f"{WEIGHT}.weight", 3, 0.0), f"{WEIGHT}.weight differs", 3),
    ("weights.fp16.safetensors", put(f"{WEIGHT}.bias", 3, float("nan")), f"{WEIGHT}.bias differs", 3),
    ("weights.fp16.safetensors", last_bit("output_weight"), "output_weight differs", 1029),
    ("weights.bf16.safetensors", put(TABLE, 4, float("inf")), f"{TABLE} differs", 4),
    ("weights.bf16.safetensors", last_bit("encoder.tokens.weight"), "encoder.tokens.weight differs", 30),
    ("weights.int8.safetensors", swapped("output.scale"), "output.scale differs", 1),
    ("weights.int8.safetensors", put("output.scale", 1000, 0.0), "output.scale differs", 1000),
    ("weights.int8.safetensors", put(f"{WEIGHT}.scale", 2, float("nan")), f"{WEIGHT}.scale differs", 2),
    ("weights.int8.safetensors", last_bit(f"{WEIGHT}.int8"), f"{WEIGHT}.int8 differs", None),
    ("weights.int4.safetensors", last_bit(f"{WEIGHT}.int4"), f"{WEIGHT}.int4 differs", None),
    ("weights.int4.safetensors", put(f"{WEIGHT}.scale", 0, float("inf")), f"{WEIGHT}.scale differs", 0),
    (SCREENING_FILE, swapped("screening.int8"), "screening.int8 differs", None),
    (SCREENING_FILE, put("screening.norm", 5, 0.0), "screening.norm differs", 5),
    (SCREENING_FILE, put("screening.error", 5, float("nan")), "screening.error differs", 5),
    (SCREENING_FILE, put("screening.scale", 1029, float("inf")), "screening.scale differs", 1029),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "change", "about", "row"), LOST, ids=[f"{x[0]}-{x[2]}-{i}" for i, x in enumerate(LOST)]
)
def test_numbers_that_are_not_the_model_s_are_told_with_their_row(
    changed: Callable[..., Bundle], model: Transformer, file: str, change: Change, about: str, row: int | None
) -> None:
    (found,) = weights_mismatches(changed(file, change), model)
    assert found.file == file
    assert found.about.startswith(about)
    assert row is None or found.about.endswith(f", first in row {row}")
    assert str(found) == f"{file}: {found.about}"
    assert found.to_dict() == {"file": file, "about": found.about}


def added(tensors: Tensors) -> None:
    tensors["another.weight"] = torch.zeros(3)


def of_no_projection(tensors: Tensors) -> None:
    tensors["another.scale"] = torch.zeros(3)


def without(name: str) -> Change:
    return lambda tensors: tensors.__delitem__(name)


def cast(name: str, dtype: torch.dtype) -> Change:
    return lambda tensors: tensors.__setitem__(name, tensors[name].to(dtype))


def reshaped(name: str) -> Change:
    return lambda tensors: tensors.__setitem__(name, tensors[name][..., :-1].contiguous())


NAMES = [
    ("weights.safetensors", added, "another.weight is not a tensor of this model"),
    ("weights.safetensors", without(f"{WEIGHT}.bias"), f"{WEIGHT}.bias is missing"),
    ("weights.safetensors", cast(f"{WEIGHT}.bias", torch.float16), f"{WEIGHT}.bias is torch.float16"),
    ("weights.safetensors", cast(f"{WEIGHT}.bias", torch.float64), f"{WEIGHT}.bias is torch.float64"),
    ("weights.safetensors", reshaped(TABLE), f"{TABLE} is torch.float32 [20, 23], not torch.float32 [20, 24]"),
    ("weights.fp16.safetensors", added, "another.weight is not a tensor of this model"),
    ("weights.fp16.safetensors", cast("output_weight", torch.float16), "output_weight is torch.float16"),
    ("weights.bf16.safetensors", without("output_bias"), "output_bias is missing"),
    ("weights.int8.safetensors", of_no_projection, "another.scale is not a tensor of this model"),
    ("weights.int8.safetensors", without("output.scale"), "output.scale is missing"),
    ("weights.int4.safetensors", without("output.int4"), "output.int4 is missing"),
    ("weights.int4.safetensors", added, "another.weight is not a tensor of this model"),
    (SCREENING_FILE, added, "another.weight is not a tensor of this model"),
    (SCREENING_FILE, without("screening.norm"), "screening.norm is missing"),
    (SCREENING_FILE, reshaped("screening.norm"), "screening.norm is "),
]  # fmt: skip


@pytest.mark.parametrize(("file", "change", "about"), NAMES, ids=[f"{x[0]}-{x[2]}" for x in NAMES])
def test_names_types_and_shapes_that_are_not_the_model_s_are_told(
    changed: Callable[..., Bundle], model: Transformer, file: str, change: Change, about: str
) -> None:
    (found,) = weights_mismatches(changed(file, change), model)
    assert found.file == file
    assert found.about.startswith(about)


def test_a_projection_that_the_file_has_not_is_told_of_the_graphs(
    changed: Callable[..., Bundle], model: Transformer
) -> None:
    """In the file it looks like one that stays in float32; the graphs point to it all the same."""

    def no_output(tensors: Tensors) -> None:
        del tensors["output.int8"], tensors["output.scale"]

    bundle = changed("weights.int8.safetensors", no_output)
    assert weights_mismatches(bundle, model) == []
    found = {check.file for check in check_graphs(bundle, model, "int8") if check.first is not None}
    assert "beam_step.int8.ort.onnx" in found


def test_a_file_of_another_name_is_told(clean: Bundle, model: Transformer) -> None:
    other = replace(clean, files={**clean.files, "weights.fp8.safetensors": "0" * 64})
    assert weights_mismatches(other, model) == [
        Mismatch("weights.fp8.safetensors", "not a weights file of this version")
    ]


def test_every_file_of_another_model_is_told(clean: Bundle) -> None:
    found = weights_mismatches(clean, random_model(MODEL, seed=6))
    assert {mismatch.file for mismatch in found} == {name for name in clean.files if name.endswith(".safetensors")}


# --- settings


def test_every_setting_that_differs_is_told(clean: Bundle) -> None:
    changes = {"eos_id": 4, "norm_eps": 1e-6, "activation": "gelu", "source_eos": False, "suppressed_ids": (7,)}
    for name, value in changes.items():
        (found,) = config_mismatches(clean, clean.config.replace(**{name: value}))
        assert found.file == "manifest.json"
        assert found.about.startswith(f"{name} is ")
    several = config_mismatches(clean, clean.config.replace(**changes))
    assert [mismatch.about.split(" ")[0] for mismatch in several] == [
        name for name in clean.config.to_dict() if name in changes
    ]


def test_graphs_that_change_places_in_the_manifest_are_told(clean: Bundle) -> None:
    graphs = list(clean.graphs)
    one, other = (
        next(index for index, graph in enumerate(graphs) if graph.file == file)
        for file in ("decoder_step.ort.onnx", "beam_step.ort.onnx")
    )
    graphs[one], graphs[other] = (
        replace(graphs[one], file=graphs[other].file),
        replace(graphs[other], file=graphs[one].file),
    )
    found = manifest_mismatches(replace(clean, graphs=tuple(graphs)))
    assert [mismatch.about for mismatch in found] == [
        "says that beam_step.ort.onnx is the graph decoder_step.ort.onnx",
        "says that decoder_step.ort.onnx is the graph beam_step.ort.onnx",
    ]
    assert {mismatch.file for mismatch in found} == {"manifest.json"}


@pytest.mark.parametrize("changes", [{"precision": "int8"}, {"dialect": "ort-cuda"}, {"role": "encoder_classifier"}])
def test_a_graph_that_is_called_another_one_is_told(clean: Bundle, changes: dict[str, Any]) -> None:
    graphs = tuple(replace(g, **changes) if g.file == "select_rows.onnx" else g for g in clean.graphs)
    found = manifest_mismatches(replace(clean, graphs=graphs))
    assert "lists select_rows.onnx, a graph that this model does not have" in [mismatch.about for mismatch in found]


def test_a_graph_that_is_not_listed_or_twice_is_told(clean: Bundle) -> None:
    kept = [graph for graph in clean.graphs if graph.file != "greedy_step.ort.onnx"]
    assert len(kept) == len(clean.graphs) - 1
    (missing,) = manifest_mismatches(replace(clean, graphs=tuple(kept)))
    assert missing.about == "does not list the graph greedy_step.ort.onnx"
    (double,) = manifest_mismatches(replace(clean, graphs=(*clean.graphs, clean.graphs[0])))
    assert double.about == f"lists the graph {clean.graphs[0].file} 2 times"


def test_a_bundle_without_optional_graphs_has_no_mismatch(clean: Bundle) -> None:
    kept = [g for g in clean.graphs if "shortlist" not in g.role and "attention" not in g.role]
    assert 0 < len(kept) < len(clean.graphs)
    assert manifest_mismatches(replace(clean, graphs=tuple(kept))) == []


@pytest.mark.parametrize(
    ("runtime", "precision", "dialect"),
    [("ort-cpu", "float32", "onnx24"), ("tensorrt", "float16", "ort-cuda"), ("ort-cuda", "bfloat16", "onnx24")],
)
def test_a_runtime_that_is_given_other_graphs_is_told(
    clean: Bundle, runtime: str, precision: str, dialect: Any
) -> None:
    """Those of another dialect compute the same; but which ones were compared follows from this."""
    assert clean.dialects[runtime][precision] != dialect
    dialects = {**clean.dialects, runtime: {**clean.dialects[runtime], precision: dialect}}
    (found,) = manifest_mismatches(replace(clean, dialects=dialects))
    assert found.about.startswith(f"gives {runtime} the dialects ")


def test_a_runtime_of_another_name_or_none_is_told(clean: Bundle) -> None:
    (found,) = manifest_mismatches(replace(clean, dialects={**clean.dialects, "ort-npu": {"float32": "ort"}}))
    assert found.about.startswith("gives ort-npu the dialects ")


def test_entries_of_graphs_that_differ_are_told(clean: Bundle, tmp_path: Path) -> None:
    """Other programs may read them; nothing here does."""
    folder = Path(shutil.copytree(clean.directory, tmp_path / "changed"))
    manifest = json.loads((folder / "manifest.json").read_text())
    entries = {entry["file"]: entry for entry in manifest["graphs"]}
    assert entries["decoder_step.fp16.onnx"]["float32_islands"]
    entries["encoder.onnx"]["inputs"] = []
    entries["decoder_step.onnx"]["outputs"][0]["shape"][-1] = 7
    entries["decoder_step.fp16.onnx"]["float32_islands"] = {"everything": "for no reason"}
    entries["encoder.int8.ort.onnx"]["more"] = 1

    def told(**versions: str) -> list[str]:
        (folder / "manifest.json").write_text(json.dumps({**manifest, "versions": versions}))
        found = manifest_mismatches(open_bundle(folder))
        assert all(mismatch.file == "manifest.json" for mismatch in found)
        return sorted(mismatch.about for mismatch in found)

    differences = [
        "the entry of decoder_step.fp16.onnx differs from this version's in float32_islands.everything",
        "the entry of encoder.onnx differs from this version's in inputs",
        "the entry of encoder.int8.ort.onnx differs from this version's in more",
        "the entry of decoder_step.onnx differs from this version's in outputs[0].shape[1]",
    ]
    assert told() == told(tfexport=version()) == told(tfexport="0.0.9") == sorted(differences)


def test_graphs_of_all_kinds_are_known(clean: Bundle) -> None:
    specs = graph_specs(clean)
    assert {spec.file for spec in specs.values()} >= {graph.file for graph in clean.graphs}
    assert all((spec.role, spec.precision, spec.dialect) == key for key, spec in specs.items())


# --- tokenizers


def test_tokenizers_that_are_not_the_checkpoint_s_are_told(
    tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    bundle, own = open_bundle(tiny_bundle), tiny_checkpoint.tokenizers()
    assert tokenizer_mismatches(bundle, own) == ([], [])
    words = json.loads(tiny_checkpoint.src_vocab.read_text(encoding="utf-8"))
    words = list(words) if isinstance(words, list) else sorted(words, key=words.get)
    for other in (words[:-1], [*words, "more"], [*words[:-2], words[-1], words[-2]]):
        (tmp_path / "words.json").write_text(json.dumps(other), encoding="utf-8")
        ((found,), unknown) = tokenizer_mismatches(
            bundle, Tokenizers(read_vocabulary(tmp_path / "words.json"), own.target)
        )
        assert found.file == bundle.tokenizers["source"]
        assert found.about.endswith(" is not the checkpoint's")
        assert unknown == []
    lower = read_vocabulary(tiny_checkpoint.tgt_vocab, lowercase=True)
    ((found,), unknown) = tokenizer_mismatches(bundle, Tokenizers(own.source, lower))
    assert found.file == bundle.tokenizers["target"]
    assert found.about == "tokenizer.normalizer is not the checkpoint's"


def test_a_side_that_only_one_of_them_has_is_told(tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    bundle, own = open_bundle(tiny_bundle), tiny_checkpoint.tokenizers()
    assert tokenizer_mismatches(bundle, Tokenizers(None, None)) == ([], ["source", "target"])
    assert tokenizer_mismatches(bundle, Tokenizers(own.source, None)) == ([], ["target"])
    none = replace(bundle, tokenizers={"source": bundle.tokenizers["source"]}, _tokenizers={})
    ((found,), unknown) = tokenizer_mismatches(none, own)
    assert (str(found), unknown) == ("manifest.json: has no target tokenizer, and the checkpoint has one", [])
    assert tokenizer_mismatches(replace(bundle, tokenizers={}, _tokenizers={}), Tokenizers(None, None)) == ([], [])


# --- parity, of which this is a part


@pytest.mark.thorough
def test_parity_fails_for_each_of_them(own_bundle: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    path = own_bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["runtimes"]["tensorrt"]["float32"] = "ort-cuda"
    path.write_text(json.dumps(manifest))
    comparison = check(own_bundle, None, ["ort-cpu"], max_length=4, say=lambda _: None)
    assert all(report.passed for report in comparison.reports)
    assert [mismatch.file for mismatch in comparison.mismatches] == ["manifest.json"]
    assert not comparison.passed
    assert not comparison.holds("float32")
