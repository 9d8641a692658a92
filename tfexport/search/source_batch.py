"""Pads sources to one length and encodes them as one batch, and computes the length limits of their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from tfexport.config import ModelConfig
from tfexport.runtimes.base import Runtime
from tfexport.runtimes.masked_shortlist import MaskedShortlistRuntime
from tfexport.runtimes.outputs import IntArray
from tfexport.search.hypothesis import Source
from tfexport.search.options import SearchOptions


def as_sources(sources: Sequence[Source | Sequence[int]]) -> list[Source]:
    """Convert plain encoder ids to `Source`."""
    return [source if isinstance(source, Source) else Source(source) for source in sources]


def pad(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[IntArray, IntArray]:
    """Pad `sequences` with `pad_id`. Returns ids [batch, longest] and lengths [batch]."""
    lengths = np.array([*map(len, sequences)], dtype=np.int64)
    ids = np.full((len(sequences), lengths.max()), pad_id, dtype=np.int64)
    every = chain.from_iterable(sequences)
    ids[np.arange(ids.shape[1]) < lengths[:, None]] = np.fromiter(every, dtype=np.int64, count=int(lengths.sum()))
    return ids, lengths


def encode(runtime: Runtime, sources: Sequence[Source], options: SearchOptions) -> tuple[Runtime, Any]:
    """The state of a search before the first token, and the runtime to continue with: `runtime`, or one that masks the
    logits outside of the sources' shortlists. Returns (runtime, state)."""
    src_ids, src_len = pad([source.ids for source in sources], runtime.config.pad_id)
    beam, attention = options.width, options.reads_attention
    if all(source.candidates is None for source in sources):
        return runtime, runtime.encode(src_ids, src_len, beam=beam, attention=attention)
    vocabulary = np.arange(runtime.config.tgt_vocab_size)
    candidates = [
        vocabulary
        if source.candidates is None
        else np.union1d(source.candidates, [*source.given_ids, *options.end_ids(runtime.config)])
        for source in sources
    ]
    if runtime.capabilities.shortlists and not attention:  # graphs for shortlists have no attention output
        return runtime, runtime.encode_shortlisted(src_ids, src_len, candidates, beam=beam)
    masked = MaskedShortlistRuntime(runtime)
    return masked, masked.encode_shortlisted(src_ids, src_len, candidates, beam=beam, attention=attention)


def length_limits(runtime: Runtime, sources: Sequence[Source], options: SearchOptions) -> IntArray:
    """The largest number of output tokens for each source, [batch]: the smallest of the limits of the search, the model, the
    runtime and the source."""
    limits = search_limits(options, runtime.config, np.array([len(source.ids) for source in sources]))
    limits = np.minimum(limits, runtime.capacity.target)
    if all(source.most is None for source in sources):
        return limits
    own = [limit if source.most is None else source.most for source, limit in zip(sources, limits, strict=True)]
    return np.minimum(limits, np.array(own, dtype=np.int64))


def search_limits(options: SearchOptions, config: ModelConfig, src_len: IntArray) -> IntArray:
    """The limits of the search and the model, [batch], for sources of `src_len` [batch] ids."""
    limit = np.full(len(src_len), min(options.max_new_tokens, config.max_target_length))
    if options.max_length_ratio is not None:
        # Rounded first: in binary 50 * 1.1 is a little more than 55. Compared as floats: the product may be infinite.
        most = np.ceil(np.round(np.minimum(src_len * options.max_length_ratio, limit), 9))
        limit = np.minimum(limit, most.astype(np.int64))
    return np.maximum(limit, 1)
