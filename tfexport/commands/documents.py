"""`tfexport decode` of texts with many sentences per line, with columns, or with markup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfexport.commands.console import say, warned, with_progress
from tfexport.errors import TfexportError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tfexport.commands.output import OpenOutput
    from tfexport.decoding.documents import DocumentResult
    from tfexport.decoding.job import Job
    from tfexport.decoding.request_options import AlignmentOptions, FormatOptions, PrefixOptions, TermOptions
    from tfexport.documents.options import InputDocumentOptions
    from tfexport.system.input_files import Lines


def require_documents(
    asked: InputDocumentOptions,
    *,
    formats: FormatOptions,
    search: Mapping[str, Any],
    prefixes: PrefixOptions,
    terms: TermOptions,
    alignments: AlignmentOptions,
    stream: bool,
    resume: bool,
) -> None:
    """Raises TfexportError where a flag cannot be used for a text of many sentences."""
    flag = _flag(asked)
    if prefixes:
        raise TfexportError(f"a prefix is for one sentence, and {flag} splits lines. Leave one of them out.")
    if terms.constraint_columns or terms.constraint_file is not None:
        raise TfexportError(f"phrases of a line are for one sentence, and {flag} splits lines. Give a --glossary.")
    if stream:
        raise TfexportError(f"--stream writes the tokens of one sentence per line. Leave it or {flag} out.")
    for name, format in (("input", formats.input_format), ("output", formats.output_format)):
        if format in ("tokens", "ids"):
            raise TfexportError(f"{flag} reads and writes text. Leave --{name}-format {format} out.")
    if resume and asked.is_whole:
        raise TfexportError(
            "with --markup the input is one document, and --resume continues after lines. Leave it out."
        )
    if formats.output_format == "jsonl":
        return
    if alignments.alignments is not None:
        raise TfexportError(f"with {flag} each sentence has its own alignment. Add --output-format jsonl.")
    several = [name for name in ("nbest", "samples") if int(search.get(name) or 1) > 1]
    several += ["alternatives"] * bool(search.get("alternatives"))
    if several:
        raise TfexportError(
            f"with {flag} a line is joined from the best output of each sentence, and --{several[0]} returns further "
            "outputs. Add --output-format jsonl, which has all outputs of each sentence."
        )


def _flag(asked: InputDocumentOptions) -> str:
    values = {"--split": asked.split, "--markup": asked.markup, "--column": asked.column}
    return next(name for name, value in values.items() if value is not None)


def document_results(job: Job, options: InputDocumentOptions, lines: Lines, *, done: int) -> Iterator[DocumentResult]:
    """The results of the units of an input after the first `done` ones.

    Raises:
        TfexportError: the bundle has no vocabularies, or the input cannot be read.
    """
    from tfexport.decoding.document_input import units_of

    if job.setup.reader.format != "text" or job.setup.writer.tokenizer is None:
        raise TfexportError(
            f"{_flag(options)} needs vocabularies, which read and write text. Export again with --src-vocab."
        )
    maker = job.document_maker(options)
    if options.parts == "sentences" and maker.language is None:
        say("note: sentences are split by the rules of English; give another language with --language CODE")
    units = units_of(lines, maker, options.column, is_whole=options.is_whole)
    return job.documents(units, moves_tags=options.markup is not None, done=done)


def write_documents(
    results: Iterable[DocumentResult], job: Job, options: InputDocumentOptions, out: OpenOutput
) -> None:
    """Write each unit, with a newline if it is a line."""
    from tfexport.decoding.documents import document_record
    from tfexport.system.json_text import json_text

    writer = job.setup.writer
    for result in warned(with_progress(results, "decoding lines")):
        text, end = result.text, "" if options.is_whole else "\n"
        if writer.format == "jsonl":
            text, end = json_text(document_record(result, writer), ensure_ascii=False), "\n"
        print(text, file=out.file, end=end, flush=job.window == 1)
