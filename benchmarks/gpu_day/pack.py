"""`make gpu-day-pack`: what a bare GPU machine without a network lacks, in parts small enough to carry there.

    python -m benchmarks.gpu_day.pack --python 3.12 --architecture 90

It downloads the wheels for that Python, leaves in them the machine code of one GPU architecture, adds the exported embedded
model, and writes `build/gpu-day/pack`: `pack.json` with checksums, and `part-00`, `part-01`, ... Nothing is installed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.fatbin import NoFatbin, thin_file
from benchmarks.gpu_day.parts import MANIFEST, write_parts
from benchmarks.gpu_day.requirements import packages
from benchmarks.gpu_day.state import commit, now, write_json
from benchmarks.gpu_day.unpack import BUNDLE, PACK, ROOT

PART_MB = 44
"""A part and a copy of this repository (16 MB) may have to go to the machine together, in 64 MiB."""
WHEELS = ROOT / "build" / "gpu-day" / "wheels"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
LARGE = 1 << 20
"""A library of more bytes is looked at for code of other GPUs."""
LEFT_OUT = {
    "onnxruntime-gpu": (
        *("onnxruntime/tools/", "onnxruntime/transformers/", "onnxruntime/quantization/", "onnxruntime/datasets/"),
        "onnxruntime/capi/libonnxruntime_providers_tensorrt.so",
        "onnxruntime/capi/libonnxruntime.so.",  # for other languages: Python's module has its own copy
    ),
    "onnx": ("onnx/backend/test/",),
}
"""Paths of wheels that are not used here."""


def download(names: Iterable[str], python: str, folder: Path) -> None:
    """Wheels of `name==version` for this Python on Linux, without what they need.

    Raises:
        subprocess.CalledProcessError: one cannot be had; pip has said why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tags = [word for platform in PLATFORMS for word in ("--platform", platform)]
    kind = ["--only-binary=:all:", "--no-deps", "--implementation", "cp", "--python-version", python, *tags]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *kind]
    subprocess.run([*command, "--dest", str(folder), *names], check=True)


def wheel_of(name: str, version: str, folder: Path) -> Path:
    """The wheel of a package among those that were downloaded."""
    wanted = f"{name}-{version}".replace("-", "_").lower()
    for path in folder.glob("*.whl"):
        found = "_".join(path.name.split("-")[:2]).lower()
        if found.replace(".", "_") == wanted.replace(".", "_"):
            return path
    raise FileNotFoundError(f"no wheel of {name} {version} in {folder}")


def unfold(wheel: Path, target: Path, left_out: Sequence[str] = ()) -> None:
    """Unpack a wheel without the paths that begin with one of `left_out`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.startswith(tuple(left_out))] if left_out else None
        archive.extractall(target, names)


def thin_libraries(tree: Path, architecture: int) -> list[dict[str, Any]]:
    """Leave in the libraries of `tree` the code of one architecture; what was done with each that has GPU code."""
    found = []
    for path in sorted(tree.rglob("*.so*")):
        if path.is_symlink() or path.stat().st_size < LARGE:
            continue
        try:
            thinned = thin_file(path, path, architecture)
        except NoFatbin:
            continue
        about = f"{thinned.before / 1e6:.0f} MB of GPU code, {thinned.after / 1e6:.0f} MB for {architecture}"
        say(f"  {path.name}: {about}; {thinned.without} of {thinned.containers} parts have none of it")
        found.append({"library": path.name, **vars(thinned)})
    return found


def make(options: argparse.Namespace) -> dict[str, Any]:
    """Write the pack; returns its manifest."""
    wanted, needs = packages(ROOT, options.python)
    say(f"{len(wanted)} packages for Python {options.python}")
    wheels = options.wheels / options.python  # one of the same name and version for another Python does not load
    missing = [f"{name}=={version}" for name, version in wanted.items() if not _there(name, version, wheels)]
    if missing:
        download(missing, options.python, wheels)
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=options.out.parent) as folder:
        tree = Path(folder)
        for name, version in wanted.items():
            unfold(wheel_of(name, version, wheels), tree / name, LEFT_OUT.get(name, ()))
        thinned = thin_libraries(tree, options.architecture)
        if not options.no_bundle:
            from benchmarks.gpu.runtimes import export_embedded

            export_embedded(tree / BUNDLE, "cpu")
        say("compressing")
        parts = write_parts(tree, options.out, int(options.part_mb * 1e6))
    manifest = {
        **{"python": options.python, "architecture": options.architecture, "commit": commit(), "made": now()},
        **{"packages": wanted, "needs": needs, "thinned": thinned, "parts": parts},
    }
    write_json(manifest, options.out / MANIFEST)
    return manifest


def _there(name: str, version: str, folder: Path) -> bool:
    try:
        return wheel_of(name, version, folder).is_file()
    except FileNotFoundError:
        return False


def say(line: str) -> None:
    print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="of the GPU machine")
    parser.add_argument(
        "--architecture", type=int, default=90, help="compute capability times ten: 90 for H100 and H200"
    )
    parser.add_argument("--part-mb", type=float, default=PART_MB, help="most megabytes of a part")
    parser.add_argument("--no-bundle", action="store_true", help="without the exported embedded model")
    parser.add_argument(
        "--wheels", type=Path, default=WHEELS, help="where wheels are kept, in a folder for each Python"
    )
    parser.add_argument("--out", type=Path, default=PACK)
    options = parser.parse_args(arguments)
    try:
        manifest = make(options)
    except (OSError, PackageNotFoundError, subprocess.CalledProcessError) as error:
        print(f"error: the pack was not made: {error}", file=sys.stderr)
        return 2
    for part in manifest["parts"]:
        say(f"{options.out / part['file']}: {part['bytes'] / 1e6:.1f} MB")
    say(f"Carry {options.out} to the machine, with a copy of this repository, and run there: make gpu-day")
    return 0


if __name__ == "__main__":
    sys.exit(main())
