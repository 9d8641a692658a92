"""How the arithmetic of the output projection changes what graphs in half precision decode, by explicit rounding on a CPU.

    python -m benchmarks.gpu.output_projection BUNDLE TEXT --out projection.json

The states before the projection are in half precision in any case. Compared are

    float32  products of float32 weights
    tf32     weights of 10 fraction bits: a tensor core multiplies such numbers exactly, and adds in float32
    half     weights in half precision and logits rounded to it, as MatMul of ONNX in half precision gives them

with PyTorch in float32: along its greedy outputs the share of steps with its best token, the mean KL divergence of a step
and the steps whose best logit is not the only one (by PyTorch, rounded after each function); and of searches the number of
sentences with its tokens (by the graphs, rounded after each node).
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
from torch.overrides import TorchFunctionMode

from benchmarks.peers.converters import canonical_model
from tfexport.bundle.reader import MANIFEST, Bundle, file_sha256, open_bundle
from tfexport.contract import FLOATS, Precision, weights_file
from tfexport.decoding.line_reader import Reader
from tfexport.models.precision import in_precision, to_tf32
from tfexport.runtimes.base import BaseRuntime
from tfexport.runtimes.ort import ort_cpu_portable
from tfexport.runtimes.outputs import Best, FloatArray, IntArray, best_from_logits
from tfexport.runtimes.pytorch import TorchRuntime
from tfexport.search.search import SearchOptions, pad, search
from tfexport.search.token_rules import log_softmax

BATCH = 50
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


class Rounded(TorchFunctionMode):
    """Within it, what a function of PyTorch computes in float32 is rounded to half precision, and stays in float32.

    PyTorch's own products in half precision are slow on most CPUs.
    """

    def __init__(self, half: torch.dtype):
        self._half = half

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_float = isinstance(found, Tensor) and found.dtype == torch.float32
        return found.to(self._half).float() if is_float else found


Logits = list[FloatArray]
"""Of each sentence, [tokens, vocab]."""


def forced(bundle: Bundle, sources: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> dict[str, Logits]:
    """The logits along outputs, by precision and variant, by PyTorch in float32 with each result rounded."""
    model = canonical_model(bundle)
    weight, bias = model.output_matrix().detach(), model.output_bias
    found: dict[str, Logits] = {}
    for short, precision in FLOATS.items():
        half = getattr(torch, precision)
        with Rounded(half):
            states = list(_states(in_precision(model, precision).float(), sources, outputs))
        for kind, of_kind in WEIGHTS.items() if precision != "float32" else [("float32", WEIGHTS["float32"])]:
            logits = [state.float() @ of_kind(weight, half).T + (0 if bias is None else bias) for state in states]
            if kind == "half":
                logits = [tensor.to(half).float() for tensor in logits]
            found[f"{short} {kind}"] = [tensor.detach().numpy() for tensor in logits]
    return found


def _states(model: Any, sources: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """The states [tokens, d_model] before the output projection, along the output of each sentence."""
    seen: list[Tensor] = []
    handle = model.decoder.norm.register_forward_hook(lambda module, inputs, states: seen.append(states))
    for some, theirs in zip(_batches(sources), _batches(outputs), strict=True):
        inputs = [[model.config.bos_id, *ids[:-1]] for ids in theirs]
        (src_ids, src_len), (tgt_ids, tgt_len) = pad(some, model.config.pad_id), pad(inputs, model.config.pad_id)
        with torch.inference_mode():
            model(*(torch.from_numpy(array) for array in (src_ids, src_len, tgt_ids)))
        yield from (row[:length] for row, length in zip(seen.pop(), tgt_len, strict=True))
    handle.remove()


def distances(found: Logits, exact: Logits) -> dict[str, float]:
    same, ties, steps, divergence = 0, 0, 0, 0.0
    for one, other in zip(found, exact, strict=True):
        ours, theirs = log_softmax(one), log_softmax(other)
        same += int((one.argmax(-1) == other.argmax(-1)).sum())
        ties += int(((one == one.max(-1, keepdims=True)).sum(-1) > 1).sum())
        steps += len(other)
        divergence += float((np.exp(theirs) * (theirs - ours)).sum())
    return {"steps": steps, "best_token": same / steps, "ties": ties, "kl": divergence / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, help="in fp32, fp16 and bf16")
    parser.add_argument("text", type=Path)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--beams", default="1")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    options = parser.parse_args()
    bundle = open_bundle(options.bundle)
    reader = Reader.of(bundle, None)
    lines = options.text.read_bytes().splitlines()[: options.lines]
    sources = sorted((reader.ids(line) for line in lines), key=len)
    torch_runtime = TorchRuntime.from_bundle(bundle)
    beams = [int(beam) for beam in options.beams.split(",")]
    wanted = {beam: decoded(torch_runtime, sources, beam) for beam in {1, *beams}}
    logits = forced(bundle, sources, wanted[1])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for short, precision in FLOATS.items():
            for kind in WEIGHTS if precision != "float32" else ():
                row = {"precision": short, "projection": kind, "sentences": len(sources)}
                row |= distances(logits[f"{short} {kind}"], logits["fp32 float32"])
                print(row, file=sys.stderr, flush=True)
                runtime = variant(bundle, precision, kind, Path(folder))
                for beam, outputs in wanted.items():
                    ours = decoded(runtime, sources, beam)
                    row[f"same_beam_{beam}"] = sum(one == other for one, other in zip(ours, outputs, strict=True))
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
    options.out.write_text(json.dumps({"text": options.text.name, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
