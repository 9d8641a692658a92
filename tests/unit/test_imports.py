"""Who may import whom. The sources are parsed, so that imports inside functions and for type checkers count too."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import tfexport

ROOT = Path(tfexport.__file__).parent
MODULES = {
    ".".join(("tfexport", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
EXPORT_SIDE = (
    "tfexport.models",
    "tfexport.exporter.pipeline",
    "tfexport.graph_checks.cases_portable",
    "tfexport.graph_checks.check",
    "tfexport.graph_checks.session",
    "tfexport.graph_checks.values",
    "tfexport.graph_checks.weights",
    "tfexport.graph_checks.screening",
    "tfexport.graph_checks.definition",
    "tfexport.graphs.projections",
    "tfexport.graphs.emitter",
    "tfexport.graphs.mixed_precision",
    "tfexport.graphs.layers",
    "tfexport.graphs.portable",
    "tfexport.graphs.ort",
    "tfexport.graph_checks.cases_ort",
    "tfexport.graphs.linear_quantized",
    "tfexport.graphs.screening",
    "tfexport.graphs.stored_weights",
    "tfexport.exporter.engines",
    "tfexport.exporter.engine_plan",
    "tfexport.commands.targets",
)
DECODE_SIDE = (
    "tfexport.runtimes",
    "tfexport.decoding.profiles",
    "tfexport.decoding.options",
    "tfexport.decoding.token_rules",
    "tfexport.decoding.sampling",
    "tfexport.decoding.search",
    "tfexport.decoding.greedy",
    "tfexport.decoding.beam",
    "tfexport.decoding.finished",
    "tfexport.decoding.steps",
    "tfexport.decoding.source_batch",
    "tfexport.decoding.batches",
    "tfexport.decoding.workers",
    "tfexport.decoding.translate",
    "tfexport.decoding.classify",
    "tfexport.decoding.line_reader",
    "tfexport.decoding.stream",
    "tfexport.decoding.shortlist",
    "tfexport.decoding.alternatives",
    "tfexport.decoding.alignments",
    "tfexport.decoding.attention_trace",
    "tfexport.api",
)
SHARED = (
    "config",
    "contract",
    "bundle",
    "bundle_writer",
    "tokenizers",
    "pieces",
    "errors",
    "gpu",
    "kept",
    "cpus",
    "certificate",
)
PYTORCH_RUNTIMES = ("tfexport.runtimes.pytorch", "tfexport.runtimes.pytorch_in_place")
HEAVY = {"torch", "onnx", "onnx_ir", "safetensors", "lightning", "cuda", "tensorrt", "tensorrt_rtx"}


class Imports(ast.NodeVisitor):
    """Collects what a module in `package` imports; `at_import`: only what importing the module runs."""

    def __init__(self, package: str, *, at_import: bool):
        self.package, self.at_import = package.split("."), at_import
        self.found: set[str] = set()

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parents = self.package[: len(self.package) - node.level + 1] if node.level else []
        module = ".".join([*parents, *([node.module] if node.module else [])])
        # `from package import name` may name a module of the package.
        self.found |= {module, *({f"{module}.{alias.name}" for alias in node.names} & set(MODULES))}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not self.at_import:
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if self.at_import and ast.unparse(node.test) == "TYPE_CHECKING":
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)


def imports_by_name(source: str) -> bool:
    """Whether a module is imported whose name is computed, which `Imports` cannot follow."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return any(ast.unparse(call.func).endswith(("import_module", "__import__")) for call in calls)


def imports(source: str, package: str, *, at_import: bool = False) -> set[str]:
    visitor = Imports(package, at_import=at_import)
    visitor.visit(ast.parse(source))
    return visitor.found


def imports_of(module: str, *, at_import: bool = False) -> set[str]:
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return imports(path.read_text(encoding="utf-8"), package, at_import=at_import)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def importers(*libraries: str) -> set[str]:
    """The modules of tfexport that import one of `libraries` anywhere."""
    return {module for module in MODULES if any(within(name, libraries) for name in imports_of(module))}


def loaded_with(module: str) -> set[str]:
    """All that importing `module` imports, through the modules of tfexport."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        # Importing a.b.c runs a and a.b before.
        for part in (".".join(name.split(".")[: n + 1]) for n in range(name.count(".") + 1)):
            if part not in seen:
                seen.add(part)
                waiting += imports_of(part, at_import=True) if part in MODULES else []
    return seen


def test_the_parser_sees_every_kind_of_import() -> None:
    source = """
import a.b, c as d
from typing import TYPE_CHECKING
from . import cli
from .models import native
if TYPE_CHECKING:
    from e import f
try:
    import g
except ImportError:
    g = None
def outer():
    def inner():
        import h.i
class K:
    import j
    def method(self):
        from tfexport import search
"""
    always = {
        "a.b",
        "c",
        "typing",
        "tfexport",
        "tfexport.cli",
        "tfexport.models",
        "tfexport.models.formats.native",
        "g",
        "j",
    }
    assert imports(source, "tfexport") == {*always, "e", "h.i", "tfexport.decoding.search"}
    assert imports(source, "tfexport", at_import=True) == always
    assert imports("from ..errors import TfexportError", "tfexport.models") == {"tfexport.errors"}
    for call in ("importlib.import_module(name)", "import_module('onnx')", "__import__(name)"):
        assert imports_by_name(f"def f():\n    return {call}")
    assert not imports_by_name("import importlib.util\nimportlib.util.find_spec('onnx')")


def test_all_modules_are_looked_at() -> None:
    assert {"tfexport", "tfexport.cli", "tfexport.models.checkpoints.load", "tfexport.runtimes.ort"} <= set(MODULES)
    for side in (EXPORT_SIDE, DECODE_SIDE):
        assert all(any(within(module, (package,)) for module in MODULES) for package in side)


@pytest.mark.parametrize("module", [module for module in MODULES if within(module, EXPORT_SIDE)])
def test_export_side_does_not_import_the_decode_side(module: str) -> None:
    assert not {name for name in imports_of(module) if within(name, DECODE_SIDE)}


@pytest.mark.parametrize("module", [module for module in MODULES if within(module, DECODE_SIDE)])
def test_decode_side_does_not_import_the_export_side(module: str) -> None:
    found = {name for name in imports_of(module) if within(name, EXPORT_SIDE)}
    if module in PYTORCH_RUNTIMES:  # they run the canonical model itself
        found = {name for name in found if not within(name, ("tfexport.models",))}
    assert not found


@pytest.mark.parametrize("module", SHARED)
def test_what_both_sides_read_imports_neither(module: str) -> None:
    assert not {name for name in imports_of(f"tfexport.{module}") if within(name, EXPORT_SIDE + DECODE_SIDE)}


def test_torch_is_imported_only_where_models_are_made_or_run() -> None:
    allowed = {
        "export",
        "graph_modules",
        "graph_check",
        "graph_values",
        "screening_check",
        "ort_cases",
        "definition",
        "bundle_check",
        "train",
        "data",
    }
    allowed |= {"training_state", "probe", "probe_checks", "probe_layers"}
    allowed |= {"peers"}  # engines that it is compared with
    found = {
        module
        for module in importers("torch", "lightning", "safetensors.torch")
        if not within(module, ("tfexport.models", *PYTORCH_RUNTIMES))
    }
    assert found == {f"tfexport.{module}" for module in allowed}
    assert {"tfexport.models.transformer", "tfexport.runtimes.pytorch"} <= importers("torch")


def test_onnxruntime_is_imported_only_by_the_check_of_graphs_and_the_runtimes() -> None:
    runtimes = {f"tfexport.runtimes.{name}" for name in ("ort", "ort_cpu", "ort_cpu_steps", "packed")}
    comparison = {
        "tfexport.bench.peers",
        "tfexport.bench.machine",
    }  # what it is compared with, and what the machine can do
    assert importers("onnxruntime") == {"tfexport.graph_checks.session", "tfexport.kernels", *runtimes, *comparison}


def test_commands_write_json_without_words_for_what_is_no_number() -> None:
    """`json.dumps` writes NaN and Infinity, which other readers refuse."""
    writers = [ROOT / f"{name}.py" for name in ("cli", "translate", "stream", "bench", "parity_report")]
    found = [path.name for path in (*writers, *ROOT.glob("*_command.py")) if "json.dump" in path.read_text()]
    assert found == []


def test_onnxruntime_tells_nobody_of_sessions() -> None:
    making = {module for module, path in MODULES.items() if "InferenceSession(" in path.read_text(encoding="utf-8")}
    assert making == {"tfexport.runtimes.ort", "tfexport.graph_checks.session", "tfexport.bench.machine"}
    for module in making:
        assert "onnxruntime.disable_telemetry_events()" in MODULES[module].read_text(encoding="utf-8")


def test_onnx_is_imported_only_by_what_makes_and_changes_graphs() -> None:
    found = importers("onnx", "onnx_ir")
    graphs = {
        "tfexport.exporter.pipeline",
        "tfexport.graphs.emitter",
        "tfexport.graphs.portable",
        "tfexport.graphs.ort",
        "tfexport.graphs.mixed_precision",
        "tfexport.graphs.linear_quantized",
        "tfexport.graphs.screening",
        "tfexport.kernels.explicit_rounding",
    }
    checks = {
        f"tfexport.{name}"
        for name in ("graph_session", "graph_structure", "graph_values", "placed_weights", "screening_check")
    }
    assert found == {
        *graphs,
        *checks,
        "tfexport.graph_checks.check",
        "tfexport.graphs.stored_weights",
        "tfexport.exporter.engines",
    }


def test_cuda_is_imported_only_by_the_search_for_a_gpu_and_the_memory_of_one() -> None:
    assert importers("cuda") == {"tfexport.system.gpu", "tfexport.runtimes.cuda"}


def test_tensorrt_is_imported_by_name_by_the_engines_and_their_runtime_and_nothing_else_is() -> None:
    assert importers("tensorrt", "tensorrt_rtx") == set()
    found = {module for module, path in MODULES.items() if imports_by_name(path.read_text(encoding="utf-8"))}
    assert found == {"tfexport.exporter.engines", "tfexport.runtimes.tensorrt"}


def test_the_command_line_loads_nothing_heavy() -> None:
    outside = {name.split(".")[0] for name in loaded_with("tfexport.cli")} - {"tfexport"}
    assert outside - set(sys.stdlib_module_names) == {"typer"}


@pytest.mark.parametrize(
    "module", ["tfexport.runtimes", "tfexport.runtimes.ort_cpu.runtime", "tfexport.decoding.translate"]
)
def test_decoding_on_the_cpu_loads_onnxruntime_and_nothing_heavier(module: str) -> None:
    loaded = {name.split(".")[0] for name in loaded_with(module)}
    assert "numpy" in loaded  # the closure is not empty
    assert not loaded & HEAVY


@pytest.mark.parametrize("module", ["tfexport.commands.targets", "tfexport.runtimes.tensorrt"])
def test_engines_are_built_and_run_without_torch(module: str) -> None:
    loaded = {name.split(".")[0] for name in loaded_with(module)}
    assert "tfexport" in loaded
    assert not loaded & {"torch", "onnxruntime", "safetensors", "lightning"}
