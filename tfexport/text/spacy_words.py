"""Splitting of text into words by spaCy's rules for a language."""

from __future__ import annotations

from typing import Any

from tfexport.errors import RuntimeUnavailable
from tfexport.system.imports import import_failure


def spacy_tokenizer(language: str | None) -> Any:
    """spaCy's tokenizer for a language. It only has rules; no model is loaded.

    Raises:
        RuntimeUnavailable: spaCy is not installed, or has no such language.
    """
    try:
        import spacy
    except ImportError as error:
        absent = (
            "this model's text is tokenised by spaCy, which is not installed: pip install 'tfexport[spacy]', "
            "or decode ids with --input-format ids."
        )
        raise import_failure(error, "spacy", absent) from error
    try:
        return spacy.blank(language).tokenizer
    except MemoryError:
        raise
    except Exception as error:
        raise RuntimeUnavailable(f"spaCy has no language {language!r}: {error}. Use a code such as de.") from error
