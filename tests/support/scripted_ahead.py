"""A scripted runtime that makes several steps of a search by itself, written without regard to speed."""

from __future__ import annotations

import numpy as np

from tests.support.fakes import ScriptedRuntime, ScriptedState
from tfexport.runtimes.base import AHEAD, Ahead, Capabilities
from tfexport.runtimes.outputs import Continuations, IntArray


class AheadRuntime(ScriptedRuntime):
    """A `ScriptedRuntime` that searches ahead, and counts how often."""

    capabilities = Capabilities(greedy_ahead=True, beam_ahead=True, waits_for_host=True)
    launches = 0

    def search_ahead(self, state: ScriptedState, request: Ahead) -> tuple[Continuations, ScriptedState]:
        self.launches += 1
        beam, tokens = state.beam, request.tokens
        batch = len(tokens) // beam
        live = np.zeros((batch, beam)) if request.log_probs is None else request.log_probs
        found: list[Continuations] = []
        for step in range(AHEAD):
            if (
                len(state.prefixes[0]) == self.config.max_target_length
            ):  # what is told behind the last position means nothing
                found.append(found[-1])
                continue
            banned = list(request.banned[step])
            best, state = self.best(state, tokens, self.config.tgt_vocab_size)
            log_probs = np.where(np.isin(best.ids, banned), -np.inf, best.log_probs)
            totals = (log_probs if request.log_probs is None else live.reshape(-1, 1) + log_probs).reshape(batch, -1)
            every = np.arange(batch)[:, None]
            order = np.argsort(-totals, axis=1, kind="stable")[:, : request.candidates]
            ids = best.ids.reshape(batch, -1)
            found.append(Continuations(totals[every, order], order // best.ids.shape[1], ids[every, order]))
            parents, tokens, live = self._go_on(found[-1], request, beam)
            state = state.select((every * beam + parents).ravel())
        return Continuations(*(np.stack(fields) for fields in zip(*found, strict=True))), state

    def _go_on(self, found: Continuations, request: Ahead, beam: int) -> tuple[IntArray, IntArray, np.ndarray]:
        """The hypotheses that live on: the hypothesis that each continues, their tokens [rows], and log-probabilities."""
        leaves = np.isin(found.tokens, request.end_ids) & (beam > 1)
        places = np.argsort(leaves, axis=1, kind="stable")[:, :beam]
        kept = found.at((np.arange(len(places))[:, None], places))
        return kept.parents, kept.tokens.ravel(), kept.log_probs
