"""Random and mutated bytes into every reader of files: each gives a result or an error of ours, and nothing else.

    python fuzz/readers.py [--inputs 50000] [--seed 0] [--only checkpoint,manifest]

Each reader runs in a process of its own that may use 6 GiB of addresses, and 20 seconds for an input. What escapes (another
exception, a signal, a hang, a file that was written where none should be) is kept in --out with the reader's name, and the
exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutations import mutated

SECONDS = 20
"""For one input: more is a hang."""

ADDRESSES = 6 * 2**30
"""Bytes of address space beyond what the process has when it begins: a small file must not ask for more."""


@dataclass(frozen=True)
class Reader:
    """One way in which bytes from outside come in."""

    name: str
    seeds: tuple[bytes, ...]
    """Valid content, which mutations begin with."""
    read: Callable[[Path], object]
    """Reads a file as the commands do."""
    suffix: str = ".bin"


# --- what is read


def readers(folder: Path) -> list[Reader]:
    """All of them; `folder` gets the valid files that they begin with."""
    import torch

    from tfexport.bundle import open_bundle
    from tfexport.certificate import certify, read_certificates, write_certificates
    from tfexport.config import ModelConfig
    from tfexport.export import export
    from tfexport.models import native
    from tfexport.models.checkpoint import inspect_checkpoint, load_checkpoint, read_hints
    from tfexport.models.transformer import Transformer
    from tfexport.runtimes import load_runtime
    from tfexport.search import SearchOptions
    from tfexport.tokenizers import TextTokenizer, read_vocabulary
    from tfexport.translate import Reader as LineReader
    from tfexport.translate import Writer, translate

    words = ["<unk>", "<pad>", "<sos>", "<eos>", *(f"word{index}" for index in range(27))]
    vocabulary = folder / "words.json"
    vocabulary.write_text(json.dumps(words), encoding="utf-8")
    config = ModelConfig(
        d_model=16,
        n_heads=2,
        d_ff=24,
        n_encoder_layers=1,
        n_decoder_layers=1,
        src_vocab_size=len(words),
        tgt_vocab_size=len(words),
        max_source_length=20,
        max_target_length=20,
        unk_id=0,
        pad_id=1,
        bos_id=2,
        eos_id=3,
    )
    torch.manual_seed(0)
    model = Transformer(config)
    tokenizers = native.Tokenizers(read_vocabulary(vocabulary), read_vocabulary(vocabulary))
    safetensors = folder / "model.safetensors"
    native.save(safetensors, model.state_dict(), config, tokenizers, torch.float32)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from tiny import HINTS, tiny_transformer
    from torch_models import Tutorial as TorchTutorial
    from torch_models import made

    pickled, archive, legacy, torch_layers = (folder / f"{name}.pt" for name in ("model", "nested", "legacy", "torch"))
    weights = tiny_transformer().state_dict()
    torch.save(weights, pickled)
    torch.save({"model_state_dict": weights, "epoch": 3, "args": {"heads": 2}}, archive)
    torch.save(weights, legacy, _use_new_zipfile_serialization=False)
    torch.save(made("tutorial").state_dict(), torch_layers)
    bundle = export(load_checkpoint(safetensors, {}), folder / "bundle", precisions=("int8",)).directory
    opened = open_bundle(bundle)
    runtime = load_runtime("ort-cpu", opened, threads=1)
    line_reader, writer = LineReader.of(opened, None), Writer.of(opened, "jsonl")

    def checkpoint(path: Path) -> None:
        hints = {**HINTS, **TorchTutorial.hints} if path.suffix == ".pt" else {}
        inspect_checkpoint(path, hints)
        load_checkpoint(path, hints)

    def in_bundle(name: str) -> Callable[[Path], object]:
        """Reads `path` as the file `name` of a bundle, whose manifest has its checksum unless it is the manifest."""

        def read(path: Path) -> object:
            from tfexport.bundle import file_sha256

            copy = path.parent / "bundle"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(bundle, copy)
            shutil.copyfile(path, copy / name)
            if name in opened.files:
                manifest = json.loads((copy / "manifest.json").read_text(encoding="utf-8"))
                manifest["files"][name]["sha256"] = file_sha256(path)
                (copy / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
            found = open_bundle(copy)
            read_certificates(found)
            for side in ("source", "target"):
                found.tokenizer(side)
            if name.endswith(".onnx"):
                altered = load_runtime("ort-cpu", found, threads=1)
                altered.best(altered.encode(*_pair()), _tokens(), 1)  # type: ignore[attr-defined]
            return found

        return read

    def text(path: Path) -> None:
        given = path.read_bytes().splitlines(keepends=True)[:50]
        results = list(translate(runtime, line_reader, given, SearchOptions(max_length=3)))
        if len(results) != len(given):
            raise AssertionError(f"{len(given)} lines in, {len(results)} out")
        for result in results:
            json.loads(writer.line(result))

    def tokenizer(path: Path) -> None:
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            return
        TextTokenizer.from_dict(fields, where=path.name)

    stamp = certify(opened, "ort-cpu", "float32", [{"beam": 1}], {"sentences": 3}, "bundle")
    path = write_certificates(opened, [stamp])
    certificates = path.read_bytes()
    path.unlink()
    bytes_of = Path.read_bytes
    sentences = b"word1 word2 word3\nword4\n\nword5 unknown \xc3\xa4\n" * 3
    graphs = [(bundle / f"{name}.onnx").read_bytes() for name in ("encoder.ort", "encoder", "decoder_step.ort")]
    dictionary = json.dumps({word: index for index, word in enumerate(words)}).encode()
    return [
        Reader("checkpoint", tuple(map(bytes_of, (pickled, archive, legacy, torch_layers))), checkpoint, ".pt"),
        Reader("safetensors", (bytes_of(safetensors),), checkpoint, ".safetensors"),
        Reader("config", (json.dumps({**HINTS, "d_model": 16}).encode(),), read_hints, ".json"),
        Reader("vocabulary", (bytes_of(vocabulary), dictionary, "\n".join(words).encode()), read_vocabulary, ".json"),
        Reader("tokenizer", (bytes_of(bundle / "source_tokenizer.json"),), tokenizer, ".json"),
        Reader("manifest", (bytes_of(bundle / "manifest.json"),), in_bundle("manifest.json"), ".json"),
        Reader("certificates", (certificates, b"[]"), in_bundle("certificates.json"), ".json"),
        Reader("graph", tuple(graphs), in_bundle("encoder.ort.onnx"), ".onnx"),
        Reader("text", (sentences, b"1 2 3\n"), text, ".txt"),
    ]


def _pair() -> tuple[Any, Any]:
    import numpy as np

    return np.array([[4, 5, 6], [7, 8, 1]]), np.array([3, 2])


def _tokens() -> Any:
    import numpy as np

    return np.array([2, 2])


# --- running


REFUSED = "refused"


def run_one(reader: Reader, data: bytes, folder: Path) -> str | None:
    """None for what was read, `REFUSED` for an error of ours, else what escaped."""
    from tfexport.errors import TfexportError

    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    path = work / f"given{reader.suffix}"
    path.write_bytes(data)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            reader.read(path)
    except TfexportError as error:
        message = str(error)
        return REFUSED if message.strip() else "an error without a message"
    except BaseException:  # whatever it is, it must not come out
        return traceback.format_exc()
    finally:
        signal.alarm(0)
    written = sorted(p.name for p in folder.iterdir() if p.name != "work")
    return f"it wrote {written} outside" if written else None


def worker(name: str, seed: int, count: int, out: Path, pipe: Any) -> None:
    """Run `count` inputs of a reader; the last one is in `out` while it is under way, so that a crash leaves it there."""

    def too_long(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} seconds")

    signal.signal(signal.SIGALRM, too_long)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (reader,) = [reader for reader in readers(folder) if reader.name == name]
        size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESSES, size + ADDRESSES))
        chosen = random.Random(seed)
        place = Path(tempfile.mkdtemp(dir=folder))
        for valid in reader.seeds[:1]:
            if (found := run_one(reader, valid, place)) is not None:
                raise AssertionError(f"what {name} begins with is not read: {found}")
        for index in range(count):
            data = mutated(chosen, reader.seeds)
            current = out / f"{name}.{seed}.current"
            current.write_bytes(data)
            escaped = run_one(reader, data, place)
            if escaped not in (None, REFUSED):
                (out / f"{name}.{seed}.{index}{reader.suffix}").write_bytes(data)
                (out / f"{name}.{seed}.{index}.why").write_text(escaped, encoding="utf-8")
            pipe.send(escaped)
        current.unlink(missing_ok=True)


def fuzz(name: str, seed: int, count: int, out: Path) -> tuple[int, int, list[str]]:
    """How many inputs ran and were refused, and what escaped. A process that dies is replaced, with another seed."""
    context = multiprocessing.get_context("spawn")
    done, refused, escapes = 0, 0, []
    while done < count:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=worker, args=(name, seed + done, count - done, out, theirs))
        process.start()
        theirs.close()
        started = done
        while True:
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
    names = (
        "checkpoint",
        "safetensors",
        "config",
        "vocabulary",
        "tokenizer",
        "manifest",
        "certificates",
        "graph",
        "text",
    )
    parser.add_argument("--inputs", type=int, default=50_000, help="in all, shared by the readers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="what escaped is kept here")
    options = parser.parse_args(arguments)
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"there is no reader {unknown.pop()}")
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    share = -(-options.inputs // len(chosen))
    total, bad = 0, 0
    for name in chosen:
        began = time.monotonic()
        count, refused, escapes = fuzz(name, options.seed, share, options.out)
        total, bad = total + count, bad + len(escapes)
        found = f"{count:>8,} inputs, {refused:>7,} refused, {len(escapes):>4} escapes"
        print(f"{name:<14}{found}, {time.monotonic() - began:.0f} s", flush=True)
        for escape in dict.fromkeys(escapes):
            print(f"    {escape[:160]}")
    print(f"{total:,} inputs, {bad} escapes" + (f", kept in {options.out}" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
