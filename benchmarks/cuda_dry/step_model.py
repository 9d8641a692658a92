"""The time of a decoder step on an H100, computed from launches, bytes and operations; then beside a measured one.

    time = launches * gap + sum over the work of max(0, time of the work - gap)

A kernel in a recorded graph takes at least `gap`, whatever it does. Large ones take what the memory or the arithmetic takes.
Launches of `ort-cuda` are those that benchmarks/cuda_dry counted. Those of CTranslate2 are counted from its source: its
wheel links the CUDA runtime statically, so that it does not meet stand-ins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BANDWIDTH = 0.8 * 3.35e12
"""Bytes a second: 80 % of the data sheet of an H100 SXM."""
RATES = {"half": 0.6 * 989e12, "tf32": 0.6 * 494e12, "float32": 0.7 * 67e12}
"""Operations a second, by the arithmetic: parts of the data sheet."""
GAP, HOST_GAP = 2.5e-6, 4.0e-6
"""Seconds from one small kernel to the next: in a recorded graph, and where the host launches each. Assumptions."""

LAYERS, D_MODEL, D_FF, VOCAB = 6, 512, 2048, 32_000
LENGTH = 32
"""Source ids, and tokens that a hypothesis has already."""
BATCHES = (1, 32, 256)
BEAM = 4


@dataclass(frozen=True)
class Engine:
    """What decodes, and how."""

    name: str
    projection: str
    """The arithmetic of the output projection, one of `RATES`."""
    logits_passes: int
    """How often the logits are written and read."""
    copies_cache: int = 0
    """How often a step reads and writes the whole self-attention cache besides attention."""
    shares_cache: bool = False
    """The hypotheses of a sentence share one cache: it is read once a sentence."""
    gap: float = GAP


PORTABLE = Engine("onnx24", "float32", logits_passes=5)
CUDA = Engine("ort-cuda", "tf32", logits_passes=4, shares_cache=True)
CTRANSLATE2 = Engine("CTranslate2 float16", "half", logits_passes=2, copies_cache=1, gap=HOST_GAP)

PEER_LAYER = {
    "query, key, value: product, bias": 2,
    "split of heads": 3,
    "cache: concatenation of keys and of values": 4,
    "self-attention: product, softmax, product": 3,
    "output: product, bias; sum; norm": 4,
    "cross-attention: query 2, attention 3, output 2, sum, norm": 9,
    "feed-forward: product and bias twice, sum, norm": 6,
}
"""Launches of a CTranslate2 decoder layer in greedy search, by its source (src/layers/attention.cc and transformer.cc)."""
PEER_REST = 3 + 1 + 2
"""Embedding, scale and position; output projection; best tokens."""
PEER_BEAM = 2 * LAYERS + 2 * LAYERS + 2
"""More in beam search: heads transposed twice a layer, keys and values of the cache gathered, log-softmax and scores."""


def peer_launches(beam: int) -> int:
    return LAYERS * sum(PEER_LAYER.values()) + PEER_REST + (PEER_BEAM if beam > 1 else 0)


def work(engine: Engine, batch: int, beam: int, words: int = VOCAB) -> Iterator[float]:
    """The seconds of each larger piece of a step by itself."""
    rows, half = batch * beam, 2

    def product(inputs: int, outputs: int, kind: str = "half", item: int = half) -> float:
        n_bytes = item * inputs * outputs + rows * (half * inputs + item * outputs)
        return max(n_bytes / BANDWIDTH, 2 * rows * inputs * outputs / RATES[kind])

    slots = LENGTH * (beam if engine.shares_cache else 1)
    own = (batch if engine.shares_cache else rows) * slots * 2 * D_MODEL * half
    cross = batch * LENGTH * 2 * D_MODEL * half
    for _ in range(LAYERS):
        yield product(D_MODEL, 3 * D_MODEL)
        yield from [product(D_MODEL, D_MODEL)] * 3
        yield product(D_MODEL, D_FF)
        yield product(D_FF, D_MODEL)
        yield own / BANDWIDTH
        yield cross / BANDWIDTH
        yield from [2 * own / BANDWIDTH] * (engine.copies_cache + (beam > 1 and not engine.shares_cache))
    item = half if engine.projection == "half" else 4
    yield product(D_MODEL, words, engine.projection, item)
    yield from [rows * words * item / BANDWIDTH] * (engine.logits_passes - 1)


def step_seconds(engine: Engine, launches: int, batch: int, beam: int, words: int = VOCAB) -> float:
    return launches * engine.gap + sum(max(0.0, seconds - engine.gap) for seconds in work(engine, batch, beam, words))


def table(steps: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the table; `steps` are the counts of benchmarks/cuda_dry."""
    head = ["search", "batch", "engine", "launches", "launches alone, ms", "step, ms", "tokens/s"]
    rows = []
    for beam in (1, BEAM):
        for batch in BATCHES:
            counted = {
                PORTABLE: _launches(steps, "onnx24", "decoder_step", batch) + (beam > 1),  # the reorder
                CUDA: _cuda_launches(steps, batch, beam),
                CTRANSLATE2: peer_launches(beam),
            }
            for engine, launches in counted.items():
                seconds = step_seconds(engine, launches, batch, beam)
                search = "greedy" if beam == 1 else f"beam {beam}"
                alone = f"{1e3 * launches * engine.gap:.2f}"
                cells = [str(launches), alone, f"{1e3 * seconds:.2f}", f"{batch / seconds:,.0f}"]
                rows.append([search, str(batch), engine.name, *cells])
    return head, rows


def measured_table(
    steps: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]], words: int
) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the table that compares a step of `ort-cuda` in fp16 with its computed time.

    Args:
        measured: the rows that the stage `speed` of benchmarks/gpu_day measured.
        words: in the vocabulary of the model that it measured.
    """
    head = ["search", "batch", "computed, ms", "measured, ms", "measured / computed"]
    rows = []
    for row in measured:
        batch, beam = row["batch"], row["beam"]
        if (row["runtime"], row["precision"]) != ("ort-cuda", "fp16") or not row["step_ms"]:
            continue
        computed = 1e3 * step_seconds(CUDA, _cuda_launches(steps, batch, beam), batch, beam, words)
        found = row["step_ms"]["median"]
        search = "greedy" if beam == 1 else f"beam {beam}"
        rows.append([search, str(batch), f"{computed:.2f}", f"{found:.2f}", f"{found / computed:.1f}"])
    return head, rows


def _cuda_launches(steps: Sequence[Mapping[str, Any]], batch: int, beam: int) -> int:
    """Of a step of `ort-cuda`, with the choice of tokens."""
    step, choice = ("decoder_step", "greedy_search") if beam == 1 else ("beam_step", "beam_search")
    return _launches(steps, "ort-cuda", step, batch) + _launches(steps, "onnx24", choice, batch)


def _launches(steps: Sequence[Mapping[str, Any]], dialect: str, role: str, batch: int) -> int:
    (counts,) = [
        row["counts"]
        for row in steps
        if (row["model"], row["precision"], row["dialect"], row["role"], row["batch"])
        == ("base", "fp16", dialect, role, batch)
    ]
    return int(counts["kernels"] + counts["on_device"] + counts["fills"])
