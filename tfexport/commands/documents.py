"""`tfexport decode` of texts with many sentences per line, with columns, or with markup."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfexport.commands.console import say, warned, with_progress
from tfexport.errors import TfexportError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tfexport.bundle.watch import Watch
    from tfexport.commands.decode import Job, Request
    from tfexport.commands.output import Output
    from tfexport.decoding.translate import Result
    from tfexport.system.input_files import Lines


def require_documents(request: Request, *, resume: bool) -> None:
    """Raises TfexportError where a flag has no meaning for a text of many sentences."""
    flags, asked = _flags(request), request.documents
    if request.prefixes:
        raise TfexportError(f"a prefix is that of one sentence, and {flags} splits lines. Leave one of them out.")
    if request.stream:
        raise TfexportError(f"--stream writes the tokens of one sentence per line. Leave it or {flags} out.")
    for name, format in (("input", request.formats.input_format), ("output", request.formats.output_format)):
        if format in ("tokens", "ids"):
            raise TfexportError(f"{flags} reads and writes text. Leave --{name}-format {format} out.")
    if resume and asked.is_whole:
        raise TfexportError(
            "--resume goes on after whole lines, and with --markup the input is one document. Leave it out."
        )
    if request.formats.output_format == "jsonl":
        return
    if request.alignments.alignments is not None:
        raise TfexportError(f"with {flags} an alignment is that of a sentence. Add --output-format jsonl.")
    several = [name for name in ("nbest", "samples") if int(request.search.get(name) or 1) > 1]
    several += ["alternatives"] * bool(request.search.get("alternatives"))
    if several:
        raise TfexportError(
            f"with {flags} a line is put together from the best output of each sentence, and --{several[0]} gives others. "
            "Add --output-format jsonl, which has those of each sentence."
        )


def _flags(request: Request) -> str:
    asked = request.documents
    given = {"--split": asked.split, "--markup": asked.markup, "--column": asked.column}
    return next(name for name, value in given.items() if value is not None)


def decode_documents(job: Job, lines: Lines, out: Output, watch: Watch) -> None:
    """Decode the input of a job unit by unit, and write these.

    Raises:
        TfexportError: the bundle has no vocabularies, or the input cannot be read.
    """
    from tfexport.decoding.document_input import units_of
    from tfexport.decoding.documents import DocumentMaker, document_record, translate_units
    from tfexport.decoding.translate import translate
    from tfexport.system.json_text import json_text

    asked, batches = job.request.documents, job.request.batches
    if job.reader.format != "text" or job.writer.tokenizer is None:
        raise TfexportError(
            f"{_flags(job.request)} needs vocabularies for text. Export again with --src-vocab and --tgt-vocab."
        )
    maker = DocumentMaker.of(job.reader, job.model.capacity, asked)
    if asked.parts == "sentences" and maker.language is None:
        say("note: sentences are split by the rules of English; --language CODE says another language")

    def decode(sentences: Iterable[bytes], done: int) -> Iterator[Result]:
        return translate(
            job.model,
            job.reader,
            sentences,
            job.options,
            batch_size=batches.batch_size,
            max_batch_tokens=batches.max_batch_tokens,
            window=job.window,
            workers=job.split.workers,
            done=done,
            shortlist=job.shortlist,
        )

    units = units_of(lines, maker, asked.column, is_whole=asked.is_whole)
    is_aligned = asked.markup is not None
    found = translate_units(units, decode, job.writer, window=job.window, done=out.done, is_aligned=is_aligned)
    for one in warned(with_progress(watch.over(found), "decoding lines")):
        if job.writer.format == "jsonl":
            print(json_text(document_record(one, job.writer), ensure_ascii=False), file=out.file, flush=job.window == 1)
        else:
            print(one.text, file=out.file, end="" if asked.is_whole else "\n", flush=job.window == 1)
