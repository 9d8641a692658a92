"""`Job`: lines in, results out. Commands, the Python API, the server and corpora all decode through it.

    Request  options of a caller, checked, before a bundle is read
    Setup    how the lines of a request are read, searched and written, with the vocabularies of a bundle
    Job      a setup with a loaded runtime and the size of its batches

The server decodes the sources of many requests in shared batches, so it has no jobs. It takes setups, and reads lines and
writes results with the functions that `translate` calls (`read_window`, `result_of`). Its answers equal those of `decode`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from tfexport.bundle.reader import Bundle
from tfexport.config import ModelConfig
from tfexport.decoding.documents import DocumentMaker, DocumentResult, Unit, translate_units
from tfexport.decoding.generation_config import GenerationDefaults, options_with_defaults
from tfexport.decoding.line_reader import Reader, TargetReader
from tfexport.decoding.request_options import (
    AlignmentOptions,
    BatchOptions,
    InputFormat,
    OutputFormat,
    RuntimeOptions,
)
from tfexport.decoding.shortlist import Shortlist
from tfexport.decoding.stream import Streamed, stream_lines
from tfexport.decoding.terminology import Terminology
from tfexport.decoding.translate import Result, Writer, translate, window_size, with_alignments
from tfexport.decoding.workers import CpuSplit
from tfexport.documents.options import DocumentOptions
from tfexport.option import Given
from tfexport.runtimes import load_runtime, require_workers, takes_workers
from tfexport.runtimes.base import Runtime
from tfexport.search.attention_trace import resolve_layer
from tfexport.search.options import SearchOptions
from tfexport.search.token_rules import suppressed_ids


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of a caller. Equal requests to a bundle have the same setup."""

    search: Given[SearchOptions]
    input_format: InputFormat | None = None
    """The default is text, or ids if the bundle has no source vocabulary."""
    output_format: OutputFormat | None = None
    """The default is text, or ids if the bundle has no target vocabulary."""
    alignments: AlignmentOptions = field(default_factory=AlignmentOptions)
    moves_tags: bool = False
    """Whether tags of markup move with words, for which the search returns attention."""
    has_requirements: bool = False
    """Whether outputs begin with a prefix or must contain phrases. Only graphs that return scores can do this."""


def whole_outputs(config: ModelConfig) -> Given[SearchOptions]:
    """The search that scores given outputs: the log-probability of each token, without length normalisation."""
    return Given({"length_penalty": 0.0, "max_length": config.max_target_length, "token_scores": True})


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The reader, the search and the writer of lines, with the vocabularies of a bundle."""

    bundle: Bundle
    reader: Reader
    writer: Writer
    search: SearchOptions
    defaults: GenerationDefaults
    """The options of the search that the bundle's generation_config.json gives."""
    shortlist: Shortlist | None = None

    @classmethod
    def of(cls, bundle: Bundle, request: Request) -> Setup:
        """The setup of a request.

        Raises:
            TfexportError: options do not fit together or the model, or a format needs a vocabulary that the bundle lacks.
        """
        reader, writer = Reader.of(bundle, request.input_format), Writer.of(bundle, request.output_format)
        reads_attention = bool(request.alignments) or request.moves_tags
        search, defaults = options_with_defaults(
            request.search | {"attention": True} if reads_attention else request.search,
            bundle.generation_config,
            bundle.config,
            writer.token_ids,
        )
        suppressed_ids(bundle.config, search)
        if search.reads_attention:
            resolve_layer(search.alignment_layer, bundle.config.n_decoder_layers)
        reader, writer = with_alignments(request.alignments, replace(reader, tells_tokens=search.attention), writer)
        search = replace(search, scores=search.scores or request.has_requirements)
        return cls(bundle=bundle, reader=reader, writer=writer, search=search, defaults=defaults)

    def with_terms(self, terms: Terminology | None) -> Setup:
        """This setup with required and forbidden phrases.

        Raises:
            TfexportError: the phrases do not fit the format of the input, or need a beam search.
        """
        if terms is None:
            return self
        terms = terms.for_search(self.search)
        terms.require_format(self.reader.format)
        return replace(self, reader=replace(self.reader, terms=terms))


@dataclass(frozen=True, kw_only=True)
class Job:
    """Decodes lines with a loaded bundle."""

    setup: Setup
    runtime: Runtime
    batch_size: int = 32
    """The largest number of sentences decoded together."""
    max_batch_tokens: int | None = None
    workers: int = 1
    window: int | None = None
    """See `translate`."""
    split: CpuSplit | None = None
    """The division of the CPUs, if `load` was free to choose it."""

    @classmethod
    def load(cls, setup: Setup, runtime: RuntimeOptions, batches: BatchOptions, *, window: int | None = None) -> Job:
        """Load a runtime for a setup, and divide the CPUs among workers.

        Args:
            window: lines that are decoded together. All CPUs then work on one batch. None to choose it from the batches.

        Raises:
            RuntimeUnavailable: the runtime does not exist, or its packages are not installed.
            TfexportError: the bundle has no such precision, or the runtime does not support so many workers.
        """
        bundle = setup.bundle
        name, precision = runtime.runtime, runtime.number_format
        at_once = window is None and takes_workers(name, bundle, precision)
        split = CpuSplit.choose(batches.workers, batches.threads, at_once=at_once)
        require_workers(name, bundle, precision, split.workers)
        loaded = load_runtime(
            name,
            bundle,
            precision=precision,
            threads=split.threads,
            share_weights=batches.share_weights,
            shortlist=setup.shortlist is not None,
        )
        loaded.prepare(setup.search.needs)
        return cls(
            setup=setup,
            runtime=loaded,
            batch_size=batches.batch_size,
            max_batch_tokens=batches.max_batch_tokens,
            workers=split.workers,
            window=window,
            split=split if at_once and None in (batches.workers, batches.threads) else None,
        )

    @property
    def lines_at_once(self) -> int:
        """The number of lines that are read before the first is decoded."""
        return self.window or window_size(self.batch_size, self.workers)

    def lines(
        self, lines: Iterable[bytes], *, outputs: TargetReader | None = None, done: int = 0, live: bool = False
    ) -> Iterator[Result]:
        """The result of each line, in order; see `translate` for the arguments.

        Raises:
            TfexportError: as `translate`, or a phrase that all outputs must not contain cannot be read.
        """
        self._require_readable()
        return translate(
            self.runtime,
            self.setup.reader,
            lines,
            self.setup.search,
            batch_size=self.batch_size,
            max_batch_tokens=self.max_batch_tokens,
            window=self.lines_at_once,
            workers=self.workers,
            done=done,
            outputs=outputs,
            shortlist=self.setup.shortlist,
            live=live,
        )

    def document_maker(self, options: DocumentOptions) -> DocumentMaker:
        """Splits texts into sentences that the model can read; see `DocumentMaker.of`."""
        return DocumentMaker.of(self.setup.reader, self.runtime.capacity, options)

    def documents(self, units: Iterable[Unit], *, moves_tags: bool, done: int = 0) -> Iterator[DocumentResult]:
        """The result of each unit of an input with many sentences, in order.

        Args:
            moves_tags: put the tags of markup into translations.
            done: units whose results exist already.

        Raises:
            TfexportError: there are fewer units than `done`.
        """
        return translate_units(
            units,
            lambda lines, done: self.lines(lines, done=done),
            self.setup.writer,
            window=self.lines_at_once,
            done=done,
            is_aligned=moves_tags,
        )

    def stream(self, lines: Iterable[bytes], *, outputs: TargetReader | None = None) -> Iterator[Streamed]:
        """Each token as soon as it is decided, and the result of each line; see `stream_lines`.

        Raises:
            TfexportError: the search returns more than one output.
        """
        self._require_readable()
        setup = self.setup
        return stream_lines(
            self.runtime, setup.reader, lines, setup.search, setup.writer, outputs=outputs, shortlist=setup.shortlist
        )

    def _require_readable(self) -> None:
        if self.setup.reader.terms is not None:
            self.setup.reader.terms.require_readable()
