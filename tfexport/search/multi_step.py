"""Decides when a runtime makes several steps of a search by itself.

A runtime that ranks continuations by itself does not need the search between two steps: a GPU does not wait for the host,
and a CPU runs less Python. The search receives the result of each step afterwards, and handles it like its own ranking. The
search ranks by itself if a step needs more than the best tokens of a row: for rules about past tokens, sampling, forced
prefixes and attention.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from tfexport.runtimes.base import AHEAD, Ahead, Capabilities
from tfexport.runtimes.outputs import IntArray
from tfexport.search.options import SearchOptions
from tfexport.search.token_rules import LogProbs, TokenRules


def obstacle(options: SearchOptions) -> str:
    """Describes the option that keeps a whole search on the host; empty if there is none."""
    if options.samples:
        # Sampling sums over the vocabulary in float64, in a fixed order, so that a seed gives the same output everywhere.
        return "sampling"
    if options.active_rules:
        return "rules about past tokens"
    if options.reads_attention:
        return "attention weights"
    if options.search_profile.narrows_beam and options.beam > 1:
        return f"the profile {options.profile}, whose beam depends on finished hypotheses"
    return ""


class SearchAhead:
    """Decides at each step whether the runtime continues by itself.

    Args:
        capabilities: the capabilities of the runtime.
    """

    def __init__(self, rules: TokenRules, options: SearchOptions, capabilities: Capabilities):
        self._rules, self._beam = rules, options.beam
        able = capabilities.greedy_ahead if options.width == 1 else capabilities.beam_ahead
        reason = obstacle(options) if able else ""
        if reason and capabilities.waits_for_host:
            _note_once(reason)
        continues_past_eos = options.search_profile.continues_past_eos and options.beam > 1
        # Without ids at which it stops, a runtime would make steps after the end of a sentence.
        stops = capabilities.waits_for_host or not continues_past_eos
        self._able = able and not reason and stops
        self._leaving = () if continues_past_eos else options.end_ids(rules.config)

    def request(
        self,
        length: int,
        sentences: IntArray,
        tokens: IntArray,
        log_probs: LogProbs | None,
        candidates: int,
        *,
        steps: int = AHEAD,
        live: NDArray[np.bool_] | None = None,
    ) -> Ahead | None:
        """A request for the next steps, after `length` tokens of each hypothesis; None if the search ranks the next step.

        Args:
            steps: the number of steps before a sentence may be done without a further end token, if it is less than `AHEAD`.
            live: as in `Ahead`.
        """
        if not self._able:
            return None
        banned = self._rules.banned_ahead(length + 1, sentences, AHEAD)
        if banned is None:
            return None
        # A new hypothesis has as many tokens as the vocabulary. CUDA's TopK fills up with the least finite number: where
        # candidates would be -inf, it returns places that do not exist.
        if candidates + max(map(len, banned)) > self._rules.config.tgt_vocab_size:
            return None
        return Ahead(
            *(tokens, log_probs, candidates, banned, self._leaving),
            steps=max(1, min(steps, AHEAD)),
            live=live,
            best_only=self._rules.use_argmax,
        )


_noted: set[str] = set()


def _note_once(reason: str) -> None:
    """Log why a search stays on the host, once per process."""
    if reason not in _noted:
        _noted.add(reason)
        logging.getLogger(__name__).warning("note: %s: the host chooses each token, which is slower on a GPU.", reason)
