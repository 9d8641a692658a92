"""The sizes of a runtime's buffers."""

from __future__ import annotations

from dataclasses import dataclass

from tfexport.bundle.reader import Bundle
from tfexport.config import ModelConfig
from tfexport.contract import Precision, aligned_length
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Capacity

CACHE_BLOCK = 16
"""The number of slots by which a cache on the CPU grows. It is small, because kernels also read empty slots."""

CUDA_BATCH = tuple(2**power for power in range(15))
CUDA_LENGTH = 64
"""The length of the shortest source and cache on a GPU. The others are 2, 4, 8, ... times as long."""
CUDA_SHRINK, CUDA_LEAST = 4, 8
"""`Buckets.shrink` and `Buckets.least_batch` on a GPU, where a step of few sentences takes hardly less time."""


@dataclass(frozen=True)
class Buckets:
    """The sizes that buffers have, ascending. None: any size."""

    cache: tuple[int, ...]
    batch: tuple[int, ...] | None = None
    src: tuple[int, ...] | None = None
    rows: int | None = None
    """The largest number of rows, batch * beam."""
    remedy: str = ""
    """The advice at the end of error messages about sizes above all of these."""
    shrink: int = 1
    """A batch moves to buffers of 1 / `shrink` of its size, or less, if its sentences fit there. 1: to any smaller ones."""
    least_batch: int = 1
    """The smallest batch to whose buffers a batch moves."""
    cache_as_source: bool = False
    """Whether a cache begins with as many slots as the source, because translations are about as long; else with few."""

    def capacity(self, config: ModelConfig) -> Capacity:
        """The part of the model's capacity that fits into these sizes."""
        return Capacity(
            min(config.max_source_length, max(self.src or (config.max_source_length,))),
            min(config.max_target_length, max(self.cache)),
            max(self.batch) if self.batch else None,
            self.rows,
        )

    def cache_for(self, slots: int) -> int:
        """The smallest cache with at least this number of `slots`.

        Raises:
            TfexportError: there is none.
        """
        return self._smallest(self.cache, slots, "a translation of {} tokens")

    def first_cache(self, src: int) -> int:
        """The first cache of a batch with sources of length `src`."""
        return self.cache_for(min(src, max(self.cache)) if self.cache_as_source else 1)

    def batch_for(self, sentences: int, beam: int) -> int:
        """The smallest batch for this number of sentences.

        Raises:
            TfexportError: there is none.
        """
        batch = sentences if self.batch is None else self._smallest(self.batch, sentences, "a batch of {} sentences")
        if self.rows is not None and batch * beam > self.rows:
            batch = sentences  # it may fit without the empty places of a bucket
            if batch * beam > self.rows:
                raise TfexportError(f"{batch} sentences with beam {beam} are more than {self.rows} rows. {self.remedy}")
        return batch

    def batch_after(self, batch: int, sentences: int, beam: int) -> int:
        """The size of the batch to which the remaining `sentences` of a `batch` move; `batch` if they stay."""
        if self.shrink == 1:
            return min(batch, self.batch_for(sentences, beam))
        while batch // self.shrink >= max(sentences, self.least_batch):
            batch //= self.shrink
        return batch

    def src_for(self, length: int) -> int:
        """The smallest source length for `length` ids.

        Raises:
            TfexportError: there is none.
        """
        return length if self.src is None else self._smallest(self.src, length, "a source of {} ids")

    def _smallest(self, sizes: tuple[int, ...], needed: int, what: str) -> int:
        for size in sizes:
            if size >= needed:
                return size
        raise TfexportError(f"{what.format(needed)} is more than the {max(sizes)} planned for. {self.remedy}")


def cpu_buckets(max_target_length: int, block: int = CACHE_BLOCK) -> Buckets:
    """The sizes of a CPU's buffers: batches and sources of any size, and caches that grow by blocks to the model's limit."""
    sizes = range(block, max_target_length, block)
    return Buckets((*sizes, max_target_length), remedy="The model has no more positions.")


def cuda_buckets(bundle: Bundle, precision: Precision) -> Buckets:
    """The sizes of a GPU's buffers: few, so that few graphs are recorded, and soon reused."""
    config = bundle.config
    shortest = max(CUDA_LENGTH, aligned_length(config.d_attention, precision))

    def doubled(most: int) -> list[int]:
        return [shortest * 2**power for power in range(most.bit_length()) if shortest * 2**power < 2 * most] or [
            shortest
        ]

    longest = config.max_source_length
    src = (*(length for length in doubled(longest) if length < longest), longest)
    return Buckets(
        tuple(doubled(config.max_target_length)),
        CUDA_BATCH,
        src,
        remedy="Use a smaller --batch-size, or shorter lines.",
        shrink=CUDA_SHRINK,
        least_batch=CUDA_LEAST,
        cache_as_source=True,
    )
