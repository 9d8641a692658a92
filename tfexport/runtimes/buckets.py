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

    def batch_for(self, sentences: int, beam: int) -> int:
        """The smallest batch for `sentences`."""
        batch = sentences if self.batch is None else self._smallest(self.batch, sentences, "a batch of {} sentences")
        if self.rows is not None and batch * beam > self.rows:
            batch = sentences  # it may fit without the empty places of a bucket
            if batch * beam > self.rows:
                raise TfexportError(f"{batch} sentences with beam {beam} are more than {self.rows} rows. {self.remedy}")
        return batch

    def src_for(self, length: int) -> int:
        """The smallest source length for `length` ids."""
        return length if self.src is None else self._smallest(self.src, length, "a source of {} ids")

    def _smallest(self, sizes: tuple[int, ...], needed: int, what: str) -> int:
        for size in sizes:
            if size >= needed:
                return size
        raise TfexportError(f"{what.format(needed)} is more than the {max(sizes)} planned for. {self.remedy}")
