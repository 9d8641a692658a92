"""The batches of a worker: one for each kind of sentence. They take turns step by step."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from tfexport.runtimes.base import Runtime
from tfexport.scheduling.batch import Batch, batch_for, kind_of
from tfexport.scheduling.groups import failed
from tfexport.scheduling.sentences import NO_ORDERS, Event, Failed, Finished, Orders, Report, Sentence
from tfexport.search.alternatives import Alternatives
from tfexport.search.hypothesis import Hypothesis


@dataclass
class _Expanded:
    """A sentence whose alternatives are separate sentences."""

    key: Hashable
    alternatives: Alternatives
    parts: list[Hashable]
    outputs: dict[Hashable, list[Hypothesis]] = field(default_factory=dict)


class Decoder:
    """Decodes sentences that arrive and leave between steps. For one thread.

    Args:
        clock: returns seconds, for the reports.
    """

    def __init__(self, runtime: Runtime, clock: Callable[[], float] = time.perf_counter):
        self._runtime, self._clock = runtime, clock
        self._batches: OrderedDict[Hashable, Batch] = OrderedDict()
        self._waiting: dict[Hashable, deque[Sentence]] = {}  # sentences whose batch accepts none now
        self._expanded: dict[Hashable, _Expanded] = {}  # by their own keys

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to decode."""
        return not self._batches and not self._waiting

    def turn(self, orders: Orders = NO_ORDERS) -> Report:
        """Execute `orders`, then let the next batch run one step."""
        start, report = self._clock(), Report()
        if orders.drop:
            self._drop(frozenset(orders.drop))
        events = self._add(orders.add)
        if self._batches:
            kind, batch = next(iter(self._batches.items()))
            self._batches.move_to_end(kind)
            rows = batch.rows
            events += self._step(kind, batch)
            report.steps.append((rows, self._clock() - start))
        report.events = [reported for event in events for reported in self._reported(event)]
        return report

    def _add(self, sentences: Iterable[Sentence]) -> list[Event]:
        events: list[Event] = []
        wanted: dict[Hashable, list[Sentence]] = {}
        for sentence in sentences:
            try:
                parts = self._parts(sentence) if sentence.options.alternatives else [sentence]
            except Exception as error:
                events += failed([sentence], error)
                continue
            for part in parts:
                wanted.setdefault(kind_of(self._runtime, part), []).append(part)
        for kind, members in wanted.items():
            self._waiting.setdefault(kind, deque()).extend(members)
        for kind in list(self._waiting):
            events += self._admit(kind)
        return events

    def _admit(self, kind: Hashable) -> list[Event]:
        """Let sentences of a kind begin, if its batch accepts them."""
        batch = self._batches.get(kind) or batch_for(self._runtime, self._waiting[kind][0])
        if not batch.takes_more:
            return []
        waiting, capacity = self._waiting[kind], self._runtime.capacity
        most = capacity.batch_size(len(waiting), waiting[0].options.width)
        members = [waiting.popleft() for _ in range(most)]
        if not waiting:
            del self._waiting[kind]
        try:
            events = batch.add(members)
        except Exception as error:  # a fault of the runtime in the shared state of the batch
            self._batches.pop(kind, None)
            return failed([*members, *batch.live()], error)
        if batch.rows:
            self._batches[kind] = batch
        return events

    def _step(self, kind: Hashable, batch: Batch) -> list[Event]:
        try:
            events = batch.step()
        except Exception as error:  # the runtime cannot compute: too little memory, or a damaged graph
            del self._batches[kind]
            return failed(batch.live(), error)
        if not batch.rows:
            del self._batches[kind]
        return events

    def _drop(self, keys: frozenset[Hashable]) -> None:
        gone = {key for key in keys if key in self._expanded}
        parts = {part for key in gone for part in self._expanded.pop(key).parts}
        every = keys | parts
        for kind, waiting in list(self._waiting.items()):
            self._waiting[kind] = deque(sentence for sentence in waiting if sentence.key not in every)
            if not self._waiting[kind]:
                del self._waiting[kind]
        for kind, batch in list(self._batches.items()):
            batch.drop(every)
            if not batch.rows:
                del self._batches[kind]

    def _parts(self, sentence: Sentence) -> list[Sentence]:
        """The sentences whose best outputs are the alternatives of this one."""
        alternatives = Alternatives(self._runtime, [sentence.source], sentence.options)
        sources = [source for batch in alternatives.batches for source in batch]
        parts = [
            Sentence((sentence.key, number), source, alternatives.options) for number, source in enumerate(sources)
        ]
        self._expanded[sentence.key] = _Expanded(sentence.key, alternatives, [part.key for part in parts])
        return parts

    def _reported(self, event: Event) -> list[Event]:
        """The events to report for an event. Parts of a sentence are reported when all of them are done."""
        whole = self._whole_of(event.key)
        if whole is None:
            return [event]
        if isinstance(event, Finished):
            whole.outputs[event.key] = event.hypotheses
            if len(whole.outputs) < len(whole.parts):
                return []
            del self._expanded[whole.key]
            outputs = whole.alternatives.best_continuations([[whole.outputs[part]] for part in whole.parts])
            return [Finished(whole.key, outputs[0])]
        if isinstance(event, Failed):
            self._drop(frozenset([whole.key]))
            return [Failed(whole.key, event.error)]
        return []

    def _whole_of(self, key: Hashable) -> _Expanded | None:
        return self._expanded.get(key[0]) if isinstance(key, tuple) else None
