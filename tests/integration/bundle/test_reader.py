"""The bundle is written whole or not at all, and is never decoded from when anything about it has changed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from makers.tiny import HEADS, IDS, TGT_VOCAB, TinyCheckpoint
from tfexport import __version__
from tfexport.bundle.reader import Engine, open_bundle
from tfexport.bundle.writer import new_bundle, with_engines
from tfexport.contract import FORMAT, WEIGHTS_FILE
from tfexport.errors import BundleError, TfexportError
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.runtimes import load_runtime

FILES = {
    "encoder.onnx",
    "decoder_step.onnx",
    "select_rows.onnx",
    "greedy_search.onnx",
    "beam_search.onnx",
    "best_tokens.onnx",
    "encoder.ort.onnx",
    "decoder_step.ort.onnx",
    "greedy_step.ort.onnx",
    "beam_step.ort.onnx",
    *(f"{role}.ort-cuda.onnx" for role in ("encoder", "decoder_step", "beam_step")),
    "weights.safetensors",
    "source_tokenizer.json",
    "target_tokenizer.json",
}


def search_graphs() -> dict[str, Any]:
    """The inputs and outputs of the graphs of a search, the same in every precision."""
    found, listed = ["rows", "found"], ["batch", "candidates"]
    best = [("best.log_probs", "float32", found), ("best.ids", "int64", found)]
    bias = ("bias", "float32", [TGT_VOCAB])
    live = [("scores", "float64", ["batch", "beam"]), ("mask", "bool", ["batch", 1, "beam", "cache"])]
    places = [
        *[("first_row", "int64", ["batch", 1]), ("slots", "int64", ["cache"]), ("own", "int64", ["beam", 1])],
        *[("leaving", "float32", [TGT_VOCAB]), ("order", "float32", ["candidates"]), ("found", "int64", [1])],
    ]
    candidates = [
        *[("candidates.log_probs", "float64", listed), ("candidates.parents", "int64", listed)],
        ("candidates.tokens", "int64", listed),
    ]
    following = [("next.tokens", "int64", ["batch", "beam"]), *((f"next.{name}", *rest) for name, *rest in live)]
    return {
        "greedy_search": (
            [*best, bias],
            [("next.tokens", "int64", ["rows", 1]), ("next.log_probs", "float32", ["rows", 1])],
        ),
        "beam_search": ([*best, bias, *live, *places], [*candidates, *following]),
        "best_tokens": ([("logits", "float32", ["rows", TGT_VOCAB]), ("places", "float32", ["found"])], best),
    }


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))


def write_manifest(folder: Path, manifest: Any) -> None:
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


# --- what is in it


def test_manifest_names_every_file_as_it_is(tiny_bundle: Path) -> None:
    manifest = manifest_of(tiny_bundle)
    assert manifest["format"] == FORMAT
    assert set(manifest["files"]) == FILES
    assert set(content(tiny_bundle)) == {*FILES, "manifest.json"}
    for name, entry in manifest["files"].items():
        raw = (tiny_bundle / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)}
    assert manifest["tokenizers"] == {"source": "source_tokenizer.json", "target": "target_tokenizer.json"}


def test_manifest_describes_the_graphs(half_bundle: Path) -> None:
    cross = [("cross.0.key", ["batch", 3, "src", 8]), ("cross.0.value", ["batch", 3, "src", 8])]
    past = [("past.0.key", ["rows", 3, "cache", 8]), ("past.0.value", ["rows", 3, "cache", 8])]
    present = [(name.replace("past", "present"), shape) for name, shape in past]

    def typed(dtype: str, tensors: list[tuple[str, list[Any]]]) -> list[tuple[str, str, list[Any]]]:
        return [(name, dtype, shape) for name, shape in tensors]

    expected: dict[tuple[str, str, str], Any] = {}
    for precision in ("float32", "float16", "bfloat16"):
        encoder = (
            typed("int64", [("src_ids", ["batch", "src"]), ("src_len", ["batch"])]),
            typed(precision, cross),
        )
        step = (
            [
                *typed("int64", [("tokens", ["rows"]), ("position", ["rows"]), ("src_len", ["batch"])]),
                *typed(precision, past + cross),
            ],
            [
                *typed("float32", [("logits", ["rows", TGT_VOCAB]), ("best.log_probs", ["rows", 17])]),
                ("best.ids", "int64", ["rows", 17]),
                *typed(precision, present),
            ],
        )
        select = (
            [*typed(precision, [("tensors", ["blocks", "from", "width"])]), ("index", "int64", ["rows"])],
            typed(precision, [("selected", ["blocks", "rows", "width"])]),
        )
        expected["encoder", precision, "onnx24"] = encoder
        expected["decoder_step", precision, "onnx24"] = step
        expected["select_rows", precision, "onnx24"] = select
        flat_cross = [(name, ["batch", "src", 24]) for name, _ in cross]
        flat_slots = [(name, ["batch", "cache", 24]) for name, _ in past]
        length = ("src_len", "int64", ["batch"])
        rows = [("tokens", "int64", ["rows"]), ("position", "int32", ["rows"]), length]
        beams = [("tokens", "int64", ["batch", "beam"]), ("position", "int32", ["batch", "beam"])]
        beams += [("slot", "int64", ["batch"]), ("mask", "bool", ["batch", 1, "beam", "cache"]), length]
        expected["encoder", precision, "ort-cuda"] = (encoder[0], typed(precision, flat_cross))
        expected["decoder_step", precision, "ort-cuda"] = ([*rows, *typed(precision, past + flat_cross)], step[1])
        expected["beam_step", precision, "ort-cuda"] = (
            [*beams, *typed(precision, flat_slots + flat_cross)],
            [*step[1][:3], *typed(precision, [(n.replace("past", "present"), shape) for n, shape in flat_slots])],
        )
        for role, sides in search_graphs().items():
            expected[role, precision, "onnx24"] = sides
    slots = [(name, ["batch", 3, "cache", 8]) for name, _ in past]
    found = [
        *typed("float32", [("logits", ["rows", TGT_VOCAB]), ("best.log_probs", ["rows", "count"])]),
        ("best.ids", "int64", ["rows", "count"]),
    ]
    length = ("src_len", "int32", ["batch"])
    expected["encoder", "float32", "ort"] = (
        [("src_ids", "int64", ["batch", "src"]), length],
        typed("float32", [("cross", [2, "batch", 3, "src", 8])]),
    )
    expected["decoder_step", "float32", "ort"] = (
        [
            *[("tokens", "int64", ["rows"]), ("position", "int32", ["rows"]), ("total", "int32", [1])],
            *[("count", "int64", [1]), length, *typed("float32", past + cross)],
        ],
        [*found, *typed("float32", present)],
    )
    expected["greedy_step", "float32", "ort"] = (
        [
            *[("tokens", "int64", ["rows"]), ("position", "int32", ["rows"]), ("total", "int32", [1])],
            *[("banned", "int64", ["banned"]), length, *typed("float32", past + cross)],
        ],
        [("best.logits", "float32", ["rows", 1]), ("best.ids", "int64", ["rows", 1]), *typed("float32", present)],
    )
    expected["beam_step", "float32", "ort"] = (
        [
            *[("tokens", "int64", ["batch", "beam"]), ("position", "int32", ["batch", "beam"])],
            *[("slot", "int64", ["batch"]), ("mask", "bool", ["batch", 1, "beam", "cache"])],
            *[("count", "int64", [1]), length, *typed("float32", slots + cross)],
        ],
        [*found, *typed("float32", [(name.replace("past", "present"), shape) for name, shape in slots])],
    )
    for graph in manifest_of(half_bundle)["graphs"]:
        sides = [[(t["name"], t["dtype"], t["shape"]) for t in graph[side]] for side in ("inputs", "outputs")]
        assert tuple(sides) == expected.pop((graph["role"], graph["precision"], graph["dialect"]))
    assert not expected


def test_manifest_describes_quantized_graphs_as_those_of_float32(quantized_bundle: Path) -> None:
    """All that goes in and comes out of them is float32."""
    found: dict[str, dict[str, Any]] = {}
    for graph in manifest_of(quantized_bundle)["graphs"]:
        if graph["dialect"] == "ort":
            assert graph["float32_islands"] == {}
            found.setdefault(graph["precision"], {})[graph["role"]] = (graph["inputs"], graph["outputs"])
    assert set(found["float32"]) == {"encoder", "decoder_step", "greedy_step", "beam_step"}
    assert found == dict.fromkeys(("float32", "int8", "int4"), found["float32"])


def test_manifest_names_the_dialect_of_each_runtime_and_precision(half_bundle: Path, quantized_bundle: Path) -> None:
    halves = ("float32", "float16", "bfloat16")
    assert manifest_of(half_bundle)["runtimes"] == {
        "ort-cpu": {"float32": "ort", "float16": "onnx24", "bfloat16": "onnx24"},
        "ort-cuda": dict.fromkeys(halves, "ort-cuda"),
        "tensorrt": dict.fromkeys(halves, "onnx24"),
    }
    assert manifest_of(quantized_bundle)["runtimes"] == {
        "ort-cpu": dict.fromkeys(("float32", "int8", "int4"), "ort"),
        "ort-cuda": {"float32": "ort-cuda"},
        "tensorrt": {"float32": "onnx24"},
    }
    bundle = open_bundle(quantized_bundle)
    assert bundle.precisions == ["float32", "int8", "int4"]
    assert bundle.dialect("ort-cpu", "int4") == "ort"
    assert bundle.graph("beam_step", "int4", "ort") == quantized_bundle / "beam_step.int4.ort.onnx"
    assert bundle.dialect("torch", "float32") == bundle.dialect("ort-cpu", "float16") == "onnx24"


def test_a_runtime_decodes_with_the_dialect_that_the_bundle_names(own_bundle: Path) -> None:
    """Whoever takes the entry out, as a bundle without these graphs would have it, decodes with the portable ones."""
    kinds = []
    for dialect in ("ort", "onnx24"):
        manifest = manifest_of(own_bundle)
        manifest["runtimes"]["ort-cpu"]["float32"] = dialect
        write_manifest(own_bundle, manifest)
        kinds.append(type(load_runtime("ort-cpu", open_bundle(own_bundle), threads=1)).__name__)
    assert kinds == ["OrtCpuRuntime", "LoopRuntime"]
    manifest["runtimes"]["ort-cpu"]["float32"] = "onnx25"
    write_manifest(own_bundle, manifest)
    with pytest.raises(BundleError, match=r"manifest\.json cannot be read: .*onnx25.* are not dialects"):
        open_bundle(own_bundle)


def test_manifest_says_what_is_float32_in_half_precision_and_why(half_bundle: Path) -> None:
    for graph in manifest_of(half_bundle)["graphs"]:
        islands = graph["float32_islands"]
        if graph["role"] in ("decoder_step", "beam_step") and graph["precision"] != "float32":
            assert list(islands) == ["output projection"]
            assert "half-precision logits tie" in islands["output projection"]
        else:
            assert islands == {}


def test_manifest_tells_where_the_bundle_comes_from(tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    manifest = manifest_of(tiny_bundle)
    assert manifest["source"] == {
        "file": "tiny.pt",
        "sha256": hashlib.sha256(tiny_checkpoint.path.read_bytes()).hexdigest(),
        "family": "tutorial",
        "given": {"n_heads": HEADS, **IDS},
        "text": {},
        "notes": [],
        "ignored": [],
        "confirmation": tiny_checkpoint.load().confirmation.to_dict(),
    }
    libraries = ("torch", "onnx", "onnxruntime", "numpy")
    assert manifest["versions"] == {"tfexport": __version__} | {name: version(name) for name in libraries}


def test_manifest_holds_nothing_of_the_machine(tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    text = (tiny_bundle / "manifest.json").read_text(encoding="utf-8")
    for folder in (tiny_bundle.parent, tiny_checkpoint.path.parent, Path.home()):
        assert f"{folder}/" not in text


def test_opened_bundle_gives_config_graphs_and_tokenizers(tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    bundle = open_bundle(tiny_bundle)
    assert bundle.config == tiny_checkpoint.load().config
    assert bundle.graph("encoder") == tiny_bundle / "encoder.onnx"
    assert bundle.weights == tiny_bundle / "weights.safetensors"
    assert bundle.tokenizer("source").encode("de5 de30") == [5, 30]
    assert bundle.tokenizer("target").decode([5, 36]) == "wört5 wört36"
    assert bundle.precisions == ["float32"]
    assert bundle.engines == ()
    with pytest.raises(BundleError, match="translation model, which has no classes"):
        bundle.graph("encoder_classifier")


def test_opened_bundle_gives_the_graph_of_a_precision_and_dialect(half_bundle: Path) -> None:
    bundle = open_bundle(half_bundle)
    assert bundle.precisions == ["float32", "float16", "bfloat16"]
    assert bundle.graph("decoder_step", "float16") == half_bundle / "decoder_step.fp16.onnx"
    assert bundle.graph("encoder", dialect="ort-cuda") == half_bundle / "encoder.ort-cuda.onnx"
    assert bundle.graph("encoder", "bfloat16", "ort-cuda") == half_bundle / "encoder.bf16.ort-cuda.onnx"
    assert set(bundle.files) == set(content(half_bundle)) - {"manifest.json"}


def test_a_precision_that_a_bundle_does_not_have_names_the_flag(tiny_bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"no bf16 encoder graph .* Export again with --precision bf16"):
        open_bundle(tiny_bundle).graph("encoder", "bfloat16")


# --- what has changed


def test_a_missing_bundle_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BundleError, match=r"it has no manifest\.json"):
            open_bundle(folder)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_changed_byte_is_seen(own_bundle: Path, name: str) -> None:
    raw = bytearray((own_bundle / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (own_bundle / name).write_bytes(raw)
    with pytest.raises(BundleError, match=f"{name} is not what was exported"):
        open_bundle(own_bundle)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_cut_file_is_seen(own_bundle: Path, name: str) -> None:
    os.truncate(own_bundle / name, 100)
    message = (
        "has 100. Export" if name == WEIGHTS_FILE else "is not what was exported"
    )  # sizes are held against it first
    with pytest.raises(BundleError, match=f"{name} {message}"):
        open_bundle(own_bundle)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_missing_file_is_seen(own_bundle: Path, name: str) -> None:
    (own_bundle / name).unlink()
    with pytest.raises(BundleError, match=rf"{name}.* cannot be read: No such file"):
        open_bundle(own_bundle)


@pytest.mark.parametrize("other", [FORMAT + 1, FORMAT - 1, 0, str(FORMAT), float(FORMAT), True, None, [FORMAT]])
def test_another_format_is_refused(own_bundle: Path, other: object) -> None:
    # Whatever else another format has: the number is looked at first.
    write_manifest(own_bundle, {"format": other, "parts": []})
    message = rf"has bundle format {re.escape(repr(other))}, this version reads {FORMAT}\. Export the checkpoint again"
    with pytest.raises(BundleError, match=message):
        open_bundle(own_bundle)


OUTSIDE = ["../x", "/etc/passwd", "..", ".", "", "a/b", "a/../weights.safetensors"]
UNUSABLE = ["\0", "\ud800", "x" * 300]


def list_file(bundle: Path, name: str) -> None:
    manifest = manifest_of(bundle)
    manifest["files"][name] = {"sha256": hashlib.sha256(b"outside").hexdigest(), "bytes": 7}
    write_manifest(bundle, manifest)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_file_name_that_is_a_path_is_refused(own_bundle: Path, name: str) -> None:
    (own_bundle.parent / "x").write_text("outside")
    list_file(own_bundle, name)
    with pytest.raises(BundleError, match=re.escape(f"names {name!r}, which is outside the bundle")):
        open_bundle(own_bundle)


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_file_name_that_no_file_can_have_is_refused(own_bundle: Path, name: str) -> None:
    list_file(own_bundle, name)
    with pytest.raises(BundleError, match=r"manifest\.json|cannot be read"):
        open_bundle(own_bundle)


@pytest.mark.parametrize("name", OUTSIDE + UNUSABLE)
def test_only_listed_files_serve_as_graphs_engines_and_tokenizers(own_bundle: Path, name: str) -> None:
    original = manifest_of(own_bundle)
    for change in (
        {"tokenizers": {"source": name}},
        {"graphs": [{**original["graphs"][0], "file": name}]},
        {"engines": [{**ENGINE, "file": name}]},
    ):
        write_manifest(own_bundle, {**original, **change})
        with pytest.raises(BundleError, match="does not list"):
            open_bundle(own_bundle)


def test_weights_must_be_listed(own_bundle: Path) -> None:
    manifest = manifest_of(own_bundle)
    del manifest["files"]["weights.safetensors"]
    write_manifest(own_bundle, manifest)
    with pytest.raises(BundleError, match=r"does not list weights\.safetensors"):
        open_bundle(own_bundle)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "5", "null", "{}", f'{{"format": {FORMAT}}}', "\xff"])
def test_a_manifest_that_is_none_is_refused(own_bundle: Path, text: str) -> None:
    (own_bundle / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(BundleError, match=r"manifest\.json cannot be read"):
        open_bundle(own_bundle)


def changes(value: Any) -> Iterator[Any]:
    """`value` with one of its parts taken out or replaced by something else, part after part."""
    yield from (None, 5, "x", [], {}, True, 10**400)
    for key in list(value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []):
        rest = value.copy()
        del rest[key]
        yield rest
        for part in changes(value[key]):
            changed = value.copy()
            changed[key] = part
            yield changed


ENGINE = {
    "file": "encoder.onnx",  # listed, and nobody reads it here
    "role": "encoder",
    "precision": "float32",
    "library": "tensorrt_rtx",
    "version": "1.0",
    "gpu": "sm89",
    "cache": 0,
    "profile": {"src_len": [[1], [1], [2]]},
    "seconds": 1.5,
}


@pytest.mark.thorough
def test_whatever_is_wrong_in_a_manifest_the_error_is_ours(own_bundle: Path) -> None:
    original = manifest_of(own_bundle)
    # What nobody reads need not be tried in all its places.
    graphs = [graph for graph in original["graphs"] if graph["dialect"] == "onnx24"]
    original["graphs"] = [{key: graph[key] for key in ("role", "file", "precision", "dialect")} for graph in graphs]
    original["engines"] = [ENGINE]
    write_manifest(own_bundle, original)
    assert open_bundle(own_bundle).engines[0].about == "encoder fp32 sm89"
    refused = 0
    for manifest in changes(original):
        write_manifest(own_bundle, manifest)
        try:
            bundle = open_bundle(own_bundle)
            bundle.graph("encoder"), bundle.graph("decoder_step"), bundle.graph("select_rows")
            bundle.tokenizer("source"), bundle.tokenizer("target")
            [engine.about for engine in bundle.engines]
        except TfexportError:
            refused += 1
    assert refused > 100


def test_a_tokenizer_that_is_none_is_refused(own_bundle: Path) -> None:
    manifest = manifest_of(own_bundle)
    for text in ("{", "[]", '{"tokenizer": {}}'):
        (own_bundle / "source_tokenizer.json").write_text(text)
        manifest["files"]["source_tokenizer.json"]["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        write_manifest(own_bundle, manifest)
        with pytest.raises(TfexportError, match=r"source_tokenizer\.json"):
            open_bundle(own_bundle).tokenizer("source")


# --- where it is written


def fill(folder: Path, text: str = "new") -> None:
    """Stand for an export: the smallest folder that counts as a bundle."""
    (folder / "part").write_text(text)
    write_manifest(folder, {"format": FORMAT, "files": {"part": {}}, "graphs": [], "tokenizers": {}, "config": {}})


def leftovers(folder: Path, *expected: str) -> set[str]:
    return {path.name for path in folder.iterdir()} - set(expected)


def test_a_new_bundle_takes_its_place(tmp_path: Path) -> None:
    with new_bundle(tmp_path / "new" / "place" / "b") as folder:
        fill(folder)
        assert not (tmp_path / "new" / "place" / "b").exists()
    assert (tmp_path / "new" / "place" / "b" / "part").read_text() == "new"
    assert not leftovers(tmp_path / "new" / "place", "b")


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with new_bundle(tmp_path / "b") as folder:
        fill(folder)
    assert (tmp_path / "b" / "part").exists()
    assert not leftovers(tmp_path, "b")


def test_an_existing_bundle_is_replaced_only_with_force(tmp_path: Path, own_bundle: Path) -> None:
    before = content(own_bundle)
    with pytest.raises(BundleError, match=f"{own_bundle} exists. Replace it with --force"), new_bundle(own_bundle):
        pytest.fail("nothing is to be computed for a bundle that will not be written")
    assert content(own_bundle) == before
    with new_bundle(own_bundle, force=True) as folder:
        fill(folder)
    assert set(content(own_bundle)) == {"part", "manifest.json"}
    assert not leftovers(tmp_path, "own")


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", ["notes.txt", "manifest.json"])
def test_a_folder_that_is_no_bundle_is_never_replaced(tmp_path: Path, force: bool, name: str) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / name).write_text('{"name": "my web page", "icons": []}')  # other programs have manifests too
    (tmp_path / "b" / "precious").write_text("mine")
    before = content(tmp_path / "b")
    with pytest.raises(BundleError), new_bundle(tmp_path / "b", force=force) as folder:
        fill(folder)
    assert content(tmp_path / "b") == before
    assert not leftovers(tmp_path, "b")


@pytest.mark.parametrize("force", [False, True])
def test_a_file_is_never_replaced(tmp_path: Path, force: bool) -> None:
    (tmp_path / "b").write_text("mine")
    with pytest.raises(BundleError, match="is not a bundle"), new_bundle(tmp_path / "b", force=force) as folder:
        fill(folder)
    assert (tmp_path / "b").read_text() == "mine"
    assert not leftovers(tmp_path, "b")


@pytest.mark.parametrize("force", [False, True])
def test_what_came_to_the_place_during_the_export_is_not_replaced(tmp_path: Path, force: bool) -> None:
    def export_slowly() -> None:
        with new_bundle(tmp_path / "b", force=force) as folder:
            fill(folder)
            (tmp_path / "b").mkdir()
            (tmp_path / "b" / "precious").write_text("mine")

    with pytest.raises(BundleError):
        export_slowly()
    assert content(tmp_path / "b") == {"precious": b"mine"}
    assert not leftovers(tmp_path, "b")


def test_the_first_of_two_exports_to_one_place_stays(tmp_path: Path) -> None:
    def export_twice() -> None:
        with new_bundle(tmp_path / "b") as slow:
            fill(slow, "slow")
            with new_bundle(tmp_path / "b") as fast:
                fill(fast, "fast")

    with pytest.raises(BundleError, match="exists"):
        export_twice()
    assert (tmp_path / "b" / "part").read_text() == "fast"
    assert not leftovers(tmp_path, "b")


def test_a_link_to_a_bundle_leaves_nothing_behind(tmp_path: Path, own_bundle: Path) -> None:
    (tmp_path / "link").symlink_to(own_bundle)
    try:
        with new_bundle(tmp_path / "link", force=True) as folder:
            fill(folder)
    except BundleError:
        open_bundle(own_bundle)
    else:
        assert (tmp_path / "link" / "part").exists()
    assert not leftovers(tmp_path, "own", "link")


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_permissions_follow_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        with new_bundle(tmp_path / "b") as folder:
            fill(folder)
            (folder / "part").chmod(0o600)  # as a library leaves what it wrote under a temporary name
        assert os.umask(mask) == mask  # looking the mask up means setting it
    finally:
        os.umask(before)
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o777 & ~mask
    for path in (tmp_path / "b").iterdir():
        assert path.stat().st_mode & 0o777 == 0o666 & ~mask


# --- engines


def engine(file: str, **changes: Any) -> Engine:
    return Engine(**{**ENGINE, "file": file, **changes})


def put_engines(directory: Path, contents: dict[str, bytes], *, keep: Sequence[str] = ()) -> None:
    """Write `contents` as engines of the bundle, and `keep` some that it has."""
    bundle, engines = open_bundle(directory), []
    with with_engines(bundle, engines) as folder:
        for name, raw in contents.items():
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_bytes(raw)
            engines.append(engine(name))
        engines += [engine for engine in bundle.engines if engine.file in keep]


def test_engines_are_added_to_what_a_bundle_has(own_bundle: Path) -> None:
    before, manifest = content(own_bundle), manifest_of(own_bundle)
    put_engines(own_bundle, {"one.engine": b"1", "two.engine": b"2"})
    bundle = open_bundle(own_bundle)
    assert bundle.engines == (engine("one.engine"), engine("two.engine"))
    for name, raw in {**before, "one.engine": b"1", "two.engine": b"2"}.items():
        if name != "manifest.json":
            assert (own_bundle / name).read_bytes() == raw
            assert bundle.files[name] == hashlib.sha256(raw).hexdigest()
    unchanged = set(manifest) - {"engines", "files"}
    assert {key: manifest_of(own_bundle)[key] for key in unchanged} == {key: manifest[key] for key in unchanged}
    assert not leftovers(own_bundle.parent, "own")


def test_an_engine_that_is_not_kept_goes_and_one_of_the_same_name_is_replaced(own_bundle: Path) -> None:
    put_engines(own_bundle, {"one.engine": b"1", "two.engine": b"2", "three.engine": b"3"})
    put_engines(own_bundle, {"one.engine": b"new", "four.engine": b"4"}, keep=["two.engine"])
    bundle = open_bundle(own_bundle)
    assert {e.file: (own_bundle / e.file).read_bytes() for e in bundle.engines} == {
        "one.engine": b"new",
        "four.engine": b"4",
        "two.engine": b"2",
    }
    assert not (own_bundle / "three.engine").exists()


def test_engines_that_cannot_be_built_leave_the_bundle_as_it_was(own_bundle: Path, tmp_path: Path) -> None:
    put_engines(own_bundle, {"one.engine": b"1"})
    before = content(own_bundle)

    def fail() -> None:
        with with_engines(open_bundle(own_bundle), []) as folder:
            (folder / "one.engine").unlink()
            (folder / "one.engine").write_bytes(b"half")
            raise Interruption

    with pytest.raises(Interruption):
        fail()
    assert content(own_bundle) == before
    assert not leftovers(tmp_path, "own")


def test_what_else_lies_in_a_bundle_is_not_lost_to_a_build(own_bundle: Path) -> None:
    (own_bundle / "NOTES.txt").write_text("mine")
    before = content(own_bundle)
    with pytest.raises(
        BundleError, match=r"contains files that are not the bundle's: NOTES\.txt\. Move them elsewhere"
    ):
        put_engines(own_bundle, {"one.engine": b"1"})
    assert content(own_bundle) == before


def test_of_two_builds_at_once_the_second_is_told(own_bundle: Path) -> None:
    first, second = open_bundle(own_bundle), open_bundle(own_bundle)
    engines: list[Engine] = []

    def slow() -> None:
        with with_engines(first, engines) as folder:
            (folder / "slow.engine").write_bytes(b"slow")
            engines.append(engine("slow.engine"))
            others: list[Engine] = []
            with with_engines(second, others) as other:
                (other / "fast.engine").write_bytes(b"fast")
                others.append(engine("fast.engine"))

    with pytest.raises(BundleError, match="was changed by another program during the build"):
        slow()
    assert [e.file for e in open_bundle(own_bundle).engines] == ["fast.engine"]


@pytest.mark.parametrize("damage", ["cut", "lost"])
def test_a_damaged_engine_is_not_made_whole_by_building_another(own_bundle: Path, damage: str) -> None:
    put_engines(own_bundle, {"one.engine": b"1"})
    (own_bundle / "one.engine").unlink()
    if damage == "cut":
        (own_bundle / "one.engine").write_bytes(b"")
    put_engines(own_bundle, {"two.engine": b"2"}, keep=["one.engine"])
    bundle = open_bundle(own_bundle)
    assert bundle.engine(engine("two.engine")).read_bytes() == b"2"
    if damage == "lost":
        assert [e.file for e in bundle.engines] == ["two.engine"]
    else:
        with pytest.raises(BundleError, match=r"one\.engine is not what was exported .*Build again: tfexport build"):
            bundle.engine(engine("one.engine"))


@pytest.mark.parametrize("cache", [0, 64])
def test_an_engine_says_what_it_is(cache: int) -> None:
    found = engine("x", role="decoder_step", precision="float16", gpu="portable", cache=cache)
    assert found.about == "decoder_step fp16 portable" + (" cache 64" if cache else "")


# --- what interrupts it


class Interruption(Exception):
    pass


def fail_while_writing(target: Path, error: BaseException) -> None:
    with new_bundle(target, force=True) as folder:
        fill(folder)
        (folder / "deeper").mkdir()
        raise error


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), Interruption(), MemoryError()], ids=repr)
def test_an_interrupted_export_leaves_nothing(
    tmp_path: Path, own_bundle: Path, error: BaseException, existing: bool
) -> None:
    target = own_bundle if existing else tmp_path / "b"
    before = content(own_bundle)
    with pytest.raises(type(error)):
        fail_while_writing(target, error)
    assert content(own_bundle) == before
    assert not leftovers(tmp_path, "own")


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failed_write_is_told_and_leaves_nothing(tmp_path: Path, own_bundle: Path, code: int, existing: bool) -> None:
    target = own_bundle if existing else tmp_path / "b"
    before = content(own_bundle)
    with pytest.raises(BundleError, match=os.strerror(code)):
        fail_while_writing(target, OSError(code, os.strerror(code)))
    assert content(own_bundle) == before
    assert not leftovers(tmp_path, "own")


@pytest.mark.parametrize("step", ["fsync", "rename"])
@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_at_the_very_end_leaves_what_there_was(
    tmp_path: Path, own_bundle: Path, monkeypatch: pytest.MonkeyPatch, step: str, existing: bool
) -> None:
    target = own_bundle if existing else tmp_path / "b"
    before = content(own_bundle)
    rename = Path.rename

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fail_for_the_new_one(self: Path, to: Path) -> Path:
        return fail() if self.suffix == ".partial" else rename(self, to)

    if step == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(BundleError, match="Input/output error"), new_bundle(target, force=existing) as folder:
        fill(folder)
    assert content(own_bundle) == before
    assert not leftovers(tmp_path, "own")


@pytest.mark.parametrize(
    "at",
    [
        "exporter.weights.save_weights",
        "exporter.pipeline.write_graphs",
        "exporter.pipeline.write_manifest",
        "graph_checks.gate.check_written",
        "exporter.graphs.emit",
    ],
)
def test_export_interrupted_anywhere_leaves_nothing(
    tmp_path: Path, tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"tfexport.{at}", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export(tiny_checkpoint.load(), tmp_path / "b")
    assert not leftovers(tmp_path)


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let no file grow beyond 32 kB: writing fails as on a full disk, and needs no rights to bring about."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_weights_that_cannot_be_written_are_told(tmp_path: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    with pytest.raises(BundleError, match=r"cannot write the bundle .*File too large"):
        export(tiny_checkpoint.load(), tmp_path / "b")
    assert not leftovers(tmp_path)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Make a file system of so many kB."""
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        folder = tmp_path / f"disk{size}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)]
        if os.geteuid() != 0 or shutil.which("mount") is None:
            pytest.skip("only root can mount a small file system")
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def kilobytes(*files: Path) -> int:
    """What they take on a file system of pages of 4 kB."""
    return sum(4 * -(-path.stat().st_size // 4096) for path in files)


@pytest.mark.parametrize("full_at", ["weights", "graphs"])
def test_a_full_disk_is_told_and_left_as_it_was(
    disk: Callable[[int], Path], tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint, full_at: str
) -> None:
    weights = kilobytes(tiny_bundle / "weights.safetensors")
    folder = disk(weights // 2 if full_at == "weights" else weights + 8)
    with pytest.raises(BundleError, match=r"No space left on device.*give another folder with -o"):
        export(tiny_checkpoint.load(), folder / "b")
    assert not leftovers(folder)


@pytest.mark.thorough
def test_a_disk_that_holds_one_bundle_keeps_the_old_one(
    disk: Callable[[int], Path], tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    weights = kilobytes(tiny_bundle / "weights.safetensors")
    folder = disk(kilobytes(*tiny_bundle.iterdir()) + weights + 8)
    export(tiny_checkpoint.load(), folder / "b")
    before = content(folder / "b")
    other = torch.load(tiny_checkpoint.path, weights_only=True)
    other["decoder.fc_out.bias"] += 1.0
    torch.save(other, folder.parent / "other.pt")
    checkpoint = load_checkpoint(folder.parent / "other.pt", {"n_heads": HEADS, **IDS})
    with pytest.raises(BundleError, match="No space left on device"):
        export(checkpoint, folder / "b", force=True)
    assert content(folder / "b") == before
    open_bundle(folder / "b")
    assert not leftovers(folder, "b")


@pytest.mark.parametrize("name", ["weights.fp16.safetensors", "weights.screening.safetensors", "more.safetensors"])
def test_weights_that_the_manifest_does_not_list_are_refused(half_bundle: Path, tmp_path: Path, name: str) -> None:
    """Nothing would verify or compare them, and graphs may point to them."""
    folder = Path(shutil.copytree(half_bundle, tmp_path / "bundle"))
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"].pop(name, None)
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    if not (folder / name).exists():
        shutil.copy(folder / "weights.safetensors", folder / name)
    with pytest.raises(BundleError, match=f"does not list {name}"):
        open_bundle(folder)


@pytest.mark.parametrize(
    ("changes", "telling"),
    [
        ({"d_model": 2**31 - 2, "n_heads": 1}, "d_model is 2147483646, above"),
        ({"max_target_length": 2**31 - 2}, "max_target_length is 2147483646, above"),
        ({"n_decoder_layers": 1000}, "describes a model of"),
        ({"d_model": 2**16, "n_heads": 2**10}, "describes a model of"),
        ({"tgt_vocab_size": 2**26}, "describes a model of"),
    ],
)
def test_sizes_that_the_weights_have_not_are_refused(own_bundle: Path, changes: dict[str, int], telling: str) -> None:
    """Before room is made for caches of these sizes."""
    manifest = manifest_of(own_bundle)
    manifest["config"] |= changes
    (own_bundle / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(TfexportError, match=telling):
        open_bundle(own_bundle)
