"""The flags that commands share, and what they mean."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tfexport.commands.console import opened, say
from tfexport.contract import precisions_of
from tfexport.errors import RuntimeUnavailable, TfexportError, TokenizerError

if TYPE_CHECKING:
    from tfexport.commands.targets import EngineRequest
    from tfexport.contract import Precision
    from tfexport.exporter.pipeline import Chooser
    from tfexport.models.checkpoints.load import Checkpoint as LoadedCheckpoint
    from tfexport.models.checkpoints.recognise import Chosen
    from tfexport.models.formats.native import Tokenizers
    from tfexport.text.tokenizers import TextTokenizer

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CKPT", help="A state_dict: .pt, .pth, .ckpt or .safetensors; or a toolkit's file or folder."
    ),
]
BundleDir = Annotated[Path, typer.Argument(metavar="DIR", help="A bundle that `tfexport export` wrote.")]
Input = Annotated[Path | None, typer.Argument(metavar="[INPUT]", help="A sentence a line; - or nothing reads stdin.")]
OutputFile = Annotated[Path | None, typer.Option("-o", "--output", help="Write here instead of stdout.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the -o FILE that an interrupted run of the same command began.")
]
FamilyOption = Annotated[
    str | None,
    typer.Option(
        "--family",
        metavar="NAME|FILE.py",
        help="Checkpoint family; or a family file of your own, which is run as Python.",
    ),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="JSON with model fields; by default CKPT's name with .json, if there.")
]
Heads = Annotated[int | None, typer.Option("--heads", min=1, help="Attention heads.")]
SourceVocabulary = Annotated[
    Path | None,
    typer.Option("--src-vocab", help="tokenizer.json, SentencePiece model, JSON list or dict, or a word a line."),
]
TargetVocabulary = Annotated[Path | None, typer.Option("--tgt-vocab", help="The same for the target.")]
SourceTokenizer = Annotated[
    str,
    typer.Option(
        "--src-tokenizer", help="How source text is split into the vocabulary's words: whitespace, or spacy:LANG."
    ),
]
Lowercase = Annotated[bool, typer.Option("--lowercase", help="Lower-case source text before looking it up.")]
SourceCodes = Annotated[
    Path | None, typer.Option("--src-bpe", metavar="CODES", help="Split source text by these codes of subword-nmt.")
]
TargetCodes = Annotated[
    Path | None,
    typer.Option("--tgt-bpe", metavar="CODES", help="The same for given target text, as `score` reads it."),
]
UnkId = Annotated[int | None, typer.Option("--unk", min=0, help="Id of the unknown token.")]
PadId = Annotated[int | None, typer.Option("--pad", min=0, help="Id of padding.")]
BosId = Annotated[int | None, typer.Option("--bos", min=0, help="Id that begins a sequence.")]
EosId = Annotated[int | None, typer.Option("--eos", min=0, help="Id that ends a sequence.")]
SourceLanguage = Annotated[
    str | None,
    typer.Option("--src-lang", help="Language of the sources, as a folder's vocabulary writes it: deu_Latn."),
]
TargetLanguage = Annotated[str | None, typer.Option("--tgt-lang", help="Language to translate to.")]
SourcePrefix = Annotated[
    str,
    typer.Option(
        "--prefix",
        help="Put before every source text: 'translate German to English: ' for T5, '>>fra<< ' for Marian.",
    ),
]
SourceMaxLength = Annotated[
    int | None,
    typer.Option("--max-length", min=1, help="Most source ids and generated tokens; by default the model's positions."),
]
_OWN = "What a checkpoint of torch.nn.Transformer does not tell"
NormFirst = Annotated[
    bool | None,
    typer.Option("--norm-first/--no-norm-first", help="Norms before each sublayer, or after it.", rich_help_panel=_OWN),
]
ActivationOption = Annotated[
    Literal["relu", "gelu", "gelu_tanh", "silu"] | None,
    typer.Option("--activation", help="Of the feed-forward.", rich_help_panel=_OWN),
]
EmbeddingScale = Annotated[
    str | None,
    typer.Option(
        "--embedding-scale",
        metavar="sqrt|N",
        help="Embeddings are multiplied by it: sqrt is that of d_model, 1 none.",
        rich_help_panel=_OWN,
    ),
]
SrcEmbedding = Annotated[
    str | None,
    typer.Option("--src-embedding", metavar="NAME", help="Your name of the source embedding.", rich_help_panel=_OWN),
]
TgtEmbedding = Annotated[
    str | None, typer.Option("--tgt-embedding", metavar="NAME", help="Of the target's.", rich_help_panel=_OWN)
]
OutputLayer = Annotated[
    str | None,
    typer.Option(
        "--output-layer", metavar="NAME", help="Of what gives the logits; a tied embedding too.", rich_help_panel=_OWN
    ),
]
Positions = Annotated[
    str | None,
    typer.Option(
        "--positions",
        metavar="NAME|sinusoidal",
        help="Of the table of positions, or of two as in SRC,TGT; sinusoidal where the model computes them.",
        rich_help_panel=_OWN,
    ),
]
InputFormatOption = Annotated[
    Literal["text", "tokens", "ids"] | None,
    typer.Option("--input-format", help="Raw text, space-separated tokens, or ids as the encoder reads them."),
]
RuntimeOption = Annotated[str, typer.Option("--runtime", help="ort-cpu, ort-cuda, tensorrt, torch or torch-cuda.")]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=256, help="CPU threads of a worker; by default its share of the CPUs."),
]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, max=256, help="Batches decoded at once; by default as many as CPUs.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Sentences decoded together.")]
MaxLength = Annotated[int, typer.Option("--max-length", min=1, help="Most tokens to generate, eos included.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PrecisionOption = Annotated[
    Literal["fp32", "fp16", "bf16", "int8", "int4"] | None,
    typer.Option("--precision", help="Of the graphs or engines to use."),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpu", help="GPU generations to build for, such as sm89,sm120; portable; here. By default the GPU here."
    ),
]
LibraryOption = Annotated[
    Literal["auto", "tensorrt", "tensorrt_rtx"],
    typer.Option("--library", help="tensorrt builds on the GPU itself, tensorrt_rtx anywhere."),
]
MaxBatch = Annotated[int, typer.Option("--max-batch", min=1, help="Most sentences at once in an engine.")]
MaxBeam = Annotated[int, typer.Option("--max-beam", min=1, help="Widest beam in an engine.")]
MaxSource = Annotated[
    int | None, typer.Option("--max-source", min=1, help="Most source ids in an engine; by default 128.")
]
CacheSizes = Annotated[str | None, typer.Option("--cache", help="Cache slots of the engines; by default 32,64,128.")]
PlanFor = Annotated[
    Path | None, typer.Option("--plan-for", metavar="TEXT", help="Take lengths from this source text instead.")
]
GpuMemory = Annotated[
    float | None, typer.Option("--gpu-memory", min=0.1, help="GiB of the GPU that will run the engines.")
]
ServedBy = Annotated[str, typer.Option("--runtime", help="What a Triton server decodes with.")]
ServedBeam = Annotated[int, typer.Option("--beam", min=1, help="Beam width of a Triton server.")]


def automatic_of(given: str) -> tuple[str, tuple[Precision, ...]]:
    """`fp32,auto-int8` to `fp32,int8` and the precisions that had `auto-` before them."""
    names = [name.strip() for name in given.split(",")]
    plain = [name.removeprefix("auto-") for name in names]
    automatic = [name.removeprefix("auto-") for name in names if name.startswith("auto-")]
    for name in automatic:
        if name not in ("fp16", "int8", "int4"):
            raise TfexportError(f"there is no auto-{name}. Give auto-fp16, auto-int8 or auto-int4.")
        if plain.count(name) > 1:
            raise TfexportError(f"a bundle has one {name}. Give {name} or auto-{name}.")
    return ",".join(plain), precisions_of(",".join(automatic)) if automatic else ()


def choosers_of(
    checkpoint: LoadedCheckpoint,
    precisions: tuple[Precision, ...],
    budget: str | None,
    source: Path | None,
    targets: Path | None,
) -> dict[Precision, Chooser]:
    """What chooses the float32 modules of each of these precisions."""
    if not precisions:
        if budget or source or targets:
            raise TfexportError("--budget is for auto- precisions. Give one, as in --precision fp32,auto-int8.")
        return {}
    from tfexport.decoding.line_reader import Reader
    from tfexport.decoding.translate import Writer
    from tfexport.models.transformer import Transformer
    from tfexport.verification.budget import Budget, BudgetChooser, Text

    if budget is None or source is None:
        raise TfexportError(
            "an auto- precision is held to a budget on real text. Give both, as in --budget top1=0.999 --budget-input FILE."
        )
    parsed = Budget.parse(budget)
    if parsed.needs_targets and targets is None:
        raise TfexportError(f"{parsed.metric} compares with translations. Give them with --budget-targets FILE.")
    model, tokenizers = checkpoint.build_model(), checkpoint.tokenizers
    if not isinstance(model, Transformer):
        raise TfexportError("encoder classifiers decode nothing that a budget could hold. Leave auto- out.")
    if parsed.needs_targets and tokenizers.target is None:
        raise TfexportError(
            f"{parsed.metric} is of text, and there is no target vocabulary. Give --tgt-vocab, or top1."
        )
    reader = Reader(model.config, tokenizers.source, "ids" if tokenizers.source is None else "text")
    writer = Writer(model.config, tokenizers.target, "text")
    with opened(source) as lines, contextlib.nullcontext() if targets is None else opened(targets) as wanted:
        text = Text.read(model, reader, writer, lines, wanted if parsed.needs_targets else None, say)
    return dict.fromkeys(precisions, BudgetChooser(parsed, text))


def numbers_of(flag: str, given: str) -> tuple[int, ...]:
    """`1,8` to the numbers; each is at least 1."""
    words = [word.strip() for word in given.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) < 10 and int(word) > 0 for word in words):
        raise TfexportError(f"{flag} is {given!r}, not numbers above 0. Give them as in 1,8.")
    return tuple(dict.fromkeys(int(word) for word in words))


def gpus_of(given: str | None) -> tuple[str, ...]:
    """`sm89,SM120` to the names of GPU generations; none where nothing is given."""
    if given is None:
        return ()
    names = [name.strip().lower() for name in given.split(",")]
    if not all(names):
        raise TfexportError(f"--gpu is {given!r}, with an empty name. Give names as in sm89,sm120.")
    return tuple(dict.fromkeys(names))


def engine_request(
    precision: str,
    gpus: str | None,
    library: Literal["auto", "tensorrt", "tensorrt_rtx"],
    *,
    max_batch: int,
    max_beam: int,
    max_source: int | None,
    cache: str | None,
    gpu_memory: float | None,
    plan_for: Path | None = None,
) -> EngineRequest:
    """The engines that the flags ask for; with `plan_for` the lengths of their plan are still to be set."""
    from tfexport import contract
    from tfexport.exporter.engine_plan import LengthPlan

    try:
        from tfexport.commands.targets import EngineRequest
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise RuntimeUnavailable(
            "building engines needs onnx, which is not installed: pip install 'tfexport[tensorrt-rtx]'."
        ) from error
    if plan_for is not None and (cache is not None or max_source is not None):
        raise TfexportError("--plan-for takes the place of --cache and --max-source. Give one of them.")
    sizes = ["32", "64", "128"] if cache is None else cache.split(",")
    if not all(size.strip().isdecimal() for size in sizes):
        raise TfexportError(f"--cache is {cache!r}, not numbers of slots. Give them as in 32,64,128.")
    plan = LengthPlan(
        max_batch=max_batch,
        max_beam=max_beam,
        max_source=128 if max_source is None else max_source,
        cache=tuple(sorted({int(size) for size in sizes})),
    )
    precisions = precisions_of(precision)
    quantized = [contract.short_name(wanted) for wanted in precisions if wanted in contract.QUANTIZED]
    if quantized:
        raise TfexportError(
            f"engines have no {', '.join(quantized)}: it is for the CPU. Build them in fp32, fp16 or bf16."
        )
    memory = None if gpu_memory is None else gpu_memory * 2**30
    if memory is not None and not math.isfinite(memory):
        raise TfexportError(f"--gpu-memory is {gpu_memory}, not a size in GiB. Give that of the GPU, such as 24.")
    return EngineRequest(plan, precisions, gpus_of(gpus), library, None if memory is None else int(memory))


def family_of(given: str | None) -> Chosen:
    """The name of a family, or the families of a file of the user's own, which is run."""
    if given is None or not given.endswith(".py"):
        return given
    from tfexport.models.checkpoints.user_family import read_family_file

    return read_family_file(Path(given))


def scale_of(given: str | None) -> float | str | None:
    """`sqrt`, or a number as text, to what `hints_of` takes for the scale of embeddings."""
    if given is None or given == "sqrt":
        return given
    try:
        return float(given)
    except ValueError as error:
        raise TfexportError(f"--embedding-scale is {given!r}. Give sqrt, or a number such as 1 or 22.6.") from error


def hints_of(checkpoint: Path, config: Path | None, **flags: float | str | None) -> dict[str, Any]:
    """The model fields and names of layers that the user gives: flags win over the JSON file."""
    from tfexport.errors import ConfigError
    from tfexport.models.checkpoints.load import read_hints

    beside = checkpoint.parent / f"{checkpoint.stem}.json"
    fields: dict[str, Any] = {}
    if config is not None:
        fields = read_hints(config)
    elif beside.is_file() and beside != checkpoint:
        try:
            fields = read_hints(beside)
            say(f"note: using the configuration {beside}")
        except ConfigError as error:
            say(f"note: not using the file beside the checkpoint: {error}")
    return {**fields, **{name: value for name, value in flags.items() if value is not None}}


def vocabularies_of(
    source: Path | None, target: Path | None, splitter: str, lowercase: bool, unk_id: int | None
) -> Tokenizers | None:
    from tfexport.models.formats.native import Tokenizers
    from tfexport.text.tokenizers import read_vocabulary

    language = splitter.removeprefix("spacy:") if splitter.startswith("spacy:") else None
    if language is None and splitter != "whitespace":
        raise TfexportError(f"there is no tokeniser {splitter!r}. Use --src-tokenizer whitespace, or spacy:LANG.")
    if source is None and (language is not None or lowercase):
        raise TfexportError("--src-tokenizer and --lowercase say how --src-vocab is used. Give --src-vocab too.")
    if source is None and target is None:
        return None
    return Tokenizers(
        None
        if source is None
        else read_vocabulary(source, lowercase=lowercase, spacy_language=language, unk_id=unk_id),
        None if target is None else read_vocabulary(target, unk_id=unk_id),
    )


def split_by_codes(tokenizers: Tokenizers, source: Path | None, target: Path | None) -> Tokenizers:
    """The `tokenizers` for text that codes of subword-nmt split, on the sides that have some.

    Raises:
        TokenizerError: a side has no vocabulary, or splits text by itself, or a file has no codes.
    """
    from tfexport.models.formats.native import Tokenizers

    def split(side: str, flag: str, tokenizer: TextTokenizer | None, codes: Path | None) -> TextTokenizer | None:
        if codes is None:
            return tokenizer
        if tokenizer is None:
            raise TokenizerError(f"there is no {side} vocabulary for the subwords of {codes}. Give {flag}.")
        return tokenizer.with_codes(codes, where=f"the {side} vocabulary")

    return Tokenizers(
        split("source", "--src-vocab", tokenizers.source, source),
        split("target", "--tgt-vocab", tokenizers.target, target),
    )
