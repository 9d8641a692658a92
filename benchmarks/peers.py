"""What is compared: the runtimes of tfexport and Hugging Face's `generate`, behind one way to decode."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from benchmarks.hugging_face import HuggingFace
from tfexport.bundle.reader import Bundle
from tfexport.contract import Precision
from tfexport.decoding.search import SearchOptions, search
from tfexport.errors import TfexportError
from tfexport.runtimes import load_runtime
from tfexport.runtimes.base import BaseRuntime, Best, FloatArray, IntArray, Runtime

NAMES = {
    "cuda": ("torch-cuda", "torch-cuda-compiled", "ort-cuda", "tensorrt", "hugging-face"),
    "cpu": ("torch", "torch-compiled", "ort-cpu", "hugging-face"),
}
"""The peers on each device; the first, eager PyTorch, is what the others' speed is a ratio to."""


class Peer(Protocol):
    """Something that decodes."""

    @property
    def name(self) -> str: ...

    @property
    def precision(self) -> Precision: ...

    @property
    def steps(self) -> Sequence[float]:
        """Seconds of each decoder step of the last `decode`; empty where the library does not tell."""
        ...

    def decode(self, sources: Sequence[Sequence[int]], options: SearchOptions) -> list[tuple[int, ...]]:
        """The best hypothesis of each source, without bos, with eos when it came."""
        ...


class Timed(BaseRuntime):
    """A runtime that notes how long each `best` takes, from tokens on the host to the best tokens on the host.

    A reorder of beams that was enqueued before it is waited for in it.
    """

    def __init__(self, runtime: Runtime[Any]):
        self._runtime = runtime
        self.name, self.config, self.precision = runtime.name, runtime.config, runtime.precision
        self.capacity = runtime.capacity
        self.seconds: list[float] = []

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> Any:
        return self._runtime.encode(src_ids, src_len, beam=beam, attention=attention)

    def step(self, state: Any, tokens: IntArray) -> tuple[FloatArray, Any]:
        return self._runtime.step(state, tokens)

    def best(self, state: Any, tokens: IntArray, count: int) -> tuple[Best, Any]:
        start = time.perf_counter()
        result = self._runtime.best(state, tokens, count)
        self.seconds.append(time.perf_counter() - start)
        return result


class RuntimePeer:
    """A runtime of tfexport under tfexport's search."""

    def __init__(self, name: str, runtime: Runtime[Any]):
        self.name, self.runtime, self.precision = name, runtime, runtime.precision
        self._timed = Timed(runtime)

    @property
    def steps(self) -> Sequence[float]:
        return self._timed.seconds

    def decode(self, sources: Sequence[Sequence[int]], options: SearchOptions) -> list[tuple[int, ...]]:
        self._timed.seconds = []
        return [hypotheses[0].ids for hypotheses in search(self._timed, sources, options)]


def load_peer(name: str, device: str, bundle: Bundle, precision: Precision, threads: int | None) -> Peer:
    """One of the `NAMES` of a device.

    Raises:
        TfexportError: it cannot run here, or not this model or precision.
    """
    if name == "hugging-face":
        return _hugging_face(device, bundle, precision)
    if name.endswith("-compiled"):
        from tfexport.runtimes.pytorch import TorchRuntime

        compiled = TorchRuntime.from_bundle(bundle, device=device, precision=precision, threads=threads, compiled=True)
        return RuntimePeer(name, compiled)
    return RuntimePeer(name, load_runtime(name, bundle, precision=precision, threads=threads))


def _hugging_face(device: str, bundle: Bundle, precision: Precision) -> Peer:
    from safetensors.torch import load_file

    from tfexport.models.checkpoints.load import build_model
    from tfexport.models.transformer import Transformer

    model = build_model(bundle.config, load_file(bundle.weights))
    assert isinstance(model, Transformer)
    try:
        return HuggingFace(model, device, precision)
    except ImportError as error:
        raise TfexportError(
            f"Hugging Face is not installed ({error.name} is missing). Add it with: pip install transformers."
        ) from error


def one_line(error: BaseException) -> str:
    """What a table says of a failure."""
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, TfexportError) else f"{type(error).__name__}: {first}"
