"""What a dry run decodes: random models, and searches whose tokens follow a script, because nothing is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.base_model import BASE, random_checkpoint
from benchmarks.cuda_dry.stand_in import Counts
from tfexport.config import ModelConfig
from tfexport.contract import FLOATS
from tfexport.exporter.pipeline import export
from tfexport.runtimes.base import Ahead, BaseRuntime, Capabilities, Capacity
from tfexport.runtimes.outputs import Best, Continuations, FloatArray, IntArray

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 24, "n_heads": 3, "d_ff": 40, "n_encoder_layers": 2, "n_decoder_layers": 1},
    "tutorial": {"d_model": 256, "n_heads": 8, "d_ff": 512, "n_encoder_layers": 3, "n_decoder_layers": 3},
    "base": {"src_vocab_size": 32_000, "tgt_vocab_size": 32_000},
}
"""What differs from the paper's base size, and from `VOCAB`."""

VOCAB, LONGEST = 500, 128
"""Words and positions of the models, because both cost seconds. Of TopK there are more launches in larger vocabularies."""


def model_config(name: str) -> ModelConfig:
    sizes = {"src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB, "max_source_length": LONGEST}
    return replace(BASE, **{**sizes, "max_target_length": LONGEST, **MODELS[name]})


def write_bundle(name: str, folder: Path) -> Path:
    """Export the random model `name` in the precisions of GPUs, without checks."""
    checkpoint = random_checkpoint(model_config(name), folder / f"{name}.safetensors")
    export(checkpoint, folder / name, precisions=list(FLOATS.values()), gate=None)
    return folder / name


def sources(config: ModelConfig, lengths: IntArray, seed: int = 0) -> list[list[int]]:
    """Random sentences of these lengths."""
    random = np.random.default_rng(seed)
    return [random.integers(4, config.src_vocab_size, length).tolist() for length in lengths]


def text_lengths(lines: int) -> IntArray:
    """Source lengths of a text: half of them from 12 to 30, a few to 90."""
    lengths = np.random.default_rng(1).lognormal(np.log(19), 0.6, lines)
    return lengths.astype(np.int64).clip(3, 90)


class ScriptedState:
    """A state, and the position at which each of its sentences is to end."""

    def __init__(self, inner: Any, ends: IntArray, beam: int, position: int = 0):
        self.inner, self.ends, self.beam, self.position = inner, ends, beam, position

    @property
    def rows(self) -> int:
        return int(self.inner.rows)

    def select(self, rows: IntArray) -> ScriptedState:
        return ScriptedState(
            self.inner.select(rows), self.ends[rows[:: self.beam] // self.beam], self.beam, self.position
        )


class Scripted(BaseRuntime):
    """A runtime that does its work and then tells random tokens, so that searches go on, reorder beams and end.

    A sentence of n ids ends after about n tokens. `steps` has the counts of each call with the reorder after it: of a step,
    or of several that the runtime makes by itself. `step_count` is the number of steps.
    """

    def __init__(self, inner: Any):
        self._inner = inner
        self.steps: list[Counts] = []
        self.encoders: list[Counts] = []
        self.start()

    def start(self) -> None:
        """Forget the counts and tell the same tokens again."""
        self.steps.clear()
        self.step_count = 0
        self.encoders.clear()
        self._before: Counts | None = None
        self._random = np.random.default_rng(2)

    name = property(lambda self: self._inner.name)
    config = property(lambda self: self._inner.config)
    precision = property(lambda self: self._inner.precision)

    @property
    def capabilities(self) -> Capabilities:
        found: Capabilities = self._inner.capabilities
        return found

    @property
    def capacity(self) -> Capacity:
        found: Capacity = self._inner.capacity
        return found

    def prepare(self, needs: Any) -> None:
        self._inner.prepare(needs)

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> ScriptedState:
        self._close()
        before = Counts.now()
        inner = self._inner.encode(src_ids, src_len, beam=beam, attention=attention)
        self.encoders.append(Counts.now().since(before))
        ends = (src_len * self._random.uniform(0.8, 1.2, len(src_len))).astype(np.int64)
        return ScriptedState(inner, ends, beam)

    def best(self, state: ScriptedState, tokens: IntArray, count: int) -> tuple[Best, ScriptedState]:
        self._close()
        self._before = Counts.now()
        self.step_count += 1
        _, inner = self._inner.best(state.inner, tokens, count)
        return self._told(state, count), ScriptedState(inner, state.ends, state.beam, state.position + 1)

    def search_ahead(self, state: ScriptedState, request: Ahead) -> tuple[Continuations, ScriptedState]:
        self._close()
        self._before = Counts.now()
        found, inner = self._inner.search_ahead(state.inner, request)
        steps = len(found.tokens)
        self.step_count += steps
        told = self._continued(state, request, steps)
        return told, ScriptedState(inner, state.ends, state.beam, state.position + steps)

    def begin_ahead(self, state: ScriptedState, request: Ahead, sentences: int) -> None:
        self._inner.begin_ahead(state.inner, request, sentences)

    def _continued(self, state: ScriptedState, request: Ahead, steps: int) -> Continuations:
        """Random continuations of each step, best first, and the end where a sentence is over."""
        shape = (steps, state.rows // state.beam, request.candidates)
        tokens = self._random.integers(4, self._inner.config.tgt_vocab_size, shape)
        parents = self._random.integers(0, state.beam, shape)
        before = 0.0 if request.log_probs is None else request.log_probs[:, :1]
        falls = -np.arange(1, steps + 1)[:, None, None] - np.arange(request.candidates)
        log_probs = np.broadcast_to(before + falls, shape).copy()
        over = state.position + np.arange(steps)[:, None] >= state.ends
        tokens[over, 0] = self._inner.config.eos_id
        log_probs[over, 1:] -= 100.0
        return Continuations(log_probs, parents, tokens)

    def step(self, state: ScriptedState, tokens: IntArray) -> tuple[FloatArray, ScriptedState]:
        raise NotImplementedError("searches of a dry run ask for the best tokens")

    def finish(self) -> None:
        """The last step is over."""
        self._close()

    def _close(self) -> None:
        if self._before is not None:
            self.steps.append(Counts.now().since(self._before))
            self._before = None

    def _told(self, state: ScriptedState, count: int) -> Best:
        config, rows = self._inner.config, state.rows
        ids = self._random.integers(4, config.tgt_vocab_size - count, (rows, 1)) + np.arange(count)
        scores = np.sort(-self._random.exponential(3, (rows, count)).astype(np.float32))[:, ::-1]
        ended = np.repeat(state.position >= state.ends, state.beam)
        ids[ended, 0] = config.eos_id
        scores[ended, 0] = -0.001
        return Best(scores, ids)


def batches(lines: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    """As `decode` makes them: sentences of similar lengths together, the longest first."""
    ordered = sorted(lines, key=len, reverse=True)
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]
