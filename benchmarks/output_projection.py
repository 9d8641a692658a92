"""How the arithmetic of the output projection changes what graphs in half precision decode, by explicit rounding on a CPU.

    python -m benchmarks.output_projection BUNDLE TEXT --out projection.json

The states before the projection are in half precision in any case. Compared are

    float32  products of float32 weights
    tf32     weights of 10 fraction bits: a tensor core multiplies such numbers exactly, and adds in float32
    half     weights in half precision and logits rounded to it, as MatMul of ONNX in half precision gives them

with PyTorch in float32: along its greedy outputs the share of steps with its best token, the mean KL divergence of a
step and the steps whose best logit is not the only one; and of searches the number of sentences with its tokens.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tfexport.bundle.reader import MANIFEST, Bundle, file_sha256, open_bundle
from tfexport.contract import FLOATS, Precision, weights_file
from tfexport.decoding.line_reader import Reader
from tfexport.decoding.search import SearchOptions, pad, search
from tfexport.decoding.token_rules import log_softmax
from tfexport.models.precision import to_tf32
from tfexport.runtimes.base import BaseRuntime, Best, FloatArray, IntArray, best_from_logits
from tfexport.runtimes.ort import ort_cpu_portable
from tfexport.runtimes.pytorch import TorchRuntime

BATCH = 50
OUTPUT = ("output_weight", "output_bias")
WEIGHTS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "float32": lambda weight, half: weight,
    "tf32": lambda weight, half: to_tf32(weight),
    "half": lambda weight, half: weight.to(half).float(),
}
"""The weights of the projection, which are float32 in the file, by variant."""


class RoundedLogits(BaseRuntime):
    """A runtime whose logits are rounded to half precision."""

    def __init__(self, inner: Any, half: torch.dtype):
        self._inner, self._half = inner, half

    name = property(lambda self: self._inner.name)
    config = property(lambda self: self._inner.config)
    precision = property(lambda self: self._inner.precision)
    capacity = property(lambda self: self._inner.capacity)

    def encode(self, *arguments: Any, **options: Any) -> Any:
        return self._inner.encode(*arguments, **options)

    def step(self, state: Any, tokens: IntArray) -> tuple[FloatArray, Any]:
        logits, state = self._inner.step(state, tokens)
        return torch.from_numpy(logits).to(self._half).float().numpy(), state

    def best(self, state: Any, tokens: IntArray, count: int) -> tuple[Best, Any]:
        logits, state = self.step(state, tokens)
        return best_from_logits(logits, count), state


def variant(bundle: Bundle, precision: Precision, kind: str, folder: Path) -> Any:
    """The runtime of a copy of `bundle` with other weights of the output projection."""
    half = getattr(torch, precision)
    directory = Path(shutil.copytree(bundle.directory, folder / f"{precision}-{kind}"))
    path = directory / weights_file(precision)
    tensors = load_file(path)
    tensors["output_weight"] = WEIGHTS[kind](load_file(bundle.weights)[_output_name(bundle)], half).contiguous()
    save_file(tensors, path, {"format": "pt"})
    manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    manifest["files"][path.name] = {"sha256": file_sha256(path), "bytes": path.stat().st_size}
    (directory / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    runtime = ort_cpu_portable(open_bundle(directory), precision=precision)
    return RoundedLogits(runtime, half) if kind == "half" else runtime


def _output_name(bundle: Bundle) -> str:
    config = bundle.config
    if not config.tie_output:
        return "output_weight"
    return "encoder.tokens.weight" if config.tie_source_target else "decoder.tokens.weight"


def decoded(runtime: Any, sources: Sequence[Sequence[int]], beam: int) -> list[tuple[int, ...]]:
    options = SearchOptions(beam=beam)
    return [found[0].ids for batch in _batches(sources) for found in search(runtime, batch, options)]


def _batches(sources: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(sources), BATCH):
        yield sources[start : start + BATCH]


def along(runtime: Any, sources: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Iterator[FloatArray]:
    """The logits [tokens, vocab] of each sentence along an output."""
    config = runtime.config
    for some, theirs in zip(_batches(sources), _batches(outputs), strict=True):
        inputs = [[config.bos_id, *ids[:-1]] for ids in theirs]
        state, rows = runtime.encode(*pad(some, config.pad_id)), []
        for place in range(max(map(len, inputs))):
            tokens = np.array([ids[min(place, len(ids) - 1)] for ids in inputs])
            logits, state = runtime.step(state, tokens)
            rows.append(logits)
        for index, ids in enumerate(inputs):
            yield np.stack([logits[index] for logits in rows[: len(ids)]])


def compare(
    runtime: Any,
    sources: Sequence[Sequence[int]],
    wanted: dict[int, list[tuple[int, ...]]],
    reference: Sequence[FloatArray],
) -> dict[str, Any]:
    same, ties, steps, divergence = 0, 0, 0, 0.0
    for found, exact in zip(along(runtime, sources, wanted[1]), reference, strict=True):
        ours, theirs = log_softmax(found), log_softmax(exact)
        same += int((found.argmax(-1) == exact.argmax(-1)).sum())
        ties += int(((found == found.max(-1, keepdims=True)).sum(-1) > 1).sum())
        steps += len(exact)
        divergence += float((np.exp(theirs) * (theirs - ours)).sum())
    row = {"steps": steps, "best_token": same / steps, "ties": ties, "kl": divergence / steps}
    for beam, outputs in wanted.items():
        ours = decoded(runtime, sources, beam)
        row[f"same_sentences_beam_{beam}"] = sum(one == other for one, other in zip(ours, outputs, strict=True))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, help="in fp32, fp16 and bf16")
    parser.add_argument("text", type=Path)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--beams", default="1,4")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    options = parser.parse_args()
    bundle = open_bundle(options.bundle)
    reader = Reader.of(bundle, None)
    lines = options.text.read_bytes().splitlines()[: options.lines]
    sources = sorted((reader.ids(line) for line in lines), key=len)
    torch_runtime = TorchRuntime.from_bundle(bundle)
    beams = [int(beam) for beam in options.beams.split(",")]
    wanted = {beam: decoded(torch_runtime, sources, beam) for beam in {1, *beams}}
    reference = list(along(torch_runtime, sources, wanted[1]))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for short, precision in FLOATS.items():
            for kind in WEIGHTS if precision != "float32" else ():
                row = compare(variant(bundle, precision, kind, Path(folder)), sources, wanted, reference)
                rows.append({"precision": short, "projection": kind, "sentences": len(sources), **row})
                print(rows[-1], file=sys.stderr)
    options.out.write_text(json.dumps({"text": options.text.name, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
