"""What a dry run needs, in `build/cuda-dry`: onnxruntime-gpu, which is unpacked and not installed, and the stand-ins."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "cuda-dry"
SITE, LIBRARIES = FOLDER / "site", FOLDER / "lib"
HEADERS = FOLDER / "headers"
WHEEL = "onnxruntime-gpu==1.31.1"
HEADER_WHEELS = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")
SOURCES = Path(__file__).parent

HEADER_ROOTS = ("CUDA_HOME", "CUDA_PATH")
SONAMES = {
    "runtime.cpp": ("libcudart.so.13",),
    "products.cpp": ("libcublas.so.13", "libcublasLt.so.13"),
    "attention.cpp": ("libcudnn.so.9",),
}
DRIVER, RANDOM = "libcuda.so.1", "libcurand.so.10"


class Missing(Exception):
    """What a dry run needs is not here."""


def prepare(*, download: bool) -> None:
    """Unpack the provider and compile the stand-ins, unless that is done.

    Args:
        download: get the wheel of the provider (250 MB), and CUDA's headers (2 MB), from PyPI where they are not here.

    Raises:
        Missing: there are no CUDA headers, no C++ compiler or no wheel. The message says what to do.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None or shutil.which("nm") is None:
        raise Missing("there is no C++ compiler, or no nm: install g++ and binutils.")
    headers = _headers(download)
    _unpack(download)
    _compile(compiler, headers)


def environment() -> dict[str, str]:
    """The environment of a process that uses the stand-ins and the provider."""
    paths = [str(SITE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "LD_LIBRARY_PATH": str(LIBRARIES), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _headers(download: bool) -> Path:
    """The folder with CUDA's headers: of a CUDA toolkit, or of NVIDIA's packages."""
    roots = [Path(os.environ[name]) for name in HEADER_ROOTS if name in os.environ]
    roots += [Path("/usr/local/cuda-13.0"), Path("/usr/local/cuda"), HEADERS / "nvidia" / "cu13"]
    for root in roots:
        if "CUDART_VERSION  13" in _text(root / "include" / "cuda_runtime_api.h"):
            return root / "include"
    if download:
        wheels = [_wheel(requirement, download=True) for requirement in HEADER_WHEELS]
        if None not in wheels:
            for wheel in filter(None, wheels):
                _extract(wheel, HEADERS)
            return _headers(download=False)
    raise Missing("there are no headers of CUDA 13: install the CUDA toolkit, or run make cuda-dry with a network.")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _unpack(download: bool) -> None:
    if (SITE / "unpacked").exists():
        return
    wheel = _wheel(WHEEL, download=download)
    if wheel is None:
        raise Missing(f"the wheel of {WHEEL} is not here: put it into {FOLDER}, or run make cuda-dry with a network.")
    shutil.rmtree(SITE, ignore_errors=True)
    _extract(wheel, SITE)
    (SITE / "unpacked").touch()


def _wheel(requirement: str, *, download: bool) -> Path | None:
    """The wheel of `name==version` in `FOLDER`; None if it is not there, and cannot be downloaded."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    pattern = requirement.replace("-", "_").replace("==", "-") + "-*.whl"
    if download and not any(FOLDER.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(FOLDER), requirement]
        subprocess.run(command, check=False)
    return next(FOLDER.glob(pattern), None)


def _extract(path: Path, folder: Path) -> None:
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(folder)


def _compile(compiler: str, headers: Path) -> None:
    done = LIBRARIES / "built"
    sources = [*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"), Path(__file__)]
    if done.exists() and done.stat().st_mtime > max(path.stat().st_mtime for path in sources):
        return
    shutil.rmtree(LIBRARIES, ignore_errors=True)
    LIBRARIES.mkdir(parents=True)
    (LIBRARIES / "empty.cpp").write_text('extern "C" int cuTensorMapEncodeTiled() { return 0; }\n', encoding="utf-8")
    needed = _needed_symbols()
    products = [f"PRODUCT({name})" for name in needed["libcublas.so.13"] if _is_product(name)]
    (LIBRARIES / "cublas_products.inc").write_text("\n".join(products) + "\n", encoding="utf-8")
    for source, sonames in SONAMES.items():
        for soname in sonames:
            _library(compiler, headers, SOURCES / source, soname, needed.get(soname, []))
    for soname in (DRIVER, RANDOM):
        _library(compiler, headers, LIBRARIES / "empty.cpp", soname, [])
    done.touch()


def _is_product(name: str) -> bool:
    return not any(word in name for word in ("Create", "Destroy", "SetStream", "MathMode", "GetStatus"))


def _needed_symbols() -> dict[str, list[str]]:
    """The names that the provider looks for, by the library that it expects them in."""
    provider = SITE / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so"
    listed = subprocess.run(["nm", "-D", "--undefined-only", provider], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = {}
    for line in listed.stdout.splitlines():
        name, _, library = line.split()[-1].partition("@")
        found.setdefault(library, []).append(name)
    return found


def _library(compiler: str, headers: Path, source: Path, soname: str, needed: list[str]) -> None:
    """Compile one stand-in. What the provider needs and the source does not define does nothing, successfully."""
    first = [compiler, "-shared", "-fPIC", "-O1", "-std=c++17", "-pthread", "-Wl,-soname," + soname]
    first += [f"-I{headers}", f"-I{SOURCES}", f"-I{LIBRARIES}", *(["-DCUBLAS"] if "cublas." in soname else [])]
    versions = LIBRARIES / "versions.map"
    versions.write_text(f"{soname} {{ global: *; }};\n", encoding="utf-8")
    last = ["-o", str(LIBRARIES / soname)]
    if needed:
        last = [f"-Wl,--version-script={versions}", *last]
    if soname != "libcudart.so.13":
        last = [f"-L{LIBRARIES}", "-l:libcudart.so.13", *last]
    subprocess.run([*first, str(source), *last], check=True)
    listed = subprocess.run(["nm", "-D", LIBRARIES / soname], capture_output=True, text=True, check=True).stdout
    defined = {line.split()[-1].partition("@")[0] for line in listed.splitlines() if " T " in line}
    rest = [f'extern "C" int {name}() {{ return 0; }}' for name in needed if name not in defined]
    if rest:
        other = LIBRARIES / "rest.cpp"
        other.write_text("\n".join(rest) + "\n", encoding="utf-8")
        subprocess.run([*first, str(source), str(other), *last], check=True)
    if soname == "libcudnn.so.9":
        shutil.copy(LIBRARIES / soname, LIBRARIES / "libcudnn.so")
