"""Decodes on several CPUs, and checks that a bundle gives the same tokens with kernels and is certified on each.

    python -m fuzz.models.cpus BUNDLE TEXT --precision int8

Other CPUs are emulated. This needs `qemu-x86_64` (Debian's package qemu-user), and about an hour for 200 lines. Each CPU
decodes greedily and with a beam of 4, and runs `tfexport parity` on a copy of the bundle, with the kernels and without them.
All runs with the kernels have to write the same bytes. In int8, a few lines of the others may differ.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tfexport.kernels import SWITCH

HERE = "this CPU"
CPUS = (HERE, "Haswell", "EPYC-Milan", "SandyBridge")
"""The machine's own; with AVX2 and without VNNI; the same of another maker; with AVX and without fused operations."""

SEARCHES = {"greedy": (), "beam 4": ("--beam", "4")}


def run(cpu: str, kernels: bool, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run tfexport on a CPU."""
    emulator = [] if cpu == HERE else ["qemu-x86_64", "-cpu", cpu]
    # An emulated interpreter does not find its virtual environment by itself.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    environment[SWITCH] = "1" if kernels else "0"
    command = [*emulator, os.path.realpath(sys.executable), "-m", "tfexport", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def outputs(cpu: str, kernels: bool, bundle: Path, text: Path, precision: str, folder: Path) -> dict[str, list[str]]:
    """The lines that each search writes on a CPU."""
    found = {}
    for name, options in SEARCHES.items():
        written = folder / "output"
        done = run(
            cpu, kernels, "decode", bundle, text, "--precision", precision, "--threads", "1", *options, "-o", written
        )
        if done.returncode:
            raise SystemExit(f"decode failed on {cpu}:\n{done.stderr[-2000:]}")
        found[name] = written.read_text(encoding="utf-8").split("\n")[:-1]
    return found


def certified(cpu: str, kernels: bool, bundle: Path, text: Path, precision: str, folder: Path) -> bool:
    """Whether `tfexport parity` certifies a copy of the bundle on a CPU."""
    copied = shutil.copytree(bundle, folder / "bundle")
    done = run(cpu, kernels, "parity", copied, text, "--precision", precision, "--runtime", "ort-cpu")
    shutil.rmtree(copied)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return done.returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The same tokens on all CPUs.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path, help="a sentence a line")
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--certified", type=int, default=20, metavar="LINES", help="lines for parity, which is slower")
    options = parser.parse_args(arguments)
    if shutil.which("qemu-x86_64") is None:
        raise SystemExit("qemu-x86_64 is not installed. Install Debian's package qemu-user.")
    problems = 0
    wanted: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        few = Path(name) / "few"
        few.write_text("".join(options.text.open(encoding="utf-8").readlines()[: options.certified]), encoding="utf-8")
        for cpu in CPUS:
            for kernels in (True, False):
                found = outputs(cpu, kernels, options.bundle, options.text, options.precision, Path(name))
                wanted = wanted or found
                differ = {
                    search: sum(a != b for a, b in zip(lines, wanted[search], strict=True))
                    for search, lines in found.items()
                }
                passed = certified(cpu, kernels, options.bundle, few, options.precision, Path(name))
                problems += not passed or (kernels and any(differ.values()))
                told = ", ".join(
                    f"{search}: {count} of {len(wanted[search])} lines differ" for search, count in differ.items()
                )
                with_kernels = "with kernels" if kernels else "without kernels"
                print(f"{cpu}, {with_kernels}: {told}; {'certified' if passed else 'NOT CERTIFIED'}", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
