"""The files next to a Marian model: vocabularies, the SentencePiece models of OPUS-MT, and decoder.yml."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfexport.errors import CheckpointError, ConfigError, TokenizerError
from tfexport.models.formats.native import Tokenizers
from tfexport.models.toolkits.toolkit import TextOptions
from tfexport.system.yaml_files import read_settings, read_yaml_file
from tfexport.text.sentencepiece import PieceModel, Pieces
from tfexport.text.tokenizers import TextTokenizer, word_tokenizer
from tfexport.text.vocabularies import read_vocabulary, vocabulary_words

_EOS, _UNK = 0, 1
"""Marian's ids, if no vocabulary defines others."""
_OLD_NAMES = {"</s>": "eos", "<unk>": "UNK"}
"""Nematus's names of special tokens, at Marian's own ids."""
_SEARCH = {"beam-size": 12, "normalize": 0, "word-penalty": 0, "allow-unk": False, "n-best": False}
"""Search options of marian-decoder, with its defaults."""


@dataclass(frozen=True)
class MarianText:
    """The content of the vocabularies."""

    tokenizers: Tokenizers
    unk_id: int = _UNK
    eos_id: int = _EOS
    assumed: tuple[str, ...] = ()
    """Fields of `ModelConfig` that are not in a vocabulary."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Notes for a user who gives no vocabulary, by the side whose vocabulary was not found."""
    notes: tuple[str, ...] = ()


def model_file(path: Path) -> Path:
    """The .npz of a folder, or the file itself.

    Raises:
        CheckpointError: the folder has several, and neither decoder.yml nor their names single out one.
    """
    if not path.is_dir():
        return path
    models = _names(_decoder_settings(path, None), "models")
    if len(models) > 1:
        raise ConfigError(
            f"{path} has a decoder.yml with {len(models)} models: an ensemble is not one model. Give the path of one of "
            "them."
        )
    files = [file for file in sorted(path.glob("*.npz")) if not file.name.endswith((".optimizer.npz", ".orig.npz"))]
    named = [file for file in files if file.name in ({*models} or {"model.npz"})]
    if len(named or files) != 1:
        raise CheckpointError(
            f"{path} has {'no model' if not files else ', '.join(file.name for file in files)}. Give the path of the .npz."
        )
    return (named or files)[0]


def search_note(model: Path) -> tuple[str, ...]:
    """A note with the search options of the model's decoder.yml."""
    settings = _decoder_settings(model.parent, model)
    unusual = {name: settings[name] for name, usual in _SEARCH.items() if settings.get(name, usual) != usual}
    if not unusual:
        return ()
    options = ", ".join(f"{name} {str(value)[:30]}" for name, value in unusual.items())
    return (
        f"its decoder.yml searches with {options}; give `decode --search-profile marian` the options that you want",
    )


def read_text(model: Path, sizes: tuple[int, int], options: TextOptions) -> MarianText:
    """The tokenizers next to `model`, whose source and target embeddings have `sizes` rows.

    Raises:
        ConfigError: an option is not for this model, or the two vocabularies contradict each other.
        TokenizerError: a vocabulary cannot be read.
    """
    if options.source_language or options.target_language:
        raise ConfigError(
            "Marian knows no languages: --src-lang and --tgt-lang have no effect. In models of many languages, the language "
            "is a word of the text: give it with --prefix, such as '>>fra<< '."
        )
    files = _vocabularies(model)
    if factored := [file.name for file in files if file.suffix == ".fsv"]:
        raise ConfigError(f"{model} has the factored vocabulary {factored[0]}, which is not supported.")
    if len(files) != 2:
        if options:
            raise ConfigError(f"{model} has no vocabularies next to it, so --prefix has no effect. Leave it out.")
        note = (
            "no vocabularies were found next to it (vocab.spm, vocab.yml, or those of its decoder.yml): ids are read and "
            f"written, </s> as {_EOS} and <unk> as {_UNK}; or give --src-vocab and --tgt-vocab"
        )
        absent = dict.fromkeys(("source", "target"), note)
        return MarianText(Tokenizers(None, None), assumed=("unk_id", "eos_id", "pad_id"), absent=absent)
    pieces = [model.parent / f"{side}.spm" for side in ("source", "target")]
    notes: list[str] = []
    sides = [_side(file, own, size, notes) for file, own, size in zip(files, pieces, sizes, strict=True)]
    ids = {tuple(side.inner.token_to_id(token) for token in ("<unk>", "</s>")) for side in sides}
    if len(ids) > 1:
        raise ConfigError(f"the vocabularies {' and '.join(map(str, files))} have different ids of <unk> and </s>.")
    ((unk_id, eos_id),) = ids
    if unk_id is None or eos_id is None:
        raise TokenizerError(
            f"{files[0]} has no {'</s>' if eos_id is None else '<unk>'}. Give the model's own vocabulary."
        )
    source = sides[0].framed((), (), options.prefix)
    return MarianText(Tokenizers(source, sides[1]), unk_id, eos_id, notes=tuple(dict.fromkeys(notes)))


def _side(file: Path, pieces: Path, size: int, notes: list[str]) -> TextTokenizer:
    """One side's tokenizer: pieces with their own ids, words, or pieces with the ids of a word list (OPUS-MT).

    Words of the file beyond the model's embedding are added to `notes`.
    """
    if file.suffix == ".spm":
        return read_vocabulary(file)
    # A model may have fewer rows than its vocabulary has words; the other words are then unknown.
    all_words = vocabulary_words(file)
    words = {word: index for word, index in all_words.items() if index < size}
    if beyond := len(all_words) - len(words):
        notes.append(f"{file.name} has {len(all_words)} words, the model's embedding {size} rows: {beyond} are unknown")
    by_id = {index: word for word, index in words.items()}
    for index, (name, old) in enumerate(_OLD_NAMES.items()):
        if by_id.get(index, old) == old and name not in words:
            words.pop(old, None)
            words[name] = index
    if not pieces.is_file():
        return word_tokenizer(words, unknown="<unk>")
    special = [
        word for word in words if word in ("<s>", "</s>", "<pad>") or (word.startswith(">>") and word.endswith("<<"))
    ]
    return TextTokenizer.from_inner(Pieces(PieceModel.read(pieces).content, words, special), skips_special=True)


def _vocabularies(model: Path) -> Sequence[Path]:
    """The files of both sides, if found: those that decoder.yml or the training's settings name, or the usual names."""
    folder = model.parent
    for settings in (_decoder_settings(folder, model), _settings_of(folder / f"{model.name}.yml")):
        files = [folder / name for name in _names(settings, "vocabs")]
        # os.path reports a name that is too long as a missing file.
        if len(files) == 2 and all(map(os.path.isfile, files)):
            return files
    for names in (("vocab.spm",), ("vocab.yml",), ("source.yml", "target.yml"), ("source.spm", "target.spm")):
        files = [folder / name for name in names]
        if all(file.is_file() for file in files):
            return files * 2 if len(files) == 1 else files
    joint = sorted(folder.glob("*.vocab.yml"))
    return joint * 2 if len(joint) == 1 else ()


def _decoder_settings(folder: Path, model: Path | None) -> dict[str, Any]:
    """The settings of the model's decoder.yml; Marian writes it as MODEL.npz.decoder.yml."""
    own = () if model is None else (f"{model.name}.decoder.yml",)
    for name in (*own, "decoder.yml"):
        if os.path.isfile(folder / name):
            return _settings_of(folder / name)
    return {}


def _settings_of(path: Path) -> dict[str, Any]:
    return read_settings(read_yaml_file(path), str(path)) if os.path.isfile(path) else {}


def _names(settings: dict[str, Any], name: str) -> list[str]:
    """Names of files in a setting, without the folders of the machine that trained the model."""
    files = settings.get(name) or []
    return [Path(file).name for file in files if isinstance(file, str)] if isinstance(files, list) else []
