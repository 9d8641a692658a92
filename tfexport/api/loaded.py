"""A bundle that a runtime has loaded: its properties, and the setups and jobs of requests to it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from tfexport.api.arguments import (
    MOST_THREADS,
    Keywords,
    count_of,
    group_of,
    path_of,
    require,
    require_shortlist,
    terms_of,
)
from tfexport.bundle.reader import Bundle
from tfexport.config import ModelConfig
from tfexport.contract import Precision, short_name
from tfexport.decoding.glossary import Glossary, read_glossary
from tfexport.decoding.job import Job, Request, Setup
from tfexport.decoding.request_options import GlossaryCase, InputFormat, TermOptions
from tfexport.decoding.shortlist import DEFAULT_BEST, DEFAULT_FIRST, Shortlist, read_shortlist
from tfexport.decoding.terminology import Terminology
from tfexport.decoding.translate import Writer
from tfexport.runtimes import require_workers
from tfexport.runtimes.base import Runtime

_log = logging.getLogger("tfexport")

MOST_SETUPS = 100
"""The largest number of cached setups."""


class LoadedModel:
    """The part of `Model` that all methods share."""

    def __init__(self, bundle: Bundle, runtime: Runtime):
        self._bundle, self._runtime = bundle, runtime
        # The cache must not refer to this object, or only a garbage collection would free the bundle.
        self._kept_setup = lru_cache(MOST_SETUPS)(partial(_new_setup, bundle))
        for side in ("source", "target"):
            bundle.tokenizer(side)  # load now: another bundle may replace the folder later

    def __repr__(self) -> str:
        return (
            f"<tfexport.Model {self._bundle.directory} on {self._runtime.name}, {short_name(self._runtime.precision)}>"
        )

    @property
    def config(self) -> ModelConfig:
        """Sizes, special ids and arithmetic of the model."""
        return self._runtime.config

    @property
    def precision(self) -> Precision:
        """The precision of the weights and products."""
        return self._runtime.precision

    def token_ids(self, tokens: str) -> tuple[int, ...]:
        """The ids of tokens of the target vocabulary, separated by spaces, for options such as `suppress`.

        Raises:
            TfexportError: a token is not in the vocabulary, or there is no vocabulary.
        """
        require(str, "tokens", tokens, "Give tokens in one string, separated by spaces.")
        return self._target().token_ids(tokens)

    def read_shortlist(self, path: str | Path, *, first: int = DEFAULT_FIRST, best: int = DEFAULT_BEST) -> Shortlist:
        """Read a shortlist for `translate` from a file, as `decode --shortlist` does. A bundle that was exported with
        `--shortlist` and loaded with `load(..., shortlist=True)` computes only the logits of these words.

        Raises:
            TfexportError: the file cannot be read, or the vocabularies lack its words.
        """
        tokenizers = (self._bundle.tokenizer("source"), self._bundle.tokenizer("target"))
        first, best = count_of("first", first, minimum=0), count_of("best", best)
        return read_shortlist(path_of("path", path), self.config, *tokenizers, first=first, best=best)

    def read_glossary(self, path: str | Path, *, case: GlossaryCase = "exact") -> Glossary:
        """Read a glossary for `translate` from a file, as `decode --glossary` does.

        Args:
            case: `ignore` to match source phrases in any case.

        Raises:
            TfexportError: the file cannot be read, or a line has another form.
        """
        chosen = group_of(TermOptions, {"glossary": path_of("path", path), "glossary_case": case})
        return read_glossary(path_of("path", path), "text", chosen.glossary_case)

    def _target(self) -> Writer:
        """Reads and writes outputs as text."""
        return Writer.of(self._bundle, "text")

    def _setup(self, request: Request, terms: Terminology | None = None, shortlist: Shortlist | None = None) -> Setup:
        """The setup of a request, with terms and a shortlist. Setups are cached, because requests have few kinds."""
        require_shortlist(shortlist)
        # A file may change before the next call, and lists may be long: such setups are not kept.
        is_kept = request.alignments.unk_dictionary is None and not _has_lists(request)
        setup = self._kept_setup(request) if is_kept else _new_setup(self._bundle, request)
        return replace(setup.with_terms(terms), shortlist=shortlist)

    def _setup_of(
        self,
        keywords: Keywords,
        format: InputFormat,
        has_prefix: bool,
        terms: Terminology | None,
        shortlist: Shortlist | None,
        *,
        moves_tags: bool = False,
    ) -> Setup:
        """The setup of a method with these arguments; see `Request`."""
        request = Request(
            search=keywords.search,
            input_format=format,
            output_format="jsonl",
            alignments=keywords.alignments,
            moves_tags=moves_tags,
            has_requirements=has_prefix or terms is not None,
        )
        return self._setup(request, terms, shortlist)

    def _terms(
        self, keywords: Keywords, glossary: Any, phrases: Iterable[Sequence[bytes]] | None
    ) -> Terminology | None:
        """The required and forbidden phrases of a method with these arguments; see `terms_of`."""
        return terms_of(keywords.keep, glossary, phrases, lambda: self._target().reader())

    def _job(self, setup: Setup, keywords: Keywords, batch_size: int, workers: int) -> Job:
        """A job with these arguments of a method, checked."""
        workers = count_of("workers", workers, maximum=MOST_THREADS)
        require_workers(self._runtime.name, self._bundle, self._runtime.precision, workers)
        return Job(
            setup=setup,
            runtime=self._runtime,
            batch_size=count_of("batch_size", batch_size),
            max_batch_tokens=keywords.limits.max_batch_tokens,
            workers=workers,
        )


def _new_setup(bundle: Bundle, request: Request) -> Setup:
    setup = Setup.of(bundle, request)
    for note in setup.defaults.notes():
        _log.info(note)
    return setup


def _has_lists(request: Request) -> bool:
    return any(isinstance(value, tuple) for value in request.search.values())
