"""`tfexport train`: its flags, and how they become a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def train(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the model and the training's state.")],
    src: Annotated[Path | None, typer.Option(help="Source text, a sentence a line.")] = None,
    tgt: Annotated[Path | None, typer.Option(help="Target text, a sentence a line.")] = None,
    val_src: Annotated[Path | None, typer.Option(help="Source text to validate on.")] = None,
    val_tgt: Annotated[Path | None, typer.Option(help="Target text to validate on.")] = None,
    tsv: Annotated[Path | None, typer.Option(help="source<TAB>target lines, instead of --src and --tgt.")] = None,
    val_tsv: Annotated[Path | None, typer.Option(help="The same for validation.")] = None,
    preset: Annotated[
        Literal["tiny", "small", "base"], typer.Option(help="Model size; base is the paper's.")
    ] = "small",
    vocabulary: Annotated[
        Literal["bpe", "word"], typer.Option(help="Joint byte-level BPE, or words of each side.")
    ] = "bpe",
    vocab_size: Annotated[int | None, typer.Option(min=300, help="Most entries; by default the preset's.")] = None,
    min_frequency: Annotated[int, typer.Option(min=1, help="Words seen less often are unknown.")] = 2,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Train on lower-cased text.")] = False,
    epochs: Annotated[int, typer.Option(min=1)] = 20,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a batch, padding included.")] = 1024,
    max_length: Annotated[int, typer.Option(min=2, help="Positions; longer pairs are left out.")] = 128,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    precision: Annotated[str, typer.Option(help="Lightning's name, such as 32-true or bf16-mixed.")] = "32-true",
    weights: Annotated[Literal["float32", "float16"], typer.Option(help="Storage of the final weights.")] = "float32",
    accelerator: Annotated[str, typer.Option(help="auto, cpu or gpu.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on after the last epoch in the folder.")] = False,
) -> None:
    """Train a Transformer on parallel text, keep the epoch of the best validation BLEU."""
    from tfexport.training.data import read_either
    from tfexport.training.train import TrainOptions
    from tfexport.training.train import train as run_training

    training = read_either(src, tgt, tsv, "--src and --tgt, or --tsv")
    validation = read_either(val_src, val_tgt, val_tsv, "--val-src and --val-tgt, or --val-tsv")
    options = TrainOptions(
        preset=preset,
        vocabulary=vocabulary,
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        lowercase=lowercase,
        epochs=epochs,
        max_tokens=batch_tokens,
        max_length=max_length,
        seed=seed,
        precision=precision,
        weights=weights,
        accelerator=accelerator,
    )
    model = run_training(training, validation, output, options, resume=resume)
    print(f"trained {model}\nnext: tfexport export {model}")
