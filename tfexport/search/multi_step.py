"""Decides when a runtime makes several steps of a search by itself.

A runtime that ranks continuations on its own device does not need the host between two steps. The search receives the
result of each step afterwards, and handles it like its own ranking. The search ranks by itself if a step needs more than
the best tokens of a row: for rules about past tokens, sampling, forced prefixes and attention.
"""

from __future__ import annotations

import logging

from tfexport.runtimes.base import AHEAD, Ahead, Capabilities, IntArray
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
        if reason:
            _note_once(reason)
        self._able = able and not reason
        ends = options.end_ids(rules.config)
        self._leaving = () if options.search_profile.continues_past_eos and options.beam > 1 else ends

    def request(
        self, length: int, sentences: IntArray, tokens: IntArray, log_probs: LogProbs | None, candidates: int
    ) -> Ahead | None:
        """A request for the next steps, after `length` tokens of each hypothesis; None if the search ranks the next step."""
        if not self._able:
            return None
        banned = self._rules.banned_ahead(length + 1, sentences, AHEAD)
        if banned is None:
            return None
        # A new hypothesis has as many tokens as the vocabulary. CUDA's TopK fills up with the least finite number: where
        # candidates would be -inf, it returns places that do not exist.
        if candidates + max(map(len, banned)) > self._rules.config.tgt_vocab_size:
            return None
        return Ahead(tokens, log_probs, candidates, banned, self._leaving)


_noted: set[str] = set()


def _note_once(reason: str) -> None:
    """Log why a search stays on the host, once per process."""
    if reason not in _noted:
        _noted.add(reason)
        logging.getLogger(__name__).warning("note: %s: the host chooses each token, which is slower on a GPU.", reason)
