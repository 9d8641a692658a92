"""`tfexport decode`: parse, load, run, write."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tfexport.commands.console import say, warned, with_progress
from tfexport.commands.documents import document_results, require_documents, write_documents
from tfexport.commands.flags import BundleDir, Input, OutputFile, Resume
from tfexport.commands.help import common_options
from tfexport.commands.output import content_of, refuse_to_replace, writing
from tfexport.commands.signature import with_options
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
from tfexport.option import Given
from tfexport.search.options import SearchOptions
from tfexport.system.input_files import opened, require_one_stdin

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tfexport.bundle.reader import Bundle
    from tfexport.decoding.job import Job, Request, Setup
    from tfexport.decoding.shortlist import Shortlist
    from tfexport.decoding.terminology import Terminology


@common_options(
    "-o --beam --nbest --search-profile --split --output-format --runtime --precision --batch-size --threads"
)
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

    flags = Flags(
        directory, source, formats, search, prefixes, terms, shortlist, alignments, documents, runtime, batches, stream
    )
    read = (prefixes.prefix_file, terms.constraint_file, terms.glossary, shortlist.shortlist, alignments.unk_dictionary)
    refuse_to_replace(output, source, *read, bundle=directory)
    flags.check(to_file=output is not None)
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
        job = flags.load(phrase_lines, window=1 if stream or lines.isatty() else None)
        setup = job.setup
        watch.loaded()
        return_freed_memory(now=True)  # the memory of loading
        # Lines of documents have any number of sentences. Resuming finds the whole windows of sentences by itself.
        with writing(output, flags.identity(job), resume=resume, window=1 if documents else job.lines_at_once) as out:
            for note in flags.notes(job):
                say(f"note: {note}")
            if documents:
                write_documents(watch.over(document_results(job, documents, lines, done=out.done)), job, documents, out)
                return
            outputs = setup.writer.reader(lines=prefix_lines) if prefixes else None
            if stream:
                from tfexport.decoding.stream import shown

                events = job.stream(lines, outputs=outputs)
                for _ in warned(watch.over(shown(events, setup.writer, out.file))):
                    pass
                return
            results = job.lines(lines, outputs=outputs, done=out.done)
            for result in warned(with_progress(watch.over(results), "decoding lines")):
                print(setup.writer.line(result), file=out.file, flush=job.window == 1)


@dataclass(frozen=True)
class Flags:
    """The flags of `decode`."""

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
        if self.search.get("profile") != "hf":  # the full check of hf needs the bundle's defaults
            self._check_search(
                SearchOptions.of(self._search, lambda tokens: (0,))
            )  # ids: the vocabulary is not known yet
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

        if options.alignment_layer != -1 and not (options.reads_attention or self._moves_tags or self.alignments):
            raise TfexportError("--alignment-layer needs --alignments, --replace-unk or --coverage-penalty. Add one.")
        if self.stream:
            refuse_several(options)

    @property
    def _search(self) -> Given[SearchOptions]:
        # Text has no scores, and greedy search without them can be much faster.
        return Given({"scores": self.stream or self.formats.output_format == "jsonl"}) | self.search

    @property
    def _moves_tags(self) -> bool:
        return self.documents.markup is not None

    @property
    def request(self) -> Request:
        """The flags as the request of a job."""
        from tfexport.decoding.job import Request

        return Request(
            search=self._search,
            input_format=self.formats.input_format,
            output_format=self.formats.output_format,
            alignments=self.alignments,
            moves_tags=self._moves_tags,
            has_requirements=bool(self.prefixes) or bool(self.terms),
        )

    def load(self, phrase_lines: Iterable[bytes] | None, window: int | None) -> Job:
        """Open the bundle and load everything that the run needs.

        Args:
            phrase_lines: the lines of the file with the phrases of each line.
            window: the number of lines that are decoded together; None to choose it from the batch size.
        """
        from tfexport.bundle.reader import open_bundle
        from tfexport.decoding.job import Job, Setup

        setup = Setup.of(open_bundle(self.directory), self.request)
        self._check_search(setup.search)
        setup = replace(setup, shortlist=self._shortlist(setup.bundle))
        return Job.load(setup.with_terms(self._terms(setup, phrase_lines)), self.runtime, self.batches, window=window)

    def _terms(self, setup: Setup, phrase_lines: Iterable[bytes] | None) -> Terminology | None:
        """The required and forbidden phrases."""
        from tfexport.decoding.glossary import read_glossary
        from tfexport.decoding.terminology import Terminology, phrases_in

        if not self.terms:
            return None
        path, case = self.terms.glossary, self.terms.glossary_case
        terms = Terminology(
            setup.writer.reader(),
            columns=self.terms.constraint_columns,
            phrases=None if phrase_lines is None else phrases_in(phrase_lines),
            glossary=None if path is None else read_glossary(path, setup.reader.format, case),
            keep=self.terms.keep_between,
        )
        terms.require_readable()  # before the runtime, which takes longer to load
        return terms

    def _shortlist(self, bundle: Bundle) -> Shortlist | None:
        from tfexport.decoding.shortlist import read_shortlist

        if self.shortlist.shortlist is None:
            return None
        source, target = bundle.tokenizer("source"), bundle.tokenizer("target")
        return read_shortlist(self.shortlist.shortlist, bundle.config, source, target, **self.shortlist.numbers)

    def identity(self, job: Job) -> dict[str, Any]:
        """Everything that the output depends on: only a run with the same identity continues its file."""
        from tfexport.bundle.reader import MANIFEST, file_sha256

        setup, words, listed, terms = job.setup, self.alignments, self.shortlist, self.terms
        return {
            "bundle": file_sha256(setup.bundle.directory / MANIFEST),
            "runtime": self.runtime.runtime,
            "precision": job.runtime.precision,
            "search": asdict(setup.search),
            "input": [str(self.source), setup.reader.format],
            "documents": asdict(self.documents),
            "prefixes": content_of(self.prefixes.prefix_file) or self.prefixes.prefix_column,
            "terms": [
                content_of(terms.constraint_file) or terms.constraint_columns,
                *(content_of(terms.glossary), terms.glossary_case, terms.keep_between),
            ],
            "output": [setup.writer.format, words.alignments, words.replace_unk, content_of(words.unk_dictionary)],
            "shortlist": [content_of(listed.shortlist), listed.shortlist_first, listed.shortlist_best],
        }

    def notes(self, job: Job) -> Iterator[str]:
        """The choices that were made for the user, and what was not checked."""
        from tfexport.decoding.shortlist import SHORTLIST_ADVICE
        from tfexport.verification.certificates import missing, parity_command

        setup, runtime = job.setup, job.runtime
        if self.formats.input_format is None and setup.reader.format == "ids":
            yield f"{self.directory} has no source vocabulary: the input is read as ids"
        if self.formats.output_format is None and setup.writer.format == "ids":
            yield f"{self.directory} has no target vocabulary: the output is written as ids"
        yield from setup.defaults.notes()
        has_graphs = runtime.capabilities.shortlists and not setup.search.reads_attention
        if setup.shortlist is not None and not has_graphs:
            yield f"all logits are computed, because there are no graphs for shortlists: {SHORTLIST_ADVICE}"
        if job.split is not None:
            yield f"decoding with {job.split}; choose with --workers and --threads"
        if reason := missing(setup.bundle, runtime.name, runtime.precision):
            yield f"{reason}: {parity_command(self.directory, runtime.name)}"
