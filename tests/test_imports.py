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
EXPORT_SIDE = ("tfexport.models", "tfexport.export")
DECODE_SIDE = ("tfexport.runtimes", "tfexport.search", "tfexport.translate")


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
    always = {"a.b", "c", "typing", "tfexport", "tfexport.cli", "tfexport.models", "tfexport.models.native", "g", "j"}
    assert imports(source, "tfexport") == {*always, "e", "h.i", "tfexport.search"}
    assert imports(source, "tfexport", at_import=True) == always
    assert imports("from ..errors import TfexportError", "tfexport.models") == {"tfexport.errors"}


def test_all_modules_are_looked_at() -> None:
    assert {"tfexport", "tfexport.cli", "tfexport.models.checkpoint", "tfexport.runtimes.ort"} <= set(MODULES)
    for side in (EXPORT_SIDE, DECODE_SIDE):
        assert all(any(within(module, (package,)) for module in MODULES) for package in side)


@pytest.mark.parametrize("module", [module for module in MODULES if within(module, EXPORT_SIDE)])
def test_export_side_does_not_import_the_decode_side(module: str) -> None:
    assert not {name for name in imports_of(module) if within(name, DECODE_SIDE)}


@pytest.mark.parametrize("module", [module for module in MODULES if within(module, DECODE_SIDE)])
def test_decode_side_does_not_import_the_export_side(module: str) -> None:
    found = {name for name in imports_of(module) if within(name, EXPORT_SIDE)}
    if module == "tfexport.runtimes.pytorch":  # it runs the canonical model itself
        found = {name for name in found if not within(name, ("tfexport.models",))}
    assert not found


def test_torch_is_imported_only_where_models_are_made_or_run() -> None:
    allowed = {"tfexport.export", "tfexport.train", "tfexport.data", "tfexport.runtimes.pytorch"}
    found = importers("torch", "lightning", "safetensors.torch")
    assert {module for module in found if not within(module, ("tfexport.models",))} <= allowed
    assert "tfexport.models.transformer" in found


def test_onnxruntime_is_imported_only_by_the_self_check_and_the_runtime() -> None:
    assert importers("onnxruntime") == {"tfexport.export", "tfexport.runtimes.ort"}


def test_onnx_is_imported_only_by_the_export() -> None:
    assert importers("onnx", "onnx_ir", "onnxscript") == {"tfexport.export"}


def test_the_command_line_loads_nothing_heavy() -> None:
    outside = {name.split(".")[0] for name in loaded_with("tfexport.cli")} - {"tfexport"}
    assert outside - set(sys.stdlib_module_names) == {"typer"}


@pytest.mark.parametrize("module", ["tfexport.runtimes", "tfexport.runtimes.ort", "tfexport.translate"])
def test_decoding_does_not_load_torch(module: str) -> None:
    loaded = {name.split(".")[0] for name in loaded_with(module)}
    assert "numpy" in loaded  # the closure is not empty
    assert not loaded & {"torch", "onnx", "onnxscript", "safetensors", "lightning"}
