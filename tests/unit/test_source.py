"""What the source may not contain. The contracts of pyproject.toml say which module may import which: `lint-imports`."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache

import pytest

from makers.paths import ROOT

PACKAGE = ROOT / "tfexport"
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}


@cache
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
        for name in ("fuzz", "benchmarks", "makers", "docs")
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
    assert {name.partition(".")[0] for _, name in missing} <= SEPARATELY_INSTALLED, missing
    ours = {
        (path, name) for path, name in imported if name.startswith(("fuzz.", "benchmarks.", "makers.", "tfexport."))
    }
    assert len(ours) > 50
    assert not [(path, name) for path, name in ours if importlib.util.find_spec(name) is None]


SEPARATELY_INSTALLED = {"litserve", "mkdocs", "mlperf_loadgen", "optimum", "psutil"}
"""Libraries that `[dev]` does not have: peers of benchmarks, and what `make docs` installs."""


def test_tests_import_a_fuzzer_only_to_test_it() -> None:
    """`makers` has what both need. import-linter does not see the folders of tests."""
    tests = ROOT / "tests"
    folders = {
        path.parent.relative_to(tests).as_posix()
        for path in tests.rglob("*.py")
        for name in imports_of(ast.parse(path.read_text(encoding="utf-8")))
        if name.partition(".")[0] == "fuzz"
    }
    assert folders == {"integration/fuzz", "unit/fuzz"}


def imports_of(module: ast.Module) -> set[str]:
    """The modules that are imported, also within functions."""
    nodes = [*ast.walk(module)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


NAMED = re.compile(
    r"\b((?:tests|tfexport|fuzz|benchmarks|makers|docs|examples)/[\w/.-]+\.py)\b|\b[Ss]ee `?((?:\w+/)*\w+\.py)\b"
)
"""A file with its folders, and one that a sentence points to."""


def test_source_files_that_are_named_exist() -> None:
    folders = ("tests", "tfexport", "fuzz", "benchmarks", "makers", "examples")
    files = {path.relative_to(ROOT).as_posix(): path for name in folders for path in (ROOT / name).rglob("*.py")}
    endings = {name.split("/", skipped)[-1] for name in files for skipped in range(name.count("/") + 1)} | {
        "docs/hooks.py"
    }
    named = [
        (name, whole or end)
        for name, path in files.items()
        for whole, end in NAMED.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(named) > 30
    assert [pair for pair in named if pair[1] not in endings] == []


MOST_LINES, MOST_PARAMETERS = 80, 12


def functions_of(source: str) -> list[tuple[str, int, int, bool]]:
    """Name, lines, parameters and whether it declares the options of a command, of each function."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = []
    for node in nodes:
        given = node.args
        named = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        count = sum(one is not None and one.arg not in ("self", "cls") for one in named)
        is_command = any(ast.unparse(mark) == "with_options" for mark in node.decorator_list)
        found.append((node.name, (node.end_lineno or 0) - node.lineno + 1, count, is_command))
    return found


def test_functions_are_short_and_have_few_parameters() -> None:
    body = "\n".join(["def f(a, *, b):", *["    b()"] * MOST_LINES])
    assert functions_of(body) == [("f", MOST_LINES + 1, 2, False)]
    found = [(name, *function) for name, source in SOURCES.items() for function in functions_of(source)]
    assert len(found) > 1000
    assert [(name, function, lines) for name, function, lines, _, _ in found if lines > MOST_LINES] == []
    wide = [one for one in found if one[3] > MOST_PARAMETERS and not one[4]]
    assert wide == []


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
    # One reads back what it wrote, the other writes names and offsets of tensors: whole numbers and text.
    internal = {"commands/output.py", "commands/demo.py"}
    found = {call for call in calls(SOURCES[name]) if call.startswith("json.dump")}
    assert not found or name in internal


def test_sources_were_found() -> None:
    assert {"cli.py", "models/checkpoints/load.py", "commands/decode.py"} <= set(SOURCES)
