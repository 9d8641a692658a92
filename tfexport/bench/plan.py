"""The plan of `tfexport bench`: its cells, and the sentences of each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfexport.config import ModelConfig
from tfexport.contract import Precision, short_name
from tfexport.errors import TfexportError
from tfexport.search.profiles import ProfileName

FEWEST_SENTENCES = 16
MIXED_SENTENCES = 64
"""The smallest number of sentences in a cell with outputs of mixed lengths."""
BEST_BATCHES = (8, 16, 32, 64, 128)
"""The batch sizes among which a contestant's best is searched."""

Sources = Sequence[list[int]]


@dataclass(frozen=True)
class Cell:
    """One setting. All cells of a run have the same output lengths."""

    precision: Precision
    threads: int
    batch: int | None
    """None: each contestant's best."""
    beam: int

    @property
    def about(self) -> str:
        """A short name, such as `fp32, 2 threads, batch 8, beam 1`."""
        batch = "each one's best batch" if self.batch is None else f"batch {self.batch}"
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return f"{short_name(self.precision)}, {threads}, {batch}, beam {self.beam}"

    @property
    def batches(self) -> tuple[int, ...]:
        return BEST_BATCHES if self.batch is None else (self.batch,)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a benchmark.

    Raises:
        TfexportError: a setting cannot be measured.
    """

    precisions: tuple[Precision, ...] = ("float32",)
    threads: tuple[int, ...] = (1,)
    batches: tuple[int | None, ...] = (1, 8, 32)
    """None: each contestant's best."""
    beams: tuple[int, ...] = (1,)
    tokens: int | None = 32
    """The exact number of tokens of every output; None to end outputs as the model does."""
    max_length: int = 256
    """The largest number of tokens of an output that the model ends."""
    rounds: int = 5
    profile: ProfileName = "tfexport"
    """The profile of tfexport's search. With the profile of another engine both do the same work if outputs end freely."""
    sentences: int | None = None
    """The number of sentences of each cell. The default gives each worker a batch, and has more for mixed lengths."""

    def __post_init__(self) -> None:
        numbers = (*self.threads, *(batch for batch in self.batches if batch is not None), *self.beams, self.rounds)
        numbers += tuple(number for number in (self.tokens, self.sentences) if number is not None)
        if min(numbers) < 1:
            raise TfexportError(
                "threads, batch sizes, beams, tokens, rounds and sentences are at least 1. Change them."
            )

    @property
    def cells(self) -> list[Cell]:
        """The cells in the order of measurement: small ones first, because processes keep their memory."""
        batches = sorted(dict.fromkeys(self.batches), key=lambda batch: batch or max(BEST_BATCHES))
        order = itertools.product(
            dict.fromkeys(self.precisions), sorted({*self.threads}), batches, sorted({*self.beams})
        )
        return [Cell(*cell) for cell in order]

    def stream(self, sources: Sources, cell: Cell) -> list[list[int]]:
        """The sentences of a cell, repeated if there are too few."""
        count = self.sentences
        if count is None:
            count = max(FEWEST_SENTENCES, max(cell.batches) * cell.threads)
            if self.tokens is None:
                count = max(count * 2, MIXED_SENTENCES)
        return [sources[index % len(sources)] for index in range(count)]

    def request(self, command: str, sources: Sources, batch: int, beam: int) -> dict[str, Any]:
        """A request to decode `sources` (see `worker.py`)."""
        least, most = (0, self.max_length) if self.tokens is None else (self.tokens - 1, self.tokens)
        lengths = {"min_length": least, "max_length": most}
        asked = {"batch_size": batch, "beam": beam, "profile": self.profile, **lengths}
        return {"command": command, "sources": sources, **asked}


def random_sources(config: ModelConfig, count: int, *, seed: int = 0) -> list[list[int]]:
    """Random encoder ids, 4 to 32 per sentence if the model reads so many. The only special ids are its bos and eos."""
    random = np.random.default_rng(seed)
    specials = {config.unk_id, config.pad_id, config.bos_id, config.eos_id}
    words = [index for index in range(config.src_vocab_size) if index not in specials]
    most = max(1, config.max_source_length - config.source_bos - config.source_eos)
    lengths = random.integers(min(4, most), min(32, most) + 1, count)
    begin, end = [config.bos_id] * config.source_bos, [config.eos_id] * config.source_eos
    return [begin + random.choice(words, length).tolist() + end for length in lengths]
