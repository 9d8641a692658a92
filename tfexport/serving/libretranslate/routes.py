"""The routes of LibreTranslate: `/translate`, `/languages`, `/detect` and `/frontend/settings`. Clients work unchanged.

A text may have any number of lines, and a line any number of sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from tfexport.errors import TfexportError
from tfexport.serving.catalog import Catalog, Served
from tfexport.serving.fitting import require_rows
from tfexport.serving.http.forms import fields_of
from tfexport.serving.http.openapi import body_schema
from tfexport.serving.libretranslate.languages import AUTO, languages, name_of, pairs, resolve
from tfexport.serving.libretranslate.schemas import (
    Detected,
    DetectRequest,
    FrontendSettings,
    Language,
    LanguageName,
    LanguagePair,
    LibreRequest,
    LibreResponse,
    read,
)
from tfexport.serving.problems import PROBLEMS

MOST_INTERACTIVE = 4096
"""The largest number of characters of a request that is not a bulk request."""

MOST_TEXT = 262_144
"""The largest number of characters of text in a request. Each sentence of a text takes many times its size in memory."""

MOST_SENTENCES = 8192
"""The largest number of sentences of a request. The scheduler takes all of them at once."""

MOST_HTML = 32_768
"""The largest number of characters of HTML in a request: Python's parser takes quadratic time if many tags stay open."""

_TYPING_PAUSE = 500
"""Milliseconds; the value that LibreTranslate gives its page."""


def libretranslate_router(catalog: Catalog, *, needs_key: bool = False) -> APIRouter:
    """The routes of LibreTranslate.

    Args:
        needs_key: requests need an API key.
    """
    router = APIRouter(tags=["LibreTranslate"], responses=PROBLEMS)

    @router.post("/translate", response_model=LibreResponse, openapi_extra=body_schema(LibreRequest.__name__))
    async def libre_translate(request: Request) -> Response:
        """Translate text or HTML, sentence by sentence. White space is kept. Forms have the same fields as JSON.

        A sentence that is too long for the model is cut. If a sentence cannot be translated, the error names it.
        """
        asked: LibreRequest = read(LibreRequest, await fields_of(request))
        source, name = resolve(catalog, asked.source, asked.target)
        texts = [asked.q] if isinstance(asked.q, str) else asked.q
        with catalog.use(name) as served:
            outputs = await _translated(served, texts, asked, source)
        answer: dict[str, Any] = {"translatedText": [best for best, *_ in outputs]}
        if asked.alternatives:
            answer["alternatives"] = [others for _, *others in outputs]
        if asked.source == AUTO:
            answer["detectedLanguage"] = [Detected(confidence=0, language=source)] * len(texts)
        if isinstance(asked.q, str):
            answer = {name: several[0] for name, several in answer.items()}
        response = LibreResponse(**answer)
        return Response(response.model_dump_json(exclude_unset=True), media_type="application/json")

    @router.get("/languages", response_model=list[Language])
    async def libre_languages() -> list[Language]:
        """The languages of the bundles with the name of a language pair, such as de-en."""
        known = languages(list(pairs(catalog)))
        return [Language(code=code, name=name_of(code), targets=targets) for code, targets in known.items()]

    @router.post("/detect", response_model=list[Detected], openapi_extra=body_schema(DetectRequest.__name__))
    async def libre_detect(request: Request) -> list[Detected]:
        """The only source language, with a confidence of 0, because this server does not analyse the text.

        With several source languages this is an error.
        """
        read(DetectRequest, await fields_of(request))
        sources = list(dict.fromkeys(source for source, _ in pairs(catalog)))
        if len(sources) > 1:
            raise TfexportError(f"this server does not detect languages. Choose one of {', '.join(sources)}.")
        return [Detected(confidence=0, language=source) for source in sources]

    @router.get("/frontend/settings", response_model=FrontendSettings)
    async def libre_frontend_settings() -> FrontendSettings:
        """The settings that clients request at their start."""
        source, target = next(iter(pairs(catalog)), ("", ""))
        shown = LanguagePair(
            source=LanguageName(code=source, name=name_of(source)),
            target=LanguageName(code=target, name=name_of(target)),
        )
        return FrontendSettings(
            apiKeys=needs_key,
            charLimit=MOST_TEXT,
            filesTranslation=False,
            frontendTimeout=_TYPING_PAUSE,
            keyRequired=needs_key,
            language=shown,
            suggestions=False,
            supportedFilesFormat=[],
        )

    return router


async def _translated(served: Served, texts: Sequence[str], asked: LibreRequest, source: str) -> list[list[str]]:
    """The translation of each text, followed by its alternatives.

    Raises:
        TfexportError: a sentence cannot be translated.
    """
    size = sum(map(len, texts))
    kind, most = ("HTML", MOST_HTML) if asked.format == "html" else ("text", MOST_TEXT)
    if size > most:
        raise TfexportError(f"the {kind} has {size:,} characters, above {most:,}. Send it in several requests.")
    documents = await served.translator.translate_documents_async(
        texts,
        language=source,
        markup="html" if asked.format == "html" else None,
        bulk=size > MOST_INTERACTIVE,  # large requests must not delay short ones
        most_sentences=MOST_SENTENCES,
        **_options(served, asked.alternatives),
    )
    for number, document in enumerate(documents):
        failed = [sentence for sentence in document.sentences if not sentence.translation.hypotheses]
        if failed:  # an error, because a missing sentence would not be noticed
            place = "" if isinstance(asked.q, str) else f"q.{number}, "
            first, reason = failed[0], failed[0].translation.message or failed[0].translation.status
            shown = f"characters {first.start} to {first.end}, {first.source[:40]!r}"
            raise TfexportError(f"{place}{shown} cannot be translated: {reason}.")
    return [[document.text, *document.alternatives] for document in documents]


def _options(served: Served, alternatives: int) -> dict[str, Any]:
    """The options of a search with this number of further outputs."""
    if not alternatives:
        return {}
    width = max(alternatives + 1, served.translator.search_options().beam)
    options = {"beam": width, "nbest": alternatives + 1}
    require_rows(served, options)
    return options
