"""A tutorial's way of decoding beside ours, in one run: one sentence at a time, in PyTorch, without a cache.

    python -m benchmarks.cpu.tutorial_way BUNDLE REFERENCE.jsonl

REFERENCE has a line {"src": ids, "out": ids} for each sentence; both ways must give exactly these outputs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tfexport.bundle.reader import open_bundle
from tfexport.decoding.batches import decode_all
from tfexport.decoding.workers import CpuSplit
from tfexport.models.model import build_model
from tfexport.models.transformer import Encoder, Transformer
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions

Outputs = list[tuple[int, ...]]


class Encoded(nn.Module):
    """An encoder that has already run."""

    def __init__(self, encoder: Encoder, states: Tensor):
        super().__init__()
        self.tokens, self.states = encoder.tokens, states

    def forward(self, src_ids: Tensor, src_len: Tensor) -> Tensor:
        return self.states


def tutorial_way(model: Transformer, sources: Sequence[Sequence[int]], most: int) -> Outputs:
    """The encoder once a sentence, then the whole prefix through the whole decoder for each token."""
    config, outputs, encoder = model.config, [], model.encoder
    for source in sources:
        src_ids, src_len = torch.tensor([source]), torch.tensor([len(source)])
        model.encoder = Encoded(encoder, encoder(src_ids, src_len))  # type: ignore[assignment]
        ids: list[int] = []
        while len(ids) < most and config.eos_id not in ids:
            ids.append(int(model(src_ids, src_len, torch.tensor([[config.bos_id, *ids]]))[0, -1].argmax()))
        outputs.append(tuple(ids))
    model.encoder = encoder
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("reference", type=Path)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--max-length", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args()
    records = [json.loads(line) for line in options.reference.read_text().splitlines()][: options.sentences]
    sources, wanted = [r["src"] for r in records], [tuple(r["out"]) for r in records]
    bundle, split = open_bundle(options.bundle), CpuSplit.choose(None, None, at_once=True)
    model = build_model(bundle.config, load_file(bundle.weights)).eval()
    assert isinstance(model, Transformer)
    runtime = load_runtime("ort-cpu", bundle, threads=split.threads)
    search = SearchOptions(max_length=options.max_length, scores=False)

    def ours() -> Outputs:
        found = decode_all(runtime, sources, search, batch_size=options.batch_size, workers=split.workers)
        return [hypotheses[0].ids for hypotheses in found]

    def theirs() -> Outputs:
        with torch.inference_mode():
            return tutorial_way(model, sources, options.max_length)

    decode_all(runtime, sources[:64], search, batch_size=options.batch_size, workers=split.workers)  # warm
    before, slow, after = (
        timed(name, way, wanted) for name, way in (("ours", ours), ("tutorial", theirs), ("ours", ours))
    )
    print(f"{slow / ((before + after) / 2):.1f} times as fast as the tutorial's way; ours with {split}")


def timed(name: str, way: Callable[[], Outputs], wanted: Outputs) -> float:
    start = time.perf_counter()
    outputs = way()
    seconds = time.perf_counter() - start
    same = sum(found == expected for found, expected in zip(outputs, wanted, strict=True))
    print(f"{name}: {seconds:.2f} s, {same} of {len(wanted)} outputs identical to the reference", flush=True)
    if same < len(wanted):
        raise SystemExit(f"{name} gives other outputs: there is nothing to compare the speed of")
    return seconds


if __name__ == "__main__":
    main()
