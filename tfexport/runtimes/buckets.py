"""The sizes of a runtime's buffers."""

from __future__ import annotations

from dataclasses import dataclass

from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Capacity


@dataclass(frozen=True)
class Buckets:
    """The sizes that buffers have, ascending. None: any size."""

    cache: tuple[int, ...]
    batch: tuple[int, ...] | None = None
    src: tuple[int, ...] | None = None
    rows: int | None = None
    """Most rows, batch * beam."""
    remedy: str = ""
    """What to do when a size is above all of these: the end of error messages."""
    shrink: int = 1
    """A batch moves to buffers for 1 / `shrink` of it, and again, once its sentences fit there. 1: to any smaller size."""
    least_batch: int = 1
    """A batch moves to no smaller buffers than these."""
    cache_as_source: bool = False
    """A cache begins with as many slots as the source has, because translations are about as long; else with few."""

    def capacity(self, config: ModelConfig) -> Capacity:
        """The part of the model's capacity that fits into these sizes."""
        return Capacity(
            min(config.max_source_length, max(self.src or (config.max_source_length,))),
            min(config.max_target_length, max(self.cache)),
            max(self.batch) if self.batch else None,
            self.rows,
        )

    def cache_for(self, slots: int) -> int:
        """The smallest cache with `slots`. Raises TfexportError if there is none, as the next two do."""
        return self._smallest(self.cache, slots, "a translation of {} tokens")

    def first_cache(self, src: int) -> int:
        """The cache that a batch with sources of `src` begins with."""
        return self.cache_for(min(src, max(self.cache)) if self.cache_as_source else 1)

    def batch_for(self, sentences: int, beam: int) -> int:
        """The smallest batch for `sentences`."""
        batch = sentences if self.batch is None else self._smallest(self.batch, sentences, "a batch of {} sentences")
        if self.rows is not None and batch * beam > self.rows:
            batch = sentences  # it may fit without the empty places of a bucket
            if batch * beam > self.rows:
                raise TfexportError(f"{batch} sentences with beam {beam} are more than {self.rows} rows. {self.remedy}")
        return batch

    def batch_after(self, batch: int, sentences: int, beam: int) -> int:
        """The batch for `sentences` that are left of a `batch`."""
        if self.shrink == 1:
            return min(batch, self.batch_for(sentences, beam))
        while batch // self.shrink >= max(sentences, self.least_batch):
            batch //= self.shrink
        return batch

    def src_for(self, length: int) -> int:
        """The smallest source length for `length` ids."""
        return length if self.src is None else self._smallest(self.src, length, "a source of {} ids")

    def _smallest(self, sizes: tuple[int, ...], needed: int, what: str) -> int:
        for size in sizes:
            if size >= needed:
                return size
        raise TfexportError(f"{what.format(needed)} is more than the {max(sizes)} planned for. {self.remedy}")
