"""The tokenizer files of a folder that `transformers` saved, and the tokens that its models expect around a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tfexport.errors import ConfigError, TokenizerError
from tfexport.models.formats.native import Tokenizers
from tfexport.models.toolkits.hugging_face_pieces import NotRead, language_id, read_pieces
from tfexport.models.toolkits.toolkit import TextOptions
from tfexport.system import regular_files
from tfexport.text.tokenizer_parts import library_tokenizer
from tfexport.text.tokenizers import TextTokenizer


@dataclass(frozen=True)
class FolderText:
    """The content of the tokenizer files."""

    tokenizers: Tokenizers
    fields: dict[str, Any]
    """`ModelConfig` fields."""
    language: int | None = None
    """Id of the target language that the user chose."""
    speaks: bool = False
    """Whether sources include the id of their language."""
    notes: tuple[str, ...] = ()


def read_text(path: Path, model_type: str, ids: Mapping[str, Any], options: TextOptions) -> FolderText:
    """The tokenizers of a folder.

    Args:
        ids: `pad_id`, `bos_id` and `eos_id`, as far as they are known.

    Raises:
        ConfigError: an option is not for this model, or a language is not in the vocabulary.
        TokenizerError: a file cannot be read.
    """
    if (path / "tokenizer.json").is_file():
        inner = _tokenizer(path / "tokenizer.json")
        source = target = TextTokenizer.from_inner(inner, skips_special=True, spaces="all")
        before, after = _affixes(inner)
    else:
        try:
            pieces = read_pieces(path, model_type, options.source_language)
        except NotRead as why:
            if options:
                raise ConfigError(f"{path} gives no text for --src-lang, --tgt-lang and --prefix: {why}") from None
            return FolderText(Tokenizers(None, None), {}, notes=(f"the text of {path} is not read: {why}",))
        source, target, before, after = pieces.source, pieces.target, pieces.before, pieces.after

    plain = {ids.get("eos_id"), ids.get("pad_id"), _special(source, "<s>"), _special(source, "</s>")}
    places = [index for index in (*before, *after) if index not in plain]
    if options.source_language:
        wanted = language_id(source.inner.token_to_id, options.source_language, path)
        if len(places) != 1:
            raise ConfigError(
                f"{path} puts no language before or after a source, so --src-lang has no effect. Leave it out; if the "
                "language is a word of the text, such as >>fra<<, give it with --prefix."
            )
        before, after = (tuple(wanted if index == places[0] else index for index in side) for side in (before, after))
    fields = {"unk_id": source.special_id("unk") if source.special_id("unk") is not None else -1}
    fields["source_eos"] = bool(after) and after[-1] == ids.get("eos_id")
    if fields["source_eos"]:
        after = after[:-1]  # the model's own
    source = source.framed(before, after, options.prefix)
    spoken = None
    if options.target_language is not None:
        spoken = language_id(target.inner.token_to_id, options.target_language, path)
    return FolderText(Tokenizers(source, target), fields, spoken, bool(places))


def _affixes(inner: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the tokenizer adds before and after a text."""
    bare, whole = (inner.encode("a", add_special_tokens=special).ids for special in (False, True))
    start = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return tuple(whole[:start]), tuple(whole[start + len(bare) :])


def _special(tokenizer: TextTokenizer, token: str) -> int | None:
    return tokenizer.inner.token_to_id(token)


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return library_tokenizer(json.loads(regular_files.read_text(path)), str(path))
    except TokenizerError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"cannot read {path}: {error}. Check that it was copied completely.") from error
