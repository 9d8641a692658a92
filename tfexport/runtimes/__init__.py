"""The runtimes: ways to execute a bundle. The library of a runtime is imported when the runtime is loaded."""

from __future__ import annotations

from tfexport.bundle.reader import Bundle
from tfexport.contract import QUANTIZED, Precision, short_name
from tfexport.errors import RuntimeUnavailable, TfexportError
from tfexport.runtimes.base import ClassifierRuntime, Runtime
from tfexport.runtimes.known import RUNTIMES
from tfexport.system.imports import import_failure


def load_runtime(
    name: str,
    bundle: Bundle,
    *,
    precision: Precision | None = None,
    threads: int | None = None,
    share_weights: bool = False,
    shortlist: bool = False,
) -> Runtime:
    """The runtime `name` on `bundle`.

    Args:
        precision: if None, float32; for `tensorrt` that of the bundle's engines.
        threads: CPU threads; all that this process may use if None.
        share_weights: for `ort-cpu`: keep packed weights in memory once for all processes with this option.
        shortlist: prepare for searches with shortlists; `ort-cpu` has graphs for them, if the bundle has.

    Raises:
        RuntimeUnavailable: there is no such runtime, or what it needs is not here.
        BundleError: the bundle is a classifier's, or has no graphs or engines for this.
    """
    if name not in RUNTIMES:
        raise RuntimeUnavailable(f"there is no runtime {name!r} in this version. Use one of: {', '.join(RUNTIMES)}.")
    bundle.graph("decoder_step")  # a classifier has nothing to decode
    if precision in QUANTIZED and name != "ort-cpu":
        raise RuntimeUnavailable(
            f"the runtime {name} does not compute in {short_name(precision)}: it is for ort-cpu. Use --runtime ort-cpu, or "
            "--precision fp32."
        )
    if share_weights and name != "ort-cpu":
        raise RuntimeUnavailable(f"the runtime {name} cannot share weights: leave --share-weights out, or use ort-cpu.")
    try:
        return _load(name, bundle, precision, threads, share_weights, shortlist)
    except ImportError as error:
        raise _missing(name, error) from error


def _missing(name: str, error: ImportError) -> Exception:
    library = (error.name or name).partition(".")[0]
    extra = RUNTIMES[name].extra
    absent = f"the runtime {name} needs {error.name}, which is not installed: pip install 'tfexport[{extra}]'."
    return import_failure(error, library, absent)


def load_classifier(
    name: str, bundle: Bundle, *, precision: Precision | None = None, threads: int | None = None
) -> ClassifierRuntime:
    """The runtime `name`, `ort-cpu` or `torch`, on the bundle of an encoder classifier; see `load_runtime`.

    Raises:
        RuntimeUnavailable: it is another one, or what it needs is not here.
        BundleError: the bundle is not a classifier's, or has no graph of this precision.
    """
    bundle.graph("encoder_classifier")
    if name not in ("ort-cpu", "torch"):
        raise RuntimeUnavailable(f"the runtime {name!r} does not classify. Use --runtime ort-cpu or torch.")
    if precision in QUANTIZED:
        raise RuntimeUnavailable("classifiers compute in fp32, fp16 and bf16. Give --precision with one of these.")
    try:
        if name == "torch":
            from tfexport.runtimes.pytorch import TorchClassifier

            return TorchClassifier(bundle, precision=precision or "float32", threads=threads)
        from tfexport.runtimes.ort import OrtClassifier

        return OrtClassifier(bundle, precision=precision or "float32", threads=threads)
    except ImportError as error:
        raise _missing(name, error) from error


def takes_workers(name: str, bundle: Bundle, precision: Precision | None) -> bool:
    """Whether several threads may decode over one such runtime at once."""
    return name == "ort-cpu" and bundle.dialect(name, precision or "float32") == "ort"


def require_workers(name: str, bundle: Bundle, precision: Precision | None, workers: int) -> None:
    """Raises:
    TfexportError: the runtime does not work for this number of workers.
    """
    there = (precision or "float32") in bundle.precisions  # if not, loading raises the error
    if workers > 1 and there and not takes_workers(name, bundle, precision):
        raise TfexportError(
            f"the runtime {name} works for one worker at a time with this bundle and precision. Leave --workers out, or use "
            "--runtime ort-cpu with fp32 or int8, on a bundle exported by this version."
        )


def _load(
    name: str,
    bundle: Bundle,
    precision: Precision | None,
    threads: int | None,
    share_weights: bool,
    shortlist: bool,
) -> Runtime:
    if name == "tensorrt":
        from tfexport.runtimes.tensorrt import tensorrt

        return tensorrt(bundle, precision=precision)
    precision = precision or "float32"
    if name.startswith("torch"):
        from tfexport.runtimes.pytorch import TorchRuntime

        device = "cuda" if name == "torch-cuda" else "cpu"
        return TorchRuntime.from_bundle(bundle, device=device, precision=precision, threads=threads)
    if name == "ort-cuda":
        from tfexport.runtimes.ort import ort_cuda

        return ort_cuda(bundle, precision=precision, threads=threads)
    from tfexport.runtimes.ort_cpu.load import ort_cpu

    return ort_cpu(bundle, precision=precision, threads=threads, share_weights=share_weights, shortlist=shortlist)
