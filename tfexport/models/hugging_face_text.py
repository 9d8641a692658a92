"""The tokenizer files of a folder that `transformers` saved, and what its models expect around a text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tfexport.errors import ConfigError, TokenizerError
from tfexport.models.native import Tokenizers
from tfexport.models.toolkit import TextOptions
from tfexport.pieces import Pieces
from tfexport.tokenizers import TextTokenizer

_HOW = "Save one there: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."


_M2M_LANGUAGES = """
    af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy
    id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru
    sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu
"""
"""Of M2M-100, in the order of their ids, which follow those of vocab.json and are in no file."""


@dataclass(frozen=True)
class FolderText:
    """What tokenizer files tell."""

    tokenizers: Tokenizers
    fields: dict[str, Any]
    """Of `ModelConfig`."""
    language: int | None = None
    """The id of the target language that the user wants."""
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
        source = target = TextTokenizer.from_inner(inner, skips_special=True)
        before, after = _affixes(inner)
    elif model_type == "marian" and (path / "source.spm").is_file():
        vocabulary = _vocabulary(path / "vocab.json")
        theirs = path / "target_vocab.json"
        source = _pieces(path / "source.spm", vocabulary)
        target = _pieces(path / "target.spm", _vocabulary(theirs) if theirs.is_file() else vocabulary)
        before, after = (), (_of(vocabulary, "</s>", path),)
    elif model_type == "m2m_100" and (path / "vocab.json").is_file() and _models(path):
        vocabulary = _with_languages(_vocabulary(path / "vocab.json"), path) | _added(path)
        source = target = _pieces(_models(path)[0], vocabulary)
        language = options.source_language or _json(path / "tokenizer_config.json").get("src_lang")
        if language is None:
            note = "the folder does not say the language of its sources, so it has no tokenizer: give --src-lang, such as en"
            return FolderText(Tokenizers(None, None), {}, notes=(note,))
        before, after = (_language(source, str(language), path),), (_of(vocabulary, "</s>", path),)
    elif options:
        raise ConfigError(
            f"{path} has no tokenizer.json, so --src-lang, --tgt-lang and --prefix mean nothing. {_HOW} Or leave them out."
        )
    else:
        found = [name.name for name in path.glob("*") if name.suffix in (".model", ".spm")]
        notes = (
            (f"{', '.join(found)} of this kind of model is not read without a tokenizer.json. {_HOW}",) if found else ()
        )
        return FolderText(Tokenizers(None, None), {}, notes=notes)

    if options.source_language:
        wanted = _language(source, options.source_language, path)
        plain = {ids.get("eos_id"), ids.get("pad_id"), _special(source, "<s>"), _special(source, "</s>")}
        places = [index for index in (*before, *after) if index not in plain]
        if len(places) != 1:
            raise ConfigError(
                f"{path} puts no language before or after a source, so --src-lang means nothing. Leave it out; where the "
                "language is a word of the text, such as >>fra<<, give it with --prefix."
            )
        before, after = (tuple(wanted if index == places[0] else index for index in side) for side in (before, after))
    fields = {"unk_id": source.special_id("unk") if source.special_id("unk") is not None else -1}
    fields["source_eos"] = bool(after) and after[-1] == ids.get("eos_id")
    if fields["source_eos"]:
        after = after[:-1]  # the model's own
    source = source.framed(before, after, options.prefix)
    language_id = None if options.target_language is None else _language(target, options.target_language, path)
    return FolderText(Tokenizers(source, target), fields, language_id)


def _affixes(inner: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the tokenizer itself puts before and after a text."""
    bare, whole = (inner.encode("a", add_special_tokens=special).ids for special in (False, True))
    start = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return tuple(whole[:start]), tuple(whole[start + len(bare) :])


def _language(tokenizer: TextTokenizer, name: str, path: Path) -> int:
    """The id of a language as the vocabulary writes it: `deu_Latn`, `de_DE`, or `__de__` for de."""
    for token in (name, f"__{name}__"):
        if (found := tokenizer.inner.token_to_id(token)) is not None:
            return int(found)
    raise ConfigError(f"the vocabulary in {path} has no language {name!r}. Give it as it is written there.")


def _special(tokenizer: TextTokenizer, token: str) -> int | None:
    return tokenizer.inner.token_to_id(token)


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"cannot read {path}: {error}. Check that it was copied completely.") from error


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"cannot read {path}: {error}. Check that it was copied completely.") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} is not a JSON object. Check that it was copied completely.")
    return content


def _vocabulary(path: Path) -> dict[str, int]:
    vocabulary = _json(path)
    if not vocabulary or not all(type(index) is int for index in vocabulary.values()) or "<unk>" not in vocabulary:
        raise TokenizerError(
            f"{path} is no vocabulary of words and ids with <unk>. Check that it was copied completely."
        )
    return vocabulary


def _with_languages(vocabulary: Mapping[str, int], path: Path) -> dict[str, int]:
    """The vocabulary of an M2M-100 and its languages, where these are M2M-100's own."""
    if _json(path / "tokenizer_config.json").get("language_codes", "m2m100") != "m2m100":
        return dict(vocabulary)
    languages = enumerate(_M2M_LANGUAGES.split(), len(vocabulary))
    return {**vocabulary, **{f"__{language}__": index for index, language in languages}}


def _added(path: Path) -> dict[str, int]:
    """Tokens that are not in vocab.json, such as languages."""
    entries = _json(path / "tokenizer_config.json").get("added_tokens_decoder", {})
    try:
        return _json(path / "added_tokens.json") | {entry["content"]: int(index) for index, entry in entries.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"the added tokens in {path} cannot be read: {error!r}. Save the tokenizer again."
        ) from error


def _models(path: Path) -> Sequence[Path]:
    return [found for found in (path / "sentencepiece.bpe.model", path / "spm.model") if found.is_file()]


def _pieces(path: Path, vocabulary: Mapping[str, int]) -> TextTokenizer:
    special = [token for token in vocabulary if token in ("<s>", "</s>", "<pad>", "<unk>") or _is_language(token)]
    try:
        model = path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error}. Check that it was copied completely.") from error
    return TextTokenizer.from_inner(Pieces(model, vocabulary, special), skips_special=True)


def _is_language(token: str) -> bool:
    return (token.startswith("__") and token.endswith("__")) or (token.startswith(">>") and token.endswith("<<"))


def _of(vocabulary: Mapping[str, int], token: str, path: Path) -> int:
    if token not in vocabulary:
        raise TokenizerError(f"the vocabulary in {path} has no {token}. Check that it was copied completely.")
    return vocabulary[token]
