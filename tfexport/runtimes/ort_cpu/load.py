"""Loads the runtime `ort-cpu` for a bundle, with the classes for which the bundle has graphs."""

from __future__ import annotations

from tfexport.bundle.reader import Bundle
from tfexport.contract import Precision
from tfexport.errors import RuntimeUnavailable
from tfexport.runtimes.base import Runtime
from tfexport.runtimes.ort import ort_cpu_portable
from tfexport.runtimes.ort_cpu.context import DEFAULT_LAYOUT, CacheLayout
from tfexport.runtimes.ort_cpu.runtime import OrtCpuRuntime
from tfexport.runtimes.ort_cpu.shared_weights import PRECISIONS
from tfexport.runtimes.ort_cpu.shortlist import ShortlistRuntime


def ort_cpu(
    bundle: Bundle,
    *,
    precision: Precision = "float32",
    threads: int | None = None,
    share_weights: bool = False,
    shortlist: bool = False,
    layout: CacheLayout = DEFAULT_LAYOUT,
) -> Runtime:
    """The runtime `ort-cpu`, over the dialect that the bundle has for it.

    Args:
        threads: CPU threads; all that this process may use when None.
        share_weights: with other processes; see `runtimes/ort_cpu/shared_weights.py`.
        shortlist: for searches with shortlists. They run graphs for them where the bundle has such graphs.

    Raises:
        RuntimeUnavailable: half precision needs onnx, which is not installed; or weights cannot be shared in this dialect,
            or on this system.
        BundleError: the bundle has no such graphs, or ONNX Runtime cannot load them.
    """
    own_dialect = bundle.dialect("ort-cpu", precision) == "ort"
    if share_weights and not (own_dialect and precision in PRECISIONS):
        raise RuntimeUnavailable(
            "this bundle's graphs of this precision cannot share weights. Leave --share-weights out, or use --precision "
            "fp32 or int8 on a bundle exported by this version."
        )
    if not own_dialect:
        return ort_cpu_portable(bundle, precision=precision, threads=threads, block=layout.block, fill=layout.fill)
    has_graphs = shortlist and bundle.has_graph("shortlist", precision, "ort")
    kind = ShortlistRuntime if has_graphs else OrtCpuRuntime
    return kind(bundle, precision=precision, threads=threads, share_weights=share_weights, layout=layout)
