"""The results of texts with many sentences, for the Python API."""

from __future__ import annotations

from dataclasses import dataclass

from tfexport.api.results import Translation, translation_of
from tfexport.decoding.documents import DocumentResult
from tfexport.decoding.translate import Writer


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
    """The first status of a sentence that is not `ok`. Without one, `cut` if a sentence was too long for the model, `empty`
    if there is nothing to translate, else `ok`."""
    message: str
    """A description of the problem; empty if there is none."""
    sentences: tuple[SentenceTranslation, ...]
    """The sentences in the order of the document. All characters between them are copied."""
    alternatives: tuple[str, ...] = ()
    """The documents with the second output of each sentence, with the third, and so on, without duplicates. They need
    `nbest`."""

    def __str__(self) -> str:
        return self.text


def document_translation_of(document: DocumentResult, writer: Writer) -> DocumentTranslation:
    """The result of a document in the types of the API."""
    sentences = tuple(
        SentenceTranslation(
            sentence.segment.start,
            sentence.segment.end,
            sentence.segment.text,
            sentence.segment.is_piece,
            translation_of(sentence.result, writer),
        )
        for sentence in document.sentences
    )
    return DocumentTranslation(document.text, document.status, document.message, sentences, document.alternatives)
