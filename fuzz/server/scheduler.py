"""Random requests through a scheduler, against each sentence alone: the same text, tokens and scores, to the last bit.

    python -m fuzz.server.scheduler [--requests 2000] [--seed 0] [--bundle DIR] [--http]

Requests of all kinds of search come at random moments, stream, are cancelled, and lose their workers. Budgets are drawn at
random too. With --http they go to `tfexport serve`, a process of its own; see `over_http`. The bundle is of a small
random model, or DIR; it is decoded in each of its precisions that joins batches. The exit code is 1 where an answer differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from fuzz.server import over_http
from tests.support.ort_bundles import random_model
from tests.support.scheduling import drive, problems
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.config import ModelConfig
from tfexport.exporter.pipeline import export
from tfexport.models.checkpoints.load import load_checkpoint
from tfexport.models.formats import native
from tfexport.models.transformer import Transformer
from tfexport.runtimes import load_runtime
from tfexport.text.tokenizers import TextTokenizer, word_tokenizer

CONFIG = ModelConfig(
    d_model=64,
    n_heads=2,
    d_ff=96,
    n_encoder_layers=2,
    n_decoder_layers=2,
    src_vocab_size=50,
    tgt_vocab_size=60,
    max_source_length=40,
    max_target_length=60,
    unk_id=0,
    pad_id=1,
    bos_id=2,
    eos_id=3,
    output_bias=True,
)
"""With heads that kernels take: where ONNX Runtime multiplies a row alone, it has other last bits than in a batch."""

AT_ONCE = 100
"""Requests of a run, each with budgets of its own."""


def small_model() -> Transformer:
    """Outputs end at many lengths."""
    model = random_model(CONFIG, seed=5)
    assert model.output_bias is not None
    with torch.no_grad():
        model.output_bias[CONFIG.eos_id] += 1.5
    return model.eval()


def words(stem: str, size: int) -> TextTokenizer:
    """A vocabulary of words such as `w4`, with the special tokens of `CONFIG`."""
    specials = ["<unk>", "<pad>", "<s>", "</s>"]
    entries = [*specials, *(f"{stem}{index}" for index in range(len(specials), size))]
    return word_tokenizer({word: index for index, word in enumerate(entries)})


def write_bundle(folder: Path, *, with_words: bool = False) -> Bundle:
    """A bundle of `small_model` in float32 and int8, with graphs that tell attention."""
    path, tokenizers = folder / "model.safetensors", native.Tokenizers(None, None)
    if with_words:
        tokenizers = native.Tokenizers(words("s", CONFIG.src_vocab_size), words("t", CONFIG.tgt_vocab_size))
    native.save(path, small_model().state_dict(), CONFIG, tokenizers, torch.float32)
    checkpoint = load_checkpoint(path, {}, tokenizers=tokenizers) if with_words else load_checkpoint(path, {})
    export(checkpoint, folder / "bundle", precisions=("int8",), alignments=True, gate=None)
    return open_bundle(folder / "bundle")


def check(bundle: Bundle, precision: str, requests: int, seed: int) -> tuple[int, list[str]]:
    """Answers that were compared, and what differs."""
    runtime = load_runtime("ort-cpu", bundle, precision=precision, threads=1)  # type: ignore[arg-type]
    attention = bundle.has_graph("beam_step_attention", runtime.precision, "ort")
    compared, found = 0, []
    for start in range(0, requests, AT_ONCE):
        count = min(AT_ONCE, requests - start)
        vocab = min(bundle.config.src_vocab_size, bundle.config.tgt_vocab_size)
        _, answers = drive(
            runtime,
            seed + start,
            count,
            vocab=vocab,
            max_length=30,
            attention=attention,
            workers=1 + start // AT_ONCE % 2,
        )
        compared += sum(answer.outputs is not None for answer in answers)
        found += [problem for answer in answers for problem in problems(runtime, answer)]
    return compared, found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random requests through a scheduler.")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--http", action="store_true", help="send them to a server")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        bundle = open_bundle(options.bundle) if options.bundle else write_bundle(Path(folder), with_words=options.http)
        for precision in (one for one in ("float32", "int8", "int4") if one in bundle.precisions):
            began = time.monotonic()
            run = over_http.check if options.http else check
            compared, found = run(bundle, precision, options.requests, options.seed)
            for problem in found[:5]:
                print(problem, flush=True)
            bad += len(found)
            seconds = time.monotonic() - began
            print(
                f"{precision}: {options.requests} requests, {compared} compared, {len(found)} differ; {seconds:.0f} s"
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
