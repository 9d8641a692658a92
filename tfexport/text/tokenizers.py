"""Text to ids and back. Every vocabulary, also a plain list of words, becomes a model of the `tokenizers` library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tfexport.errors import TfexportError, TokenizerError
from tfexport.text.sentencepiece import Pieces
from tfexport.text.spacy_words import spacy_tokenizer
from tfexport.text.subword_nmt import SEPARATOR, Subwords, has_subwords
from tfexport.text.tokenizer_parts import library_tokenizer, telling_of_panics
from tfexport.text.word_parts import WordParts, kind_of, word_parts

SPECIAL_NAMES = {
    "unk": ("<unk>", "[UNK]", "<UNK>"),
    "pad": ("<pad>", "<blank>", "[PAD]", "<PAD>"),
    "bos": ("<bos>", "<sos>", "<s>", "[BOS]", "<BOS>", "<SOS>"),
    "eos": ("<eos>", "</s>", "[EOS]", "<EOS>"),
}
"""How vocabularies name their special tokens; looked for only where the user has not said the ids."""

Spaces = Literal["single", "between", "all"]
"""Spaces of readable text; see `TextTokenizer.spaces`."""

SplitAt = Literal["whitespace", "spaces", "stripped spaces"]
"""How text is split into words; see `word_tokenizer`."""

LONGEST_WORD = 500
"""Characters between white space that rules of spaCy or subword-nmt split. They take a time that grows with the square of
this number: a twentieth of a second for so many brackets, 30 seconds for 20,000."""


class WordTooLong(TokenizerError):
    """Text has more than `LONGEST_WORD` characters without white space."""


_BREAK = re.compile(r"[^\S ]")
"""White space other than spaces, some of which ends lines or columns."""

_NO_WORD = "\ufdd0"
"""Stands for the empty word between two spaces: a code point that Unicode gives no character."""


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
    spaces: Spaces = "single"
    """Those of readable text: single ones between words, or those that the vocabulary gives it, without or with those at its
    ends. The tokenizers of the transformers library differ in it."""
    subwords: Subwords | None = None
    """Split words into those of a vocabulary of subwords before looking them up."""

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.inner.get_vocab().values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of raw text.

        Raises:
            TokenizerError: a word is not in the vocabulary, which has no unknown token.
            PanicError: the library stops at this text.
            WordTooLong: a word is too long to be split.
        """
        text = self.prefix + text
        if isinstance(self.inner, Pieces):
            return self.inner.encode(text)
        try:
            with telling_of_panics("the text cannot be encoded"):
                words = self._words(self.inner, text)
                split = not isinstance(words, str)
                return list(self.inner.encode(words, is_pretokenized=split, add_special_tokens=False).ids)
        except TfexportError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(
                f"the text cannot be encoded: {error}. Give the vocabulary an unknown token."
            ) from error

    def encode_inside(self, text: str) -> list[int]:
        """Ids of text that stands inside a sentence: `Ġdog`, where `dog` alone begins one. Text that begins with a sign is
        taken alone.

        Raises:
            TokenizerError, PanicError, WordTooLong: as `encode`.
        """
        alone, kind = self.encode(text), kind_of(text[:1] or " ")
        is_unspaced = kind == "alone" and text[0].isalnum()
        if self._looks_words_up or not (is_unspaced or kind == "run"):
            return alone
        before = "." if is_unspaced else "a"
        with suppress(TokenizerError):  # of a vocabulary that lacks `before`
            first, both = self.encode(before), self.encode(f"{before}{text}" if is_unspaced else f"{before} {text}")
            if len(both) > len(first) and both[: len(first)] == first:
                return both[len(first) :]
        return alone

    def written(self, text: str) -> list[str]:
        """The part of `text` that each of the ids of `encode` stands for: an unknown word too is what it is."""
        text = self.prefix + text
        if isinstance(self.inner, Pieces):
            return self.inner.written(text)
        with telling_of_panics("the text cannot be encoded"):
            words = self._words(self.inner, text)
            split = not isinstance(words, str)
            found = self.inner.encode(words, is_pretokenized=split, add_special_tokens=False)
        if not split:
            return [text[start:end].strip() for start, end in found.offsets]
        places = zip(found.word_ids, found.offsets, strict=True)
        parts = ["" if word is None else words[word][start:end] for word, (start, end) in places]
        return [part.removesuffix(SEPARATOR) for part in parts] if self.subwords else parts

    def _words(self, inner: Tokenizer, text: str) -> Any:
        """What is looked up: all of `text`, or the words that are told apart before."""
        if self.subwords is not None or self._splits_by_rules:
            longest = max(map(len, text.split()), default=0)
            if longest > LONGEST_WORD:
                raise WordTooLong(f"{longest:,} characters without white space, at most {LONGEST_WORD:,} can be split")
        words: Any = text if self.spacy_language is None else [word.text for word in self._spacy(text)]
        if self.subwords is not None:
            normal = inner.normalizer  # of upper case, before words are split
            words = text.strip("\r\n ").split(" ") if isinstance(words, str) else words
            words = self.subwords.split([normal.normalize_str(word) for word in words] if normal else words)
            words = " ".join(words).split()  # as toolkits read the line: some control characters are white space then
        return words

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

    @property
    def unknown_id(self) -> int | None:
        """The id that stands for all that is not in the vocabulary, if it has one."""
        unknown = self.inner.unknown if isinstance(self.inner, Pieces) else getattr(self.inner.model, "unk_token", None)
        return None if unknown is None else self.inner.token_to_id(unknown)

    def _id(self, token: str) -> int:
        found = self.inner.token_to_id(token)
        if found is None:
            found = self.unknown_id
        if found is not None:
            return found
        raise TokenizerError(f"the token {token!r} is not in the vocabulary, which has no unknown token. Replace it.")

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """The vocabulary's own writing of each id."""
        return [self.inner.id_to_token(index) or f"<id:{index}>" for index in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Readable text; a word vocabulary joins its words with spaces."""
        with telling_of_panics("the output cannot be written as text"):
            text = str(self.inner.decode(list(ids), skip_special_tokens=self.skips_special))
        return text if self.spaces == "all" else text.strip()

    def decode_line(self, ids: Sequence[int]) -> str:
        """Readable text that is one column of one line: without newlines and tabs."""
        text = self.decode(ids)
        return " ".join(text.split()) if self.spaces == "single" else _BREAK.sub(" ", text)

    @cached_property
    def word_parts(self) -> WordParts:
        """Its tokens that are parts of words. It takes some tenths of a second to find them."""

        def decode(several: Sequence[Sequence[int]]) -> list[str]:
            if isinstance(self.inner, Pieces):
                return [self.decode(ids) for ids in several]
            with telling_of_panics("the vocabulary cannot be written as text"):
                texts = self.inner.decode_batch([list(ids) for ids in several], skip_special_tokens=self.skips_special)
            return [text.strip() for text in texts]

        return word_parts(decode, self.size)

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
        about: dict[str, Any] = {
            "before": list(self.before),
            "after": list(self.after),
            "prefix": self.prefix,
            "skips_special": self.skips_special,
            "spaces": "" if self.spaces == "single" else self.spaces,
        }
        if self.subwords is not None:
            known = self.subwords.known
            about |= {"codes": self.subwords.codes, "known": None if known is None else sorted(known)}
        return {
            **inner,
            "spacy_language": self.spacy_language,
            **{name: value for name, value in about.items() if value},
        }

    @classmethod
    def from_inner(cls, inner: Tokenizer | Pieces, *, skips_special: bool, spaces: Spaces = "single") -> TextTokenizer:
        """A tokenizer that reads text as text, whatever it spells."""
        read = inner if isinstance(inner, Pieces) else _as_text_reader(inner)
        return cls(read, skips_special=skips_special, spaces=spaces)

    def framed(self, before: Iterable[int], after: Iterable[int], prefix: str) -> TextTokenizer:
        """This tokenizer for sources that have these ids before and after them, and begin with this text."""
        return replace(self, before=tuple(before), after=tuple(after), prefix=prefix)

    def with_codes(self, path: Path, *, where: str) -> TextTokenizer:
        """This tokenizer for text that the codes of subword-nmt in a file split into its words.

        Args:
            where: whose tokenizer it is, for messages.

        Raises:
            TokenizerError: the file has no codes, or the tokenizer is not of words.
        """
        if isinstance(self.inner, Pieces) or not isinstance(self.inner.model, models.WordLevel):
            raise TokenizerError(f"{where} splits text by itself: codes of subword-nmt mean nothing. Leave them out.")
        return replace(self, subwords=Subwords.from_file(path))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], *, where: str) -> TextTokenizer:
        """Raises: TokenizerError if the fields are not those of `to_dict`."""
        try:
            inner = (
                Pieces.from_dict(fields["pieces"])
                if "pieces" in fields
                else _as_text_reader(library_tokenizer(fields["tokenizer"], where))
            )
            before, after = (tuple(fields.get(side, [])) for side in ("before", "after"))
            if not all(type(index) is int and 0 <= index < 2**31 for index in (*before, *after)):
                raise ValueError("the ids before and after a text are none")
            about = (str(fields.get("prefix", "")), bool(fields.get("skips_special", False)))
            spaces = fields.get("spaces", "single")
            if spaces not in get_args(Spaces):
                raise ValueError(f"spaces are {spaces!r}")
            subwords = None
            if "codes" in fields:
                known = fields.get("known")
                subwords = Subwords(str(fields["codes"]), None if known is None else frozenset(map(str, known)))
                subwords.check(where)
            return cls(inner, fields.get("spacy_language"), before, after, *about, spaces, subwords)
        except TfexportError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{where} is not a tokenizer: {error}. Export the model again.") from error

    @property
    def _looks_words_up(self) -> bool:
        """Whether words are told apart before, so that they are the same anywhere."""
        if self.spacy_language is not None or self.subwords is not None:
            return True
        return not isinstance(self.inner, Pieces) and isinstance(self.inner.model, models.WordLevel)

    @cached_property
    def _splits_by_rules(self) -> bool:
        """Whether spaCy's general rules split text, and not a splitter of one language, such as Chinese."""
        return self.spacy_language is not None and type(self._spacy).__module__ == "spacy.tokenizer"

    @cached_property
    def _spacy(self) -> Any:
        return spacy_tokenizer(self.spacy_language)


def word_tokenizer(
    words: Mapping[str, int],
    *,
    lowercase: bool = False,
    spacy_language: str | None = None,
    unknown: str | None = None,
    joins: bool = True,
    split_at: SplitAt = "whitespace",
    hidden: Sequence[str] = (),
) -> TextTokenizer:
    """A tokenizer that looks whole words up, from words and their ids.

    Args:
        unknown: stands for all other words.
        joins: readable text has the subwords of subword-nmt joined, where the words are such: `ab@@ c` is `abc`.
        split_at: what stands between words. Spaces are U+0020 alone, other whitespace is part of a word, and between two
            spaces there is a word that no vocabulary has; those at the end of text, and at its beginning where they are
            `stripped`, are none.
        hidden: words that readable text leaves out.
    """
    unknown = unknown or next((name for name in SPECIAL_NAMES["unk"] if name in words), None)
    inner = Tokenizer(models.WordLevel(dict(words), unk_token=unknown or "<unk>"))
    steps: list[normalizers.Normalizer] = [normalizers.Lowercase()] if lowercase else []
    if split_at != "whitespace":
        inner.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
        nothing = normalizers.Replace(Regex("(?<= |^)(?= )"), _NO_WORD)
        steps += [normalizers.Strip(left=split_at == "stripped spaces", right=True), nothing]
    elif spacy_language is None:
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if steps:
        inner.normalizer = steps[0] if len(steps) == 1 else normalizers.Sequence(steps)
    if joins and has_subwords(words):
        joining = [decoders.Replace(Regex(f"(?<!{SEPARATOR})$"), " "), decoders.Replace(Regex(f"{SEPARATOR}$"), "")]
        inner.decoder = decoders.Sequence(joining)
    if hidden:
        inner.add_special_tokens([AddedToken(word, normalized=False) for word in hidden])
        _as_text_reader(inner)
    return TextTokenizer(inner, spacy_language, skips_special=bool(hidden))


def _as_text_reader(inner: Tokenizer) -> Tokenizer:
    """Text that spells a special token is text: it must not become one; nor is text cut or padded behind our back."""
    inner.encode_special_tokens = True
    inner.no_truncation()
    inner.no_padding()
    return inner
