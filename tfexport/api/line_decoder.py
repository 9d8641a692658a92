"""The common part of the methods of a `Model`: checked options, and the decoding of lines with them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tfexport.api.arguments import MOST_THREADS, count_of, glossary_of, group_of, require
from tfexport.api.documents import DocumentTranslation, document_options, document_translation_of
from tfexport.api.results import Translation, translation_of
from tfexport.bundle.reader import Bundle
from tfexport.config import ModelConfig
from tfexport.decoding.documents import DocumentMaker, Unit, translate_units
from tfexport.decoding.generation_config import options_with_defaults
from tfexport.decoding.glossary import Glossary
from tfexport.decoding.line_reader import Reader, TargetReader
from tfexport.decoding.request_options import AlignmentOptions, BatchLimits, InputFormat, KeepOptions
from tfexport.decoding.shortlist import Shortlist
from tfexport.decoding.terminology import Terminology
from tfexport.decoding.translate import Result, Writer, translate, window_size, with_alignments
from tfexport.option import checked, declared
from tfexport.runtimes import require_workers
from tfexport.runtimes.base import Runtime
from tfexport.search.options import SearchOptions

_log = logging.getLogger("tfexport")

_OTHERS = (
    *("batch_size", "workers", "prefix", "shortlist", "constraints", "glossary"),
    *declared(KeepOptions),
    *declared(AlignmentOptions),
    *declared(BatchLimits),
)
"""Arguments of the methods that are not options of a search."""


def require_shortlist(value: Any) -> None:
    """Raises TfexportError if an argument is neither a shortlist nor None."""
    require(Shortlist, "shortlist", value, "Give what Model.read_shortlist returns.")


def score_options(config: ModelConfig) -> dict[str, Any]:
    """The options of a search whose whole output is given."""
    return {"length_penalty": 0.0, "max_length": config.max_target_length, "token_scores": True}


@dataclass(frozen=True)
class LineDecoder:
    """Decodes lines with a bundle that a runtime has loaded."""

    bundle: Bundle
    runtime: Runtime[Any]

    def decoded(
        self,
        lines: Iterable[bytes],
        format: InputFormat,
        outputs: TargetReader | None,
        shortlist: Shortlist | None,
        batch_size: int,
        workers: int,
        given: Mapping[str, Any],
        convert: Callable[[Result, Writer], Translation] = translation_of,
        terms: Terminology | None = None,
    ) -> Iterator[Translation]:
        """The results of lines of a format; see `decoder`."""
        decode = self.decoder(outputs is not None, shortlist, batch_size, workers, given, convert, terms=terms)
        return decode(lines, format, outputs)

    def decoder(
        self,
        begins: bool,
        shortlist: Shortlist | None,
        batch_size: int,
        workers: int,
        given: Mapping[str, Any],
        convert: Callable[[Result, Writer], Any] = translation_of,
        live: bool = False,
        terms: Terminology | None = None,
        window: int | None = None,
    ) -> Callable[[Iterable[bytes], InputFormat, TargetReader | None], Iterator[Any]]:
        """A function that decodes lines of a format, with all arguments checked.

        Args:
            begins: outputs begin with a prefix.
            given: options of the search, of alignments and of the size of batches.
            convert: makes of each result what is returned.
            live: return each result without waiting for later lines.
            terms: the required and forbidden phrases.
            window: the number of lines that are read before the first is decoded; see `translate`.
        """
        batches, others = self._batches(batch_size, workers, given)
        asked, options = self.search_of(begins, shortlist, others, terms)

        def decode(lines: Iterable[bytes], format: InputFormat, outputs: TargetReader | None) -> Iterator[Any]:
            ready = None if terms is None else terms.ready(format, options)
            reader, writer = with_alignments(asked, Reader.of(self.bundle, format), Writer.of(self.bundle, "jsonl"))
            results = translate(
                self.runtime,
                replace(reader, tells_tokens=options.attention, terms=ready),
                lines,
                options,
                window=window,
                outputs=outputs,
                shortlist=shortlist,
                live=live,
                **batches,
            )
            return (convert(result, writer) for result in results)

        return decode

    def documents(
        self,
        texts: Iterable[str],
        shortlist: Shortlist | None,
        glossary: Glossary | Mapping[str, str] | None,
        batch_size: int,
        workers: int,
        given: Mapping[str, Any],
    ) -> Iterator[DocumentTranslation]:
        """The results of texts of many sentences; see `decoder`."""
        asked, given = document_options(given)
        batches, others = self._batches(batch_size, workers, given)
        terms, others = self.terms(others, glossary, None)
        alignments, options = self.search_of(False, shortlist, others, terms)
        reader, writer = with_alignments(alignments, Reader.of(self.bundle, "text"), Writer.of(self.bundle, "text"))
        ready = None if terms is None else terms.ready("text", options)
        reader = replace(reader, tells_tokens=options.attention, terms=ready)
        maker = DocumentMaker.of(reader, self.runtime.capacity, asked)
        window = window_size(batches["batch_size"], batches["workers"])

        def decode(lines: Iterable[bytes], done: int) -> Iterator[Result]:
            return translate(
                self.runtime,
                reader,
                lines,
                options,
                window=window,
                done=done,
                shortlist=shortlist,
                **batches,
            )

        units = (Unit(number, maker.document(text)) for number, text in enumerate(texts, start=1))
        found = translate_units(units, decode, writer, window=window, is_aligned=asked.markup is not None)
        return (document_translation_of(one, writer) for one in found)

    def _batches(
        self, batch_size: int, workers: int, given: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The checked arguments of `translate` about batches, and the other `given` options."""
        batch_size, workers = count_of("batch_size", batch_size), count_of("workers", workers, maximum=MOST_THREADS)
        limits = group_of(BatchLimits, given)
        require_workers(self.runtime.name, self.bundle, self.runtime.precision, workers)
        others = {name: value for name, value in given.items() if name not in declared(BatchLimits)}
        return {"batch_size": batch_size, "workers": workers, "max_batch_tokens": limits.max_batch_tokens}, others

    def search_of(
        self,
        begins: bool,
        shortlist: Shortlist | None,
        given: Mapping[str, Any],
        terms: Terminology | None = None,
    ) -> tuple[AlignmentOptions, SearchOptions]:
        """The options of alignments, and the search with all that they need.

        Args:
            begins: outputs begin with a prefix.
            given: options of the search and of alignments.
            terms: the required and forbidden phrases.
        """
        require_shortlist(shortlist)
        asked = group_of(AlignmentOptions, given)
        search = {name: value for name, value in given.items() if name not in declared(AlignmentOptions)}
        options = self.options({**search, "attention": True} if asked else search)
        if terms is not None:
            terms.for_search(options)  # report wrong options before the first line is read
        # Outputs with a prefix or required phrases need the graph that returns scores.
        return asked, replace(options, scores=True) if begins or terms is not None else options

    def terms(
        self,
        given: Mapping[str, Any],
        glossary: Glossary | Mapping[str, str] | None,
        phrases: Iterable[Sequence[bytes]] | None,
    ) -> tuple[Terminology | None, dict[str, Any]]:
        """The required and forbidden phrases, and the other options.

        Args:
            phrases: the required phrases of each line.

        Raises:
            TfexportError: an argument has another type.
        """
        keep = group_of(KeepOptions, given).keep_between
        others = {name: value for name, value in given.items() if name not in declared(KeepOptions)}
        if isinstance(glossary, Mapping):
            glossary = glossary_of(glossary)
        elif glossary is not None:
            require(Glossary, "glossary", glossary, "Give what Model.read_glossary returns, or a dictionary.")
        if keep is None and glossary is None and phrases is None:
            return None, others
        return Terminology(self.writer().reader(), phrases=phrases, glossary=glossary, keep=keep), others

    def options(self, search: Mapping[str, Any]) -> SearchOptions:
        """The checked options of a search, with defaults from the bundle's generation_config.json."""
        checked(SearchOptions, search, others=_OTHERS)
        content, config = self.bundle.generation_config, self.runtime.config
        options, defaults = options_with_defaults(search, content, config, self.token_ids)
        for line in defaults.notes():
            _log.info(line)
        return options

    def token_ids(self, tokens: str) -> tuple[int, ...]:
        """Ids of tokens of the target vocabulary, separated by spaces."""
        return self.writer().token_ids(tokens)

    def writer(self) -> Writer:
        """A writer that turns output ids into text."""
        return Writer.of(self.bundle, "text")
