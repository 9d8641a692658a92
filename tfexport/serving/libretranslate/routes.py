"""The addresses of LibreTranslate: `/translate`, `/languages`, `/detect` and `/frontend/settings`. Clients work unchanged.

A text has any number of lines, each of which is a sentence to the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from tfexport.api.results import Translation
from tfexport.errors import TfexportError
from tfexport.serving.catalog import Catalog, Served
from tfexport.serving.fitting import require_rows
from tfexport.serving.http.forms import fields_of
from tfexport.serving.http.openapi import body_schema
from tfexport.serving.libretranslate.documents import Document, PlainText, Sentence
from tfexport.serving.libretranslate.html_text import Markup
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

READ_HERE = 4096
"""Characters of a text that the event loop takes apart itself."""

MOST_INTERACTIVE = 32
"""Sentences of a request that goes before bulk requests."""

HTML_HERE, MOST_HTML = 512, 32_768
"""Characters of HTML that the event loop takes apart itself, and that a request may have. For what leaves many tags open the
time of Python's parser grows with the square of the length: to seconds for this."""

_HTML = ThreadPoolExecutor(1, "tfexport reads HTML")

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
        """Translate text or HTML, line by line. Line breaks and white space stay. Forms have the same fields as JSON.

        A line that cannot be translated is an error that names it.
        """
        asked: LibreRequest = read(LibreRequest, await fields_of(request))
        source, name = resolve(catalog, asked.source, asked.target)
        texts = [asked.q] if isinstance(asked.q, str) else asked.q
        with catalog.use(name) as served:
            documents = await _taken_apart(texts, asked)
            outputs = await _translated(served, documents, asked.alternatives)
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


async def _taken_apart(texts: Sequence[str], asked: LibreRequest) -> list[Document]:
    """The texts as documents. HTML and long texts take a while, in which the event loop goes on."""

    def documents() -> list[Document]:
        kind = Markup if asked.format == "html" else PlainText
        places = ["" if isinstance(asked.q, str) else f"q.{number}, " for number in range(len(texts))]
        return [kind(text, place) for text, place in zip(texts, places, strict=True)]

    size = sum(map(len, texts))
    if asked.format == "text":
        return await asyncio.to_thread(documents) if size > READ_HERE else documents()
    if size > MOST_HTML:
        raise TfexportError(f"the HTML has {size} characters, above {MOST_HTML}. Send it in several requests.")
    return await asyncio.get_running_loop().run_in_executor(_HTML, documents) if size > HTML_HERE else documents()


async def _translated(served: Served, documents: Sequence[Document], alternatives: int) -> list[list[str]]:
    """Of each document its translation, and others after it.

    Raises:
        TfexportError: a sentence cannot be translated.
    """
    options = _options(served, alternatives)
    sentences = [sentence for document in documents for sentence in document.sentences]
    texts = [one.text for one in sentences]
    is_document = len(texts) > MOST_INTERACTIVE  # it is not to keep out those who wait for a sentence
    found = await served.translator.translate_async(texts, bulk=is_document, **options) if texts else []
    _require_all(sentences, found)

    def written() -> list[list[str]]:
        waiting = iter(found)
        return [_versions(one, list(islice(waiting, len(one.sentences))), alternatives) for one in documents]

    is_long = sum(map(len, texts)) > READ_HERE
    return await asyncio.to_thread(written) if is_long else written()


def _options(served: Served, alternatives: int) -> dict[str, Any]:
    """Those of a search with so many outputs beside the best."""
    if not alternatives:
        return {}
    width = max(alternatives + 1, served.translator.search_options().beam)
    options = {"beam": width, "nbest": alternatives + 1}
    require_rows(served, options)
    return options


def _require_all(sentences: Sequence[Sentence], found: Sequence[Translation]) -> None:
    """Raises TfexportError where a sentence has no output: left out, it would not be missed."""
    for sentence, one in zip(sentences, found, strict=True):
        if not one.hypotheses:
            raise TfexportError(f"{sentence.place} cannot be translated: {one.message or one.status}.")


def _versions(document: Document, found: Sequence[Translation], alternatives: int) -> list[str]:
    """The document with the best translations, then others with those of each next rank; none comes twice."""
    versions = []
    for rank in range(alternatives + 1):
        ranked = [one.hypotheses[min(rank, len(one.hypotheses) - 1)].text for one in found]
        versions.append(document.text(ranked))
    return list(dict.fromkeys(versions))
