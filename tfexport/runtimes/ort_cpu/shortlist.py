"""`ort-cpu` with shortlists: a step multiplies with the part of the output projection that belongs to the candidates.

This part is gathered once for a batch, for the candidates of all its sentences. The logits of candidates of other sentences
become -inf, so that the words and probabilities of a sentence depend on its own candidates alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tfexport.contract import SHORTLIST_ROLES, Role, shape
from tfexport.runtimes.base import Capabilities, Needs
from tfexport.runtimes.ort_cpu.beam_state import BeamState
from tfexport.runtimes.ort_cpu.bound_graphs import BatchShortlist, Binding
from tfexport.runtimes.ort_cpu.context import Context
from tfexport.runtimes.ort_cpu.greedy_state import GreedyState
from tfexport.runtimes.ort_cpu.runtime import OrtCpuRuntime
from tfexport.runtimes.outputs import Best, IntArray, best_from_logits
from tfexport.shortlist_contract import shortlist_graphs_of

FEWEST = 512
"""The smallest number of candidates of a batch. Other words of the vocabulary fill it up, with logits of -inf. ONNX Runtime
sums the products of narrow matrices in another order, so that the last bits of a sentence's logits would depend on the other
sentences."""


class ShortlistRuntime(OrtCpuRuntime):
    """The runtime `ort-cpu` for bundles with graphs for shortlists. It runs searches without shortlists too."""

    @property
    def capabilities(self) -> Capabilities:
        # The outputs of a step are numbers of candidates, which the loops over several steps do not know.
        return replace(super().capabilities, shortlists=True, greedy_ahead=False, beam_ahead=False)

    def prepare(self, needs: Needs) -> None:
        if needs.attention:  # graphs for shortlists have no attention output
            super().prepare(needs)
            return
        roles: tuple[Role, ...] = ("encoder", "shortlist", SHORTLIST_ROLES[self.step_role(needs.width)])
        for role in roles:
            self.context.session(role)

    def encode_shortlisted(
        self, src_ids: IntArray, src_len: IntArray, candidates: Sequence[IntArray], *, beam: int = 1
    ) -> GreedyState | BeamState:
        cross, lengths = self.encode_sources(src_ids, src_len)
        return self.first_state(cross, lengths, beam, shortlist=gather_shortlist(self.context, candidates))

    def best(self, state: Any, tokens: IntArray, count: int) -> tuple[Best, Any]:
        if count > min(FEWEST, self.config.tgt_vocab_size):  # there may be fewer candidates
            logits, state = self.step(state, tokens)
            return best_from_logits(logits, count), state
        return super().best(state, tokens, count)


def gather_shortlist(context: Context, candidates: Sequence[IntArray]) -> BatchShortlist:
    """The output projection for the `candidates` (sorted ids, of each sentence) of a batch."""
    config = context.config
    wanted = np.zeros(config.tgt_vocab_size, dtype=bool)
    wanted[np.concatenate(candidates)] = True
    others = np.flatnonzero(~wanted)
    wanted[others[: max(0, min(FEWEST, len(wanted)) - int(wanted.sum()))]] = True
    ids = np.flatnonzero(wanted)
    left_out = np.full((len(candidates), len(ids)), -np.inf, dtype=np.float32)
    for row, own in zip(left_out, candidates, strict=True):
        row[np.searchsorted(ids, own)] = 0.0
    gather = Binding(context.session("shortlist"))
    gather.input("candidates", ids)
    weights = {}
    for tensor in shortlist_graphs_of(config, context.precision)[0].outputs:
        sizes = [len(ids) if axis == "candidates" else int(axis) for axis in shape(tensor, config)]
        weights[tensor.name] = np.empty(sizes, dtype=tensor.dtype)
        gather.output(tensor.name, weights[tensor.name])
    gather.run()
    return BatchShortlist(ids, weights, left_out)
