"""`tfexport probe`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tfexport.commands.console import opened, print_probe, say, working
from tfexport.commands.flags import (
    ActivationOption,
    AsJson,
    BosId,
    Checkpoint,
    ConfigOption,
    EmbeddingScale,
    EosId,
    FamilyOption,
    Heads,
    Lowercase,
    NormFirst,
    OutputLayer,
    PadId,
    Positions,
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
    family_of,
    hints_of,
    scale_of,
    split_by_codes,
    vocabularies_of,
)
from tfexport.system.json_text import json_text

if TYPE_CHECKING:
    from tfexport.models.checkpoints.load import Checkpoint as LoadedCheckpoint


def probe(
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
    source: Annotated[
        Path | None, typer.Option("--input", metavar="FILE", help="Sentences to compare on; by default random ids.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="Largest relative difference to your own module that passes.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a checkpoint before it is exported, in PyTorch alone; exit code 1 where something is wrong.

    A family file with a function `reference` brings the module that the weights were trained in: it is compared layer by
    layer, and the first that differs is named.
    """
    from tfexport.models.toolkits.toolkit import TextOptions
    from tfexport.verification.probe import MOST_SENTENCES
    from tfexport.verification.probe import probe as run_probe

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

    def sources_of(loaded: LoadedCheckpoint) -> list[list[int]]:
        from tfexport.decoding.line_reader import Reader, read_pairs

        assert source is not None
        tokenizer = split_by_codes(loaded.tokenizers, src_bpe, tgt_bpe).source
        with opened(source) as lines:
            found, _ = read_pairs(lines, None, Reader(loaded.config, tokenizer, "text" if tokenizer else "ids"), say)
        if len(found) > MOST_SENTENCES:
            say(f"note: compared on the first {MOST_SENTENCES} of {len(found)} sentences")
        return found[:MOST_SENTENCES]

    with working(f"probing {checkpoint}"):
        found = run_probe(
            checkpoint,
            hints,
            tokenizers=vocabularies_of(src_vocab, tgt_vocab, src_tokenizer, lowercase, hints.get("unk_id")),
            family=family_of(family),
            text=TextOptions(src_lang, tgt_lang, prefix),
            sources_of=sources_of if source is not None else None,
            tolerance=tolerance,
        )
    if as_json:
        print(json_text(found.to_dict(), indent=1))
    else:
        print_probe(found)
    if not found.passed:
        raise typer.Exit(1)
