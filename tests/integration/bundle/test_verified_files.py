"""What a runtime loads from an opened bundle is what was verified, whatever happens to the files meanwhile."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tfexport
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.contract import Precision
from tfexport.errors import BundleError, ReplacedBundleError
from tfexport.runtimes import load_classifier, load_runtime, ort, pytorch
from tfexport.runtimes.ort_cpu import context

WEIGHTS = "weights.safetensors"


def write_into(file: Path) -> None:
    """Change the last byte of a file, which keeps its size and the time of its last write."""
    before, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def put_another(file: Path) -> None:
    """Replace a file by one of the same size and time."""
    new = shutil.copy2(file, file.with_name("new"))
    write_into(new)
    new.replace(file)


def remove(file: Path) -> None:
    file.unlink()


CHANGES = pytest.mark.parametrize("change", [write_into, put_another, remove])
Change = Callable[[Path], None]


@CHANGES
@pytest.mark.parametrize(
    ("runtime", "precision"), [("ort-cpu", "float32"), ("ort-cpu", "float16"), ("torch", "float32")]
)
def test_no_runtime_loads_files_that_changed_since_the_bundle_was_opened(
    half_bundle: Path, tmp_path: Path, change: Change, runtime: str, precision: Precision
) -> None:
    bundle = open_bundle(Path(shutil.copytree(half_bundle, tmp_path / "b")))
    change(bundle.directory / WEIGHTS)
    with pytest.raises(ReplacedBundleError):
        load_runtime(runtime, bundle, precision=precision, threads=1)


@pytest.mark.parametrize(
    ("load", "runtime", "precision", "module", "reads"),
    [
        (load_runtime, "ort-cpu", "float32", context, "cpu_session"),
        (load_runtime, "ort-cpu", "float16", ort, "_session"),
        (load_runtime, "torch", "float32", pytorch, "load_file"),
        (load_classifier, "ort-cpu", "float32", ort, "_session"),
        (load_classifier, "torch", "float32", pytorch, "load_file"),
    ],
)
def test_files_that_are_others_while_a_library_reads_them_are_an_error(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    load: Callable[..., Any],
    runtime: str,
    precision: Precision,
    module: Any,
    reads: str,
) -> None:
    origin = request.getfixturevalue("half_bundle" if load is load_runtime else "classifier_bundle")
    bundle, read = open_bundle(Path(shutil.copytree(origin, tmp_path / "b"))), getattr(module, reads)

    def changed(*given: Any, **options: Any) -> Any:
        kept = shutil.copy2(bundle.directory / WEIGHTS, tmp_path / "kept")
        put_another(bundle.directory / WEIGHTS)
        loaded = read(*given, **options)
        kept.replace(bundle.directory / WEIGHTS)
        return loaded

    monkeypatch.setattr(module, reads, changed)
    with pytest.raises(ReplacedBundleError):
        load(runtime, bundle, precision=precision, threads=1)


@pytest.mark.parametrize("runtime", ["ort-cpu", "torch"])
def test_no_classifier_loads_files_that_changed(classifier_bundle: Path, tmp_path: Path, runtime: str) -> None:
    bundle = open_bundle(Path(shutil.copytree(classifier_bundle, tmp_path / "b")))
    write_into(bundle.directory / WEIGHTS)
    with pytest.raises(ReplacedBundleError):
        load_classifier(runtime, bundle, threads=1)


@CHANGES
def test_files_that_change_during_a_load_are_an_error_of_that_load(own_bundle: Path, change: Change) -> None:
    bundle = open_bundle(own_bundle)
    with pytest.raises(ReplacedBundleError), bundle.loading():
        change(own_bundle / WEIGHTS)


def test_a_file_that_a_library_cannot_read_because_it_changed_is_such_an_error(own_bundle: Path) -> None:
    def fails() -> None:
        write_into(own_bundle / WEIGHTS)
        raise ValueError("a library cannot read the file")

    with pytest.raises(ReplacedBundleError), open_bundle(own_bundle).loading():
        fails()


def test_a_file_that_is_right_again_at_the_end_of_a_load_is_an_error_too(own_bundle: Path) -> None:
    bundle = open_bundle(own_bundle)
    kept = shutil.copy2(own_bundle / WEIGHTS, own_bundle / "kept")

    def change() -> None:
        put_another(own_bundle / WEIGHTS)
        kept.replace(own_bundle / WEIGHTS)
        with bundle.loading():  # of another thread, which verifies the file again
            pass

    with pytest.raises(ReplacedBundleError), bundle.loading():
        change()


def test_graphs_are_loaded_late_from_a_copy_of_the_bundle_and_from_no_other(own_bundle: Path) -> None:
    model = tfexport.load(own_bundle, threads=1)
    copy = shutil.copytree(own_bundle, own_bundle.with_name("copy"))
    shutil.rmtree(own_bundle)
    with pytest.raises(ReplacedBundleError, match="removed after it was opened"):
        model.translate("de5")
    copy.rename(own_bundle)
    assert model.translate("de5").hypotheses
    write_into(own_bundle / "beam_step.ort.onnx")
    with pytest.raises(ReplacedBundleError):
        model.translate("de5", beam=2)


def test_a_copy_of_the_object_in_another_process_knows_what_was_verified(own_bundle: Path) -> None:
    bundle: Bundle = pickle.loads(pickle.dumps(open_bundle(own_bundle)))
    with bundle.loading():
        pass
    write_into(own_bundle / WEIGHTS)
    with pytest.raises(ReplacedBundleError), bundle.loading():
        pass


def test_a_tokenizer_is_that_of_the_manifest(own_bundle: Path) -> None:
    bundle = open_bundle(own_bundle)
    write_into(own_bundle / "source_tokenizer.json")
    with pytest.raises(ReplacedBundleError):
        bundle.tokenizer("source")


def test_a_bundle_is_where_its_link_was_set_to_when_it_was_opened(own_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(own_bundle)
    bundle = open_bundle(tmp_path / "link")
    (tmp_path / "link").unlink()
    assert bundle.directory == own_bundle
    assert load_runtime("ort-cpu", bundle, threads=1)


def test_messages_keep_a_path_without_links(own_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own_bundle.parent)
    assert open_bundle(Path("own")).directory == Path("own")


def test_an_engine_is_verified_whenever_it_is_loaded(own_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(own_bundle)
    (own_bundle / "one.engine").write_bytes(b"1")
    engine: Any = type("Engine", (), {"file": "one.engine"})
    monkeypatch.setitem(bundle.files, "one.engine", "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b")  # type: ignore[arg-type]

    def change() -> None:
        assert bundle.engine(engine).read_bytes() == b"1"
        write_into(own_bundle / "one.engine")

    with pytest.raises(ReplacedBundleError), bundle.loading():
        change()
    with pytest.raises(BundleError, match="is not what was exported"):
        bundle.engine(engine)
