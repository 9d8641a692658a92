"""The files next to a CTranslate2 model.bin: config.json with the names of special tokens, and the vocabularies.

Source: `models/sequence_to_sequence.cc` and `vocabulary.cc` of CTranslate2 4.8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfexport.errors import CheckpointError, ConfigError, TokenizerError
from tfexport.models.formats.model_bin import ModelBin
from tfexport.models.formats.native import Tokenizers
from tfexport.models.formats.shards import json_object
from tfexport.models.toolkits.arguments import Arguments
from tfexport.models.toolkits.toolkit import TextOptions
from tfexport.system import regular_files
from tfexport.text.tokenizers import word_tokenizer

CONFIG = "config.json"
_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_OLD_FLAGS = ("with_source_bos", "with_source_eos", "with_target_bos", "user_decoder_start_tokens")
"""Attributes of model.bin that moved to config.json in version 6 of its layout."""
_COPY = "Check that it was copied completely."


@dataclass(frozen=True)
class CTranslate2Text:
    """The content of the vocabularies and config.json."""

    fields: dict[str, Any]
    """`ModelConfig` fields; without `bos_id` if the caller of the model gives the decoder's first token."""
    tokenizers: Tokenizers
    assumed: tuple[str, ...]
    notes: tuple[str, ...]


def read_config(folder: Path, model: ModelBin) -> Arguments:
    """Read config.json; before version 6, its entries were in model.bin.

    Raises:
        CheckpointError: the file is missing or not a JSON object.
    """
    path = folder / CONFIG
    settings: dict[str, Any] = {}
    if model.version >= 6 or path.is_file():
        settings = json_object(path)
    if model.version < 6:
        flags = {name: bool(model.attributes.get(name, name == "with_target_bos")) for name in _OLD_FLAGS}
        tokens = {name: model.texts.get(name, usual) for name, usual in _TOKENS.items()}
        start = tokens["bos_token"] if flags["with_target_bos"] else tokens["eos_token"]
        settings |= tokens | {
            "add_source_bos": flags["with_source_bos"],
            "add_source_eos": flags["with_source_eos"],
            "decoder_start_token": None if flags["user_decoder_start_tokens"] else start,
        }
    return Arguments(str(path), settings)


def moved_to_config(name: str) -> bool:
    """Whether `read_config` reads an attribute or a text of model.bin."""
    return name in (*_OLD_FLAGS, *_TOKENS)


def read_text(
    folder: Path, config: Arguments, sizes: Mapping[str, int], options: TextOptions, *, starts_with_zeros: bool
) -> CTranslate2Text:
    """The tokenizers of a folder and the ids of its special tokens.

    Args:
        sizes: numbers of rows of the embeddings, `src_vocab_size` and `tgt_vocab_size`.
        starts_with_zeros: the decoder starts with zeros instead of a token, regardless of config.json.

    Raises:
        CheckpointError: a vocabulary is missing.
        ConfigError: a vocabulary lacks a special token, or an option is not for this model.
        TokenizerError: a vocabulary cannot be read.
    """
    if options.source_language or options.target_language:
        raise ConfigError(
            f"{folder} does not list its languages: --src-lang and --tgt-lang have no effect. Give the token of the "
            "source with --prefix, such as 'deu_Latn ', and that of the target as forced_first_id with --config."
        )
    shared = _vocabulary(folder, "shared_vocabulary")
    source, target = ([shared] * 2) if shared else (_of_side(folder, side) for side in ("source", "target"))
    unk, bos, eos = (config.text(name, usual) for name, usual in _TOKENS.items())
    start = config.get("decoder_start_token")
    adds = {f"source_{kind}": config.flag(f"add_source_{kind}", False) for kind in ("bos", "eos")}
    for words, size, side in ((source, sizes["src_vocab_size"], "source"), (target, sizes["tgt_vocab_size"], "target")):
        if len(words) > size:
            raise ConfigError(f"the {side} vocabulary in {folder} has {len(words)} words, the model {size}. {_COPY}")

    def token(name: str, words: list[str], word: str) -> int:
        if word not in words:
            raise ConfigError(f"{config.where} has {name} {word!r}, which the vocabularies in {folder} lack. {_COPY}")
        return words.index(word)

    eos_id = token("eos_token", target, eos)
    fields: dict[str, Any] = {
        "unk_id": source.index(unk) if unk in source else -1,
        "eos_id": eos_id,
        "pad_id": eos_id,  # lengths limit the sources, so any id can pad them
        **adds,
    }
    if start is not None and not starts_with_zeros:
        fields["bos_id"] = token("decoder_start_token", target, config.text("decoder_start_token", ""))
    for is_added, word, kind, ours in (
        (adds["source_eos"], eos, "eos", eos_id),
        (adds["source_bos"], bos, "bos", fields.get("bos_id")),
    ):
        if is_added and token(f"{kind}_token", source, word) != ours:
            raise ConfigError(
                f"{config.where} has add_source_{kind}, and {word!r} is not the same id in the source as the "
                f"{'end' if kind == 'eos' else 'beginning'} of a target, which is not supported."
            )
    tokenizers = [word_tokenizer(_first_ids(words), unknown=unk) for words in (source, target)]
    return CTranslate2Text(
        fields,
        Tokenizers(tokenizers[0].framed((), (), options.prefix), tokenizers[1]),
        tuple(name for name, is_added in adds.items() if not is_added),
        _notes(folder, adds["source_eos"], eos, start),
    )


def _notes(folder: Path, adds_eos: bool, eos: str, start: Any) -> tuple[str, ...]:
    notes = []
    if not adds_eos and start != _TOKENS["bos_token"]:  # OpenNMT-py's models start with it; their sources have no eos
        notes.append(
            f"{CONFIG} leaves it to the input whether sources end with {eos}: models of the transformers library need it at "
            'the end of every line, or {"source_eos": true} with --config'
        )
    if (folder / "vmap.txt").is_file():
        notes.append("vmap.txt beside it is a shortlist, which is not used by itself: see --shortlist")
    return tuple(notes)


def _first_ids(words: list[str]) -> dict[str, int]:
    """The first id of each word."""
    ids: dict[str, int] = {}
    for index, word in enumerate(words):
        ids.setdefault(word, index)
    return ids


def _of_side(folder: Path, side: str) -> list[str]:
    words = _vocabulary(folder, f"{side}_vocabulary")
    if words:
        return words
    if _vocabulary(folder, f"{side}_1_vocabulary"):
        raise ConfigError(f"{folder} has vocabularies of {side} features, which are not supported.")
    raise CheckpointError(
        f"{folder} has no {side}_vocabulary.json (or .txt), and no shared_vocabulary.json. Put it there."
    )


def _vocabulary(folder: Path, name: str) -> list[str]:
    """The words of a file in the order of their ids; empty if the file is missing."""
    listed, lines = folder / f"{name}.json", folder / f"{name}.txt"
    if listed.is_file():
        content = _json(listed)
        if not isinstance(content, list) or not content or not all(map(_is_word, content)):
            raise TokenizerError(f"{listed} is not a JSON list of words. {_COPY}")
        return content
    if not lines.is_file():
        return []
    try:
        words = regular_files.read_bytes(lines).decode("utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"cannot read {lines}: {error}. {_COPY}") from error
    # A carriage return at the end of a line belongs to the word, unless all lines have one.
    return [word[:-1] for word in words] if all(word.endswith("\r") for word in words) else words


def _is_word(word: Any) -> bool:
    """Whether a value is valid text: JSON can contain lone surrogates."""
    return isinstance(word, str) and not any("\ud800" <= character <= "\udfff" for character in word)


def _json(path: Path) -> Any:
    try:
        return json.loads(regular_files.read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}. {_COPY}") from error
