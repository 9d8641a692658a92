"""The options of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tfexport.option import Options, option

_TEXT, _MODEL = "Text", "Model and vocabulary"


@dataclass(frozen=True, kw_only=True)
class CorpusOptions(Options):
    """Parallel text, in two files or in one file with tabs."""

    src: Path | None = option(None, help="Source text, one sentence per line.", panel=_TEXT)
    tgt: Path | None = option(None, help="Target text, one sentence per line.", panel=_TEXT)
    val_src: Path | None = option(None, help="Source text for validation.", panel=_TEXT)
    val_tgt: Path | None = option(None, help="Target text for validation.", panel=_TEXT)
    tsv: Path | None = option(None, help="Lines of source<TAB>target, instead of --src and --tgt.", panel=_TEXT)
    val_tsv: Path | None = option(None, help="Validation text in the same form.", panel=_TEXT)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    """Options of a training; the schedule is that of the paper (section 5.3)."""

    preset: Literal["tiny", "small", "base"] = option(
        "small", help="Model size; base is the base model of the paper.", panel=_MODEL
    )
    vocabulary: Literal["bpe", "word"] = option(
        "bpe", help="Tokenizer: joint byte-level BPE, or words of each language.", panel=_MODEL
    )
    vocab_size: int | None = option(
        None, minimum=300, help="Largest vocabulary; by default the preset's.", panel=_MODEL
    )
    min_frequency: int = option(
        2, minimum=1, help="Replace words that occur less often with the unknown token.", panel=_MODEL
    )
    lowercase: bool = option(False, help="Train on lower-cased text.", panel=_MODEL)
    epochs: int = option(20, minimum=1, help="Passes over the training text.")
    max_tokens: int = option(
        1024, minimum=1, flag="--batch-tokens", help="Size of a batch in tokens, padding included."
    )
    max_length: int = option(128, minimum=2, help="Number of positions; longer pairs are skipped.")
    """Number of layers in the encoder and in the decoder."""
    label_smoothing: float = option(0.1, flag="", help="Label smoothing (section 5.4 of the paper).")
    ema_decay: float = option(
        0.999, flag="", help="Decay per step of the averaged weights, which are validated and saved."
    )
    seed: int = option(0, minimum=0, help="Seed of the initial weights and the order of batches.")
    precision: str = option(
        "32-true", help="Precision of the training, in Lightning's terms, such as 32-true or bf16-mixed."
    )
    weights: Literal["float32", "float16"] = option("float32", help="Number format of the saved weights.")
    accelerator: str = option("auto", help="Device to train on: auto, cpu or gpu.")
