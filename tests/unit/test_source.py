"""What the source may not contain. The contracts of pyproject.toml say which module may import which: `lint-imports`."""

from __future__ import annotations

import ast
import importlib.util

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "tfexport"
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}


def calls(source: str) -> set[str]:
    """The functions that are called, as they are written."""
    return {ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)}


def imports_by_name(source: str) -> bool:
    """Whether a module is imported whose name is computed, which import-linter cannot follow."""
    return any(call.endswith(("import_module", "__import__")) for call in calls(source))


def test_modules_whose_names_are_computed_are_imported_in_three_places() -> None:
    """TensorRT's library has one of two names; `tfexport.__getattr__` imports what is asked for."""
    for call in ("importlib.import_module(name)", "import_module('onnx')", "__import__(name)"):
        assert imports_by_name(f"def f():\n    return {call}")
    assert not imports_by_name("import importlib.util\nimportlib.util.find_spec('onnx')")
    found = {name for name, source in SOURCES.items() if imports_by_name(source)}
    assert found == {"__init__.py", "exporter/engines.py", "runtimes/tensorrt.py"}


def test_imports_within_functions_of_tools_find_their_modules() -> None:
    """They run late in long runs, where no test comes."""
    tools = {
        path: path.read_text(encoding="utf-8")
        for name in ("fuzz", "benchmarks")
        for path in (ROOT / name).rglob("*.py")
    }
    nodes = [(path, node) for path, source in tools.items() for node in ast.walk(ast.parse(source))]
    imported = {
        (path.relative_to(ROOT).as_posix(), name)
        for path, node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    missing = {(path, name) for path, name in imported if importlib.util.find_spec(name.partition(".")[0]) is None}
    assert {name.partition(".")[0] for _, name in missing} <= PEERS, missing
    ours = {(path, name) for path, name in imported if name.startswith(("fuzz.", "benchmarks.", "tests.", "tfexport."))}
    assert len(ours) > 50
    assert not [(path, name) for path, name in ours if importlib.util.find_spec(name) is None]


PEERS = {"litserve", "mlperf_loadgen", "optimum", "psutil"}
"""Libraries that a benchmark imports where they are installed."""


def test_onnxruntime_sends_nothing() -> None:
    """Its builds from PyPI report events to their makers unless they are told not to before the first session."""
    making = {name for name, source in SOURCES.items() if "onnxruntime.InferenceSession" in calls(source)}
    assert making == {"runtimes/ort.py", "graph_checks/session.py", "bench/machine.py"}
    for name in making:
        assert "onnxruntime.disable_telemetry_events" in calls(SOURCES[name])


@pytest.mark.parametrize(
    "name", sorted(name for name in SOURCES if name.startswith(("commands/", "decoding/", "verification/report")))
)
def test_commands_print_json_that_every_reader_takes(name: str) -> None:
    """`json.dumps` writes NaN and Infinity, which other readers refuse; `system.json_text` does not."""
    internal = {"commands/output.py"}  # reads back what it wrote: whole numbers and text
    found = {call for call in calls(SOURCES[name]) if call.startswith("json.dump")}
    assert not found or name in internal


def test_sources_were_found() -> None:
    assert {"cli.py", "models/checkpoints/load.py", "commands/decode.py"} <= set(SOURCES)
