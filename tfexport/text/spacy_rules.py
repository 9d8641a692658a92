"""spaCy's rules for splitting text into words, and the longest word that rules are asked to split."""

from __future__ import annotations

from typing import Any

from tfexport.errors import RuntimeUnavailable, TokenizerError
from tfexport.system.imports import import_failure

LONGEST_WORD = 500
"""Characters between white space that rules of spaCy or subword-nmt split. They take a time that grows with the square of
this number: a twentieth of a second for so many brackets, 30 seconds for 20,000."""


class WordTooLong(TokenizerError):
    """Text has more than `LONGEST_WORD` characters without white space."""


def require_short_words(text: str) -> None:
    """Raises WordTooLong where a word of `text` is too long to be split."""
    longest = max(map(len, text.split()), default=0)
    if longest > LONGEST_WORD:
        raise WordTooLong(f"{longest:,} characters without white space, at most {LONGEST_WORD:,} can be split")


def rules_of(language: str) -> Any:
    """spaCy's tokeniser of a language.

    Raises:
        RuntimeUnavailable: spaCy cannot be imported, or does not know the language.
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
