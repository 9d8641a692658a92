"""`tfexport decode`."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from tfexport.commands.console import opened, require_one_stdin, say, warned, with_progress
from tfexport.commands.flags import (
    BatchSize,
    BundleDir,
    Input,
    InputFormatOption,
    MaxLength,
    OutputFile,
    PrecisionOption,
    Resume,
    RuntimeOption,
    Threads,
    Workers,
)
from tfexport.commands.output import content_of, refuse_to_replace, writing
from tfexport.contract import precisions_of
from tfexport.errors import TfexportError


def decode(
    directory: BundleDir,
    source: Input = None,
    output: OutputFile = None,
    runtime: RuntimeOption = "ort-cpu",
    precision: PrecisionOption = None,
    beam: Annotated[int, typer.Option(min=1, help="Beam width; 1 is greedy.")] = 1,
    nbest: Annotated[int, typer.Option(min=1, help="Hypotheses a line, best first, separated by tabs.")] = 1,
    search_profile: Annotated[
        Literal["tfexport", "hf", "opennmt", "fairseq", "marian", "joeynmt"],
        typer.Option(help="Search as this toolkit does: length penalty, early stopping, limits, defaults."),
    ] = "tfexport",
    early_stopping: Annotated[
        Literal["false", "true", "never"], typer.Option(help="As Transformers has it, for --search-profile hf.")
    ] = "false",
    force_eos: Annotated[
        bool,
        typer.Option("--force-eos", help="End with eos at the length limit, at no cost, for --search-profile hf."),
    ] = False,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            help="Exponent A of ((5 + length) / 6) ** A, by default 0.6; of length ** A in hf, opennmt, fairseq, marian."
        ),
    ] = None,
    min_length: Annotated[int | None, typer.Option(min=0, help="Fewest tokens before eos.")] = None,
    max_length: MaxLength = 256,
    max_length_ratio: Annotated[float | None, typer.Option(help="Most tokens for each source id.")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 makes tokens that came before less likely.")] = 1.0,
    no_repeat_ngram: Annotated[int, typer.Option(min=0, help="No N tokens come twice in an output; 0 for any.")] = 0,
    suppress: Annotated[
        str, typer.Option(metavar="TOKENS", help="Tokens never to write, separated by spaces (ids with ids output).")
    ] = "",
    suppress_first: Annotated[str, typer.Option(metavar="TOKENS", help="Tokens that no output begins with.")] = "",
    prefix_column: Annotated[
        bool, typer.Option("--prefix-column", help="What follows a tab in an input line, the output begins with.")
    ] = False,
    prefix_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What each output begins with, a line for each input line.")
    ] = None,
    alternatives: Annotated[
        int,
        typer.Option(
            min=0, help="Outputs for the N most likely tokens after the prefix, most likely first, separated by tabs."
        ),
    ] = 0,
    min_alternative_prob: Annotated[
        float, typer.Option(help="Of --alternatives: the least probability of such a token.")
    ] = 0.0,
    shortlist: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Words that outputs may have: a vmap, a lexicon (lex.s2t), or a word a line."
        ),
    ] = None,
    shortlist_first: Annotated[
        int | None,
        typer.Option(min=0, help="Of a lexicon: the N most frequent target words always may come; 100 by default."),
    ] = None,
    shortlist_best: Annotated[
        int | None,
        typer.Option(min=1, help="Of a lexicon: the N most probable words of each source word; 100 by default."),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=0, help="Draw so many outputs a line at random, separated by tabs, instead of a search.")
    ] = 0,
    temperature: Annotated[float, typer.Option(help="Of --samples: what logits are divided by.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Of --samples: draw among the K best tokens; 0 for all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Of --samples: draw among the fewest best tokens with probability P together.")
    ] = 1.0,
    seed: Annotated[
        int, typer.Option(min=0, help="Of --samples: with it and a line's number the same tokens are drawn again.")
    ] = 0,
    token_scores: Annotated[
        bool, typer.Option("--token-scores", help="The log-probability of each token, in jsonl.")
    ] = False,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream", help="Write each token as soon as it is decided, line by line; in jsonl an event each."
        ),
    ] = False,
    alignments: Annotated[
        str | None,
        typer.Option(
            metavar="hard|soft|THRESHOLD",
            help="Tell what output tokens attend to: '||| 0-0 1-2' after each output, all numbers in jsonl.",
        ),
    ] = None,
    alignment_layer: Annotated[
        int, typer.Option(help="Decoder layer whose attention that is, from 0; -1 is the last. The mean of its heads.")
    ] = -1,
    replace_unk: Annotated[
        bool, typer.Option("--replace-unk", help="Write the source token with most attention for unknown tokens.")
    ] = False,
    unk_dictionary: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of --replace-unk: lines of a source word, a tab, what to write."),
    ] = None,
    coverage_penalty: Annotated[
        float, typer.Option(metavar="BETA", help="Take from scores where parts of the source are passed over; say 0.2.")
    ] = 0.0,
    batch_size: BatchSize = 32,
    input_format: InputFormatOption = None,
    output_format: Annotated[
        Literal["text", "tokens", "ids", "jsonl"] | None,
        typer.Option(help="text by default; ids have no bos, and eos when it came; jsonl has status and scores."),
    ] = None,
    workers: Workers = None,
    threads: Threads = None,
    share_weights: Annotated[
        bool,
        typer.Option(
            "--share-weights",
            help="Have packed weights in memory once with other such commands; they are kept in ~/.cache/tfexport.",
        ),
    ] = False,
    resume: Resume = False,
) -> None:
    """Decode sentences: one output line for each input line, always.

    A line that cannot be decoded (too long, not UTF-8) gives an empty line, a warning, and its status in jsonl.
    """
    from tfexport.bundle.reader import MANIFEST, file_sha256, open_bundle
    from tfexport.bundle.watch import watched
    from tfexport.decoding.alignments import Aligner, AlignmentFormat, Replacement
    from tfexport.decoding.attention_trace import resolve_layer
    from tfexport.decoding.line_reader import Reader
    from tfexport.decoding.search import SearchOptions
    from tfexport.decoding.shortlist import SHORTLIST_ADVICE, read_shortlist
    from tfexport.decoding.stream import refuse_several, shown, stream_lines
    from tfexport.decoding.token_rules import suppressed_ids
    from tfexport.decoding.translate import Writer, translate, window_size
    from tfexport.decoding.workers import CpuSplit
    from tfexport.runtimes import load_runtime, require_workers, takes_workers
    from tfexport.system.processes import return_freed_memory
    from tfexport.verification.certificates import missing

    if prefix_column and prefix_file is not None:
        raise TfexportError("--prefix-column and --prefix-file both say what outputs begin with. Give one of them.")
    if shortlist is None and not shortlist_first is shortlist_best is None:
        raise TfexportError("--shortlist-first and --shortlist-best are of a --shortlist. Give one, or leave them out.")
    refuse_to_replace(output, source, prefix_file, shortlist, unk_dictionary)
    if prefix_file is not None:
        require_one_stdin(source, prefix_file)
    if token_scores and output_format != "jsonl":
        raise TfexportError("--token-scores are written in jsonl alone. Add --output-format jsonl.")

    if stream and (output is not None or workers not in (None, 1)):
        raise TfexportError("--stream writes to stdout, by one worker. Leave -o and --workers out.")
    if stream and (alignments is not None or replace_unk):
        raise TfexportError("--alignments and --replace-unk are known when an output ends. Leave --stream out.")
    if unk_dictionary is not None and not replace_unk:
        raise TfexportError("--unk-dictionary says what replaces unknown tokens. Add --replace-unk.")
    if replace_unk and output_format == "ids":
        raise TfexportError("--replace-unk writes words, which ids have no place for. Give another --output-format.")
    if alignment_layer != -1 and not (alignments is not None or replace_unk or coverage_penalty):
        raise TfexportError("--alignment-layer is of --alignments, --replace-unk and --coverage-penalty. Add one.")
    aligned = AlignmentFormat.parse(alignments) if alignments is not None else None

    def search_options(suppressed: tuple[int, ...] = (), suppressed_first: tuple[int, ...] = ()) -> SearchOptions:
        return SearchOptions.for_profile(
            search_profile,
            beam=beam,
            nbest=nbest,
            early_stopping=early_stopping,
            force_eos=force_eos,
            length_penalty=length_penalty,
            min_length=min_length,
            max_length=max_length,
            max_length_ratio=max_length_ratio,
            repetition_penalty=repetition_penalty,
            no_repeat_ngram=no_repeat_ngram,
            suppress=suppressed,
            suppress_first=suppressed_first,
            alternatives=alternatives,
            min_alternative_prob=min_alternative_prob,
            samples=samples,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            # Nothing but jsonl tells them; what begins with a prefix needs their graph.
            scores=stream or output_format == "jsonl" or prefix_column or prefix_file is not None,
            token_scores=token_scores,
            attention=bool(aligned or replace_unk),
            alignment_layer=alignment_layer,
            coverage_penalty=coverage_penalty,
        )

    asked = search_options()  # what is wrong with them is told before a bundle is read
    if stream:
        refuse_several(asked)
    with watched(directory) as watch:
        bundle = open_bundle(directory)
        chosen = precisions_of(precision)[0] if precision else None
        reader, writer = Reader.of(bundle, input_format), Writer.of(bundle, output_format)
        options = search_options(writer.token_ids(suppress), writer.token_ids(suppress_first))
        suppressed_ids(bundle.config, options)
        listed = None
        if shortlist is not None:
            listed = read_shortlist(
                shortlist,
                bundle.config,
                bundle.tokenizer("source"),
                bundle.tokenizer("target"),
                **{
                    name: given
                    for name, given in (("first", shortlist_first), ("best", shortlist_best))
                    if given is not None
                },
            )
        if options.tells_attention:
            resolve_layer(alignment_layer, bundle.config.n_decoder_layers)
        if aligned or replace_unk:
            replacement = Replacement.of(bundle.config, unk_dictionary) if replace_unk else None
            reader = replace(reader, tells_tokens=True)
            writer = replace(writer, aligner=Aligner(bundle.config.eos_id, aligned, replacement))
        if replace_unk and writer.tokenizer is None:
            raise TfexportError(f"{directory} has no target vocabulary to write words in. Leave --replace-unk out.")
        if input_format is None and reader.format == "ids":
            say(f"note: {directory} has no source vocabulary: the input is read as ids")
        if output_format is None and writer.format == "ids":
            say(f"note: {directory} has no target vocabulary: the output is written as ids")
        with contextlib.ExitStack() as files:
            lines = files.enter_context(opened(source))
            outputs = writer.reader() if prefix_column else None
            if prefix_file is not None:
                outputs = writer.reader(lines=files.enter_context(opened(prefix_file)))
            window = 1 if stream or lines.isatty() else None  # a person at a terminal is answered line by line
            at_once = window is None and takes_workers(runtime, bundle, chosen)
            split = CpuSplit.choose(workers, threads, at_once=at_once)
            require_workers(runtime, bundle, chosen, split.workers)
            model = load_runtime(
                runtime,
                bundle,
                precision=chosen,
                threads=split.threads,
                share_weights=share_weights,
                shortlist=listed is not None,
            )
            if listed is not None and (options.tells_attention or not model.capabilities.shortlists):
                say(f"note: all logits are computed, for want of graphs for shortlists: {SHORTLIST_ADVICE}")
            model.prepare(options.needs)
            about = {
                "bundle": file_sha256(directory / MANIFEST),
                "runtime": runtime,
                "precision": model.precision,
                "search": asdict(options),
                "input": [str(source), reader.format],
                "prefixes": content_of(prefix_file) if prefix_file else prefix_column,
                "output": [writer.format, alignments, replace_unk, content_of(unk_dictionary)],
                "shortlist": [content_of(shortlist), shortlist_first, shortlist_best],
            }
            watch.loaded()
            return_freed_memory(now=True)  # what loading needed
            size = window or window_size(batch_size, split.workers)
            with writing(output, about, resume=resume, window=size) as out:
                if at_once and (workers is None or threads is None):
                    say(f"note: decoding with {split}; choose with --workers and --threads")
                if reason := missing(bundle, model.name, model.precision):
                    say(f"note: {reason}: tfexport parity {directory} INPUT")
                if stream:
                    events = stream_lines(model, reader, lines, options, writer, outputs=outputs, shortlist=listed)
                    for _ in warned(watch.over(shown(events, writer, out.file))):
                        pass
                    return
                results = translate(
                    model,
                    reader,
                    lines,
                    options,
                    batch_size=batch_size,
                    window=size,
                    workers=split.workers,
                    done=out.done,
                    outputs=outputs,
                    shortlist=listed,
                )
                for result in warned(with_progress(watch.over(results), "decoding lines")):
                    print(writer.line(result), file=out.file, flush=window == 1)
