"""Random and mutated bytes into every reader of files: each gives a result or an error of ours, and nothing else.

    python -m fuzz.files.readers [--inputs 50000] [--seed 0] [--only checkpoint,manifest]

Each reader runs in a process of its own. An input may take 5 seconds of the CPU, and memory of 20 times its size, or of
64 MiB where that is more. What escapes is kept in --out with the reader's name, and the exit code is 1: another exception, a
signal, a hang, memory beyond that or that could not be had, something that was run, a file that was opened or written where
none should be.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fuzz.files.mutations import mutated
from fuzz.files.target import Target
from fuzz.files.valid_files import prepare, readers
from fuzz.files.watch import Watch
from tfexport.errors import words_of

SECONDS = 5
"""Of the CPU, for one input: more is a hang. Of the clock it may take WAITS times as long, as others use the machine too."""
WAITS = 6
STARTING = 300
"""Seconds until a process has loaded its libraries and read a valid file, at most."""

TIMES, FREE = 20, 64 * 2**20
"""Memory for one input: so many times its size, or so many bytes where that is more."""

ADDRESSES = 2 * 2**30
"""Bytes of address space beyond what the process has when it begins. What asks for more gets none, and that is an escape."""

ALLOCATION = re.compile(
    r"bad_?alloc|failed to allocate|(can ?not|unable to|could not) allocate|MemoryError|enough memory|out of memory|"
    r"DefaultCPUAllocator|length_error",
    re.IGNORECASE,
)
"""What libraries say of memory that they could not have. Our errors pass it on, or have it as their cause."""


NAMES = (
    *("checkpoint", "safetensors", "config", "vocabulary", "tokenizer", "manifest", "certificates", "graph"),
    *("text", "prefixes", "targets", "budget", "flags", "labels", "packed"),
    *("hf-config", "hf-generation", "hf-tokenizer-config", "hf-special-tokens", "hf-added-tokens"),
    *("hf-vocab", "hf-tokenizer", "hf-index", "hf-shard", "pieces"),
    *("yaml-words", "codes", "dictionary", "marian-model", "marian-decoder", "marian-words", "opus-words"),
    *("joeynmt-config", "joeynmt-words", "joeynmt-checkpoint", "fairseq", "fairseq-words", "opennmt", "opennmt-part"),
    *("ctranslate2", "ctranslate2-config", "ctranslate2-words"),
)
"""Of all readers in `cases.py`."""

LIBRARIES = (
    *("numpy", "onnx", "onnxruntime", "safetensors.torch", "sentencepiece", "tokenizers", "torch"),
    *(
        "tfexport.verification.budget",
        "tfexport.models.checkpoints.load",
        "tfexport.runtimes.ort_cpu.runtime",
        "tfexport.decoding.translate",
    ),
)
"""Loaded once, for the processes of all readers."""

REFUSED = "refused"


def run_one(reader: Target, data: bytes, folder: Path, watch: Watch | None = None) -> str | None:
    """None for what was read, `REFUSED` for an error of ours, else what escaped."""
    from tfexport.errors import TfexportError

    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    path = work / f"given{reader.suffix}"
    path.write_bytes(data)
    refused, found, began = False, list[str](), _memory("VmRSS")
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            watch.of() if watch else contextlib.nullcontext(found) as found,
            _limited_time(),
        ):
            reader.read(path)
    except TfexportError as error:
        if not str(error).strip():
            return "an error without a message"
        if said := _failed_allocation(error):
            return f"memory could not be had: {said}"
        refused = True
    except BaseException:  # whatever it is, it must not come out
        return traceback.format_exc()
    taken = _memory("VmHWM") - began
    if taken > max(TIMES * len(data), FREE):
        return f"it took {taken / 2**20:.0f} MiB for {len(data):,} bytes"
    if found:
        return f"it did what it must not: {'; '.join(found)}"
    written = sorted(p.name for p in folder.iterdir() if p.name != "work")
    return f"it wrote {written} outside" if written else REFUSED if refused else None


class TooLong(BaseException):
    """No Exception, which a reader of broken files may take for one of the file's own."""


@contextlib.contextmanager
def _limited_time() -> Iterator[None]:
    """Raise TooLong where a block takes too long, of the CPU or of the clock."""

    def too_long(number: int, frame: Any) -> None:
        raise TooLong(f"more than {SECONDS} seconds")

    before = {number: signal.signal(number, too_long) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WAITS * SECONDS)
    try:
        yield
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _memory(field: str) -> int:
    """Bytes that this process has (VmRSS), or has had at most (VmHWM) since the last call for VmRSS."""
    if field == "VmRSS":
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(re.findall(rf"{field}:\s*(\d+) kB", status)[0])


def _failed_allocation(error: BaseException | None) -> str | None:
    """What an error, or one that it comes from, says of memory that could not be had."""
    while error is not None:
        said = f"{type(error).__name__}: {words_of(error)}"
        if ALLOCATION.search(said):
            return said[:300]
        error = error.__cause__ or error.__context__
    return None


def worker(name: str, seed: int, count: int, prepared: Path, out: Path, pipe: Any) -> None:
    """Run `count` inputs of a reader; the last one is in `out` while it is under way, so that a crash leaves it there."""

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (reader,) = [reader for reader in readers(prepared) if reader.name == name]
        size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESSES, size + ADDRESSES))
        chosen = random.Random(seed)
        place = Path(tempfile.mkdtemp(dir=folder))
        watch = Watch([folder, prepared])
        for valid in reader.seeds[:1]:
            run_one(reader, valid, place, watch)  # once for what libraries load when they are first used
            if (found := run_one(reader, valid, place, watch)) is not None:
                raise AssertionError(f"what {name} begins with is not read: {found}")
        for index in range(count):
            data = mutated(chosen, reader.seeds)
            current = out / f"{name}.{seed}.current"
            current.write_bytes(data)
            escaped = run_one(reader, data, place, watch)
            if escaped not in (None, REFUSED):
                (out / f"{name}.{seed}.{index}{reader.suffix}").write_bytes(data)
                (out / f"{name}.{seed}.{index}.why").write_text(escaped, encoding="utf-8")
            pipe.send(escaped)
        current.unlink(missing_ok=True)


def fuzz(name: str, seed: int, count: int, prepared: Path, out: Path) -> tuple[int, int, list[str]]:
    """How many inputs ran and were refused, and what escaped. A process that dies is replaced, with another seed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LIBRARIES))
    done, refused, escapes = 0, 0, []
    while done < count:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=worker, args=(name, seed + done, count - done, prepared, out, theirs))
        process.start()
        theirs.close()
        started = done
        while True:
            if not mine.poll(2 * WAITS * SECONDS + STARTING * (done == started)):
                process.kill()  # it does not come back from a library
            try:
                escaped = mine.recv()
            except EOFError:
                break
            done += 1
            refused += escaped == REFUSED
            if escaped not in (None, REFUSED):
                escapes.append(escaped.strip().splitlines()[-1])
        process.join()
        if process.exitcode and not (out / f"{name}.{seed + started}.current").exists():
            raise SystemExit(f"{name} cannot be begun: see above")
        if process.exitcode:
            last = out / f"{name}.{seed + started}.current"
            kept = out / f"{name}.{seed + started}.crash"
            if last.exists():
                last.replace(kept)
            escapes.append(f"the process ended with {process.exitcode}: {kept.name}")
            done += 1
    return done, refused, escapes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Mutated bytes into every reader of files.")
    parser.add_argument("--inputs", type=int, default=50_000, help="in all, shared by the readers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(NAMES), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="what escaped is kept here")
    options = parser.parse_args(arguments)
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(NAMES):
        parser.error(f"there is no reader {unknown.pop()}")
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    share = -(-options.inputs // len(chosen))
    total, bad = 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        prepared = Path(temporary)
        with contextlib.redirect_stderr(io.StringIO()):  # the progress bars of what writes the valid files
            prepare(prepared)
        for name in chosen:
            began = time.monotonic()
            count, refused, escapes = fuzz(name, options.seed, share, prepared, options.out)
            total, bad = total + count, bad + len(escapes)
            found = f"{count:>8,} inputs, {refused:>7,} refused, {len(escapes):>4} escapes"
            print(f"{name:<20}{found}, {time.monotonic() - began:.0f} s", flush=True)
            for escape in dict.fromkeys(escapes):
                print(f"    {escape[:160]}")
    print(f"{total:,} inputs, {bad} escapes" + (f", kept in {options.out}" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
