"""What is compared: the runtimes of tfexport, Hugging Face's `generate` and CTranslate2, behind one way to decode."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.hugging_face import HuggingFace
from tfexport.bench.peers import CTranslate2Peer
from tfexport.bundle.reader import Bundle
from tfexport.contract import Precision
from tfexport.errors import TfexportError
from tfexport.runtimes import load_runtime
from tfexport.runtimes.base import Ahead, BaseRuntime, Capabilities, Runtime
from tfexport.runtimes.outputs import Best, Continuations, FloatArray, IntArray
from tfexport.search.search import SearchOptions, search

NAMES = {
    "cuda": ("torch-cuda", "torch-cuda-compiled", "ort-cuda", "tensorrt", "hugging-face", "ctranslate2"),
    "cpu": ("torch", "torch-compiled", "ort-cpu", "hugging-face"),
}
"""The peers on each device; the first, eager PyTorch, is what the others' speed is a ratio to. `tfexport bench` measures
CTranslate2 on a CPU."""

OTHERS = ("hugging-face", "ctranslate2")
"""Peers that are not tfexport's: their search is another one."""


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
    """A runtime that notes how long each step takes, from tokens on the host to the best tokens on the host.

    A reorder of beams that was enqueued before it is waited for in it. Steps that the runtime makes by itself take equal
    parts of the time between their begin and their results.
    """

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self.name, self.config, self.precision = runtime.name, runtime.config, runtime.precision
        self.capacity = runtime.capacity
        self.seconds: list[float] = []
        self._begun: float | None = None  # when the next steps of `search_ahead` began

    @property
    def capabilities(self) -> Capabilities:
        """Those of a search on a GPU, so that what is measured is what decodes."""
        own = self._runtime.capabilities
        return Capabilities(greedy_ahead=own.greedy_ahead, beam_ahead=own.beam_ahead, waits_for_host=own.waits_for_host)

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> Any:
        self._begun = None
        return self._runtime.encode(src_ids, src_len, beam=beam, attention=attention)

    def step(self, state: Any, tokens: IntArray) -> tuple[FloatArray, Any]:
        return self._runtime.step(state, tokens)

    def best(self, state: Any, tokens: IntArray, count: int) -> tuple[Best, Any]:
        start = time.perf_counter()
        result = self._runtime.best(state, tokens, count)
        self.seconds.append(time.perf_counter() - start)
        return result

    def search_ahead(self, state: Any, request: Ahead) -> tuple[Continuations, Any]:
        start = time.perf_counter() if self._begun is None else self._begun
        self._begun = None
        found, state = self._runtime.search_ahead(state, request)
        steps = len(found.tokens)
        self.seconds += [(time.perf_counter() - start) / steps] * steps
        return found, state

    def begin_ahead(self, state: Any, request: Ahead, sentences: int) -> None:
        self._begun = time.perf_counter()
        self._runtime.begin_ahead(state, request, sentences)


class RuntimePeer:
    """A runtime of tfexport under tfexport's search."""

    def __init__(self, name: str, runtime: Runtime):
        self.name, self.runtime, self.precision = name, runtime, runtime.precision
        self._timed = Timed(runtime)

    @property
    def steps(self) -> Sequence[float]:
        return self._timed.seconds

    def decode(self, sources: Sequence[Sequence[int]], options: SearchOptions) -> list[tuple[int, ...]]:
        self._timed.seconds = []
        return [hypotheses[0].ids for hypotheses in search(self._timed, sources, options)]


class CTranslate2:
    """CTranslate2, with weights in `precision`: its float16 computes the output projection in float16 too."""

    name = "ctranslate2"
    steps: tuple[float, ...] = ()
    """It does not tell how long a step takes."""

    def __init__(self, folder: Path, device: str, precision: Precision):
        self.precision = precision
        self._peer = CTranslate2Peer(folder, precision, device=device)  # type: ignore[arg-type]

    def decode(self, sources: Sequence[Sequence[int]], options: SearchOptions) -> list[tuple[int, ...]]:
        return self._peer.decode(sources, options, len(sources))


def load_peer(name: str, device: str, bundle: Bundle, precision: Precision, threads: int | None) -> Peer:
    """One of the `NAMES` of a device.

    Raises:
        TfexportError: it cannot run here, or not this model or precision.
    """
    if name == "hugging-face":
        return _hugging_face(device, bundle, precision)
    if name == "ctranslate2":
        return _ctranslate2(device, bundle, precision)
    if name == "torch-cuda" or name.endswith("-compiled"):
        from benchmarks.peers.pytorch_in_place import InPlaceRuntime

        options: dict[str, Any] = {"precision": precision, "threads": threads, "compiled": name.endswith("-compiled")}
        return RuntimePeer(name, InPlaceRuntime.from_bundle(bundle, device=device, **options))
    return RuntimePeer(name, load_runtime(name, bundle, precision=precision, threads=threads))


def _hugging_face(device: str, bundle: Bundle, precision: Precision) -> Peer:
    from safetensors.torch import load_file

    from tfexport.models.model import build_model
    from tfexport.models.transformer import Transformer

    model = build_model(bundle.config, load_file(bundle.weights))
    assert isinstance(model, Transformer)
    try:
        return HuggingFace(model, device, precision)
    except ImportError as error:
        raise TfexportError(
            f"Hugging Face is not installed ({error.name} is missing). Add it with: pip install transformers."
        ) from error


def _ctranslate2(device: str, bundle: Bundle, precision: Precision) -> Peer:
    """From the folder BUNDLE.ct2 of benchmarks/peers/converters.py, or from one that is written for this and removed."""
    beside = bundle.directory.with_name(f"{bundle.directory.name}.ct2")
    if beside.is_dir():
        return CTranslate2(beside, device, precision)
    from benchmarks.peers.converters import canonical_model, write_ctranslate2

    with tempfile.TemporaryDirectory() as folder:
        write_ctranslate2(canonical_model(bundle), Path(folder) / "ct2")
        return CTranslate2(Path(folder) / "ct2", device, precision)


def one_line(error: BaseException) -> str:
    """What a table says of a failure."""
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, TfexportError) else f"{type(error).__name__}: {first}"
