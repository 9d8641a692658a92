"""The options of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tfexport.option import Options, option

_TEXT, _MODEL = "Text", "Model and vocabulary"


@dataclass(frozen=True, kw_only=True)
class CorpusOptions(Options):
    """Parallel text, as two files or as one with tabs."""

    src: Path | None = option(None, help="Source text, a sentence a line.", panel=_TEXT)
    tgt: Path | None = option(None, help="Target text, a sentence a line.", panel=_TEXT)
    val_src: Path | None = option(None, help="Source text to validate on.", panel=_TEXT)
    val_tgt: Path | None = option(None, help="Target text to validate on.", panel=_TEXT)
    tsv: Path | None = option(None, help="source<TAB>target lines, instead of --src and --tgt.", panel=_TEXT)
    val_tsv: Path | None = option(None, help="The same for validation.", panel=_TEXT)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    """How to train; the schedule is the paper's (section 5.3)."""

    preset: Literal["tiny", "small", "base"] = option("small", help="Model size; base is the paper's.", panel=_MODEL)
    vocabulary: Literal["bpe", "word"] = option(
        "bpe", help="Joint byte-level BPE, or words of each side.", panel=_MODEL
    )
    vocab_size: int | None = option(None, minimum=300, help="Most entries; by default the preset's.", panel=_MODEL)
    min_frequency: int = option(2, minimum=1, help="Words seen less often are unknown.", panel=_MODEL)
    lowercase: bool = option(False, help="Train on lower-cased text.", panel=_MODEL)
    epochs: int = option(20, minimum=1, help="Passes over the training text.")
    max_tokens: int = option(1024, minimum=1, flag="--batch-tokens", help="Tokens of a batch, padding included.")
    max_length: int = option(128, minimum=2, help="Positions; longer pairs are left out.")
    """Of encoder and decoder."""
    label_smoothing: float = option(0.1, flag="", help="Section 5.4 of the paper.")
    ema_decay: float = option(
        0.999, flag="", help="Decay, per step, of the averaged weights that are validated and kept."
    )
    seed: int = option(0, minimum=0, help="Of the weights and the order of batches.")
    precision: str = option("32-true", help="Lightning's name of the arithmetic, such as 32-true or bf16-mixed.")
    weights: Literal["float32", "float16"] = option("float32", help="Storage of the final weights.")
    accelerator: str = option("auto", help="auto, cpu or gpu.")
