"""Texts of many sentences, for the Python API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tfexport.api.arguments import group_of, require
from tfexport.api.results import Translation, translation_of
from tfexport.decoding.documents import DocumentResult
from tfexport.decoding.translate import Writer
from tfexport.documents.options import DocumentOptions
from tfexport.errors import TfexportError
from tfexport.option import declared


@dataclass(frozen=True)
class SentenceTranslation:
    """A sentence of a document."""

    start: int
    """The first character of its range `[start, end)` in the document."""
    end: int
    source: str
    """The text that was translated, without markup."""
    is_piece: bool
    """Whether it is a part of a sentence that is too long for the model."""
    translation: Translation
    """The result of `Model.translate` for `source`."""


@dataclass(frozen=True)
class DocumentTranslation:
    """The result of a document; `str()` of it is its text."""

    text: str
    """The document with its sentences replaced by their translations. Sentences without a translation stay unchanged."""
    status: str
    """`ok`; the first other status of a sentence; `cut` if a sentence was too long for the model, and none has one; `empty`
    if there is nothing to translate."""
    message: str
    """A description of the problem; empty if there is none."""
    sentences: tuple[SentenceTranslation, ...]
    """The sentences in the order of the document. All characters between them are copied."""
    alternatives: tuple[str, ...] = ()
    """With `nbest`: the document with the second output of each sentence, with the third, and so on, without duplicates."""

    def __str__(self) -> str:
        return self.text


def document_options(given: Mapping[str, Any]) -> tuple[DocumentOptions, dict[str, Any]]:
    """The options for splitting a document, by default into sentences, and the options of its sentences.

    Raises:
        TfexportError: an option cannot be used.
    """
    own = declared(DocumentOptions)
    asked = group_of(DocumentOptions, {"split": "sentences", **{k: v for k, v in given.items() if v is not None}})
    others = {name: value for name, value in given.items() if name not in own}
    return asked, {**others, "attention": True} if asked.markup else others


def texts_of(texts: Any) -> list[str]:
    """Raises: TfexportError if these are not one or several strings."""
    several = [texts] if isinstance(texts, str) else texts
    if isinstance(several, bytes | Mapping) or not isinstance(several, Iterable):
        raise TfexportError(f"texts is {texts!r:.60}. Give a string, or a list of strings.")
    found = list(several)
    for text in found:
        if text is None:
            raise TfexportError("texts has None. Give strings.")
        require(str, "texts", text, "Give a string, or a list of strings.")
    return found


def document_translation_of(found: DocumentResult, writer: Writer) -> DocumentTranslation:
    """The result of a document in the types of the API."""
    sentences = tuple(
        SentenceTranslation(
            one.segment.start,
            one.segment.end,
            one.segment.text,
            one.segment.is_piece,
            translation_of(one.result, writer),
        )
        for one in found.sentences
    )
    return DocumentTranslation(found.text, found.status, found.message, sentences, found.alternatives)
