"""The languages of a server, with the names of LibreTranslate's clients.

Bundles have codes such as `pt_BR`, and clients write `pt-BR`; both are accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from babel import Locale, UnknownLocaleError

from tfexport.errors import TfexportError
from tfexport.serving.catalog import Catalog

AUTO = "auto"
"""The code that requests the detection of the source language."""


def client_code(code: str) -> str:
    """The client's form of a language code."""
    return code.replace("_", "-")


@lru_cache(maxsize=1000)
def name_of(code: str) -> str:
    """The English name of a language, or its code if it has no name."""
    try:
        return Locale.parse(code, sep="-").get_display_name("en") or code
    except (UnknownLocaleError, ValueError):
        return Locale("en").languages.get(code, code)


def pairs(catalog: Catalog) -> dict[tuple[str, str], str]:
    """The names of the bundles by pairs of languages (source, target)."""
    translators = [served for served in catalog.served if not served.bundle.config.is_classifier]
    return {
        (client_code(pair[0]), client_code(pair[1])): served.name
        for served in translators
        if (pair := served.entry.pair) is not None
    }


def languages(known: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """The target languages of each source or target language, in order."""
    targets: dict[str, list[str]] = {}
    for source, target in known:
        targets.setdefault(source, []).append(target)
    for _, target in known:
        targets.setdefault(target, [])
    return targets


def resolve(catalog: Catalog, source: str, target: str) -> tuple[str, str]:
    """The source language, and the name of the bundle that translates it.

    Raises:
        TfexportError: there is no such bundle, or the source is `auto` and several sources have this target.
    """
    source, target = client_code(source), client_code(target)
    known = pairs(catalog)
    there = languages(list(known))
    for code in (source, target):
        if code not in there and not (code == source == AUTO):
            raise TfexportError(f"{code} is not supported. There are {', '.join(there) or 'no languages here'}.")
    if source != AUTO and (source, target) not in known:
        raise TfexportError(
            f"{name_of(target)} ({target}) is not available as a target language from {name_of(source)} ({source}). "
            f"There are {', '.join(map('-'.join, known))}."
        )
    if source == AUTO:
        sources = [code for code, other in known if other == target]
        if len(sources) != 1:
            raise TfexportError(
                f"this server does not detect languages, and {len(sources)} of them have the target {target}. "
                f"Give the source: {', '.join(sources)}."
                if sources
                else f"{name_of(target)} ({target}) is not a target language here. Give another."
            )
        [source] = sources
    return source, known[source, target]
