"""Parity and speed of every runtime that a machine has, in one process: tables and all raw numbers.

    python -m benchmarks.gpu.runtimes BUNDLE                    # on a machine with an NVIDIA GPU
    python -m benchmarks.gpu.runtimes --export DIR              # of the embedded model, exported first
    python -m benchmarks.gpu.runtimes BUNDLE --device cpu       # the CPU's runtimes

A runtime that is not installed, cannot run here or fails is a row with its error. Exit codes: 0 done, 1 a runtime failed
parity or crashed in it, 2 nothing could be run.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import re
import subprocess
import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.agreement import Outputs, Reference, agreement
from benchmarks.gpu.timing import Meter, Runs, Setting, measure, summary
from benchmarks.machine import machine
from benchmarks.paths import RESULTS
from benchmarks.peers.decoders import NAMES, OTHERS, Peer, load_peer, one_line
from tfexport.bundle.reader import MANIFEST, Bundle, open_bundle
from tfexport.contract import FLOATS, WEIGHTS_FILE, Precision
from tfexport.decoding.line_reader import Reader, Unreadable
from tfexport.decoding.translate import Result, Writer
from tfexport.errors import RuntimeUnavailable, TfexportError
from tfexport.runtimes.pytorch import TorchRuntime, require_gpu
from tfexport.search.search import Hypothesis
from tfexport.verification.parity import random_sources


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Parity and speed of the runtimes of a bundle.")
    parser.add_argument("bundle", type=Path, nargs="?", help="exported with --precision fp32,fp16,bf16")
    parser.add_argument(
        "--export", type=Path, metavar="DIR", help="export the embedded model there, or use that bundle"
    )
    parser.add_argument("--device", choices=NAMES, default="cuda")
    parser.add_argument(
        "--runtimes", type=_words, help="of " + "; ".join(f"{d}: {','.join(n)}" for d, n in NAMES.items())
    )
    parser.add_argument("--precisions", type=_words, default=list(FLOATS))
    parser.add_argument("--batch-sizes", type=_numbers, default=[1, 32])
    parser.add_argument("--beams", type=_numbers, default=[1, 4])
    parser.add_argument("--input", type=Path, help="one sentence a line; random ids when not given")
    parser.add_argument("--input-format", choices=("text", "tokens", "ids"))
    parser.add_argument("--references", type=Path, help="one translation a line of --input, for BLEU")
    parser.add_argument("--sentences", type=_number, default=64, help="most sentences that parity is looked at on")
    parser.add_argument("--max-length", type=_number, default=64, help="most tokens that parity decodes")
    parser.add_argument("--tokens", type=_number, default=32, help="exactly so many tokens are decoded for time")
    parser.add_argument("--repeats", type=_number, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--only", choices=("parity", "benchmark"), help="one half alone")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--name", help="of the result files, gpu-NAME.json and .md; the GPU's when not given")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if (options.bundle is None) == (options.export is None):
        parser.error("give a bundle, or a folder with --export")
    names = options.runtimes or NAMES[options.device]
    unknown = [name for name in names if name not in NAMES[options.device]]
    unknown += [name for name in options.precisions if name not in FLOATS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: there is no such runtime or precision for --device {options.device}")
    # The first is what the others are a ratio to.
    options.runtimes = list(dict.fromkeys((NAMES[options.device][0], *names)))
    return options


def _words(text: str) -> list[str]:
    return text.split(",")


def _number(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _numbers(text: str) -> list[int]:
    return [_number(word) for word in text.split(",")]


def export_embedded(directory: Path, device: str) -> Path:
    """The bundle of the embedded model in every precision, at `directory`, with TensorRT engines if that is installed.

    One that is there already stays.
    """
    from tfexport.commands.demo import embedded_checkpoint
    from tfexport.exporter.pipeline import export
    from tfexport.models.checkpoints.load import load_checkpoint

    if (directory / MANIFEST).exists():
        return directory
    say(f"exporting the embedded model to {directory}")
    export(load_checkpoint(embedded_checkpoint(), {}), directory, precisions=list(FLOATS.values()))
    if device == "cuda":
        build = [sys.executable, "-m", "tfexport", "build", str(directory), "--gpu", "here"]
        done = subprocess.run([*build, "--precision", ",".join(FLOATS)], stdout=sys.stderr)
        if done.returncode:
            say("note: no TensorRT engines were built, for the reason above")
    return directory


def read_sources(
    bundle: Bundle, options: argparse.Namespace
) -> tuple[list[list[int]], Callable[[Outputs], float] | None]:
    """Encoder ids, and how to score outputs where there are translations of the input."""
    count = max(options.sentences, *options.batch_sizes)
    if options.input is None:
        return random_sources(bundle.config, count), None
    reader = Reader.of(bundle, options.input_format)
    sources, numbers = [], []
    for number, line in enumerate(options.input.read_bytes().removeprefix(BOM_UTF8).splitlines()):
        try:
            sources.append(reader.ids(line))
            numbers.append(number)
        except Unreadable:
            continue
    if not sources:
        raise TfexportError(f"{options.input} has no line that can be decoded. Give another file with --input.")
    sources = sources[:count]
    return sources, _bleu(bundle, options.references, numbers[: options.sentences]) if options.references else None


def _bleu(bundle: Bundle, path: Path, numbers: Sequence[int]) -> Callable[[Outputs], float] | None:
    try:
        import sacrebleu
    except ImportError:
        print("note: no BLEU: sacrebleu is not installed", file=sys.stderr)
        return None
    lines = path.read_text(encoding="utf-8").splitlines()
    if numbers[-1] >= len(lines):
        raise TfexportError(f"{path} has fewer lines than the input. Give its translations with --references.")
    references, writer = [lines[number] for number in numbers], Writer.of(bundle, "text")

    def score(outputs: Outputs) -> float:
        found = [Result(1, "ok", "", (Hypothesis(tuple(ids), 0.0, 0.0, True),)) for ids in outputs]
        return float(sacrebleu.corpus_bleu([writer.line(result) for result in found], [references]).score)

    return score


def run(bundle: Bundle, options: argparse.Namespace, record: dict[str, Any], save: Callable[[], None]) -> None:
    """Fill the rows of both tables of `record`, saving after each setting: a run that is cut short leaves what it found.

    Raises:
        TfexportError: the input cannot be used, or the model has fewer positions than tokens are asked for.
    """
    most = bundle.config.max_target_length
    if options.tokens > most:
        raise TfexportError(f"the model generates at most {most} tokens. Give --tokens {most} or fewer.")
    sources, bleu = read_sources(bundle, options)
    settings = list(itertools.product(options.batch_sizes, options.beams))
    reference = None
    if options.only != "benchmark":
        say("the reference decodes")
        plain = TorchRuntime.from_bundle(bundle, threads=options.threads)
        reference = Reference(plain, sources[: options.sentences], options.beams, options.max_length, bleu)
    for short in options.precisions:
        precision = FLOATS[short]
        peers, meters, missing = load(bundle, precision, options)
        # Speed comes first: memory that parity took would be missing from what a setting takes.
        for batch, beam in settings if options.only != "parity" else []:
            say(f"speed in {short}, batch {batch}, beam {beam}")
            rows = _speeds(peers, meters, missing, sources, batch, beam, options)
            record["benchmark"] += _placed(rows, options.runtimes, precision, batch, beam)
            save()
        for batch, beam in settings:
            if reference is None:
                break
            say(f"parity in {short}, batch {batch}, beam {beam}")
            rows = _agreements(peers, missing, reference, batch, beam)
            record["parity"] += _placed(rows, options.runtimes, precision, batch, beam)
            save()
        peers.clear()
        _free()


def _placed(
    rows: dict[str, dict[str, Any]], names: Sequence[str], precision: Precision, batch: int, beam: int
) -> list[dict[str, Any]]:
    return [{"runtime": name, "precision": precision, "batch": batch, "beam": beam, **rows[name]} for name in names]


def load(
    bundle: Bundle, precision: Precision, options: argparse.Namespace
) -> tuple[list[Peer], dict[str, Meter], dict[str, Exception]]:
    """The peers that there are, what measures their memory, and the errors of the others."""
    peers: list[Peer] = []
    meters: dict[str, Meter] = {}
    missing: dict[str, Exception] = {}
    for name in options.runtimes:
        meters[name] = Meter(options.device, name.startswith("torch") or name == "hugging-face")
        try:
            meters[name].around(
                lambda name=name: peers.append(load_peer(name, options.device, bundle, precision, options.threads))  # type: ignore[misc]
            )
        except Exception as error:
            missing[name] = error
            say(f"{name}: {one_line(error)}")
    return peers, meters, missing


def _speeds(
    peers: Sequence[Peer],
    meters: Mapping[str, Meter],
    missing: Mapping[str, Exception],
    sources: Sequence[Sequence[int]],
    batch: int,
    beam: int,
    options: argparse.Namespace,
) -> dict[str, dict[str, Any]]:
    """A row of the benchmark table for each runtime."""
    setting = Setting([sources[index % len(sources)] for index in range(batch)], beam, options.tokens)
    runs = {name: Runs(error=one_line(error)) for name, error in missing.items()}
    runs |= measure(peers, meters, setting, warmup=options.warmup, repeats=options.repeats)
    return {name: summary(mine, runs[options.runtimes[0]], options.tokens * batch) for name, mine in runs.items()}


def _agreements(
    peers: Sequence[Peer], missing: Mapping[str, Exception], reference: Reference, batch: int, beam: int
) -> dict[str, dict[str, Any]]:
    """A row of the parity table for each runtime."""
    # What tfexport itself refuses to load is not there: no engines, no such precision. Another error is a crash.
    rows = {name: _failure(name, error, crash=not isinstance(error, TfexportError)) for name, error in missing.items()}
    for peer in peers:
        if peer.name in OTHERS and beam > 1:
            rows[peer.name] = {"error": "not compared: its beam search is another one"}
            continue
        try:
            rows[peer.name] = {"error": None, **agreement(peer, reference, batch, beam)}
        except Exception as error:
            rows[peer.name] = _failure(peer.name, error, crash=not isinstance(error, RuntimeUnavailable))
    return rows


def _failure(name: str, error: Exception, *, crash: bool) -> dict[str, Any]:
    """A row of the parity table for a runtime that gave nothing; one of ours that crashed has not passed."""
    return {"error": one_line(error), "passed": False if crash and name not in OTHERS else None}


def _free() -> None:
    """Give back what compiled code and PyTorch's allocator hold."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        if options.device == "cuda":
            require_gpu()
    except RuntimeUnavailable as error:
        say(f"no NVIDIA GPU can be used here: nothing was run. {error}")
        return 2
    try:
        bundle = open_bundle(export_embedded(options.export, options.device) if options.export else options.bundle)
        facts = machine(options.device)
        record = {"machine": facts, "options": _plain(options), **_model(bundle), "parity": [], "benchmark": []}
        default = facts["gpu"]["name"] if facts["gpu"] else "cpu"
        name = options.name or re.sub(r"[^a-z0-9]+", "-", default.lower()).strip("-")
        run(bundle, options, record, lambda: report.write(record, options.out / f"gpu-{name}"))
    except (TfexportError, OSError) as error:
        say(f"error: {error}")
        return 2
    print(report.markdown(record))
    say(f"written: {options.out / f'gpu-{name}'}.json and .md")
    return 1 if any(row.get("passed") is False for row in record["parity"]) else 0


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}


def _model(bundle: Bundle) -> dict[str, Any]:
    config = bundle.config
    about = (
        f"d_model {config.d_model}, {config.n_encoder_layers} + {config.n_decoder_layers} layers, {config.n_heads} heads, "
        f"d_ff {config.d_ff}, vocabulary {config.tgt_vocab_size}"
    )
    return {"model": about, "config": config.to_dict(), "weights_sha256": bundle.files[WEIGHTS_FILE]}


if __name__ == "__main__":
    sys.exit(main())
