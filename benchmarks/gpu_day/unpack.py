"""Unpacks a pack on the machine where the day runs, and says which of it that machine needs.

    python -m benchmarks.gpu_day.unpack [PACK]

A package that the machine has in a version that will do is left alone: those that came with it fit each other.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.gpu_day.parts import MANIFEST, BadPack, OtherPython, extract_parts
from benchmarks.gpu_day.state import read_json, write_json

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "gpu-day"
PACK, SITE = FOLDER / "pack", FOLDER / "site"
UNPACKED = "unpacked.json"
BUNDLE = "bundle"
"""The folder of a pack with the embedded model, exported."""
CUBLAS, OLD_CUBLAS = "libcublas.so.13", "libcublas.so.12"


def unpack(pack: Path = PACK, site: Path = SITE, *, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Unpack `pack` to `site`, unless that is done, and choose what of it is used.

    Returns:
        `paths`, folders for PYTHONPATH; `libraries`, folders for LD_LIBRARY_PATH; `used` and `there`, versions of packages.
        Empty where there is no pack.

    Raises:
        BadPack: it is damaged or incomplete.
        OtherPython: it is for another Python.
    """
    manifest = read_json(pack / MANIFEST)
    if not manifest:
        return {}
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if manifest["python"] != here:
        raise OtherPython(
            f"the pack in {pack} is for Python {manifest['python']}, and this is {here}. Pack for it: make gpu-day-pack "
            f"PACK_FLAGS='--python {here}'."
        )
    found = read_json(site / UNPACKED)
    if found.get("parts") != manifest["parts"]:
        say(f"unpacking {pack}")
        shutil.rmtree(site, ignore_errors=True)
        extract_parts(pack, manifest, site)
    found = {"parts": manifest["parts"], "commit": manifest.get("commit"), **_choose(manifest, site)}
    write_json(found, site / UNPACKED)
    return found


def _choose(manifest: Mapping[str, Any], site: Path) -> dict[str, Any]:
    packages: dict[str, str] = manifest["packages"]
    specifiers = _packaging(site).specifiers

    def will_do(installed: str, wanted: str) -> bool:
        return bool(specifiers.SpecifierSet(wanted).contains(installed, prereleases=True))

    used, there = choose(manifest["needs"], _installed, will_do)
    paths = [str(site / name) for name in used]
    return {
        **{"paths": paths, "libraries": _libraries(site)},
        **{"used": {name: packages[name] for name in used}, "there": there},
    }


def choose(
    needs: Mapping[str, Sequence[Sequence[str]]],
    installed: Callable[[str], str | None],
    will_do: Callable[[str, str], bool],
) -> tuple[list[str], dict[str, str]]:
    """The packages of a pack that are used, and the versions of those that the machine has instead.

    What the machine has is asked for nothing more: its packages fit each other. What comes from the pack needs versions that
    fit it, and replaces older ones.

    Args:
        needs: for each package names and versions of what it needs; the key `""` is tfexport.
        installed: the version that the machine has.
        will_do: whether a version is one of those that are asked for.
    """
    used: list[str] = []
    there: dict[str, str] = {}
    waiting = [""]
    while waiting:
        for name, wanted in needs[waiting.pop()]:
            if name in used:
                continue
            found = installed(name)
            if found is not None and will_do(found, wanted):
                there[name] = found
            else:
                there.pop(name, None)
                used.append(name)
                waiting.append(name)
    return sorted(used), there


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _packaging(site: Path) -> Any:
    """The library `packaging`: the machine's, or that of the pack, which must not be taken for the machine's afterwards."""
    before = list(sys.path)
    if find_spec("packaging") is None:
        sys.path.append(str(site / "packaging"))
    try:
        import packaging.specifiers
    finally:
        sys.path[:] = before
    library: ModuleType = packaging
    return library


def _libraries(site: Path) -> list[str]:
    """Folders with libraries that are on no search path: cuBLAS under the name that CTranslate2 asks for.

    Its wheels are built for CUDA 12 and open `libcublas.so.12`. Where only CUDA 13 is there, its cuBLAS takes the place: the
    functions that CTranslate2 looks up have the same names and arguments. cuBLAS 12 itself is too large for a pack: its
    `libcublasLt` has 749 MB, of which 268 MB are in `.nv_fatbin`.
    """
    own = site / "cublas12"
    if (own / OLD_CUBLAS).exists() and not (own / OLD_CUBLAS).is_symlink():
        return [str(own)]
    new = find_cublas()
    if new is None:
        return []
    own.mkdir(exist_ok=True)
    (own / OLD_CUBLAS).unlink(missing_ok=True)
    (own / OLD_CUBLAS).symlink_to(new)
    return [str(own), str(new.parent)]


def find_cublas() -> Path | None:
    """cuBLAS of CUDA 13: that of NVIDIA's packages, or of the toolkit."""
    spec = find_spec("nvidia")
    folders = [Path(place) / "cu13" / "lib" for place in (spec.submodule_search_locations or [] if spec else [])]
    folders += [Path("/usr/local/cuda-13.0/lib64"), Path("/usr/local/cuda/lib64")]
    return next((folder / CUBLAS for folder in folders if (folder / CUBLAS).exists()), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path, nargs="?", default=PACK)
    options = parser.parse_args()
    try:
        found = unpack(options.pack)
    except BadPack as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not found:
        print(f"there is no pack in {options.pack}: nothing was unpacked")
        return 0
    print(json.dumps({name: found[name] for name in ("used", "there", "libraries")}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
