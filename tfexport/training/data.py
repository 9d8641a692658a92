"""Conversion of parallel text to batches of ids for training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.search.search import pad
from tfexport.system.regular_files import read_bytes
from tfexport.text.tokenizers import TextTokenizer, WordTooLong

POOL_BATCHES = 100
"""Number of batches whose sentences are sorted together: enough to save padding, few enough to keep batches random."""


class TextPair(NamedTuple):
    source: str
    target: str


class IdPair(NamedTuple):
    """Ids as the model reads them: the source with its bos or eos, the target with bos and eos."""

    source: list[int]
    target: list[int]


def read_parallel(source: Path, target: Path) -> list[TextPair]:
    """Read two files whose lines translate each other.

    Raises:
        TfexportError: a file cannot be read as UTF-8, or the files have different numbers of lines.
    """
    sides = [_read_lines(source), _read_lines(target)]
    if len(sides[0]) != len(sides[1]):
        raise TfexportError(
            f"{source} has {len(sides[0])} lines and {target} {len(sides[1])}: line n of one must translate line n of "
            "the other. Align the files."
        )
    return [TextPair(*pair) for pair in zip(*sides, strict=True)]


def read_tsv(path: Path) -> list[TextPair]:
    """Read a file with `source<TAB>target` on each line.

    Raises:
        TfexportError: the file cannot be read as UTF-8, or a line has not exactly two columns.
    """
    pairs = []
    for number, line in enumerate(_read_lines(path), start=1):
        columns = line.split("\t")
        if len(columns) != 2:
            raise TfexportError(f"{path}, line {number}, has {len(columns)} columns. Give source<TAB>target.")
        pairs.append(TextPair(*columns))
    return pairs


def read_either(source: Path | None, target: Path | None, tsv: Path | None, flags: str) -> list[TextPair]:
    """Read either two parallel files or one TSV file.

    Raises:
        TfexportError: both or neither are given, or a file cannot be read.
    """
    if tsv is not None and source is None and target is None:
        return read_tsv(tsv)
    if tsv is None and source is not None and target is not None:
        return read_parallel(source, target)
    raise TfexportError(f"it is not clear which text to read. Give {flags}.")


def _read_lines(path: Path) -> list[str]:
    try:
        # Not splitlines(): it also splits at characters that a sentence may contain, such as U+2028.
        text = read_bytes(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TfexportError(f"cannot read {path}: {error}. Give a UTF-8 text file.") from error
    lines = text.removesuffix("\n").split("\n") if text else []
    return [line.removesuffix("\r") for line in lines]


@dataclass(frozen=True)
class Encoded:
    """Pairs for training, with the numbers of omitted pairs."""

    pairs: list[IdPair]
    empty: int
    too_long: int
    """Number of pairs that are too long, including those with a word that is too long to be split."""


def encode_pairs(
    texts: Sequence[TextPair], source: TextTokenizer, target: TextTokenizer, config: ModelConfig
) -> Encoded:
    """Encode `texts`. Pairs are omitted if a side is empty or longer than the model's positions, or if a word is too long to
    be split (`WordTooLong`)."""
    pairs, empty, too_long = [], 0, 0
    for text in texts:
        try:
            source_ids, target_ids = source.encode(text.source), target.encode(text.target)
        except WordTooLong:
            too_long += 1
            continue
        ids = IdPair(
            [config.bos_id] * config.source_bos + source_ids + [config.eos_id] * config.source_eos,
            [config.bos_id, *target_ids, config.eos_id],
        )
        if not (text.source.strip() and text.target.strip() and source_ids and target_ids):
            empty += 1
        elif len(ids.source) > config.max_source_length or len(ids.target) - 1 > config.max_target_length:
            too_long += 1
        else:
            pairs.append(ids)
    return Encoded(pairs, empty, too_long)


class Batch(NamedTuple):
    src_ids: Tensor  # int64 [batch, src]
    src_len: Tensor  # int64 [batch]
    tgt_ids: Tensor  # int64 [batch, tgt], from bos to eos
    tgt_len: Tensor  # int64 [batch]


class PairDataset(Dataset[IdPair]):
    def __init__(self, pairs: Sequence[IdPair]):
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> IdPair:
        return self.pairs[index]


class TokenBatches(Sampler[list[int]]):
    """Batches of pairs of similar length, with about `max_tokens` tokens of the longer side, padding included.

    The batches are in random order, or the pairs are in their own order if `seed` is None. The order depends only on the
    seed, so that a resumed training sees the same batches as an uninterrupted one.
    """

    def __init__(self, pairs: Sequence[IdPair], max_tokens: int, seed: Sequence[int] | None):
        lengths = np.array([(len(pair.target), len(pair.source)) for pair in pairs])
        random = np.random.default_rng(seed)
        order = np.arange(len(pairs)) if seed is None else random.permutation(len(pairs))
        pool = max(1, int(POOL_BATCHES * max_tokens / lengths.max(axis=1).mean()))
        self.batches: list[list[int]] = []
        for start in range(0, len(order), pool):
            indices = order[start : start + pool]
            target, source = lengths[indices].T
            longest, current = 0, list[int]()
            for index in indices[np.lexsort((source, target))]:
                longest = max(longest, *lengths[index])
                if current and longest * (len(current) + 1) > max_tokens:
                    self.batches.append(current)
                    longest, current = max(lengths[index]), []
                current.append(int(index))
            self.batches.append(current)
        if seed is not None:
            random.shuffle(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def loader(
    pairs: Sequence[IdPair], config: ModelConfig, *, max_tokens: int, seed: Sequence[int] | None
) -> DataLoader[IdPair]:
    """A DataLoader of `Batch`es, shuffled by `seed`, or in order if it is None."""

    def collate(items: list[IdPair]) -> Batch:
        sides = [pad(side, config.pad_id) for side in zip(*items, strict=True)]
        return Batch(*(torch.from_numpy(array) for side in sides for array in side))

    return DataLoader(PairDataset(pairs), batch_sampler=TokenBatches(pairs, max_tokens, seed), collate_fn=collate)
