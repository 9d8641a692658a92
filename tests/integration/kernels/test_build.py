"""Builds of the package: wheels for one system with kernels, and installations that say why they have no kernels."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "tfexport")

COMPILER = """#!/bin/sh
case "$*" in
  *-dM*) printf '#define __GNUC__ {major}\\n#define __VERSION__ "{major}.4.0"\\n' ;;
  *) printf 'In file included from kernels.cpp:4:\\nfloats.h:12:1: error: bad target\\n  12 | static\\n' >&2; exit 1 ;;
esac
"""

WORKING_COMPILER = """#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done
"""


def copied(folder: Path) -> Path:
    """A copy of the sources, without what was built in them."""
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            kept = shutil.ignore_patterns("__pycache__", "*.so", "build.json")
            shutil.copytree(ROOT / name, source / name, ignore=kept)
        else:
            shutil.copy(ROOT / name, source)
    return source


def wheel_of(folder: Path, compiler: Path, **variables: str) -> Path:
    """Build a wheel of the sources with this compiler."""
    flags = ("--no-deps", "--no-build-isolation", "--no-cache-dir", "--disable-pip-version-check", "--quiet")
    command = [sys.executable, "-m", "pip", "wheel", *flags, "--wheel-dir", folder, copied(folder)]
    environment = {**os.environ, "CC": str(compiler), "CXX": str(compiler), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def installed(folder: Path, compiler: Path) -> Path:
    """Unpack a wheel that a compiler failed to build kernels for: what `pip install` puts into site-packages."""
    with zipfile.ZipFile(wheel_of(folder, compiler)) as archive:
        archive.extractall(folder / "site")
    assert not list((folder / "site/tfexport/kernels").glob("_library*"))
    return folder / "site"


def tfexport(
    site: Path, *arguments: str | Path, text: str = "", kernels: str = "1"
) -> subprocess.CompletedProcess[str]:
    """Run the command of an installation."""
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "TFEXPORT_KERNELS": kernels}
    command = [sys.executable, "-m", "tfexport", *map(str, arguments)]
    done = subprocess.run(command, env=environment, input=text, cwd=site, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def kernels_of(site: Path) -> dict[str, Any]:
    found = json.loads(tfexport(site, "version", "--json").stdout)
    assert found["tfexport"]
    assert found["runtimes"]["ort-cpu"]["available"]
    return found["kernels"]


@pytest.fixture(scope="module")
def without_compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("none"), Path("/nonexistent/c++"))


@pytest.mark.thorough
def test_without_a_compiler_the_version_says_so(without_compiler: Path) -> None:
    found = kernels_of(without_compiler)
    assert (found["state"], found["built"], found["instruction_sets"]) == ("not-built", False, [])
    assert found["build"]["reason"] == "no-compiler"
    assert found["reason"] == "they were not built: there was no C++ compiler (/nonexistent/c++ was not found)"
    last = tfexport(without_compiler, "version").stdout.splitlines()[-1]
    assert (
        last == f"kernels: not in use, as {found['reason']}. Install GCC 12 or newer, or Clang. Install tfexport again."
    )


@pytest.mark.skipif(
    platform.system() not in ("Linux", "Darwin") or platform.machine() not in ("x86_64", "aarch64", "arm64"),
    reason="there are no kernels for this machine",
)
@pytest.mark.thorough
def test_commands_print_one_note_where_kernels_are_missing(
    without_compiler: Path, tiny_bundle: Path, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    source = tmp_path / "source.txt"
    source.write_text("a b c\nb c\n" * 40, encoding="utf-8")
    # Several workers, each a process over the graphs of the first.
    many = ("--threads", "2", "--workers", "2", "--batch-size", "4")
    for command in (
        ("decode", tiny_bundle, source, *many),
        ("decode", tiny_bundle, source, "--beam", "2"),
        ("score", tiny_bundle, source, source),
        ("parity", tiny_bundle, source),
    ):
        notes = [line for line in tfexport(without_compiler, *command).stderr.splitlines() if "kernels" in line]
        assert len(notes) == 1, (command, notes)
        assert notes[0].startswith(
            "note: decoding without tfexport's kernels, as they were not built: there was no C++ compiler"
        )
    switched_off = tfexport(without_compiler, "decode", tiny_bundle, source, kernels="0").stderr
    assert switched_off.count("TFEXPORT_KERNELS=0 is set") == 1
    other = tfexport(without_compiler, "decode", tiny_bundle, source, "--runtime", "torch").stderr
    assert "kernels" not in other


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("major", "reason", "message"),
    [
        (11, "compiler-too-old", "the compiler, GCC 11.4.0, is older than GCC 12"),
        (12, "compile-error", "the compiler failed: floats.h:12:1: error: bad target"),
    ],
)
def test_the_reason_of_a_compiler_that_fails_is_kept(tmp_path: Path, major: int, reason: str, message: str) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER.format(major=major))
    compiler.chmod(0o755)
    site = installed(tmp_path, compiler)
    command = [
        sys.executable,
        "-c",
        "import json; from tfexport import kernels; print(json.dumps(kernels.status().build))",
    ]
    found = json.loads(subprocess.check_output(command, cwd=site, env={**os.environ, "PYTHONPATH": str(site)}))
    assert (found["reason"], found["message"], found["compiler"]) == (reason, message, f"GCC {major}.4.0")
    assert found["details"] == ["floats.h:12:1: error: bad target", "  12 | static"]


HERE = re.sub(r"[^a-z0-9]", "_", sysconfig.get_platform())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("compiler", "system", "tag"),
    [
        (WORKING_COMPILER, None, HERE),
        (WORKING_COMPILER, "linux-aarch64", "linux_aarch64"),
        (COMPILER.format(major=12), None, "any"),
        (COMPILER.format(major=12), "win-amd64", "win_amd64"),
    ],
    ids=["here", "cross", "failed", "windows"],
)
def test_a_wheel_is_for_every_python_and_with_kernels_for_one_system(
    tmp_path: Path, compiler: str, system: str | None, tag: str
) -> None:
    path = tmp_path / "c++"
    path.write_text(compiler)
    path.chmod(0o755)
    wheel = wheel_of(tmp_path, path, **({"_PYTHON_HOST_PLATFORM": system} if system else {}))
    assert wheel.name == f"tfexport-{VERSION}-py3-none-{tag}.whl"
    kept = {file for file in zipfile.ZipFile(wheel).namelist() if not file.startswith("tfexport-")}
    library = {"tfexport/kernels/_library.so"} if compiler == WORKING_COMPILER else set()
    assert kept == {*files_of(tmp_path / "source"), "tfexport/kernels/build.json", *library}


@pytest.mark.thorough
def test_the_sdist_has_all_that_a_build_needs(tmp_path: Path) -> None:
    source = copied(tmp_path)
    command = [sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=300)
    with tarfile.open(tmp_path / f"tfexport-{VERSION}.tar.gz") as archive:
        kept = {member.name.partition("/")[2] for member in archive if member.isfile()}
        about = archive.extractfile(f"tfexport-{VERSION}/PKG-INFO")
        assert about is not None
        assert f"\nVersion: {VERSION}\n" in about.read().decode()
    assert kept >= {*files_of(source), *SOURCES[:-1]}


def files_of(source: Path) -> set[str]:
    """The files of the package."""
    built = ("__pycache__", "_library.so", "build.json")
    paths = (path.relative_to(source) for path in (source / "tfexport").rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if not {*path.parts} & {*built}}
