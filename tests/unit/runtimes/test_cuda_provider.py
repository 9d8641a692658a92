"""The settings of ONNX Runtime's CUDA provider."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes import tiny_config
from tfexport.bundle.reader import Bundle, Origin
from tfexport.runtimes.cuda_provider import computes_in_tf32, settings


def bundle(**in_float32: tuple[str, ...]) -> Bundle:
    origin = Origin("", "native", {})
    return Bundle(Path("bundle"), tiny_config(), origin, (), (), {}, {}, {}, in_float32)  # type: ignore[arg-type]


@pytest.mark.parametrize(("precision", "wanted"), [("float32", False), ("float16", True), ("bfloat16", True)])
def test_tf32_is_for_half_precision(precision: Any, wanted: bool) -> None:
    assert computes_in_tf32(bundle(), precision) == wanted


def test_tf32_is_off_where_modules_are_float32() -> None:
    kept = bundle(float16=("decoder.norm",))
    assert not computes_in_tf32(kept, "float16")
    assert computes_in_tf32(kept, "bfloat16")


def test_settings_are_text() -> None:
    found = settings(7, record=True, tf32=False)
    assert (found["user_compute_stream"], found["enable_cuda_graph"], found["use_tf32"]) == ("7", "1", "0")
    assert settings(7, record=False, tf32=True)["use_tf32"] == "1"
