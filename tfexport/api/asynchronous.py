"""Translation from an event loop: concurrent calls share one scheduler, and so the batches of a model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar, overload

from numpy.typing import NDArray

from tfexport.api.arguments import (
    Keywords,
    id_sources_of,
    line_of,
    lines_of,
    pairs_of,
    phrases_of,
    phrases_of_one,
    sources_of,
    texts_of,
)
from tfexport.api.documents import DocumentTranslation, document_translation_of
from tfexport.api.results import Translation, translation_of
from tfexport.api.scheduled import READ_HERE, ScheduledModel
from tfexport.decoding.documents import DocumentMaker, Unit, result_of_unit
from tfexport.decoding.glossary import Glossary
from tfexport.decoding.job import Request, whole_outputs
from tfexport.decoding.request_options import AlignmentOptions, KeepOptions
from tfexport.decoding.shortlist import Shortlist
from tfexport.decoding.stream import Step, StepTexts, refuse_several
from tfexport.decoding.translate import Result, Writer, scored
from tfexport.documents.options import DocumentOptions
from tfexport.errors import TfexportError
from tfexport.option import with_keywords
from tfexport.search.options import SearchOptions

Outcome = TypeVar("Outcome")

APART_HERE = 512
"""The largest number of characters of markup that the event loop splits itself."""

WRITE_HERE = 1024
"""The largest number of output ids that the event loop converts to text itself. More take milliseconds, in which all other
calls wait."""


class AsyncTranslation(ScheduledModel):
    """The part of `Model` that decodes requests that arrive one by one."""

    @overload
    async def translate_async(  # type: ignore[overload-overlap]  # a string is many strings to the type checker
        self,
        texts: str,
        *,
        prefix: str | None = None,
        shortlist: Shortlist | None = None,
        constraints: Sequence[str] | None = None,
        glossary: Glossary | Mapping[str, str] | None = None,
        bulk: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> Translation: ...
    @overload
    async def translate_async(
        self,
        texts: Iterable[str] | Iterable[Sequence[str]],
        *,
        prefix: Iterable[str] | str | None = None,
        shortlist: Shortlist | None = None,
        constraints: Iterable[Sequence[str]] | None = None,
        glossary: Glossary | Mapping[str, str] | None = None,
        bulk: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> list[Translation]: ...
    @with_keywords(SearchOptions, AlignmentOptions, KeepOptions)
    async def translate_async(
        self,
        texts: str | Iterable[str] | Iterable[Sequence[str]],
        *,
        prefix: Iterable[str] | str | None = None,
        shortlist: Shortlist | None = None,
        constraints: Iterable[Sequence[str]] | Sequence[str] | None = None,
        glossary: Glossary | Mapping[str, str] | None = None,
        bulk: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> Translation | list[Translation]:
        """`translate` for an event loop. Concurrent calls are decoded together, and each returns the result of `translate`.
        If the task is cancelled, its sentences leave the batch.

        Args:
            texts, prefix, shortlist, constraints, glossary, options: as in `translate`; `batch_size`, `workers` and
                `max_batch_tokens` are the scheduler's, see `serve`.
            bulk: requests that are not bulk take precedence over this one.
            timeout: seconds to the deadline.

        Raises:
            QueueFullError: too many requests wait; its `retry_after` says when to try again.
            DeadlineError: the deadline has passed.
            TfexportError: as in `translate`, or the model is closed.
        """
        several = [texts] if isinstance(texts, str) else texts
        if isinstance(texts, str) and not (prefix is None or isinstance(prefix, str)):
            raise TfexportError("one sentence has one prefix. Give a string, or a list of sentences.")
        lines, format = sources_of(several)
        outputs = None
        if prefix is not None:
            prefixes = [prefix] * len(lines) if isinstance(prefix, str) else prefix
            outputs = self._target().reader(lines=lines_of("prefix", prefixes))
        each: Any = [constraints] if isinstance(texts, str) and constraints is not None else constraints
        keywords = Keywords.parse(options, AlignmentOptions, KeepOptions)
        terms = self._terms(keywords, glossary, None if each is None else list(phrases_of(each)))
        setup = self._setup_of(keywords, format, prefix is not None, terms, shortlist)
        results = await self._results(lines, setup, outputs, bulk=bulk, timeout=timeout)
        translations = await _written(results, setup.writer)
        return translations[0] if isinstance(texts, str) else translations

    @with_keywords(DocumentOptions, SearchOptions, AlignmentOptions, KeepOptions)
    async def translate_documents_async(
        self,
        texts: Iterable[str],
        *,
        shortlist: Shortlist | None = None,
        glossary: Glossary | Mapping[str, str] | None = None,
        bulk: bool = False,
        timeout: float | None = None,
        most_sentences: int | None = None,
        **options: Any,
    ) -> list[DocumentTranslation]:
        """`translate_document` of several texts for an event loop; see `translate_async`.

        Without graphs that return attention, each part of a text between two tags is translated separately.

        Args:
            most_sentences: the largest number of sentences of all texts.

        Raises:
            TfexportError: as in `translate_document`, or the texts have more sentences.
        """
        keywords = Keywords.parse(options, DocumentOptions, AlignmentOptions, KeepOptions)
        has_markup = keywords.documents.markup is not None
        moves_tags = has_markup and self.tells_attention
        terms = self._terms(keywords, glossary, None)
        setup = self._setup_of(keywords, "text", False, terms, shortlist, moves_tags=moves_tags)
        maker = DocumentMaker.of(setup.reader, self._runtime.capacity, keywords.documents, is_aligned=moves_tags)
        sources = texts_of(texts)
        is_long = sum(map(len, sources)) > (APART_HERE if has_markup else READ_HERE)

        def taken_apart() -> list[Unit]:
            return [Unit(number, maker.document(text)) for number, text in enumerate(sources, start=1)]

        units = await (asyncio.to_thread(taken_apart) if is_long else _at_once(taken_apart))
        lines = [line for unit in units for line in unit.lines]
        if most_sentences is not None and len(lines) > most_sentences:
            raise TfexportError(
                f"the text has {len(lines):,} sentences, above {most_sentences:,}. Send it in several requests."
            )
        results = iter(await self._results(lines, setup, bulk=bulk, timeout=timeout))

        def put_together() -> list[DocumentTranslation]:
            documents = (
                result_of_unit(unit, list(islice(results, len(unit.lines))), setup.writer, is_aligned=moves_tags)
                for unit in units
            )
            return [document_translation_of(document, setup.writer) for document in documents]

        return await (asyncio.to_thread(put_together) if is_long else _at_once(put_together))

    @with_keywords(SearchOptions, AlignmentOptions)
    async def translate_ids_async(
        self,
        sources: Iterable[Sequence[int]] | NDArray[Any],
        *,
        shortlist: Shortlist | None = None,
        bulk: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> list[Translation]:
        """`translate_ids` for an event loop; see `translate_async`."""
        lines = id_sources_of(sources)
        setup = self._setup_of(Keywords.parse(options, AlignmentOptions), "ids", False, None, shortlist)
        return await _written(await self._results(lines, setup, bulk=bulk, timeout=timeout), setup.writer)

    @overload
    async def score_async(  # type: ignore[overload-overlap]
        self, texts: str, targets: str, *, bulk: bool = False, timeout: float | None = None
    ) -> Translation: ...
    @overload
    async def score_async(
        self, texts: Iterable[str], targets: Iterable[str], *, bulk: bool = False, timeout: float | None = None
    ) -> list[Translation]: ...
    async def score_async(
        self,
        texts: str | Iterable[str],
        targets: str | Iterable[str],
        *,
        bulk: bool = False,
        timeout: float | None = None,
    ) -> Translation | list[Translation]:
        """`score` for an event loop; see `translate_async`."""
        sources, outputs = pairs_of(texts, targets)
        whole = self._target().reader(whole=True, lines=lines_of("targets", outputs))
        search = whole_outputs(self._runtime.config)
        setup = self._setup(Request(search=search, input_format="text", output_format="jsonl"))
        results = await self._results(list(lines_of("texts", sources)), setup, whole, bulk=bulk, timeout=timeout)
        scores = await _written([scored(result) for result in results], setup.writer)
        return scores[0] if isinstance(texts, str) else scores

    @with_keywords(SearchOptions, KeepOptions)
    async def stream_async(
        self,
        text: str,
        *,
        prefix: str | None = None,
        shortlist: Shortlist | None = None,
        bulk: bool = False,
        timeout: float | None = None,
        **more: Any,
    ) -> AsyncIterator[Step]:
        """`stream` for an event loop, in batches with all other calls. Close the iterator to stop early.

        Args:
            bulk, timeout: as in `translate_async`.
            more: `constraints` and `glossary`, as in `stream`, and options of the search.

        Raises:
            TfexportError: as in `stream` and `translate_async`.
        """
        options = {name: value for name, value in more.items() if name not in ("constraints", "glossary")}
        keywords = Keywords.parse(options, KeepOptions)
        refuse_several(self._setup_of(keywords, "text", prefix is not None, None, shortlist).search)
        events = self.follow_async(text, prefix=prefix, shortlist=shortlist, bulk=bulk, timeout=timeout, **more)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Step):
                    yield event
                elif not event.hypotheses:
                    raise TfexportError(f"this sentence cannot be decoded: {event.message or event.status}.")

    @with_keywords(SearchOptions, AlignmentOptions, KeepOptions)
    async def follow_async(
        self,
        text: str,
        *,
        prefix: str | None = None,
        shortlist: Shortlist | None = None,
        constraints: Sequence[str] | None = None,
        glossary: Glossary | Mapping[str, str] | None = None,
        bulk: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> AsyncGenerator[Step | Translation]:
        """Yield each token of the best output as soon as it is decided, and then the result of `translate_async`, including
        n-best lists and attention. The concatenated texts of the steps are the text of the best output, unless `replace_unk`
        replaces a part of it.

        Raises:
            TfexportError: as in `translate_async`, or the options request several `samples` or `alternatives`, which have no
                best output.
        """
        lines = [line_of("text", text)]
        outputs = None if prefix is None else self._target().reader(lines=[line_of("prefix", prefix)])
        phrases = None if constraints is None else [phrases_of_one(constraints)]
        keywords = Keywords.parse(options, AlignmentOptions, KeepOptions)
        terms = self._terms(keywords, glossary, phrases)
        setup = self._setup_of(keywords, "text", prefix is not None, terms, shortlist)
        refuse_several(replace(setup.search, nbest=1))
        search = replace(setup.search, scores=True, token_scores=True)
        events: asyncio.Queue[tuple[tuple[int, ...], tuple[float, ...]] | None] = asyncio.Queue()
        loop, growing = asyncio.get_running_loop(), StepTexts(self._target())

        def decided(_: int, ids: tuple[int, ...], log_probs: tuple[float, ...]) -> None:
            loop.call_soon_threadsafe(events.put_nowait, (ids, log_probs))

        task = asyncio.ensure_future(
            self._results(lines, setup, outputs, search, bulk=bulk, timeout=timeout, on_decided=decided)
        )
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (known := await events.get()) is not None:
                for step in growing.steps(*known):
                    yield step
            [result] = await task
            for best in result.hypotheses[:1]:
                for step in growing.steps(best.ids, best.token_log_probs, last=True):
                    yield step
            left_out: dict[str, Any] = {} if setup.search.token_scores else {"token_log_probs": ()}
            if not setup.search.scores:
                left_out |= {"score": math.nan, "log_prob": math.nan}
            hypotheses = tuple(replace(hypothesis, **left_out) for hypothesis in result.hypotheses)
            yield translation_of(replace(result, hypotheses=hypotheses), setup.writer)
        finally:
            task.cancel()


async def _at_once(work: Callable[[], Outcome]) -> Outcome:
    return work()


async def _written(results: Sequence[Result], writer: Writer) -> list[Translation]:
    """The results of lines in the types of the API."""

    def translations() -> list[Translation]:
        return [translation_of(result, writer) for result in results]

    many = sum(len(hypothesis.ids) for result in results for hypothesis in result.hypotheses) > WRITE_HERE
    return await asyncio.to_thread(translations) if many else translations()
