"""Text to ids and back. Every vocabulary, also a plain list of words, becomes a model of the `tokenizers` library."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tfexport.errors import RuntimeUnavailable, TfexportError, TokenizerError
from tfexport.pieces import Pieces

SPECIAL_NAMES = {
    "unk": ("<unk>", "[UNK]", "<UNK>"),
    "pad": ("<pad>", "<blank>", "[PAD]", "<PAD>"),
    "bos": ("<bos>", "<sos>", "<s>", "[BOS]", "<BOS>", "<SOS>"),
    "eos": ("<eos>", "</s>", "[EOS]", "<EOS>"),
}
"""How vocabularies name their special tokens; looked for only where the user has not said the ids."""

BPE_SPECIALS = ("<unk>", "<pad>", "<s>", "</s>")
"""Ids 0 to 3 of a vocabulary that we train."""


@dataclass(frozen=True)
class TextTokenizer:
    """One side's tokenizer. Ids never include bos or eos: those belong to the model, not to the text."""

    inner: Tokenizer | Pieces
    spacy_language: str | None = None
    """Split text with spaCy's rules for this language before looking words up."""
    before: tuple[int, ...] = ()
    """Ids that a source begins with, such as its language; `framed` puts them there."""
    after: tuple[int, ...] = ()
    """Ids that a source ends with, before the model's eos."""
    prefix: str = ""
    """Put before every text."""
    skips_special: bool = False
    """Readable text has none of the vocabulary's special tokens."""

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.inner.get_vocab().values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of raw text.

        Raises:
            TokenizerError: a word is not in the vocabulary, which has no unknown token.
        """
        text = self.prefix + text
        if isinstance(self.inner, Pieces):
            return self.inner.encode(text)
        words: Any = text if self.spacy_language is None else [word.text for word in self._spacy(text)]
        try:
            return list(
                self.inner.encode(words, is_pretokenized=not isinstance(words, str), add_special_tokens=False).ids
            )
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(
                f"the text cannot be encoded: {error}. Give the vocabulary an unknown token."
            ) from error

    def ids(self, tokens: Sequence[str]) -> list[int]:
        """Ids of tokens as they stand in the vocabulary; others become the unknown token.

        Raises:
            TokenizerError: a token is not in the vocabulary, which has no unknown token.
        """
        return [self._id(token) for token in tokens]

    def require(self, tokens: Sequence[str]) -> None:
        """Raises TokenizerError where one of `tokens` is not in the vocabulary, whatever stands for unknown ones."""
        missing = [token for token in tokens if self.inner.token_to_id(token) is None]
        if missing:
            raise TokenizerError(f"the vocabulary has no {missing[0]!r}")

    def _id(self, token: str) -> int:
        unknown = self.inner.unknown if isinstance(self.inner, Pieces) else getattr(self.inner.model, "unk_token", None)
        for candidate in (token, unknown):
            found = None if candidate is None else self.inner.token_to_id(candidate)
            if found is not None:
                return found
        raise TokenizerError(f"the token {token!r} is not in the vocabulary, which has no unknown token. Replace it.")

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """The vocabulary's own writing of each id."""
        return [self.inner.id_to_token(index) or f"<id:{index}>" for index in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Readable text; a word vocabulary joins its words with spaces."""
        return str(self.inner.decode(list(ids), skip_special_tokens=self.skips_special)).strip()

    def special_id(self, kind: str) -> int | None:
        """The id of the vocabulary's own token for `kind` (unk, pad, bos, eos), if it has one under a usual name."""
        found = (self.inner.token_to_id(name) for name in SPECIAL_NAMES[kind])
        return next((index for index in found if index is not None), None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` reads it back."""
        if isinstance(self.inner, Pieces):
            inner = {"pieces": self.inner.to_dict()}
        else:
            inner = {"tokenizer": json.loads(self.inner.to_str())}
        about = {
            "before": list(self.before),
            "after": list(self.after),
            "prefix": self.prefix,
            "skips_special": self.skips_special,
        }
        return {
            **inner,
            "spacy_language": self.spacy_language,
            **{name: value for name, value in about.items() if value},
        }

    @classmethod
    def from_inner(cls, inner: Tokenizer | Pieces, *, skips_special: bool) -> TextTokenizer:
        """A tokenizer that reads text as text, whatever it spells."""
        read = inner if isinstance(inner, Pieces) else _as_text_reader(inner)
        return cls(read, skips_special=skips_special)

    def framed(self, before: Iterable[int], after: Iterable[int], prefix: str) -> TextTokenizer:
        """This tokenizer for sources that have these ids before and after them, and begin with this text."""
        return replace(self, before=tuple(before), after=tuple(after), prefix=prefix)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], *, where: str) -> TextTokenizer:
        """Raises: TokenizerError if the fields are not those of `to_dict`."""
        try:
            inner = (
                Pieces.from_dict(fields["pieces"])
                if "pieces" in fields
                else _as_text_reader(Tokenizer.from_str(json.dumps(fields["tokenizer"])))
            )
            before, after = (tuple(map(int, fields.get(side, []))) for side in ("before", "after"))
            about = (str(fields.get("prefix", "")), bool(fields.get("skips_special", False)))
            return cls(inner, fields.get("spacy_language"), before, after, *about)
        except TfexportError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{where} is not a tokenizer: {error}. Export the model again.") from error

    @cached_property
    def _spacy(self) -> Any:
        try:
            import spacy
        except ImportError as error:
            raise RuntimeUnavailable(
                "this model's text is tokenised by spaCy, which is not installed: pip install 'tfexport[spacy]', "
                "or decode ids with --input-format ids."
            ) from error
        try:
            return spacy.blank(self.spacy_language).tokenizer
        except Exception as error:
            raise RuntimeUnavailable(
                f"spaCy has no language {self.spacy_language!r}: {error}. Use a code such as de."
            ) from error


def read_vocabulary(
    path: Path, *, lowercase: bool = False, spacy_language: str | None = None, unk_id: int | None = None
) -> TextTokenizer:
    """Read a vocabulary file: a `tokenizer.json`, a JSON list or dict of words, or one word a line.

    Words are looked up in text split at whitespace, or by spaCy's rules. `lowercase` and `unk_id`, the
    id of the unknown word where its name does not tell, apply to word vocabularies.

    Raises:
        TokenizerError: the file is none of these.
        RuntimeUnavailable: spaCy is not installed, or does not know the language.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"cannot read the vocabulary {path}: {error}. Give a UTF-8 text or JSON file.") from error
    try:
        content = json.loads(text, object_pairs_hook=_unique_keys)
    except _KeyTwice as twice:
        raise TokenizerError(f"{path} has the word {str(twice)!r} twice. Make its words unique.") from None
    except (ValueError, RecursionError):
        if path.suffix == ".json":
            raise TokenizerError(f"{path} is not valid JSON. Give a JSON list or dict, or one token a line.") from None
        content = text.removesuffix("\n").split("\n") if text else []
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        if lowercase or spacy_language:
            raise TokenizerError(f"{path} has its own normalisation: leave out --lowercase and the spaCy tokeniser.")
        return TextTokenizer.from_dict({"tokenizer": content}, where=str(path))
    words = _word_ids(content, path)
    try:
        unknown = next((word for word, index in words.items() if index == unk_id), None)
        tokenizer = word_tokenizer(words, lowercase=lowercase, spacy_language=spacy_language, unknown=unknown)
        tokenizer.encode("")  # a spaCy language that does not exist is better told now than at the first sentence
        return tokenizer
    except TypeError:  # a lone surrogate, which JSON can spell
        raise TokenizerError(f"{path} is not a vocabulary: a word is not valid Unicode. Correct it.") from None


class _KeyTwice(Exception):
    pass


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise _KeyTwice(next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
    return content


def _word_ids(content: Any, path: Path) -> dict[str, int]:
    if isinstance(content, list) and content and all(isinstance(word, str) for word in content):
        words = {word: index for index, word in enumerate(content)}
        if len(words) < len(content):
            twice = sorted(word for word, count in Counter(content).items() if count > 1)[:5]
            raise TokenizerError(f"{path} has words twice: {twice}. Make its lines unique: the position is the id.")
        return words
    if (
        isinstance(content, dict)
        and content
        and all(type(index) is int and 0 <= index < 2**31 for index in content.values())
    ):
        if len(set(content.values())) < len(content):
            raise TokenizerError(f"{path} gives one id to several words. Make the ids unique.")
        return content
    raise TokenizerError(
        f"{path} is not a vocabulary. Give a tokenizer.json, a JSON list or dict of words, or one word a line."
    )


def word_tokenizer(
    words: Mapping[str, int], *, lowercase: bool = False, spacy_language: str | None = None, unknown: str | None = None
) -> TextTokenizer:
    """A tokenizer that looks whole words up, from words and their ids; `unknown` stands for all others."""
    unknown = unknown or next((name for name in SPECIAL_NAMES["unk"] if name in words), None)
    inner = Tokenizer(models.WordLevel(dict(words), unk_token=unknown or "<unk>"))
    if spacy_language is None:
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if lowercase:
        inner.normalizer = normalizers.Lowercase()
    return TextTokenizer(inner, spacy_language)


def train_words(
    texts: Iterable[str], *, min_frequency: int = 2, vocab_size: int = 50_000, lowercase: bool = False
) -> TextTokenizer:
    """A word vocabulary of the words that `texts`, split at whitespace, hold at least `min_frequency` times."""
    lower = normalizers.Lowercase().normalize_str if lowercase else str  # as the tokenizer does it
    counts = Counter(word for text in texts for word in lower(text).split())
    frequent = [word for word, count in counts.items() if count >= min_frequency and word not in BPE_SPECIALS]
    frequent.sort(key=lambda word: (-counts[word], word))
    words = [*BPE_SPECIALS, *frequent][:vocab_size]
    return word_tokenizer({word: index for index, word in enumerate(words)}, lowercase=lowercase)


def train_bpe(texts: Iterable[str], *, vocab_size: int, lowercase: bool = False) -> TextTokenizer:
    """A byte-level BPE vocabulary (Sennrich et al. 2016): it has no unknown text and gives back exactly what it read."""
    inner = Tokenizer(models.BPE())
    steps = [normalizers.NFC(), *([normalizers.Lowercase()] if lowercase else [])]
    inner.normalizer = normalizers.Sequence(steps)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(BPE_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return TextTokenizer(_as_text_reader(inner))


def _as_text_reader(inner: Tokenizer) -> Tokenizer:
    """Text that spells a special token is text: it must not become one; nor is text cut or padded behind our back."""
    inner.encode_special_tokens = True
    inner.no_truncation()
    inner.no_padding()
    return inner
