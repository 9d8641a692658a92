"""The ways to execute a bundle. A runtime's library is imported only when it is asked for."""

from __future__ import annotations

from typing import Any

from tfexport.bundle import Bundle
from tfexport.errors import RuntimeUnavailable
from tfexport.runtimes.base import Runtime

RUNTIMES = ("ort-cpu", "torch")


def load_runtime(name: str, bundle: Bundle, *, threads: int | None = None) -> Runtime[Any]:
    """The runtime `name` on `bundle`, with `threads` CPU threads (all that this process may use when None).

    Raises:
        RuntimeUnavailable: there is no such runtime, or its library is not installed.
        BundleError: the bundle is a classifier's, or the runtime cannot load it.
    """
    if name not in RUNTIMES:
        raise RuntimeUnavailable(f"there is no runtime {name!r} in this version. Use one of: {', '.join(RUNTIMES)}.")
    try:
        if name == "torch":
            from tfexport.runtimes.pytorch import TorchRuntime

            return TorchRuntime.from_bundle(bundle, threads=threads)
        from tfexport.runtimes.ort import OrtRuntime

        return OrtRuntime(bundle, threads=threads)
    except ImportError as error:
        extra = "export" if name == "torch" else "cpu"
        raise RuntimeUnavailable(
            f"the runtime {name} needs {error.name}, which is not installed: pip install 'tfexport[{extra}]'."
        ) from error
