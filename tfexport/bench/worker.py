"""One contestant of `tfexport bench` in its own process: requests on stdin, answers on stdout, one JSON object per line.

    load    {contestant, path, precision, workers, threads, sources} -> {seconds, versions}
    decode  {sources, batch_size, beam, min_length, max_length, profile?, repeats?, outputs?, forget_peak?}
                -> {seconds, lengths, memory, outputs?}; seconds are those of one of the repeats
    profile {sources, batch_size, beam, min_length, max_length, profile?}, of a runtime of tfexport
                -> {seconds, parts, steps}
    peaks   {threads: [...]} -> {peaks}
    close

The answer to a failed request is {error}. All output of libraries goes to stderr, including output from C.

Another interpreter needs NumPy, `tokenizers` and the packages of the contestant to run this.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from tfexport.bench.machine import measure_peaks, versions
from tfexport.bench.peers import CTranslate2Peer, HuggingFacePeer, OptimumPeer, Peer, RuntimePeer
from tfexport.contract import Precision
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Runtime
from tfexport.runtimes.outputs import Continuations
from tfexport.search.search import SearchOptions
from tfexport.system.processes import end_with_parent

Ids = tuple[int, ...]
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def load(contestant: str, path: Path, precision: Precision, workers: int, threads: int) -> Peer:
    """The contestant of this name, with `workers` of `threads` threads each.

    Raises:
        TfexportError: the contestant cannot run here, or does not support this model or precision.
    """
    if contestant == "ctranslate2":
        if precision not in ("float32", "int8"):
            raise TfexportError("this benchmark runs CTranslate2 in fp32 and int8. Give --precision fp32,int8.")
        return CTranslate2Peer(path, precision, intra_threads=threads, inter_threads=workers)
    if contestant == "hugging-face":
        _not_quantized("Hugging Face generate", precision)
        return HuggingFacePeer(path, threads, precision)
    if contestant == "optimum":
        if precision != "float32":
            raise TfexportError("this benchmark runs Optimum in fp32. Give --precision fp32.")
        return OptimumPeer(path, threads)
    from tfexport.bundle.reader import open_bundle
    from tfexport.runtimes import load_runtime

    bundle = open_bundle(path)
    if contestant == "torch":
        _not_quantized("PyTorch", precision)
    return RuntimePeer(load_runtime(contestant, bundle, precision=precision, threads=threads), workers)


def _not_quantized(name: str, precision: Precision) -> None:
    if precision not in ("float32", "float16", "bfloat16"):
        raise TfexportError(f"this benchmark does not run {name} in {precision}. Give --precision fp32.")


class Profile:
    """The time of each part of a tfexport runtime, and of each step.

    `watching` replaces methods in their classes, so that runtimes and states may have any class. The time of a method that
    another replaced method calls counts for the caller. Seconds are summed over all threads.
    """

    def __init__(self) -> None:
        self.parts = {"encode": 0.0, "step": 0.0, "select": 0.0}
        self.steps: list[float] = []
        self._inside = threading.local()
        self._lock = threading.Lock()

    @contextmanager
    def watching(self, runtime: Runtime, state: type) -> Iterator[None]:
        """Replace the methods of `runtime` and of its states, which have the class `state`."""
        methods = {"encode": "encode", "step": "step", "best": "step", "argmax": "step", "search_ahead": "step"}
        wanted = [(type(runtime), name, part) for name, part in methods.items()] + [(state, "select", "select")]
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in wanted]
        for owner, name, part in wanted:
            setattr(owner, name, self._timed(getattr(owner, name), part))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _timed(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            if getattr(self._inside, "is_timed", False):
                return method(*arguments, **options)
            self._inside.is_timed = True
            start = time.perf_counter()
            try:
                result = method(*arguments, **options)
            finally:
                self._inside.is_timed = False
            seconds = time.perf_counter() - start
            with self._lock:
                self.parts[part] += seconds
                if part == "step":
                    steps = len(result[0].tokens) if isinstance(result[0], Continuations) else 1
                    self.steps += [seconds / steps] * steps
            return result

        return timed


class Session:
    """Answers requests."""

    def __init__(self) -> None:
        self._peer: Peer | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request, or its error. Only the end of the process ends the conversation."""
        handlers = {"load": self._load, "decode": self._decode, "profile": self._profile, "peaks": self._peaks}
        try:
            return handlers[request["command"]](request)
        except Exception as error:
            return {"error": one_line(error)}

    def _load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        self._peer = load(
            request["contestant"],
            Path(request["path"]),
            request["precision"],
            int(request["workers"]),
            int(request["threads"]),
        )
        # Some engines load their data at the first use.
        self._peer.decode(request["sources"], SearchOptions(max_length=2, scores=False), 1)
        return {"seconds": time.perf_counter() - start, "versions": versions()}

    def _decode(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._peer is not None
        if request.get("forget_peak"):
            forget_peak_memory()
        options, repeats = _options(request), int(request.get("repeats", 1))
        start = time.perf_counter()
        for _ in range(repeats):
            outputs = self._peer.decode(request["sources"], options, int(request["batch_size"]))
        seconds = (time.perf_counter() - start) / repeats
        result = {"seconds": seconds, "lengths": [len(ids) for ids in outputs], "memory": memory_of_all()}
        return {**result, "outputs": outputs} if request.get("outputs") else result

    def _profile(self, request: Mapping[str, Any]) -> dict[str, Any]:
        peer = self._peer
        if not isinstance(peer, RuntimePeer):
            raise TfexportError("only runtimes of tfexport can be profiled. Leave the profile out.")
        from tfexport.search.search import pad

        options, sources = _options(request), request["sources"]
        state = peer.runtime.encode(*pad(sources[:1], peer.runtime.config.pad_id), beam=options.beam)
        profile = Profile()
        with profile.watching(peer.runtime, type(state)):
            start = time.perf_counter()
            peer.decode_here(sources, options, int(request["batch_size"]))
            seconds = time.perf_counter() - start
        return {"seconds": seconds, "parts": profile.parts, "steps": profile.steps}

    def _peaks(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"peaks": [measure_peaks(int(threads)).to_dict() for threads in request["threads"]]}


def _options(request: Mapping[str, Any]) -> SearchOptions:
    return SearchOptions.for_profile(
        request.get("profile", "tfexport"),
        beam=int(request["beam"]),
        min_length=int(request["min_length"]),
        max_length=int(request["max_length"]),
        scores=False,
    )


def peak_memory() -> int | None:
    """The peak memory of this process in bytes (VmHWM), since its start or the last reset; None if unknown."""
    try:
        status = STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    words = next((line.split() for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return int(words[1]) * 1024 if words else None


def memory_of_all() -> int | None:
    """`peak_memory` of this process plus the private memory of its worker processes; None if unknown."""
    peak = peak_memory()
    return None if peak is None else peak + sum(own_memory(child.pid) for child in multiprocessing.active_children())


def own_memory(process: int | None) -> int:
    """The private memory of a process in bytes; 0 if unknown."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def forget_peak_memory() -> None:
    """Reset `peak_memory` to the current memory, if the system can."""
    with suppress(OSError):
        CLEAR.write_text("5", encoding="ascii")


def one_line(error: BaseException) -> str:
    """The text of a failure in a row."""
    text = " ".join(str(error).split()) or "no reason given"
    return text if isinstance(error, TfexportError) else f"{type(error).__name__}: {text}"[:300]


def own_pipes() -> tuple[TextIO, TextIO]:
    """The original stdin and stdout, for the conversation. From now on prints go to stderr, and stdin is empty."""
    sys.stdout.flush()
    requests, answers = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, answers


def main() -> None:
    end_with_parent()
    requests, answers = own_pipes()
    session = Session()
    for line in requests:
        request = json.loads(line)
        if request["command"] == "close":
            break
        answers.write(json.dumps(session.answer(request)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
