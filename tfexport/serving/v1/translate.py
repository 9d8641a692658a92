"""`/v1/translate`: translation with every option of a search, as one response or as a stream of tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from fastapi.sse import format_sse_event

from tfexport.api.model import Model
from tfexport.api.results import Translation
from tfexport.decoding.stream import Step
from tfexport.errors import TfexportError
from tfexport.serving.catalog import Catalog, Served
from tfexport.serving.fitting import require_one_line, require_rows
from tfexport.serving.http.responses import EventStream, json_of
from tfexport.serving.problems import PROBLEMS, Problem
from tfexport.serving.v1.results import result_of, step_of
from tfexport.serving.v1.schemas import TranslateRequest, TranslateResponse


def translation_router(catalog: Catalog) -> APIRouter:
    """The route `/v1/translate`."""
    router = APIRouter(prefix="/v1", tags=["v1"], responses=PROBLEMS)
    events = {"text/event-stream": {"schema": {"type": "string"}}}

    @router.post("/translate", responses={200: {"model": TranslateResponse, "content": events}})
    async def translate(asked: TranslateRequest) -> Response:
        """Translate sentences. The answer to each is that of `tfexport decode` for it alone.

        With `stream`, the response is server-sent events: `step` for each token of the best output, then `result`. An error
        after the first event is an event `error`.
        """
        if asked.stream:
            events = _events(catalog, asked)
            return EventStream(await anext(events), events)
        with catalog.use(asked.model, asked.pair) as served:
            translations = await _translated(served, asked)
            results = [result_of(translation) for translation in translations]
            return json_of(TranslateResponse(model=served.name, results=results))

    return router


async def _translated(served: Served, asked: TranslateRequest) -> list[Translation]:
    model = _fitting(served, asked)
    if asked.ids is not None:
        return await model.translate_ids_async(asked.ids, **asked.options, **asked.order)
    texts = [asked.text] if isinstance(asked.text, str) else asked.text or asked.tokens or []
    is_single = isinstance(asked.text, str) and asked.constraints is not None
    phrases: Any = [asked.constraints] if is_single else asked.constraints
    return await model.translate_async(
        texts, prefix=asked.prefix, constraints=phrases, glossary=asked.glossary, **asked.options, **asked.order
    )


def _fitting(served: Served, asked: TranslateRequest) -> Model:
    """The model of a bundle that can answer a request.

    Raises:
        TfexportError: the bundle cannot answer the request.
    """
    require_rows(served, asked.options)
    require_one_line(text=asked.text, prefix=asked.prefix, constraints=asked.phrases)
    return served.translator


async def _events(catalog: Catalog, asked: TranslateRequest) -> AsyncGenerator[bytes]:
    """The events of a stream. An error before the first event is raised, so that the response has its status."""
    assert isinstance(asked.text, str)
    begun = False
    with catalog.use(asked.model, asked.pair) as served:
        phrases: Any = asked.constraints
        followed = _fitting(served, asked).follow_async(
            asked.text,
            prefix=asked.prefix,
            constraints=phrases,
            glossary=asked.glossary,
            **asked.options,
            **asked.order,
        )
        async with aclosing(followed):
            try:
                async for event in followed:
                    name = "step" if isinstance(event, Step) else "result"
                    value = step_of(event) if isinstance(event, Step) else result_of(event)
                    yield format_sse_event(event=name, data_str=value.model_dump_json(exclude_defaults=True))
                    begun = True
            except TfexportError as error:
                if not begun:
                    raise
                problem = Problem.of(error)
                yield format_sse_event(event="error", data_str=problem.to_json())
