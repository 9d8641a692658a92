"""The entry point to all searches: greedy and beam search, sampling and alternatives, over any runtime, in NumPy.

Ties break the same way wherever the host or ONNX Runtime's CPU provider ranks tokens: the lower beam first, then the lower
token id. A GPU may rank equal logits in any order. Scores are summed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfexport.errors import TfexportError
from tfexport.runtimes.base import Runtime
from tfexport.search.alternatives import Alternatives
from tfexport.search.attention_trace import AttentionTrace
from tfexport.search.beam import BeamBatch
from tfexport.search.constraints.beam import ConstrainedBeamBatch
from tfexport.search.greedy import REMOVE_FINISHED_BELOW, GreedyBatch
from tfexport.search.hypothesis import Hypothesis, Source
from tfexport.search.multi_step import SearchAhead
from tfexport.search.options import SearchOptions
from tfexport.search.search_batch import SearchBatch, Steps, steps_of
from tfexport.search.source_batch import as_sources, encode, length_limits, pad
from tfexport.search.token_rules import TokenRules

__all__ = ["Hypothesis", "SearchOptions", "Source", "pad", "search", "search_batch", "search_steps"]


def search(
    runtime: Runtime, sources: Sequence[Source | Sequence[int]], options: SearchOptions
) -> list[list[Hypothesis]]:
    """Decode `sources` (encoder ids, each at least one) as one batch.

    Returns:
        For each source the `nbest` hypotheses or the alternatives, best first, or the samples in the order in which they
        were drawn.

    Raises:
        TfexportError: the runtime returned logits that are not numbers, or an option does not fit the model.
    """
    batch = as_sources(sources)
    constrained = [bool(source.required) for source in batch]
    if any(constrained) and not all(constrained):  # constrained and other sources are separate batches
        kinds = [
            [source for source, is_constrained in zip(batch, constrained, strict=True) if is_constrained is kind]
            for kind in (True, False)
        ]
        results = [iter(search(runtime, kind, options)) for kind in kinds]
        return [next(results[not is_constrained]) for is_constrained in constrained]
    if options.alternatives and sources:
        if any(constrained):
            require_beam(options)
        alternatives = Alternatives(runtime, batch, options)
        return alternatives.best_continuations(
            [search(runtime, batch, alternatives.options) for batch in alternatives.batches]
        )
    steps = _search(runtime, batch, options, ahead=True)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return list(end.value)


def search_steps(runtime: Runtime, sources: Sequence[Source | Sequence[int]], options: SearchOptions) -> Steps:
    """`search` step by step, except for alternatives: yields the known part of the outputs after each step.

    The host chooses each token, even if the runtime could make several steps by itself.

    Raises:
        TfexportError: as `search`.
    """
    return _search(runtime, sources, options, ahead=False)


def _search(
    runtime: Runtime, sources: Sequence[Source | Sequence[int]], options: SearchOptions, *, ahead: bool
) -> Steps:
    if not sources:
        return []
    batch = as_sources(sources)
    runtime, state = encode(runtime, batch, options)
    return (yield from steps_of(runtime, state, search_batch(runtime, batch, options, ahead=ahead), len(batch)))


def search_batch(
    runtime: Runtime,
    sources: Sequence[Source],
    options: SearchOptions,
    *,
    at_once: bool = False,
    ahead: bool = False,
) -> SearchBatch:
    """The search of a batch before its first step, except for alternatives.

    Args:
        runtime: the runtime that `encode` returned.
        at_once: each finished sentence leaves the batch at once. By default the batch waits until enough are finished.
        ahead: the search may request several steps at once from a runtime that makes them by itself.

    Raises:
        TfexportError: an option does not fit the model.
    """
    trace = None
    if options.reads_attention:
        src_len = np.array([len(source) for source in sources])
        trace = AttentionTrace(options.alignment_layer, runtime.config.n_decoder_layers, src_len, options.width)
    limits = length_limits(runtime, sources, options)
    rules = TokenRules(runtime, options, sources, limits)
    if any(source.required for source in sources):
        require_beam(options)
        return ConstrainedBeamBatch(rules, limits, options, trace, [source.required for source in sources])
    goes_ahead = SearchAhead(rules, options, runtime.capabilities) if ahead else None
    if options.beam > 1:
        return BeamBatch(rules, limits, options, trace, goes_ahead)
    return GreedyBatch(
        rules, limits, options, trace, goes_ahead, remove_below=1.0 if at_once else REMOVE_FINISHED_BELOW
    )


NEEDS_BEAM = "required phrases need beam search"


def instead_of_beam(options: SearchOptions) -> str:
    """The option that replaces beam search; empty if none does."""
    return "samples" if options.samples else "alternatives" if options.alternatives else ""


def require_beam(options: SearchOptions) -> None:
    """Raises: TfexportError if the search cannot have required phrases."""
    if other := instead_of_beam(options):
        raise TfexportError(f"{NEEDS_BEAM}; {other} cannot have any. Leave out {other}, or the phrases.")
