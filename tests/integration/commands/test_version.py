"""`tfexport version` looks at libraries in another process, whatever they do to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfexport.commands import version
from tfexport.errors import TfexportError
from tfexport.runtimes import RUNTIMES
from tfexport.runtimes.availability import availability


def with_module(folder: Path, monkeypatch: pytest.MonkeyPatch, **modules: str) -> None:
    """Let processes import these sources in place of what is installed."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    root = Path(version.__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{root}")


def test_a_library_that_ends_its_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = "import os, sys; print('libcuda is too old', file=sys.stderr, flush=True); os.abort()"
    with_module(tmp_path, monkeypatch, tensorrt=fault, torch="__version__ = '3.0'")
    found = version.checked()
    assert found.keys() == {*RUNTIMES, "kernels"}
    assert found["ort-cpu"]["available"]  # which was checked before
    assert found["tensorrt"]["reason"] == "signal 6 ended its process: libcuda is too old"
    assert not found["tensorrt"]["available"]
    assert found["torch"] == {"available": True, "reason": "", "libraries": {"torch": "3.0"}}  # and after
    assert json.dumps(found)


def test_a_library_that_cannot_be_imported_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = "print('a banner'); raise ImportError('libstdc++.so.6: version GLIBCXX_3.4.32 not found')"
    with_module(tmp_path, monkeypatch, onnxruntime=fault, torch="import not_there")
    found = version.checked()
    assert found["ort-cpu"]["reason"] == (
        "the import of its library failed: libstdc++.so.6: version GLIBCXX_3.4.32 not found"
    )
    assert found["torch"]["reason"] == "not_there is not installed: pip install 'tfexport[export]'."
    assert found["kernels"]["state"] in ("no-onnxruntime", "not-built")
    assert not any(found[name]["available"] for name in RUNTIMES)


@pytest.mark.thorough
def test_a_check_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_module(tmp_path, monkeypatch, torch="import time; time.sleep(60)", onnxruntime="raise ImportError")
    monkeypatch.setattr(version, "SECONDS", 8)
    found = version.checked()
    assert found["torch"]["reason"] == found["torch-cuda"]["reason"] == "there was no answer within 8 seconds"


def test_a_package_that_cannot_be_imported_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_module(tmp_path, monkeypatch, numpy="raise ImportError('numpy is damaged')")
    with pytest.raises(TfexportError, match="numpy is damaged"):
        version.checked()


def test_runtimes_that_the_tests_use_are_available() -> None:
    for name in ("ort-cpu", "torch"):
        found = availability(name)
        assert found.available, found.reason
        assert found.libraries
