"""Automata that track the required phrases of a hypothesis.

A state never changes, so the hypotheses of a sentence share states. The bank of a hypothesis is the number of phrase
tokens that it has generated. A token that interrupts a phrase loses the phrase's tokens so far.

Both automata are those of fairseq 0.12 (`token_generation_constraints.py`), including their limitation: a token that
interrupts a phrase can begin a phrase only as its first token, and with ordered phrases all of them begin again. So a state
may miss a phrase that is in the output, but never has one that is not. Phrases do not overlap in an output, and a phrase
that is required twice occurs twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

from tfexport.search.hypothesis import Ids, Phrase
from tfexport.search.options import ConstraintOrder

_OTHER = -1
"""Represents every token that is in no phrase: all of them have the same effect."""
_ROOT = 0
MOST_STATES = 4096
"""States of a sentence that are kept for reuse, at most. A state has two numbers for each token of the phrases."""


class ConstraintState:
    """The state of a hypothesis.

    Attributes:
        bank: the number of phrase tokens that count as generated.
        met: whether the output has all phrases.
    """

    def __init__(self, bank: int, met: bool, alphabet: frozenset[int]):
        self.bank, self.met = bank, met
        self._alphabet = alphabet
        self._following: dict[int, ConstraintState] = {}

    @property
    def next_tokens(self) -> list[int]:
        """The sorted tokens that begin or continue a phrase."""
        raise NotImplementedError

    def advance(self, token: int) -> ConstraintState:
        """The state after one more token."""
        token = token if token in self._alphabet else _OTHER
        state = self._following.get(token)
        if state is None:
            state = self._following[token] = self._after(token)
        return state

    def _after(self, token: int) -> ConstraintState:
        raise NotImplementedError


def first_state(phrases: Sequence[Ids], order: ConstraintOrder) -> ConstraintState:
    """The state of a hypothesis without tokens. Each phrase has at least one."""
    alphabet = frozenset(chain.from_iterable(phrases))
    if order == "ordered":
        return _OrderedState.first(phrases, alphabet)
    trie = _Trie(phrases, alphabet)
    nothing = (0,) * len(trie.parent)
    return trie.state(_ROOT, nothing, nothing)


class _OrderedState(ConstraintState):
    """Phrases in their order, with any tokens between them. The state is a place in the chain of their tokens."""

    def __init__(self, chained: Ids, ends: frozenset[int], bank: int, alphabet: frozenset[int]):
        self._chained, self._ends = chained, ends
        super().__init__(bank, bank == len(chained), alphabet)
        self._states: list[_OrderedState] = []

    @property
    def next_tokens(self) -> list[int]:
        following, begins = self._chained[self.bank : self.bank + 1], self._chained[:1] if self.bank > 1 else ()
        return sorted({*following, *begins})

    @classmethod
    def first(cls, phrases: Sequence[Ids], alphabet: frozenset[int]) -> _OrderedState:
        chained = tuple(chain.from_iterable(phrases))
        ends = frozenset(accumulate(map(len, phrases), initial=0))
        states = [cls(chained, ends, bank, alphabet) for bank in range(len(chained) + 1)]
        for state in states:
            state._states = states
        return states[0]

    def _after(self, token: int) -> ConstraintState:
        if self.met:
            return self
        if token == self._chained[self.bank]:
            return self._states[self.bank + 1]
        if self.bank in self._ends:
            return self
        return self._states[1 if token == self._chained[0] else 0]


Counts = Sequence[int]
"""A count for each node of a trie."""


class _Trie:
    """Phrases in any order, as a trie (Hu et al. 2019)."""

    def __init__(self, phrases: Sequence[Ids], alphabet: frozenset[int]):
        self.alphabet, self.n_phrases = alphabet, len(phrases)
        self.children: list[dict[int, int]] = [{}]
        self.parent = [_ROOT]
        self.capacity = [0]
        """The number of phrases through each node."""
        self.ending = [0]
        """The number of phrases that end at each node."""
        self._states: dict[object, _UnorderedState] = {}
        for phrase in phrases:
            self._add(phrase)

    def _add(self, phrase: Ids) -> None:
        node = _ROOT
        for token in phrase:
            if token not in self.children[node]:
                self.children[node][token] = len(self.parent)
                self.children.append({})
                self.parent.append(node)
                self.capacity.append(0)
                self.ending.append(0)
            node = self.children[node][token]
            self.capacity[node] += 1
        self.ending[node] += 1

    def free_child(self, node: int, token: int, generated: Counts) -> int | None:
        """The child for a token, if fewer of its phrases were generated than go through it."""
        child = self.children[node].get(token)
        return None if child is None or generated[child] >= self.capacity[child] else child

    def state(self, node: int, generated: Counts, completed: Counts) -> _UnorderedState:
        """The shared state with these numbers."""
        key = node, tuple(generated), tuple(completed)
        state = self._states.get(key)
        if state is None:
            if len(self._states) >= MOST_STATES:
                self._states.clear()
            state = self._states[key] = _UnorderedState(self, *key)
        return state


class _UnorderedState(ConstraintState):
    """A place in the trie, with the phrases that were generated before.

    Args:
        node: the node that the last tokens lead to.
        generated: how often each node was passed, as far as it counts.
        completed: the number of complete phrases that end at each node, without a phrase that ends at `node`.
    """

    def __init__(self, trie: _Trie, node: int, generated: Counts, completed: Counts):
        self._trie = trie
        self._node = node
        self._generated = generated
        self._completed = completed
        n_met = sum(completed) + self._may_complete(node, completed)
        super().__init__(sum(generated), n_met == trie.n_phrases, trie.alphabet)

    @property
    def next_tokens(self) -> list[int]:
        return sorted({*self._trie.children[_ROOT], *self._trie.children[self._node]})

    def _may_complete(self, node: int, completed: Counts) -> bool:
        return completed[node] < self._trie.ending[node]

    def _after(self, token: int) -> ConstraintState:
        trie = self._trie
        generated = [*self._generated]
        completed = [*self._completed]
        child = trie.free_child(self._node, token, generated)
        if child is None:
            child = trie.free_child(_ROOT, token, generated)
            self._fall_off(generated, completed)
        if child is None:
            return trie.state(_ROOT, generated, completed)
        generated[child] += 1
        return trie.state(child, generated, completed)

    def _fall_off(self, generated: list[int], completed: list[int]) -> None:
        """Complete the longest phrase that the last tokens begin with. The tokens after it are lost."""
        node = self._node
        while node != _ROOT and not self._may_complete(node, completed):
            generated[node] -= 1
            node = self._trie.parent[node]
        if node != _ROOT:
            completed[node] += 1


def missing_phrases(ids: Ids, phrases: Sequence[Phrase], order: ConstraintOrder) -> tuple[Phrase, ...]:
    """The `phrases` that an output lacks. The search goes from left to right, and finds the longest phrase at each place."""
    left, place = list(phrases), 0
    while place < len(ids) and left:
        here = left[:1] if order == "ordered" else sorted(left, key=lambda phrase: -len(phrase.ids))
        match = next((phrase for phrase in here if ids[place : place + len(phrase.ids)] == phrase.ids), None)
        if match is not None:
            left.remove(match)
        place += len(match.ids) if match is not None else 1
    return tuple(left)
