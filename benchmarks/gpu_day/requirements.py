"""Which packages a pack needs: what tfexport asks for on a GPU, at export and in its GPU tests, and what these need in turn.

PyTorch and what comes with it are the machine's own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("cuda", "export")
BESIDE = ("ctranslate2", "pytest", "packaging")
"""CTranslate2 is measured beside tfexport; pytest runs tests/gpu; packaging compares versions where a pack is unpacked."""
ON_THE_MACHINE = frozenset({"torch", "numpy", "triton", "transformers", "setuptools", "sympy", "huggingface-hub"})
"""They come with PyTorch and Transformers, or are not imported by what is used here: tokenizers has `huggingface-hub` for
downloads, and onnxruntime has sympy for tools of its own."""

Requires = Callable[[str], Iterable[str]]


def _requires(name: str) -> list[str]:
    return requires(name) or []


def direct(pyproject: Path) -> list[Requirement]:
    """What tfexport itself asks for, and what is used beside it."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    texts = [*project["dependencies"], *(text for extra in EXTRAS for text in optional[extra]), *BESIDE]
    return [Requirement(text) for text in texts]


Needs = dict[str, list[tuple[str, str]]]
"""For each package those that it needs, with the versions that will do, as in `>=2,<3`. The key `ROOT` is tfexport."""
ROOT = ""


def closure(
    first: Iterable[Requirement],
    python: str,
    requires: Requires = _requires,
    stand_ins: Mapping[str, str] | None = None,
) -> Needs:
    """The packages that `first` need on Linux with this Python.

    Args:
        requires: what a package asks for, by its name; by default what is installed here says it.
        stand_ins: packages that are not installed here, and others that ask for the same.

    Raises:
        PackageNotFoundError: one is not installed here.
    """
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "extra": ""}
    environment |= {"platform_system": "Linux", "platform_machine": "x86_64", "implementation_name": "cpython"}

    def needed(requirements: Iterable[Requirement]) -> list[tuple[str, str]]:
        return [
            (name, str(requirement.specifier))
            for requirement in requirements
            if requirement.marker is None or requirement.marker.evaluate(environment)
            if (name := canonicalize_name(requirement.name)) not in ON_THE_MACHINE and not name.startswith("nvidia-")
        ]

    found = {ROOT: needed(first)}
    waiting = [ROOT]
    while waiting:
        for name, _ in found[waiting.pop()]:
            if name not in found:
                found[name] = needed(Requirement(text) for text in requires((stand_ins or {}).get(name, name)))
                waiting.append(name)
    return dict(sorted(found.items()))


STAND_INS = {"onnxruntime-gpu": "onnxruntime"}


def pinned(constraints: Path) -> dict[str, str]:
    """The versions of the constraints; onnxruntime-gpu has those of onnxruntime."""
    lines = constraints.read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(name): found for name, _, found in (line.partition("==") for line in lines) if found}
    return {**pins, **{name: pins[other] for name, other in STAND_INS.items() if other in pins}}


def packages(root: Path, python: str) -> tuple[dict[str, str], Needs]:
    """The version of every package of a pack, and what each needs.

    Raises:
        PackageNotFoundError: one is not installed here, or has no version in constraints.txt.
    """
    pins = pinned(root / "constraints.txt")
    needs = closure(direct(root / "pyproject.toml"), python, stand_ins=STAND_INS)
    names = [name for name in needs if name != ROOT]
    missing = [name for name in names if name not in pins]
    if missing:
        raise PackageNotFoundError(f"{', '.join(missing)} is not in constraints.txt: run make constraints")
    return {name: pins[name] for name in names}, needs
