"""Batches that sentences join and leave between steps. The outputs equal those of a search of each sentence alone.

    joined batch     places   0    1    2    3    4            one state of the runtime, one call of the step graph
                     group A [a0] [a1]            [a2]         began together, with the same options: one search
                     group B           [b0]                    began some steps later
                     idle                   [  ]               the next sentence begins here

A group is a search as in offline decoding (`SearchBatch`). It does not depend on the places: a batch puts the tokens of all
groups into one array, runs one step, and gives each group its rows of the results. All sentences of a group are at the same
step. Groups are at different steps, and the runtime keeps a position for each place.

If a runtime or a graph cannot join states, each group has its own batch (`SeparateBatch`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from tfexport.runtimes.base import Runtime, step_for
from tfexport.runtimes.outputs import Argmax, Best, FloatArray, IntArray, StepOutput
from tfexport.scheduling.groups import Group, failed, group_properties, grouped, pieces
from tfexport.scheduling.sentences import Event, Sentence
from tfexport.search.search import pad, search_batch
from tfexport.search.search_batch import SearchBatch, rows_to_keep
from tfexport.search.source_batch import encode
from tfexport.search.token_rules import uses_argmax

REMOVE_IDLE_BELOW = 0.9
"""Idle places are removed when at most this fraction of all places is in use. Until then they wait for new sentences."""


class Batch(Protocol):
    """Sentences that are decoded together."""

    @property
    def rows(self) -> int:
        """The number of rows of live sentences."""
        ...

    @property
    def takes_more(self) -> bool:
        """Whether sentences may join."""
        ...

    def add(self, sentences: Sequence[Sentence]) -> list[Event]:
        """Let these sentences begin with the next step."""
        ...

    def live(self) -> list[Sentence]:
        """The sentences that are not done."""
        ...

    def drop(self, keys: frozenset[Hashable]) -> None:
        """Remove the sentences with these keys from the batch, if they are in it."""
        ...

    def step(self) -> list[Event]:
        """Decode one more token of each row."""
        ...


def kind_of(runtime: Runtime, sentence: Sentence) -> Hashable:
    """The kind of a sentence. Sentences of one kind may share a batch, because they run the same graph."""
    options, source = sentence.options, sentence.source
    if joins(runtime, sentence):
        return options.width, options.reads_attention, uses_argmax(runtime, options, source)
    return options, source.candidates is None, group_properties(runtime, sentence)


def joins(runtime: Runtime, sentence: Sentence) -> bool:
    """Whether a sentence may join a batch that has begun. With a shortlist it may not, because a batch gathers weights."""
    return runtime.capabilities.joins and sentence.source.candidates is None


def batch_for(runtime: Runtime, sentence: Sentence) -> Batch:
    """An empty batch for sentences of this kind."""
    if joins(runtime, sentence):
        return JoinedBatch(runtime, sentence.options.width, attention=sentence.options.reads_attention)
    return SeparateBatch(runtime)


class JoinedBatch:
    """A batch over one state, shared by sentences at different steps.

    Args:
        width: the number of rows of each sentence.
        attention: whether the searches read the cross-attention.
    """

    takes_more = True

    def __init__(self, runtime: Runtime, width: int, *, attention: bool = False):
        self._runtime = runtime
        self._width = width
        self._attention = attention
        self._state: Any = None
        self._groups: list[Group] = []
        self._idle: list[int] = []  # idle places, the lowest last
        self._places = 0

    @property
    def rows(self) -> int:
        return (self._places - len(self._idle)) * self._width

    def add(self, sentences: Sequence[Sentence]) -> list[Event]:
        groups, events = [], list[Event]()
        for members in grouped(self._runtime, sentences):
            try:
                groups.append((members, self._search(members)))
            except Exception as error:  # an option that does not fit the model, or a fault of these sentences alone
                events += failed(members, error)
        return events + self._begin(groups) if groups else events

    def _search(self, members: Sequence[Sentence]) -> SearchBatch:
        return search_batch(self._runtime, [member.source for member in members], members[0].options, at_once=True)

    def _begin(self, groups: Sequence[tuple[Sequence[Sentence], SearchBatch]]) -> list[Event]:
        every = [member for members, _ in groups for member in members]
        sources = [member.source.ids for member in every]
        runs = pieces([len(ids) for ids in sources])
        try:
            # Encode all groups before the first one gets a place: if memory is short, running sentences continue.
            states = [self._encode([sources[index] for index in piece]) for piece in runs]
        except Exception as error:
            return failed(every, error)
        places = np.empty(len(sources), dtype=np.int64)
        for piece, state in zip(runs, states, strict=True):
            places[piece] = self._place(state, len(piece))
        for members, search in groups:
            group = Group(search, members, places[: len(members)])
            places = places[len(members) :]
            group.find_rows(self._width)
            self._groups.append(group)
        return []

    def _encode(self, sources: Sequence[Sequence[int]]) -> Any:
        ids, lengths = pad(sources, self._runtime.config.pad_id)
        return self._runtime.encode(ids, lengths, beam=self._width, attention=self._attention)

    def _place(self, state: Any, count: int) -> IntArray:
        """Add the sources of a state; returns their places."""
        if self._state is None:
            self._state, self._places = state, count
            return np.arange(count)
        more = max(0, count - len(self._idle))
        taken = [self._idle.pop() for _ in range(count - more)]
        places = np.array([*taken, *range(self._places, self._places + more)], dtype=np.int64)
        self._places += more
        self._state.put(places, state)
        return places

    def live(self) -> list[Sentence]:
        return [sentence for group in self._groups for sentence in group.live()]

    def drop(self, keys: frozenset[Hashable]) -> None:
        leaving = []
        for group in self._groups:
            indices = group.drop(keys)
            if len(indices):
                leaving += group.places[indices].tolist()
                group.find_rows(self._width)
        self._leave(leaving)

    def step(self) -> list[Event]:
        self._compact()
        requests = [group.search.request() for group in self._groups]
        distinct = list(dict.fromkeys(requests))
        rows = self._places * self._width
        tokens = np.full(rows, self._runtime.config.bos_id, dtype=np.int64)
        for group in self._groups:
            tokens[group.rows] = group.search.tokens
        outputs, self._state = self._runtime.shared_step(self._state, tokens, distinct)
        output_of = dict(zip(distinct, outputs, strict=True))
        attention = self._state.attention if self._attention else None
        order = np.arange(rows)
        events = list[Event]()
        leaving = list[int]()
        again: list[Sentence] = []
        for group, request in zip(self._groups, requests, strict=True):
            before, sentences = group.rows, group.search.sentences
            try:
                output = _of_rows(output_of[request], before)
                moved = group.search.advance(output, partial(_attention_of, attention, before))
            except Exception as error:
                leaving += [place // self._width for place in before[:: self._width].tolist()]
                group.search.drop(group.search.sentences)
                members = [group.sentences[index] for index in sentences.tolist()]
                # One sentence of several may be the cause: try each of them alone.
                events += failed(members, error) if len(members) == 1 else []
                again += members if len(members) > 1 else []
                continue
            events += group.events()
            leaving += group.places[group.search.ended].tolist()
            if moved is not None and not group.search.is_done:
                order[group.find_rows(self._width)] = before[moved]
        if self._width > 1 and (order != np.arange(rows)).any():
            self._state = self._state.select(order)
        self._leave(leaving)
        for sentence in again:
            events += self.add([sentence])
        return events

    def _leave(self, places: list[int]) -> None:
        """Free these places."""
        if not places:
            return
        self._groups = [group for group in self._groups if not group.search.is_done]
        self._idle = sorted([*self._idle, *places], reverse=True)
        if len(self._idle) == self._places:
            self._state = None
            self._places = 0
            self._idle = []
        else:
            self._state.idle(np.array(places, dtype=np.int64))

    def _compact(self) -> None:
        """Remove idle places that no sentence took."""
        if self._places - len(self._idle) > REMOVE_IDLE_BELOW * self._places or not self._idle:
            return
        live = np.ones(self._places, dtype=bool)
        live[self._idle] = False
        kept = rows_to_keep(live)
        self._state = self._state.select((kept[:, None] * self._width + np.arange(self._width)).ravel())
        place = np.full(self._places, -1)
        place[kept] = np.arange(len(kept))
        self._places, self._idle = len(kept), []
        for group in self._groups:
            group.places = place[group.places]
            group.find_rows(self._width)


class SeparateBatch:
    """A batch of one group with its own state. No sentence can join it."""

    def __init__(self, runtime: Runtime):
        self._unmasked = self._runtime = runtime
        self._state: Any = None
        self._group: Group | None = None

    @property
    def takes_more(self) -> bool:
        return self._group is None

    @property
    def rows(self) -> int:
        return len(self._group.search.tokens) if self._group else 0

    def add(self, sentences: Sequence[Sentence]) -> list[Event]:
        sources, options = [sentence.source for sentence in sentences], sentences[0].options
        try:
            self._runtime, self._state = encode(self._unmasked, sources, options)
            search = search_batch(self._runtime, sources, options, at_once=True)
        except Exception as error:
            return failed(sentences, error)
        self._group = Group(search, sentences, np.arange(len(sources)))
        return []

    def live(self) -> list[Sentence]:
        return self._group.live() if self._group else []

    def drop(self, keys: frozenset[Hashable]) -> None:
        if self._group is None:
            return
        before, width = self._group.search.sentences, self._group.sentences[0].options.width
        if not len(self._group.drop(keys)):
            return
        if self._group.search.is_done:
            self._end()
            return
        places = {index: place for place, index in enumerate(before.tolist())}
        kept = np.array([places[index] for index in self._group.search.sentences.tolist()])
        self._state = self._state.select((kept[:, None] * width + np.arange(width)).ravel())

    def step(self) -> list[Event]:
        group = self._group
        assert group is not None
        search, members = group.search, group.live()
        output, state = step_for(self._runtime, self._state, search.tokens, search.request())
        try:
            moved = search.advance(output, lambda: state.attention)
        except Exception as error:
            self._end()
            if len(members) == 1:
                return failed(members, error)
            return [event for member in members for event in self._alone(member)]
        self._state = state if moved is None or search.is_done else state.select(moved)
        events = list(group.events())
        if search.is_done:
            self._end()
        return events

    def _alone(self, sentence: Sentence) -> list[Event]:
        """Decode one sentence of a failed group to its end, to find out whether it is the cause."""
        events = self.add([sentence])
        while self._group is not None:
            events += self.step()
        return events

    def _end(self) -> None:
        self._group = self._state = None


def _of_rows(output: StepOutput, rows: IntArray) -> StepOutput:
    if isinstance(output, Best):
        return Best(output.log_probs[rows], output.ids[rows])
    return Argmax(output.logits[rows], output.ids[rows]) if isinstance(output, Argmax) else output[rows]


def _attention_of(attention: FloatArray | None, rows: IntArray) -> FloatArray:
    assert attention is not None, "the batch was made without attention"
    return attention[:, rows]
