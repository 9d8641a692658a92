"""Checks which runtimes work here. `python -m tfexport.runtimes.availability` prints JSON before and after each check.

A check imports the library of a runtime. A library that was built for another CPU or driver can end the process, so
`tfexport version` makes the checks in another process. Its arguments are the names of the checks to skip.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from tfexport.errors import RuntimeUnavailable
from tfexport.runtimes.known import RUNTIMES

KERNELS = "kernels"
"""The name of the check of the kernels, which have no runtime."""


@dataclass(frozen=True)
class Availability:
    """Whether a runtime can be used here."""

    available: bool
    reason: str = ""
    """The reason why not, and what to do; empty if it can be used."""
    libraries: dict[str, str] = field(default_factory=dict)
    """The versions of the imported libraries, by name."""


def availability(runtime: str) -> Availability:
    """Import the library of a runtime, and look for the GPU if it needs one. No bundle is opened.

    Args:
        runtime: one of `RUNTIMES`.
    """
    libraries: dict[str, str] = {}
    try:
        CHECKS[runtime](libraries)
    except ModuleNotFoundError as error:
        return Availability(False, f"{error.name} is not installed: pip install 'tfexport[{RUNTIMES[runtime].extra}]'.")
    except RuntimeUnavailable as error:
        return Availability(False, str(error), libraries)
    except Exception as error:  # a broken installation, which can raise anything
        first = next(iter(str(error).splitlines()), type(error).__name__)
        return Availability(False, f"the import of its library failed: {first}", libraries)
    return Availability(True, "", libraries)


def _ort_cpu(libraries: dict[str, str]) -> None:
    import onnxruntime

    libraries["onnxruntime"] = onnxruntime.__version__


def _ort_cuda(libraries: dict[str, str]) -> None:
    _ort_cpu(libraries)
    from tfexport.runtimes.ort import require_cuda_provider
    from tfexport.system.gpu import find_gpu

    require_cuda_provider()
    find_gpu()


def _tensorrt(libraries: dict[str, str]) -> None:
    from tfexport.runtimes.tensorrt import installed_libraries
    from tfexport.system.gpu import find_gpu

    installed = installed_libraries()
    if not installed:
        raise RuntimeUnavailable(
            "neither tensorrt nor tensorrt_rtx is installed: pip install 'tfexport[tensorrt-rtx]', or 'tfexport[tensorrt]'."
        )
    libraries.update((name, library.__version__) for name, library in installed.items())
    find_gpu()


def _torch(libraries: dict[str, str]) -> None:
    import torch

    libraries["torch"] = torch.__version__


def _torch_cuda(libraries: dict[str, str]) -> None:
    _torch(libraries)
    from tfexport.runtimes.pytorch import require_gpu

    require_gpu()


CHECKS = {
    "ort-cpu": _ort_cpu,
    "ort-cuda": _ort_cuda,
    "tensorrt": _tensorrt,
    "torch": _torch,
    "torch-cuda": _torch_cuda,
}
"""The check of each of `RUNTIMES`. It imports libraries, and adds their versions to its argument."""


def kernels_status() -> dict[str, Any]:
    """The status of the kernels as `tfexport version --json` prints it."""
    from tfexport import kernels

    status = kernels.status()
    is_usable = status.state != "no-such-isa"
    return {
        "state": status.state,
        "built": status.path is not None,
        "reason": status.reason,
        "remedy": status.remedy,
        "for_this_machine": kernels.supports_this_machine(),
        "instruction_sets": list(kernels.instruction_sets()) if is_usable else [],
        "matrix_products": is_usable and kernels.has_products(),
        "library": kernels.digest() if is_usable else "",
        "build": dict(status.build),
    }


def main() -> None:
    for name in (KERNELS, *CHECKS):
        if name not in sys.argv[1:]:
            print(json.dumps({"checking": name}), flush=True)
            result = kernels_status() if name == KERNELS else asdict(availability(name))
            print(json.dumps({"name": name, **result}), flush=True)


if __name__ == "__main__":
    main()
