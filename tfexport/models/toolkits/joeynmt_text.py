"""The vocabularies of a JoeyNMT model, its special tokens, and its settings for splitting text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tfexport.errors import ConfigError, TokenizerError
from tfexport.models.formats.native import Tokenizers
from tfexport.models.toolkits.arguments import Arguments
from tfexport.models.toolkits.toolkit import TextOptions
from tfexport.system import regular_files
from tfexport.text.sentencepiece import PieceModel, Pieces
from tfexport.text.subword_nmt import SEPARATOR, Subwords
from tfexport.text.tokenizers import SplitAt, TextTokenizer, word_tokenizer

_SPECIALS = {"unk": (0, "<unk>"), "pad": (1, "<pad>"), "bos": (2, "<s>"), "eos": (3, "</s>")}
"""JoeyNMT's default ids and names, in the order in which its vocabularies start with them."""
_SPACE = "▁"
"""The space in vocabularies of characters."""


@dataclass(frozen=True)
class JoeyText:
    """The content of the vocabularies."""

    fields: dict[str, Any]
    """`ModelConfig` fields."""
    tokenizers: Tokenizers = field(default_factory=lambda: Tokenizers(None, None))
    notes: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    """Notes for a user who gives no vocabulary, by the side whose vocabulary was not found."""


@dataclass(frozen=True)
class _Symbols:
    """The names of special tokens, by kind, and of languages. None of them is text."""

    names: Mapping[str, str]
    languages: tuple[str, ...]

    def first(self) -> list[str]:
        """The first tokens of every vocabulary, which its file may omit."""
        return [*self.names.values(), *self.languages]


def read_text(folder: Path, data: Arguments, options: TextOptions) -> JoeyText:
    """The tokenizers of a model whose vocabularies are in `folder`.

    Args:
        data: the section `data` of its configuration.

    Raises:
        ConfigError: a setting or an option is not supported.
        TokenizerError: a vocabulary, SentencePiece model or codes file cannot be read.
    """
    if options.source_language or options.target_language:
        raise ConfigError(
            f"{folder} is a model of JoeyNMT: --src-lang and --tgt-lang have no effect. If a language is a word of the "
            "text, give it with --prefix."
        )
    symbols, ids = _symbols(data.inner("special_symbols"))
    words = [_words(folder, symbols, name) for name in ("src_vocab.txt", "trg_vocab.txt")]
    if None in words:
        if options:
            raise ConfigError(
                f"{folder} has no src_vocab.txt and trg_vocab.txt, so --prefix has no effect. Leave it out."
            )
        note = "there are no src_vocab.txt and trg_vocab.txt next to it: ids are read and written"
        return JoeyText(_fields(ids, ()), absent=dict.fromkeys(("source", "target"), note))
    source, target = (each or {} for each in words)
    for vocabulary in (source, target):
        for kind in _SPECIALS:
            if vocabulary[symbols.names[kind]] != ids[f"{kind}_id"]:
                raise ConfigError(
                    f"{data.where}, special_symbols has {kind}_id {ids[f'{kind}_id']}, and the vocabularies in {folder} "
                    f"have it at {vocabulary[symbols.names[kind]]}. Correct it."
                )
    never = [target[name] for kind, name in symbols.names.items() if kind in ("bos", "pad", "sep")]
    never += [target[language] for language in symbols.languages]
    # Version 1 configures both sides together, and `src` is the name of a language.
    sides = [data if isinstance(data.get(side), str) else data.inner(side) for side in ("src", "trg")]
    notes: list[str] = []
    read = [
        _tokenizer(folder, settings, vocabulary, symbols, notes)
        for settings, vocabulary in zip(sides, (source, target), strict=True)
    ]
    return JoeyText(
        _fields(ids, never),
        Tokenizers(replace(read[0], prefix=options.prefix), read[1]),
        tuple(dict.fromkeys(notes)),
    )


def _fields(ids: Mapping[str, int], never: Any) -> dict[str, Any]:
    special_ids = {name: ids[name] for name in ("unk_id", "pad_id", "bos_id", "eos_id")}
    return {**special_ids, "suppressed_ids": tuple(sorted({*never} - {ids["eos_id"]}))}


def _symbols(settings: Arguments) -> tuple[_Symbols, dict[str, int]]:
    names = {kind: settings.text(f"{kind}_token", usual) for kind, (_, usual) in _SPECIALS.items()}
    ids = {f"{kind}_id": settings.number(f"{kind}_id", usual) for kind, (usual, _) in _SPECIALS.items()}
    if settings.get("sep_token"):
        names["sep"] = settings.text("sep_token", "")
    languages = settings.get("lang_tags", [])
    if not isinstance(languages, list) or not all(isinstance(tag, str) for tag in languages):
        raise ConfigError(f"{settings.where} has lang_tags that are not a list of tokens. Correct it.")
    return _Symbols(names, tuple(languages)), ids


def _words(folder: Path, symbols: _Symbols, name: str) -> dict[str, int] | None:
    """A vocabulary as JoeyNMT reads it: special tokens that the file lacks come first, and repeated words count once."""
    path = folder / name
    if not path.is_file():
        return None
    try:
        lines = regular_files.read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"cannot read {path}: {error}. Check that it was copied completely.") from error
    return {word: index for index, word in enumerate(dict.fromkeys([*symbols.first(), *lines]))}


def _tokenizer(
    folder: Path, settings: Arguments, words: dict[str, int], symbols: _Symbols, notes: list[str]
) -> TextTokenizer:
    """One side's tokenizer. Unsupported processing of text is added to `notes`."""
    cfg = settings.inner("tokenizer_cfg")
    unknown = symbols.names["unk"]
    lowercase = settings.flag("lowercase", False)
    if settings.flag("normalize", False):
        notes.append("its text is normalised (normalize: true), which is not done here: normalise it before")
    if (kind := cfg.get("pretokenizer", "none")) != "none":
        notes.append(
            f"its text is split by {str(kind)[:30]} first, which is not done here: do it before, and undo it after"
        )
    level = settings.get("level", "word")
    if level == "char":
        return _characters(words, unknown, lowercase)
    bpe = settings.get("tokenizer_type", settings.get("bpe_type", "sentencepiece")) if level == "bpe" else None
    # os.path reports a name that is too long as a missing file.
    model, codes = (folder / Path(str(cfg.get(name, ""))).name for name in ("model_file", "codes"))
    if bpe == "sentencepiece" and os.path.isfile(model) and (pieces := _pieces(model, words, symbols)):
        if lowercase:
            notes.append("its text is in lower case (lowercase: true), which is not done here: do it before")
        return pieces
    # Version 1, which configures both sides together, splits at any whitespace (torchtext's `str.split`).
    split_at: SplitAt = "spaces" if level == "word" and not isinstance(settings.get("src"), str) else "whitespace"
    tokenizer = word_tokenizer(words, lowercase=lowercase, unknown=unknown, split_at=split_at)
    if bpe == "subword-nmt" and os.path.isfile(codes) and cfg.get("separator", SEPARATOR) == SEPARATOR:
        known = frozenset(words) - {*symbols.first()}
        return replace(tokenizer, subwords=replace(Subwords.from_file(codes), known=known))
    if bpe and not isinstance(settings.get("src"), str):  # version 1 read text that was already split
        what = "SentencePiece model" if bpe == "sentencepiece" else "codes of subword-nmt"
        notes.append(f"its {what} could not be found or used: text is split at spaces, so give it in subwords")
    return tokenizer


def _characters(words: dict[str, int], unknown: str, lowercase: bool) -> TextTokenizer:
    inner = Tokenizer(models.WordLevel(words, unk_token=unknown))
    steps = [normalizers.Replace(" ", _SPACE), *([normalizers.Lowercase()] if lowercase else [])]
    inner.normalizer = normalizers.Sequence(steps)
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.Fuse()])
    return TextTokenizer.from_inner(inner, skips_special=False)


def _pieces(path: Path, words: dict[str, int], symbols: _Symbols) -> TextTokenizer | None:
    """The tokenizer of a SentencePiece model; None if the vocabulary lacks pieces, without which JoeyNMT then splits."""
    model = PieceModel.read(path)
    if not {*model.names} - model.hidden <= words.keys():
        return None
    special = [name for name in symbols.first() if name != symbols.names["unk"]]
    pieces = Pieces(model.content, words, special, symbols.names["unk"])
    return TextTokenizer.from_inner(pieces, skips_special=True)
