"""`tfexport decode`: parse, load, run, write."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tfexport.commands.console import say, warned, with_progress
from tfexport.commands.documents import DocumentJob, require_documents
from tfexport.commands.flags import BundleDir, Input, OutputFile, Resume
from tfexport.commands.output import content_of, refuse_to_replace, writing
from tfexport.commands.signature import Given, with_options
from tfexport.decoding.request_options import (
    AlignmentOptions,
    BatchOptions,
    FormatOptions,
    PrefixOptions,
    RuntimeOptions,
    ShortlistOptions,
    TermOptions,
)
from tfexport.documents.options import InputDocumentOptions
from tfexport.errors import TfexportError
from tfexport.option import checked
from tfexport.search.options import SearchOptions
from tfexport.system.input_files import opened, require_one_stdin

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tfexport.bundle.reader import Bundle
    from tfexport.decoding.generation_config import GenerationDefaults
    from tfexport.decoding.line_reader import Reader, TargetReader
    from tfexport.decoding.shortlist import Shortlist
    from tfexport.decoding.terminology import Terminology
    from tfexport.decoding.translate import Result, Writer
    from tfexport.decoding.workers import CpuSplit
    from tfexport.runtimes.base import Runtime


@with_options
def decode(
    directory: BundleDir,
    source: Input = None,
    output: OutputFile = None,
    *,
    formats: FormatOptions,
    search: Given[SearchOptions],
    prefixes: PrefixOptions,
    terms: TermOptions,
    shortlist: ShortlistOptions,
    alignments: AlignmentOptions,
    documents: InputDocumentOptions,
    runtime: RuntimeOptions,
    batches: BatchOptions,
    stream: Annotated[
        bool,
        typer.Option("--stream", help="Write each token as soon as it is decided; in jsonl, one event per token."),
    ] = False,
    resume: Resume = False,
) -> None:
    """Decode sentences: always one output line for each input line.

    A line that cannot be decoded (too long, not UTF-8) gives an empty line and a warning; jsonl has its status.
    """
    from tfexport.bundle.watch import watched
    from tfexport.system.processes import return_freed_memory

    request = Request(
        directory, source, formats, search, prefixes, terms, shortlist, alignments, documents, runtime, batches, stream
    )
    read = (prefixes.prefix_file, terms.constraint_file, terms.glossary, shortlist.shortlist, alignments.unk_dictionary)
    refuse_to_replace(output, source, *read, bundle=directory)
    request.check(to_file=output is not None)
    if documents:
        require_documents(
            documents,
            formats=formats,
            search=search,
            prefixes=prefixes,
            terms=terms,
            alignments=alignments,
            stream=stream,
            resume=resume,
        )
    with watched(directory) as watch, contextlib.ExitStack() as files:
        lines = files.enter_context(opened(source))
        prefix_lines, phrase_lines = (
            None if path is None else files.enter_context(opened(path))
            for path in (prefixes.prefix_file, terms.constraint_file)
        )
        # Answer line by line at a terminal.
        job = request.load(window=1 if stream or lines.isatty() else None)
        watch.loaded()
        return_freed_memory(now=True)  # the memory of loading
        # Lines of documents have any number of sentences. Resuming finds the whole windows of sentences by itself.
        with writing(output, job.identity(), resume=resume, window=1 if documents else job.window) as out:
            job.print_notes()
            reader = replace(job.reader, terms=job.terminology(phrase_lines))
            if documents:
                texts = DocumentJob(documents, reader, job.writer, job.model.capacity, job.window)
                texts.write(watch.over(texts.results(lines, partial(job.decode, reader), done=out.done)), out)
                return
            outputs = job.writer.reader(lines=prefix_lines) if prefixes else None
            if stream:
                from tfexport.decoding.stream import shown, stream_lines

                events = stream_lines(
                    job.model, reader, lines, job.options, job.writer, outputs=outputs, shortlist=job.shortlist
                )
                for _ in warned(watch.over(shown(events, job.writer, out.file))):
                    pass
                return
            results = job.decode(reader, lines, out.done, outputs)
            for result in warned(with_progress(watch.over(results), "decoding lines")):
                print(job.writer.line(result), file=out.file, flush=job.window == 1)


@dataclass(frozen=True)
class Request:
    """The request that the flags of `decode` describe."""

    directory: Path
    source: Path | None
    formats: FormatOptions
    search: Given[SearchOptions]
    prefixes: PrefixOptions
    terms: TermOptions
    shortlist: ShortlistOptions
    alignments: AlignmentOptions
    documents: InputDocumentOptions
    runtime: RuntimeOptions
    batches: BatchOptions
    stream: bool

    def check(self, *, to_file: bool) -> None:
        """Check the flags before a bundle is read.

        Raises:
            TfexportError: flags exclude each other, or a flag is out of range.
        """
        from tfexport.decoding.alignments import AlignmentFormat

        if self.alignments.alignments is not None:
            AlignmentFormat.parse(self.alignments.alignments)
        if self.search.get("token_scores") and self.formats.output_format != "jsonl":
            raise TfexportError("--token-scores needs jsonl. Add --output-format jsonl.")
        if self.search.get("profile") == "hf":
            checked(SearchOptions, self.search)  # the full check needs the bundle's defaults
        else:
            self._check_search(self.options(lambda tokens: (0,)))  # placeholder ids: the vocabulary is not known yet
        beside = [path for path in (self.prefixes.prefix_file, self.terms.constraint_file) if path is not None]
        if beside:
            require_one_stdin(self.source, *beside)
        if self.stream and (to_file or self.batches.workers not in (None, 1)):
            raise TfexportError("--stream writes to stdout with one worker. Leave -o and --workers out.")
        if self.stream and self.alignments:
            raise TfexportError("--alignments and --replace-unk need the whole output. Leave --stream out.")
        if self.alignments.replace_unk and self.formats.output_format == "ids":
            raise TfexportError(
                "--replace-unk writes words, which the format ids cannot contain. Give another --output-format."
            )

    def _check_search(self, options: SearchOptions) -> None:
        """Raises TfexportError where other flags do not combine with the search."""
        from tfexport.decoding.stream import refuse_several

        if options.alignment_layer != -1 and not options.reads_attention:
            raise TfexportError("--alignment-layer needs --alignments, --replace-unk or --coverage-penalty. Add one.")
        if self.stream:
            refuse_several(options)

    def _given(self) -> dict[str, Any]:
        # Only jsonl has scores, and outputs with a prefix or phrases need the graph that computes them.
        scores = self.stream or self.formats.output_format == "jsonl" or bool(self.prefixes) or bool(self.terms)
        reads_attention = bool(self.alignments) or self.documents.markup is not None
        return {"scores": scores, "attention": reads_attention, **self.search}

    def options(self, token_ids: Any) -> SearchOptions:
        """The search that the flags describe, with tokens as ids of the vocabulary."""
        return SearchOptions.of(self._given(), token_ids)

    def load(self, window: int | None) -> Job:
        """Open the bundle and load everything that the run needs.

        Args:
            window: the number of lines that are decoded together; None to choose it from the batch size.
        """
        from tfexport.bundle.reader import open_bundle
        from tfexport.decoding.generation_config import options_with_defaults
        from tfexport.decoding.translate import window_size
        from tfexport.decoding.workers import CpuSplit
        from tfexport.runtimes import load_runtime, require_workers, takes_workers
        from tfexport.search.attention_trace import resolve_layer
        from tfexport.search.token_rules import suppressed_ids

        bundle = open_bundle(self.directory)
        name, precision = self.runtime.runtime, self.runtime.number_format
        reader, writer = self._reader_and_writer(bundle)
        options, defaults = options_with_defaults(
            self._given(), bundle.generation_config, bundle.config, writer.token_ids
        )
        self._check_search(options)
        suppressed_ids(bundle.config, options)
        shortlist, terms = self._shortlist(bundle), self._terms(reader, writer, options)
        if options.reads_attention:
            resolve_layer(options.alignment_layer, bundle.config.n_decoder_layers)
        at_once = window is None and takes_workers(name, bundle, precision)
        split = CpuSplit.choose(self.batches.workers, self.batches.threads, at_once=at_once)
        require_workers(name, bundle, precision, split.workers)
        model = load_runtime(
            name,
            bundle,
            precision=precision,
            threads=split.threads,
            share_weights=self.batches.share_weights,
            shortlist=shortlist is not None,
        )
        model.prepare(options.needs)
        size = window or window_size(self.batches.batch_size, split.workers)
        chose_split = at_once and None in (self.batches.workers, self.batches.threads)
        return Job(self, bundle, reader, writer, options, defaults, shortlist, terms, model, split, size, chose_split)

    def _reader_and_writer(self, bundle: Bundle) -> tuple[Reader, Writer]:
        from tfexport.decoding.line_reader import Reader
        from tfexport.decoding.translate import Writer, with_alignments

        reader = Reader.of(bundle, self.formats.input_format)
        reader = replace(reader, tells_tokens=self.documents.markup is not None)
        return with_alignments(self.alignments, reader, Writer.of(bundle, self.formats.output_format))

    def _terms(self, reader: Reader, writer: Writer, options: SearchOptions) -> Terminology | None:
        """The required and forbidden phrases, without the lines of a file of phrases."""
        from tfexport.decoding.glossary import read_glossary
        from tfexport.decoding.terminology import Terminology
        from tfexport.search.search import require_beam

        asked = self.terms
        if not asked:
            return None
        if asked.constraint_file is not None:
            require_beam(options)
        path, case = asked.glossary, asked.glossary_case
        glossary = None if path is None else read_glossary(path, reader.format, case)
        terms = Terminology(writer.reader(), asked.constraint_columns, None, glossary, asked.keep_between)
        return terms.ready(reader.format, options)

    def _shortlist(self, bundle: Bundle) -> Shortlist | None:
        from tfexport.decoding.shortlist import read_shortlist

        if self.shortlist.shortlist is None:
            return None
        source, target = bundle.tokenizer("source"), bundle.tokenizer("target")
        return read_shortlist(self.shortlist.shortlist, bundle.config, source, target, **self.shortlist.numbers)


@dataclass(frozen=True)
class Job:
    """A request with everything that it needs, loaded."""

    request: Request
    bundle: Bundle
    reader: Reader
    writer: Writer
    options: SearchOptions
    defaults: GenerationDefaults
    """The defaults of the options from the bundle."""
    shortlist: Shortlist | None
    terms: Terminology | None
    model: Runtime[Any]
    split: CpuSplit
    window: int
    """The number of lines that are decoded together."""
    chose_split: bool
    """Whether tfexport chose the workers or threads, not the user."""

    def terminology(self, phrase_lines: Iterable[bytes] | None) -> Terminology | None:
        """The required and forbidden phrases.

        Args:
            phrase_lines: the lines of the file with the phrases of each line.
        """
        from tfexport.decoding.terminology import phrases_in

        if self.terms is None or phrase_lines is None:
            return self.terms
        return replace(self.terms, phrases=phrases_in(phrase_lines))

    def decode(
        self, reader: Reader, lines: Iterable[bytes], done: int, outputs: TargetReader | None = None
    ) -> Iterator[Result]:
        """The results of the lines after the first `done` ones; see `translate`."""
        from tfexport.decoding.translate import translate

        return translate(
            self.model,
            reader,
            lines,
            self.options,
            batch_size=self.request.batches.batch_size,
            max_batch_tokens=self.request.batches.max_batch_tokens,
            window=self.window,
            workers=self.split.workers,
            done=done,
            outputs=outputs,
            shortlist=self.shortlist,
        )

    def identity(self) -> dict[str, Any]:
        """Everything that the output depends on: only a run with the same identity continues its file."""
        from tfexport.bundle.reader import MANIFEST, file_sha256

        asked, listed, prefixes = self.request.alignments, self.request.shortlist, self.request.prefixes
        terms = self.request.terms
        return {
            "bundle": file_sha256(self.bundle.directory / MANIFEST),
            "runtime": self.request.runtime.runtime,
            "precision": self.model.precision,
            "search": asdict(self.options),
            "input": [str(self.request.source), self.reader.format],
            "documents": asdict(self.request.documents),
            "prefixes": content_of(prefixes.prefix_file) if prefixes.prefix_file else prefixes.prefix_column,
            "terms": [
                content_of(terms.constraint_file) if terms.constraint_file else terms.constraint_columns,
                *(content_of(terms.glossary), terms.glossary_case, terms.keep_between),
            ],
            "output": [self.writer.format, asked.alignments, asked.replace_unk, content_of(asked.unk_dictionary)],
            "shortlist": [content_of(listed.shortlist), listed.shortlist_first, listed.shortlist_best],
        }

    def print_notes(self) -> None:
        """Print the choices that were made for the user, and what was not checked."""
        from tfexport.decoding.shortlist import SHORTLIST_ADVICE
        from tfexport.verification.certificates import missing, parity_command

        directory, formats = self.request.directory, self.request.formats
        if formats.input_format is None and self.reader.format == "ids":
            say(f"note: {directory} has no source vocabulary: the input is read as ids")
        if formats.output_format is None and self.writer.format == "ids":
            say(f"note: {directory} has no target vocabulary: the output is written as ids")
        for line in self.defaults.notes():
            say(f"note: {line}")
        own = self.model.capabilities.shortlists and not self.options.reads_attention
        if self.shortlist is not None and not own:
            say(f"note: all logits are computed, because there are no graphs for shortlists: {SHORTLIST_ADVICE}")
        if self.chose_split:
            say(f"note: decoding with {self.split}; choose with --workers and --threads")
        if reason := missing(self.bundle, self.model.name, self.model.precision):
            say(f"note: {reason}: {parity_command(directory, self.model.name)}")
