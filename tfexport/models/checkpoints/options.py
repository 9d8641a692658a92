"""The options that describe a checkpoint, for values that its file lacks.

`tfexport export`, `inspect`, `probe` and `parity` and the functions of the same names use them. A bundle records the options
of text, so that parity reads the checkpoint as the export did. `models/checkpoints/reading.py` applies them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from tfexport.errors import TfexportError
from tfexport.option import Options, declared, option

_LAYOUT = "Settings that files of torch.nn.Transformer lack"
_TEXT, _IDS = "Text", "Special ids"


def _scale(called: str, text: str) -> float | str:
    """`sqrt`, or a number as text."""
    try:
        return text if text == "sqrt" else float(text)
    except ValueError as error:
        raise TfexportError(f"{called} is {text!r}. Give sqrt, or a number such as 1 or 22.6.") from error


@dataclass(frozen=True, kw_only=True)
class FamilyOptions(Options):
    """Options for the reading of a checkpoint."""

    family: str | None = option(
        None,
        metavar="NAME|FILE.py",
        help="The checkpoint family, or a family file of your own, which is run as Python.",
    )
    config: Path | None = option(
        None, help="JSON file with model fields; by default the checkpoint's name with .json, if it exists."
    )
    key: str | None = option(
        None,
        metavar="NAME",
        gives=("key",),
        help="The entry of the file with the weights, if there are several: ema, or a path such as net.ema.",
    )
    ignore: tuple[str, ...] | None = option(
        None,
        metavar="PATTERN",
        repeated=True,
        gives=("ignore",),
        help="Leave out weights that belong to no layer, such as 'crit.*'; may be repeated.",
    )


@dataclass(frozen=True, kw_only=True)
class LayoutOptions(Options):
    """Options for properties that do not follow from the shapes of the weights."""

    heads: int | None = option(None, minimum=1, gives=("n_heads",), help="Number of attention heads.")
    encoder_heads: int | None = option(
        None,
        minimum=1,
        gives=("n_encoder_heads",),
        help="Number of attention heads of the encoder, if it differs from --heads.",
    )
    norm_first: bool | None = option(
        None,
        flag="--norm-first/--no-norm-first",
        gives=("norm_first",),
        usage="--norm-first (or --no-norm-first)",
        help="Whether norms are before each sublayer, or after it.",
        panel=_LAYOUT,
    )
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] | None = option(
        None,
        gives=("activation",),
        usage="--activation relu (or gelu)",
        help="Activation of the feed-forward layers.",
        panel=_LAYOUT,
    )
    norm: Literal["layer", "rms"] | None = option(
        None,
        gives=("norm",),
        usage="--norm layer (or rms)",
        help="Kind of norms: LayerNorm, or RMSNorm.",
        panel=_LAYOUT,
    )
    norm_eps: float | None = option(
        None,
        above=0,
        gives=("norm_eps",),
        usage="--norm-eps N (such as 1e-05)",
        help="The number that norms add before the square root.",
        panel=_LAYOUT,
    )
    embedding_scale: float | str | None = option(
        None,
        gives=("embedding_scale",),
        usage="--embedding-scale sqrt (or a number)",
        parse=_scale,
        metavar="sqrt|N",
        help="Factor of the embeddings: sqrt is the square root of d_model, 1 is none.",
        panel=_LAYOUT,
    )
    src_embedding: str | None = option(
        None, gives=("src_embedding",), metavar="NAME", help="The source embedding's name in your model.", panel=_LAYOUT
    )
    tgt_embedding: str | None = option(
        None, gives=("tgt_embedding",), metavar="NAME", help="The target embedding's name in your model.", panel=_LAYOUT
    )
    output_layer: str | None = option(
        None,
        gives=("output_layer",),
        metavar="NAME",
        help="The output layer's name in your model; for tied embeddings, the embedding's name.",
        panel=_LAYOUT,
    )
    positions: str | None = option(
        None,
        gives=("positions",),
        metavar="NAME|KIND",
        usage="--positions sinusoidal (or sinusoidal-halves, sinusoidal-t2t, none)",
        help="The position table's name in your model, or two, as in SRC,TGT; or the kind of table that its code computes: "
        "sinusoidal (sin and cos in turns), sinusoidal-halves (all sin, then all cos), sinusoidal-t2t (the same with "
        "d/2 - 1 frequencies below 1), none.",
        panel=_LAYOUT,
    )


@dataclass(frozen=True, kw_only=True)
class TextSettings(Options):
    """Vocabularies, subword codes and languages."""

    src_vocab: Path | None = option(
        None,
        help="Source vocabulary: tokenizer.json, a SentencePiece model, a JSON list or dict, or one word per line.",
        panel=_TEXT,
    )
    tgt_vocab: Path | None = option(None, help="Target vocabulary, in the same formats.", panel=_TEXT)
    src_tokenizer: str = option(
        "whitespace",
        help="How to split source text into words: whitespace, or spacy:LANG.",
        panel=_TEXT,
    )
    lowercase: bool = option(False, help="Convert source text to lower case first.", panel=_TEXT)
    src_bpe: Path | None = option(
        None, metavar="CODES", help="Split source text with these subword-nmt codes.", panel=_TEXT
    )
    tgt_bpe: Path | None = option(
        None, metavar="CODES", help="Split given target text with these subword-nmt codes, as in `score`.", panel=_TEXT
    )
    src_lang: str | None = option(
        None, metavar="CODE", help="Source language, as written in the folder's vocabulary: deu_Latn.", panel=_TEXT
    )
    tgt_lang: str | None = option(None, metavar="CODE", help="Target language.", panel=_TEXT)
    prefix: str = option(
        "",
        help="Text to put before every source: 'translate German to English: ' for T5, '>>fra<< ' for Marian.",
        panel=_TEXT,
    )

    def recorded(self, checkpoint: Path) -> dict[str, Any]:
        """The settings that differ from the default, JSON-ready. Paths are relative to the checkpoint's folder."""
        settings = {
            field.name: getattr(self, field.name)
            for field in fields(TextSettings)
            if getattr(self, field.name) != field.default
        }
        return {
            name: os.path.relpath(value, checkpoint.parent) if name in _FILES else value
            for name, value in settings.items()
        }

    def or_recorded(self, recorded: Mapping[str, Any], checkpoint: Path) -> tuple[TextSettings, list[str]]:
        """These settings, completed by those that an export recorded, and the recorded files that no longer exist."""
        chosen: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(TextSettings)}
        lost, gone = [], set()
        for field in fields(TextSettings):
            value: Any = recorded.get(field.name)
            is_open = chosen[field.name] == field.default and _NEEDS.get(field.name) not in gone
            wanted = bool if isinstance(field.default, bool) else str
            if not is_open or type(value) is not wanted:  # a manifest may contain any value
                continue
            if field.name in _FILES:
                value = checkpoint.parent / str(value)
                if not value.is_file():
                    lost.append(f"--{field.name.replace('_', '-')} {value}")
                    gone.add(field.name)
                    continue
            chosen[field.name] = value
        return TextSettings(**chosen), lost


_FILES = ("src_vocab", "tgt_vocab", "src_bpe", "tgt_bpe")
_NEEDS = {"src_tokenizer": "src_vocab", "lowercase": "src_vocab", "src_bpe": "src_vocab", "tgt_bpe": "tgt_vocab"}
"""The setting that each setting needs. If a recorded file is lost, the settings that need it are lost too."""


@dataclass(frozen=True, kw_only=True)
class IdOptions(Options):
    """Special ids and the maximum length of sequences."""

    unk: int | None = option(None, minimum=0, gives=("unk_id",), help="Id of the unknown token.", panel=_IDS)
    pad: int | None = option(None, minimum=0, gives=("pad_id",), help="Id of padding.", panel=_IDS)
    bos: int | None = option(
        None, minimum=0, gives=("bos_id",), help="Id of the token that begins a sequence.", panel=_IDS
    )
    eos: int | None = option(
        None, minimum=0, gives=("eos_id",), help="Id of the token that ends a sequence.", panel=_IDS
    )
    source_bos: bool | None = option(
        None,
        flag="--source-bos/--no-source-bos",
        gives=("source_bos",),
        usage="--source-bos (or --no-source-bos)",
        help="Whether source text begins with bos.",
        panel=_IDS,
    )
    source_eos: bool | None = option(
        None,
        flag="--source-eos/--no-source-eos",
        gives=("source_eos",),
        usage="--source-eos (or --no-source-eos)",
        help="Whether source text ends with eos.",
        panel=_IDS,
    )
    max_length: int | None = option(
        None,
        minimum=1,
        gives=("max_source_length", "max_target_length"),
        help="Largest number of source ids and of generated tokens; by default the model's number of positions.",
        panel=_IDS,
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions(IdOptions, TextSettings, LayoutOptions, FamilyOptions):
    """The options of `inspect`, with all flags that it asks for."""


@dataclass(frozen=True, kw_only=True)
class ModuleOptions(Options):
    """The user's own code."""

    module: str | None = option(
        None,
        metavar="FILE.py:NAME",
        help="Your function that returns the model. It is run and its forward is read, so that no settings are needed.",
    )


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions(TextSettings, FamilyOptions, ModuleOptions):
    """The options with which parity reads a checkpoint again."""


@dataclass(frozen=True, kw_only=True)
class ExpectOptions(Options):
    """Outputs of the owner's own program."""

    expect: Path | None = option(
        None,
        metavar="FILE",
        help="Greedy outputs of your own program: a source, a tab and its output in each line. They confirm the settings, "
        "and find those that you leave out.",
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(ModelOptions, ExpectOptions):
    """All options that describe a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ExportedCheckpointOptions(CheckpointOptions, ModuleOptions):
    """The options with which `export` reads a checkpoint."""

    write_family: Path | None = option(
        None,
        metavar="FILE.py",
        help="With --module: also write a family file, with which the next export needs no code of yours.",
    )


USAGE: Mapping[str, str] = {
    field: option.about.usage or f"{option.flag} {option.about.metavar or 'N'}"
    for option in declared(CheckpointOptions).values()
    for field in option.about.gives
}
"""The flag of each field of `ModelConfig`, for error messages."""
