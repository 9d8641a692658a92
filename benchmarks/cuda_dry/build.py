"""What a dry run needs, in `build/cuda-dry`: onnxruntime-gpu, which is unpacked and not installed, and the stand-ins."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "cuda-dry"
SITE, LIBRARIES = FOLDER / "site", FOLDER / "lib"
WHEEL = "onnxruntime-gpu==1.31.1"
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
        download: get the wheel of the provider (250 MB) from PyPI where it is not here.

    Raises:
        Missing: there are no CUDA headers, no C++ compiler or no wheel. The message says what to do.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None or shutil.which("nm") is None:
        raise Missing("there is no C++ compiler, or no nm: install g++ and binutils.")
    headers = _headers()
    _unpack(download)
    _compile(compiler, headers)


def environment() -> dict[str, str]:
    """The environment of a process that uses the stand-ins and the provider."""
    paths = [str(SITE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "LD_LIBRARY_PATH": str(LIBRARIES), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _headers() -> Path:
    """The folder with CUDA's headers: of a CUDA toolkit, or of the package nvidia-cuda-runtime."""
    roots = [Path(os.environ[name]) for name in HEADER_ROOTS if name in os.environ]
    roots += [Path("/usr/local/cuda-13.0"), Path("/usr/local/cuda")]
    nvidia = importlib.util.find_spec("nvidia")
    roots += [Path(path) / "cu13" for path in (nvidia.submodule_search_locations or [] if nvidia else [])]
    for root in roots:
        if "CUDART_VERSION  13" in _text(root / "include" / "cuda_runtime_api.h"):
            return root / "include"
    raise Missing(
        "there are no headers of CUDA 13: install the CUDA toolkit, or pip install nvidia-cuda-runtime==13.*."
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _unpack(download: bool) -> None:
    if (SITE / "unpacked").exists():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    wheels = sorted(FOLDER.glob("onnxruntime_gpu-*.whl"))
    if not wheels and download:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(FOLDER), WHEEL]
        subprocess.run(command, check=False)
        wheels = sorted(FOLDER.glob("onnxruntime_gpu-*.whl"))
    if not wheels:
        raise Missing(f"the wheel of {WHEEL} is not here: put it into {FOLDER}, or run make cuda-dry with a network.")
    shutil.rmtree(SITE, ignore_errors=True)
    with zipfile.ZipFile(wheels[-1]) as wheel:
        wheel.extractall(SITE)
    (SITE / "unpacked").touch()


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
