"""A model behind a scheduler: its start, its end, and the decoding of the lines of a request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from tfexport.api.arguments import Keywords
from tfexport.api.loaded import LoadedModel
from tfexport.bundle.reader import Bundle
from tfexport.contract import ATTENTION_ROLES
from tfexport.decoding.job import Request, Setup
from tfexport.decoding.line_reader import TargetReader
from tfexport.decoding.request_options import AlignmentOptions, KeepOptions
from tfexport.decoding.translate import Result, read_window, result_of
from tfexport.errors import TfexportError, UnavailableError
from tfexport.option import Given, with_keywords
from tfexport.runtimes import require_workers
from tfexport.runtimes.base import Runtime
from tfexport.scheduling.metrics import Counters
from tfexport.scheduling.options import ServingOptions
from tfexport.scheduling.service import Outputs, Service
from tfexport.search.hypothesis import Source
from tfexport.search.options import SearchOptions

READ_HERE = 4096
"""The largest number of bytes of text that the event loop splits into tokens itself. More take milliseconds, in which all
other calls wait."""


class ScheduledModel(LoadedModel):
    """The part of `Model` that has a scheduler, which starts with the first request."""

    def __init__(self, bundle: Bundle, runtime: Runtime):
        super().__init__(bundle, runtime)
        self._service: Service | None = None
        self._is_closed = False
        self._service_lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @with_keywords(ServingOptions)
    def serve(self, **options: Any) -> Self:
        """Start the scheduler of `translate_async` with these options, which are fields of `ServingOptions`.

        Without this call the scheduler starts at the first request, with the defaults. Start worker processes before other
        threads.

        Raises:
            TfexportError: the scheduler has started already, an option is out of range, or the runtime does not support so
                many workers.
        """
        return self.start(ServingOptions(**Given.parse(ServingOptions, options)))

    def start(self, options: ServingOptions) -> Self:
        """`serve` with an instance of its options."""
        require_workers(self._runtime.name, self._bundle, self._runtime.precision, options.workers)
        with self._service_lock:
            self._require_open()
            if self._service is not None:
                raise TfexportError("this model's scheduler has started. Call serve once, before translate_async.")
            self._service = Service(self._runtime, options)
        return self

    def close(self) -> None:
        """End the scheduler. Unanswered requests fail. A closed model does not start another scheduler."""
        with self._service_lock:
            self._is_closed = True
            if self._service is not None:
                self._service.close()

    @property
    def is_serving(self) -> bool:
        """Whether the scheduler answers requests. It stops if a worker ended and cannot be replaced, or if all hang."""
        with self._service_lock:
            service = self._service
        return service is not None and not service.is_closed and not service.is_stalled

    @property
    def tells_attention(self) -> bool:
        """Whether it can return attention: PyTorch can, and graphs that were exported for it."""
        roles = {graph.role for graph in self._bundle.graphs if graph.precision == self._runtime.precision}
        has_graphs = not roles.isdisjoint(ATTENTION_ROLES.values())
        return self._runtime.name.startswith("torch") or (self._runtime.name == "ort-cpu" and has_graphs)

    def serving_metrics(self) -> dict[str, object]:
        """Counts and gauges of the scheduler of `translate_async`, by name, such as `queued`, `finished` and `tokens`."""
        with self._service_lock:
            return self._service.metrics() if self._service is not None else Counters().to_dict()

    @with_keywords(SearchOptions, AlignmentOptions, KeepOptions)
    def search_options(self, **options: Any) -> SearchOptions:
        """The search of `translate` with these options and those of the bundle's generation_config.json.

        Raises:
            TfexportError: an option cannot be used.
        """
        keywords = Keywords.parse(options, AlignmentOptions, KeepOptions)
        return self._setup(
            Request(
                search=keywords.search,
                input_format="ids",
                output_format="jsonl",
                alignments=keywords.alignments,
                has_requirements=keywords.keep.keep_between is not None,
            )
        ).search

    async def _results(
        self,
        lines: Sequence[bytes],
        setup: Setup,
        outputs: TargetReader | None = None,
        search: SearchOptions | None = None,
        **more: Any,
    ) -> list[Result]:
        """The results of lines, in order; `Job.lines` is the same without a scheduler.

        Args:
            search: by default the search of the setup.
        """
        service, reader = self._scheduler(), setup.reader
        begins = [] if outputs is None or outputs.lines is None else list(outputs.lines)
        beside = reader.terms.most_bytes if reader.terms is not None else 0
        outputs = replace(outputs, lines=begins) if outputs else None
        chunk = enumerate(reader.lines(lines, outputs), start=1)

        def read() -> tuple[dict[int, Result], dict[int, Source]]:
            if reader.terms is not None:
                reader.terms.require_readable()
            return read_window(self._runtime.capacity, reader, outputs, chunk, setup.shortlist)

        if sum(map(len, [*lines, *begins])) + beside > READ_HERE:
            known, readable = await asyncio.to_thread(read)
        else:
            known, readable = read()
        search = search or setup.search
        decoded: Outputs = await service.decode(list(readable.values()), search, **more) if readable else []
        for (number, source), hypotheses in zip(readable.items(), decoded, strict=True):
            known[number] = result_of(number, hypotheses, source)
        return [known[number] for number in sorted(known)]

    def _scheduler(self) -> Service:
        with self._service_lock:
            self._require_open()
            if self._service is None:
                self._service = Service(self._runtime, ServingOptions())
            return self._service

    def _require_open(self) -> None:
        if self._is_closed:
            raise UnavailableError("this model was closed. Load it again.")
