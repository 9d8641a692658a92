"""`tfexport version`: what can run here, and why not what cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tfexport.commands import version
from tfexport.runtimes import RUNTIMES
from tfexport.runtimes.availability import CHECKS
from tfexport.system import processes

READY = {
    **{"state": "ready", "built": True, "reason": "", "remedy": "", "build": {"compiler": "GCC 12.2.0"}},
    **{"instruction_sets": ["AVX2", "FMA"], "matrix_products": False},
}
ZEN3 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: sse2 fma avx avx2\n\nprocessor\t: 1\nflags\t\t: avx512f\n"
SAPPHIRE = "model name\t: Xeon\nflags\t\t: avx fma avx2 avx512f avx512_vnni avx_vnni amx_int8\n"
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd asimddp sve i8mm\nCPU part\t: 0xd40\n"


def kernel_lines(**changes: Any) -> list[str]:
    runtimes = {"ort-cpu": {"available": True, "reason": "", "libraries": {"onnxruntime": "1.31.1"}}}
    lines = version.about_checks({"runtimes": runtimes, "kernels": {**READY, **changes}})
    assert lines[:2] == ["runtimes:", "  ort-cpu  onnxruntime 1.31.1"]
    return lines[2:]


def test_every_runtime_has_a_check() -> None:
    assert CHECKS.keys() == RUNTIMES.keys()


def test_kernels_that_are_ready() -> None:
    assert kernel_lines() == [
        "kernels: in use, AVX2, FMA; built by GCC 12.2.0",
        "  matrix products are computed by ONNX Runtime: their kernels need AVX-512 VNNI",
    ]
    assert kernel_lines(matrix_products=True, instruction_sets=["AVX-512", "AVX-512 VNNI"], build={}) == [
        "kernels: in use, AVX-512, AVX-512 VNNI"
    ]


@pytest.mark.parametrize("state", ["disabled", "not-built", "no-onnxruntime", "other-format", "cannot-load"])
def test_kernels_that_are_not(state: str) -> None:
    lines = kernel_lines(state=state, reason="REASON", remedy="REMEDY.")
    assert lines == ["kernels: not in use, as REASON. REMEDY."]


def test_the_first_lines_of_a_compile_error_are_shown() -> None:
    build = {"reason": "compile-error", "details": ["rows.h:3: error: x", "  3 | x"]}
    lines = kernel_lines(state="not-built", reason="they were not built", remedy="Report it.", build=build)
    assert lines[1:] == ["  rows.h:3: error: x", "    3 | x"]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (ZEN3, ("AVX", "FMA", "AVX2")),
        (SAPPHIRE, ("AVX", "FMA", "AVX2", "AVX-VNNI", "AVX-512", "AVX-512 VNNI", "AMX-INT8")),
        (GRAVITON, ("NEON", "NEON dot product", "I8MM", "SVE")),
        ("processor\t: 0\n", ()),
        (None, ()),
    ],
)
def test_instruction_sets_are_those_that_linux_lists(
    content: str | None, found: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "cpuinfo").write_text(content)
    monkeypatch.setattr(processes, "CPU_FACTS", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert processes.instruction_sets() == found


def test_instruction_sets_are_those_that_macos_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    known = {"hw.optional.AdvSIMD": 1, "hw.optional.arm.FEAT_DotProd": 1, "hw.optional.arm.FEAT_I8MM": 0}
    monkeypatch.setattr(processes, "system_number", lambda key: known.get(key, 0))
    assert processes.instruction_sets() == ("NEON", "NEON dot product")
