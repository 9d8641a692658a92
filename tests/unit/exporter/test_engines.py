"""Engines are built by TensorRT; what it would get wrong is refused before."""

from __future__ import annotations

import pytest

from tfexport.errors import EngineError, RuntimeUnavailable
from tfexport.exporter.engines import Builder
from tfexport.system.gpu import Gpu

tensorrt_rtx = pytest.importorskip("tensorrt_rtx", reason="the tensorrt-rtx extra is not installed: nothing was built")


@pytest.fixture(scope="module")
def builder() -> Builder:
    return Builder("tensorrt_rtx")


@pytest.mark.parametrize(("generation", "gpu"), [((9, 0), "sm90"), ((7, 5), "sm75")])
def test_a_gpu_that_is_here_may_be_one_that_cannot_be_built_for(
    generation: tuple[int, int], gpu: str, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Gpu("A GPU", f"sm{generation[0]}{generation[1]}", 1 << 30)
    monkeypatch.setattr("tfexport.exporter.engines.find_gpu", lambda: found)
    for asked in ("here", gpu):
        with pytest.raises(EngineError, match=rf"does not build for {gpu}\. It knows sm80"):
            builder.generation(asked)


def test_full_tensorrt_is_not_asked_to_build_for_another_gpu() -> None:
    builder = Builder("tensorrt_rtx")
    builder.library = "tensorrt"
    with pytest.raises(EngineError, match=r"builds on the GPU itself, not ahead of time for sm89\. Use --gpu here"):
        builder.generation("sm89")


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RuntimeUnavailable, match=r"needs tensorrt, which is not installed: pip install 'tfexport\[tensorrt\]'"
    ):
        Builder("tensorrt")
    monkeypatch.setitem(__import__("sys").modules, "tensorrt_rtx", None)
    with pytest.raises(RuntimeUnavailable, match=r"pip install 'tfexport\[tensorrt-rtx\]'"):
        Builder("tensorrt_rtx")
