"""`tfexport train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tfexport.commands.help import common_options
from tfexport.commands.signature import with_options
from tfexport.training.options import CorpusOptions, TrainOptions


@common_options("-o --src --tgt --val-src --val-tgt --preset --vocab-size --epochs --accelerator --resume")
@with_options
def train(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Folder for the model and the training's state.")
    ],
    corpus: CorpusOptions,
    options: TrainOptions,
    resume: Annotated[bool, typer.Option("--resume", help="Continue after the last epoch in the folder.")] = False,
) -> None:
    """Train a Transformer on parallel text, and keep the epoch with the best validation BLEU."""
    from tfexport.training.data import read_either
    from tfexport.training.train import train as run_training

    training = read_either(corpus.src, corpus.tgt, corpus.tsv, "--src and --tgt, or --tsv")
    validation = read_either(corpus.val_src, corpus.val_tgt, corpus.val_tsv, "--val-src and --val-tgt, or --val-tsv")
    model = run_training(training, validation, output, options, resume=resume)
    print(f"trained {model}\nnext: tfexport export {model}")
