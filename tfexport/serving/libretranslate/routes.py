"""The addresses of LibreTranslate: `/translate`, `/languages`, `/detect` and `/frontend/settings`. Clients work unchanged.

A text has any number of lines, and each of them any number of sentences.
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
"""Characters of a request that goes before bulk requests."""

MOST_HTML = 32_768
"""Characters of HTML that a request may have. For what leaves many tags open the time of Python's parser grows with the
square of the length."""

_TYPING_PAUSE = 500
"""Milliseconds: what LibreTranslate tells its page."""


def libretranslate_router(catalog: Catalog, *, needs_key: bool = False) -> APIRouter:
    """The addresses of LibreTranslate.

    Args:
        needs_key: requests are answered with an API key alone.
    """
    router = APIRouter(tags=["LibreTranslate"], responses=PROBLEMS)

    @router.post("/translate", response_model=LibreResponse, openapi_extra=body_schema(LibreRequest.__name__))
    async def libre_translate(request: Request) -> Response:
        """Translate text or HTML, sentence by sentence. White space stays. Forms have the same fields as JSON.

        A sentence that is longer than the model reads is cut. One that cannot be translated is an error that names it.
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
        found = LibreResponse(**answer)
        return Response(found.model_dump_json(exclude_unset=True), media_type="application/json")

    @router.get("/languages", response_model=list[Language])
    async def libre_languages() -> list[Language]:
        """The languages of the bundles that are called after a pair of languages, such as de-en."""
        known = languages(list(pairs(catalog)))
        return [Language(code=code, name=name_of(code), targets=targets) for code, targets in known.items()]

    @router.post("/detect", response_model=list[Detected], openapi_extra=body_schema(DetectRequest.__name__))
    async def libre_detect(request: Request) -> list[Detected]:
        """The only source language that there is, with a confidence of 0: this server does not look at the text.

        Where there are several source languages it is an error.
        """
        read(DetectRequest, await fields_of(request))
        sources = list(dict.fromkeys(source for source, _ in pairs(catalog)))
        if len(sources) > 1:
            raise TfexportError(f"this server does not detect languages. Choose one of {', '.join(sources)}.")
        return [Detected(confidence=0, language=source) for source in sources]

    @router.get("/frontend/settings", response_model=FrontendSettings)
    async def libre_frontend_settings() -> FrontendSettings:
        """What clients ask before they show anything."""
        source, target = next(iter(pairs(catalog)), ("", ""))
        shown = LanguagePair(
            source=LanguageName(code=source, name=name_of(source)),
            target=LanguageName(code=target, name=name_of(target)),
        )
        return FrontendSettings(
            apiKeys=needs_key,
            charLimit=-1,
            filesTranslation=False,
            frontendTimeout=_TYPING_PAUSE,
            keyRequired=needs_key,
            language=shown,
            suggestions=False,
            supportedFilesFormat=[],
        )

    return router


async def _translated(served: Served, texts: Sequence[str], asked: LibreRequest, source: str) -> list[list[str]]:
    """Of each text its translation, and others after it.

    Raises:
        TfexportError: a sentence cannot be translated.
    """
    size = sum(map(len, texts))
    if asked.format == "html" and size > MOST_HTML:
        raise TfexportError(f"the HTML has {size} characters, above {MOST_HTML}. Send it in several requests.")
    found = await served.translator.translate_documents_async(
        texts,
        language=source,
        markup="html" if asked.format == "html" else None,
        bulk=size > MOST_INTERACTIVE,  # it is not to keep out those who wait for a sentence
        **_options(served, asked.alternatives),
    )
    for number, one in enumerate(found):
        failed = [sentence for sentence in one.sentences if not sentence.translation.hypotheses]
        if failed:  # left out, it would not be missed
            place = "" if isinstance(asked.q, str) else f"q.{number}, "
            first, reason = failed[0], failed[0].translation.message or failed[0].translation.status
            shown = f"characters {first.start} to {first.end}, {first.source[:40]!r}"
            raise TfexportError(f"{place}{shown} cannot be translated: {reason}.")
    return [[one.text, *one.alternatives] for one in found]


def _options(served: Served, alternatives: int) -> dict[str, Any]:
    """Those of a search with so many outputs beside the best."""
    if not alternatives:
        return {}
    width = max(alternatives + 1, served.translator.search_options().beam)
    options = {"beam": width, "nbest": alternatives + 1}
    require_rows(served, options)
    return options
