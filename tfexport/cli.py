"""The command line: parse, call, print. Heavy modules are imported by the command that needs them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from tfexport.commands.attend import attend
from tfexport.commands.bench import bench
from tfexport.commands.classify import classify
from tfexport.commands.console import (
    opened,
    print_engine,
    print_export,
    print_inspection,
    print_parity,
    print_plan,
    print_repository,
    say,
    working,
)
from tfexport.commands.decode import decode
from tfexport.commands.flags import (
    ActivationOption,
    AsJson,
    BatchSize,
    BosId,
    BundleDir,
    CacheSizes,
    Checkpoint,
    ConfigOption,
    EmbeddingScale,
    EosId,
    FamilyOption,
    GpuMemory,
    Gpus,
    Heads,
    InputFormatOption,
    LibraryOption,
    Lowercase,
    MaxBatch,
    MaxBeam,
    MaxLength,
    MaxSource,
    NormFirst,
    OutputLayer,
    PadId,
    PlanFor,
    Positions,
    PrecisionOption,
    ServedBeam,
    ServedBy,
    SourceCodes,
    SourceLanguage,
    SourceMaxLength,
    SourcePrefix,
    SourceTokenizer,
    SourceVocabulary,
    SrcEmbedding,
    TargetCodes,
    TargetLanguage,
    TargetVocabulary,
    TgtEmbedding,
    UnkId,
    automatic_of,
    choosers_of,
    engine_request,
    family_of,
    hints_of,
    scale_of,
)
from tfexport.commands.parity import parity
from tfexport.commands.probe import probe
from tfexport.commands.score import score
from tfexport.commands.train import train
from tfexport.commands.version import version
from tfexport.contract import precisions_of
from tfexport.system.json_text import json_text

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Export trained PyTorch Transformers to ONNX and decode them, token for token as PyTorch would.",
    epilog="Exit codes: 0 done, 1 parity failed, 2 wrong use or input, 3 a fault of tfexport itself, 130 interrupted, "
    "143 ended by SIGTERM.",
)


@app.callback()
def options(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    """Stands for its options; `main` reads --debug wherever it is given."""


@app.command()
def inspect(
    checkpoint: Checkpoint,
    family: FamilyOption = None,
    config: ConfigOption = None,
    heads: Heads = None,
    norm_first: NormFirst = None,
    activation: ActivationOption = None,
    embedding_scale: EmbeddingScale = None,
    src_embedding: SrcEmbedding = None,
    tgt_embedding: TgtEmbedding = None,
    output_layer: OutputLayer = None,
    positions: Positions = None,
    as_json: AsJson = False,
) -> None:
    """Tell what a checkpoint is: its family, its sizes, and what is missing to export it."""
    from tfexport.models.checkpoints.load import inspect_checkpoint

    hints = hints_of(
        checkpoint,
        config,
        n_heads=heads,
        norm_first=norm_first,
        activation=activation,
        embedding_scale=scale_of(embedding_scale),
        src_embedding=src_embedding,
        tgt_embedding=tgt_embedding,
        output_layer=output_layer,
        positions=positions,
    )
    inspection = inspect_checkpoint(checkpoint, hints, family=family_of(family))
    if as_json:
        print(json_text({**vars(inspection), "path": str(inspection.path)}, indent=1))
    else:
        print_inspection(inspection)


@app.command()
def export(
    checkpoint: Checkpoint,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Bundle folder; by default CKPT's name.")
    ] = None,
    family: FamilyOption = None,
    config: ConfigOption = None,
    heads: Heads = None,
    norm_first: NormFirst = None,
    activation: ActivationOption = None,
    embedding_scale: EmbeddingScale = None,
    src_embedding: SrcEmbedding = None,
    tgt_embedding: TgtEmbedding = None,
    output_layer: OutputLayer = None,
    positions: Positions = None,
    src_vocab: SourceVocabulary = None,
    tgt_vocab: TargetVocabulary = None,
    src_tokenizer: SourceTokenizer = "whitespace",
    lowercase: Lowercase = False,
    src_bpe: SourceCodes = None,
    tgt_bpe: TargetCodes = None,
    unk: UnkId = None,
    pad: PadId = None,
    bos: BosId = None,
    eos: EosId = None,
    src_lang: SourceLanguage = None,
    tgt_lang: TargetLanguage = None,
    prefix: SourcePrefix = "",
    max_length: SourceMaxLength = None,
    shortlist: Annotated[
        bool, typer.Option("--shortlist", help="With graphs that compute the logits of a shortlist alone: fp32, int8.")
    ] = False,
    target: Annotated[
        Literal["onnx", "tensorrt", "triton"],
        typer.Option(help="tensorrt: with engines; triton: beside the bundle a model repository, DIR.triton."),
    ] = "onnx",
    precision: Annotated[
        str | None,
        typer.Option(
            help="Of graphs and engines: fp32, fp16, bf16, int8, int4, or several, as in fp32,int8. With auto- before fp16, "
            "int8 or int4, what --budget needs stays in fp32."
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC=N",
            help="What auto- may lose: bleu=POINTS, chrf=POINTS, or top1=SHARE, identical=SHARE to be the same.",
        ),
    ] = None,
    budget_input: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Source text that the budget is held on, a sentence a line.")
    ] = None,
    budget_targets: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A translation of each of its lines, for bleu and chrf.")
    ] = None,
    alignments: Annotated[
        bool,
        typer.Option("--alignments", help="Add graphs that tell what outputs attend to: decode --alignments, attend."),
    ] = False,
    gpu: Gpus = None,
    library: LibraryOption = "auto",
    max_batch: MaxBatch = 32,
    max_beam: MaxBeam = 4,
    max_source: MaxSource = None,
    cache: CacheSizes = None,
    gpu_memory: GpuMemory = None,
    runtime: ServedBy = "ort-cpu",
    beam: ServedBeam = 1,
    parity: Annotated[
        bool,
        typer.Option(
            "--parity/--no-parity",
            help="Compute every value and decode a few sentences as PyTorch does, or export nothing.",
        ),
    ] = True,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Largest absolute difference that --parity accepts; by default what follows from rounding."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing bundle.")] = False,
) -> None:
    """Export a checkpoint to a bundle: ONNX graphs, weights, tokenizers and a manifest, checked against PyTorch."""
    from tfexport.bundle.writer import refuse_to_overwrite
    from tfexport.commands.targets import EnginesTarget, GraphsTarget, TritonTarget, telling_of_lost_engines
    from tfexport.commands.text_settings import TextSettings
    from tfexport.exporter.pipeline import export as run_export
    from tfexport.verification.parity import gate

    hints = hints_of(
        checkpoint,
        config,
        n_heads=heads,
        unk_id=unk,
        pad_id=pad,
        bos_id=bos,
        eos_id=eos,
        norm_first=norm_first,
        activation=activation,
        embedding_scale=scale_of(embedding_scale),
        src_embedding=src_embedding,
        tgt_embedding=tgt_embedding,
        output_layer=output_layer,
        positions=positions,
        max_source_length=max_length,
        max_target_length=max_length,
    )
    text = TextSettings(src_vocab, tgt_vocab, src_tokenizer, lowercase, src_bpe, tgt_bpe, src_lang, tgt_lang, prefix)
    loaded = text.load(checkpoint, hints, family_of(family))
    directory = output or checkpoint.with_suffix("")
    if directory == checkpoint or (output is None and checkpoint.is_dir()):
        directory = checkpoint.with_name(f"{checkpoint.name}.bundle")
    precision, automatic = automatic_of(precision or ("fp16" if target == "tensorrt" else "fp32"))
    wanted = GraphsTarget(precisions_of(precision))
    if target == "tensorrt":
        request = engine_request(
            precision,
            gpu,
            library,
            max_batch=max_batch,
            max_beam=max_beam,
            max_source=max_source,
            cache=cache,
            gpu_memory=gpu_memory,
        )
        wanted = EnginesTarget(request.precisions, request)
    elif target == "triton":
        wanted = TritonTarget(wanted.precisions, directory, runtime, beam, force)
    wanted.check(loaded.config)
    refuse_to_overwrite(directory.resolve(), force)  # before a budget's text is decoded
    choosers = choosers_of(loaded, automatic, budget, budget_input, budget_targets)
    with telling_of_lost_engines(directory):
        with working(f"exporting {checkpoint}"):
            verify = partial(gate, tolerance=tolerance) if parity else None
            exported = run_export(
                loaded,
                directory,
                precisions=wanted.precisions,
                choosers=choosers,
                alignments=alignments,
                force=force,
                check=parity,
                tolerance=tolerance,
                verify=verify,
                shortlist=shortlist,
            )
        print_export(loaded, exported)
        wanted.write(directory)
    print(
        f"next: tfexport classify {directory} INPUT"
        if loaded.config.is_classifier
        else f"next: tfexport parity {directory} INPUT; tfexport decode {directory} INPUT"
    )


@app.command()
def build(
    directory: BundleDir,
    precision: Annotated[str, typer.Option(help="fp32, fp16, bf16, or several, as in fp16,bf16.")] = "fp16",
    gpu: Gpus = None,
    library: LibraryOption = "auto",
    max_batch: MaxBatch = 32,
    max_beam: MaxBeam = 4,
    max_source: MaxSource = None,
    cache: CacheSizes = None,
    plan_for: PlanFor = None,
    input_format: InputFormatOption = None,
    gpu_memory: GpuMemory = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what it would cost, and build nothing.")] = False,
) -> None:
    """Build TensorRT engines into a bundle: on this GPU, or ahead of time for others. PyTorch is not needed."""
    from tfexport.bundle.reader import open_bundle
    from tfexport.decoding.line_reader import Reader, source_lengths
    from tfexport.exporter.engine_plan import LengthPlan

    bundle = open_bundle(directory)
    request = engine_request(
        precision,
        gpu,
        library,
        max_batch=max_batch,
        max_beam=max_beam,
        max_source=max_source,
        cache=cache,
        gpu_memory=gpu_memory,
        plan_for=plan_for,
    )
    bundle.graph("decoder_step")  # a classifier has none
    if plan_for is not None:
        with opened(plan_for) as lines:
            lengths = source_lengths(Reader.of(bundle, input_format), lines)
        request = replace(request, plan=LengthPlan.for_lengths(lengths, max_batch=max_batch, max_beam=max_beam))
    for cost in request.costs(bundle.config, say):
        print_plan(cost)
    if not dry_run:
        request.build(directory, print_engine)
        print(f"next: tfexport decode {directory} INPUT --runtime tensorrt, on such a GPU")


@app.command()
def triton(
    directory: BundleDir,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Repository folder; by default DIR.triton.")
    ] = None,
    runtime: ServedBy = "ort-cpu",
    precision: PrecisionOption = None,
    beam: ServedBeam = 1,
    max_length: MaxLength = 256,
    batch_size: BatchSize = 32,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing repository.")] = False,
) -> None:
    """Write a bundle as a model repository of Triton Inference Server. PyTorch is not needed.

    The precision is fp32 by default, with --runtime tensorrt that of the bundle's engines.
    """
    from tfexport.bundle.reader import open_bundle
    from tfexport.serving.triton import beside, served_precision, write_repository

    bundle = open_bundle(directory)
    served = precisions_of(precision)[0] if precision else served_precision(bundle, runtime)
    written = write_repository(
        bundle,
        output or beside(directory),
        runtime=runtime,
        precision=served,
        beam=beam,
        max_length=max_length,
        batch_size=batch_size,
        force=force,
    )
    print_repository(written, served)
    print(f"next: tritonserver --model-repository={written.directory}")


app.command()(decode)
app.command()(score)
app.command()(attend)
app.command()(classify)
app.command()(parity)
app.command()(probe)
app.command()(bench)
app.command()(train)


@app.command()
def demo() -> None:
    """Export the embedded German-English model, check its parity and decode a few sentences."""
    from tfexport.commands.demo import run

    with working("exporting, comparing and decoding"):
        report, translations = run(say)
    print_parity(report)
    for german, english in translations:
        print(f"  {german}\n    {english}")
    if not report.passed:
        raise typer.Exit(1)


app.command()(version)
