"""The schema of `manifest.json` accepts every manifest that is written, and refuses what the reader refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from docs import generate, manifest_schema
from tests.support.fake_tensorrt import add_engines
from tfexport.bundle.reader import open_bundle
from tfexport.commands.demo import embedded_checkpoint
from tfexport.contract import FORMAT
from tfexport.errors import TfexportError
from tfexport.exporter.engine_plan import LengthPlan
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.verification.budget import Budget, Choice, Kept

VALIDATOR = Draft202012Validator(manifest_schema.schema())

Manifest = dict[str, Any]
Entry = tuple[str | int, ...]


def manifest_of(directory: Path) -> Manifest:
    return json.loads((directory / "manifest.json").read_text(encoding="utf-8"))


def choose(*_: Any) -> Choice:
    kept = (Kept("decoder.layers.0.feed_forward.output", loss=0.1, extra_bytes=4096),)
    return Choice(Budget.parse("top1=0.9"), kept, modules=9, lost=0.0, lost_without=float("nan"), trials=3, sentences=2)


@pytest.fixture(scope="module")
def complete(exported: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with an entry in every part of its manifest."""
    bundle = exported("complete", precisions=("int8",), choosers={"int8": choose}, alignments=True, shortlist=True)
    folder = Path(shutil.copytree(bundle, tmp_path_factory.mktemp("complete") / "bundle"))
    add_engines(folder, LengthPlan(max_batch=4, cache=(16,)))
    return folder


def test_committed_schema_is_current() -> None:
    written = generate.SCHEMA.read_text(encoding="utf-8")
    assert written == manifest_schema.text(), "docs/reference/manifest.schema.json is not current. Run: make pages"
    Draft202012Validator.check_schema(json.loads(written))


@pytest.mark.parametrize("kind", ["tiny", "half", "quantized", "aligned", "classifier"])
def test_manifests_of_exports_are_valid(kind: str, request: pytest.FixtureRequest) -> None:
    VALIDATOR.validate(manifest_of(request.getfixturevalue(f"{kind}_bundle")))


def test_a_manifest_with_every_part_is_valid(complete: Path) -> None:
    manifest = manifest_of(complete)
    assert manifest["engines"]
    assert manifest["budgets"]["int8"]["float32"]
    VALIDATOR.validate(manifest)


def test_the_manifest_of_a_file_that_describes_itself_is_valid(tmp_path: Path) -> None:
    export(load_checkpoint(embedded_checkpoint(), {}), tmp_path / "bundle", gate=None)
    manifest = manifest_of(tmp_path / "bundle")
    assert manifest["source"]["confirmation"]["by"] == "file"
    VALIDATOR.validate(manifest)


def entries(value: Any, path: Entry = ()) -> Iterator[Entry]:
    """The path of every entry of the objects in a manifest; of lists, those of the first item."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield (*path, name)
            yield from entries(item, (*path, name))
    elif isinstance(value, list) and value:
        yield from entries(value[0], (*path, 0))


def parent_of(manifest: Manifest, path: Entry) -> Any:
    for step in path[:-1]:
        manifest = manifest[step]  # type: ignore[index]
    return manifest


def refuses(directory: Path, manifest: Manifest) -> bool:
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    try:
        open_bundle(directory)
    except TfexportError:
        return True
    return False


def test_the_schema_requires_exactly_what_the_reader_requires(complete: Path, tmp_path: Path) -> None:
    manifest = manifest_of(complete)
    for graph in manifest["graphs"]:  # the first tensor of a graph stands for all, which take most of the time
        graph["inputs"], graph["outputs"] = graph["inputs"][:1], graph["outputs"][:1]
    directory = Path(shutil.copytree(complete, tmp_path / "bundle"))
    assert not refuses(directory, manifest)
    # The reader compares the names of files with graphs, which a schema cannot express, and leaves tensors to parity.
    paths = [path for path in entries(manifest) if not {"files", "inputs", "outputs"} & set(path[:-1])]
    assert len(paths) > 80
    required = 0
    for path in paths:
        changed = deepcopy(manifest)
        del parent_of(changed, path)[path[-1]]
        is_valid = VALIDATOR.is_valid(changed)
        assert is_valid is not refuses(directory, changed), path
        required += not is_valid
    assert required > 30


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), FORMAT + 1),
        (("format",), str(FORMAT)),
        (("files",), []),
        (("files", "encoder.onnx", "sha256"), "0" * 63),
        (("files", "../encoder.onnx"), {"sha256": "0" * 64, "bytes": 1}),
        (("graphs", 0, "role"), "decoder"),
        (("graphs", 0, "precision"), "fp32"),
        (("graphs", 0, "dialect"), "onnx23"),
        (("graphs", 0, "file"), "graphs/encoder.onnx"),
        (("graphs", 0), "encoder.onnx"),
        (("engines", 0, "library"), "tensorrt_llm"),
        (("engines", 0, "profile"), [1]),
        (("runtimes", "ort-cpu", "float32"), "onnx"),
        (("runtimes",), []),
        (("tokenizers", "source"), "../tokenizer.json"),
        (("config", "n_heads"), "8"),
        (("config", "norm_first"), 1),
        (("config", "activation"), "tanh"),
        (("config", "suppressed_ids"), ["1"]),
        (("config", "heads"), 8),
        (("source", "given"), 5),
        (("budgets", "int8"), {}),
        (("budgets", "int9"), {"float32": {}}),
    ],
)
def test_planted_errors_are_refused(path: Entry, value: Any, complete: Path, tmp_path: Path) -> None:
    manifest = manifest_of(complete)
    parent_of(manifest, path)[path[-1]] = value
    assert not VALIDATOR.is_valid(manifest)
    assert refuses(Path(shutil.copytree(complete, tmp_path / "bundle")), manifest)
