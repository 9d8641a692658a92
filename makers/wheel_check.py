"""Checks an installed wheel: `python makers/wheel_check.py`, with a Python that has `tfexport[cpu]` alone.

It imports nothing of this repository but the installed package. `make wheels` and cibuildwheel run it for each wheel.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

GERMAN, ENGLISH = "Ein Hund springt über einen Zaun.", "A dog jumps over a fence."


def main() -> None:
    """Decode the demo with kernels, without PyTorch; exit with the reason where this fails."""
    if importlib.util.find_spec("torch") is not None:
        sys.exit("PyTorch is installed here. Check a wheel in an environment with tfexport[cpu] alone.")
    from tfexport import __version__, kernels
    from tfexport.commands.demo import run

    status = kernels.status()
    if status.state != "ready" and sys.platform != "win32":
        sys.exit(f"the wheel has no kernels that run here: {status.reason}")
    with tempfile.TemporaryDirectory() as folder:
        _, translations = run(print, Path(folder) / "de-en")
    if dict(translations)[GERMAN] != ENGLISH:
        sys.exit(f"the wheel decodes the demo wrongly: {translations}")
    used = ", ".join(kernels.instruction_sets()) or "none"
    print(f"tfexport {__version__} decodes the demo; kernels: {used}; {Path(kernels.__file__).parent}")


if __name__ == "__main__":
    main()
