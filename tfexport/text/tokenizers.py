"""Tokenizers: text to ids and back. Every vocabulary, even a word list, becomes a model of the `tokenizers` library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tfexport.errors import TfexportError, TokenizerError
from tfexport.text.sentencepiece import Pieces
from tfexport.text.spacy_words import spacy_tokenizer
from tfexport.text.subword_nmt import SEPARATOR, Subwords, has_subwords
from tfexport.text.tokenizer_parts import library_tokenizer, telling_of_panics
from tfexport.text.word_parts import WordParts, word_parts

SPECIAL_NAMES = {
    "unk": ("<unk>", "[UNK]", "<UNK>"),
    "pad": ("<pad>", "<blank>", "[PAD]", "<PAD>"),
    "bos": ("<bos>", "<sos>", "<s>", "[BOS]", "<BOS>", "<SOS>"),
    "eos": ("<eos>", "</s>", "[EOS]", "<EOS>"),
}
"""Usual names of special tokens in vocabularies. They are only used if the user gives no ids."""

Spaces = Literal["single", "between", "all"]
"""Spaces of readable text; see `TextTokenizer.spaces`."""

SplitAt = Literal["whitespace", "spaces", "stripped spaces"]
"""Separators of words; see `word_tokenizer`."""

LONGEST_WORD = 500
"""Maximum number of characters without white space for the rules of spaCy or subword-nmt. Their time grows with its square:
a twentieth of a second for 500 brackets, 30 seconds for 20,000."""


class WordTooLong(TokenizerError):
    """Text has more than `LONGEST_WORD` characters without white space."""


_BREAK = re.compile(r"[^\S ]")
"""White space other than spaces. Some of it ends lines or columns."""

_NO_WORD = "\ufdd0"
"""The empty word between two spaces: a code point that is no character in Unicode."""


@dataclass(frozen=True)
class TextTokenizer:
    """The tokenizer of one side. Ids never include bos or eos, which belong to the model, not to the text."""

    inner: Tokenizer | Pieces
    spacy_language: str | None = None
    """Language of spaCy's rules that split text before words are looked up; None for none."""
    before: tuple[int, ...] = ()
    """Ids at the start of a source, such as its language; `framed` sets them."""
    after: tuple[int, ...] = ()
    """Ids at the end of a source, before the model's eos."""
    prefix: str = ""
    """Text before every source."""
    skips_special: bool = False
    """Whether readable text omits the vocabulary's special tokens."""
    spaces: Spaces = "single"
    """Spaces of readable text: `single` spaces between words, or the vocabulary's spaces `between` words or `all` of them,
    including those at the ends. The tokenizers of the transformers library differ in this."""
    subwords: Subwords | None = None
    """Subword codes that split words before they are looked up; None for none."""

    @property
    def size(self) -> int:
        """The largest id plus 1."""
        return max(self.inner.get_vocab().values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """The ids of raw text.

        Raises:
            TokenizerError: a word is not in the vocabulary, which has no unknown token.
            PanicError: the library panics on this text.
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

    def encode_after(self, before: str, text: str) -> list[int]:
        """The ids of text after other text: `Ġdog` after a word and a space, while `dog` would be at the start of a
        sentence. If the vocabulary joins the two, the ids are those of `encode`.

        Args:
            before: such as `before_inside` returns; empty for the start of a sentence.

        Raises:
            TokenizerError, PanicError, WordTooLong: as `encode`.
        """
        alone = self.encode(text)
        if not before or self._looks_words_up:
            return alone
        with suppress(TokenizerError):  # a vocabulary that lacks `before`
            first, both = self.encode(before.rstrip()), self.encode(before + text)
            if len(both) > len(first) and both[: len(first)] == first:
                return both[len(first) :]
        return alone

    def written(self, text: str) -> list[str]:
        """The part of `text` for each id of `encode`. An unknown word keeps its text."""
        text = self.prefix + text
        if isinstance(self.inner, Pieces):
            return self.inner.written(text)
        with telling_of_panics("the text cannot be encoded"):
            words = self._words(self.inner, text)
            split = not isinstance(words, str)
            encoding = self.inner.encode(words, is_pretokenized=split, add_special_tokens=False)
        if not split:
            return [text[start:end].strip() for start, end in encoding.offsets]
        places = zip(encoding.word_ids, encoding.offsets, strict=True)
        parts = ["" if word is None else words[word][start:end] for word, (start, end) in places]
        return [part.removesuffix(SEPARATOR) for part in parts] if self.subwords else parts

    def _words(self, inner: Tokenizer, text: str) -> Any:
        """The input of the lookup: all of `text`, or its words if they are split before."""
        if self.subwords is not None or self._splits_by_rules:
            longest = max(map(len, text.split()), default=0)
            if longest > LONGEST_WORD:
                raise WordTooLong(f"{longest:,} characters without white space, at most {LONGEST_WORD:,} can be split")
        words: Any = text if self.spacy_language is None else [word.text for word in self._spacy(text)]
        if self.subwords is not None:
            normal = inner.normalizer  # lower-cases text before words are split
            words = text.strip("\r\n ").split(" ") if isinstance(words, str) else words
            words = self.subwords.split([normal.normalize_str(word) for word in words] if normal else words)
            words = " ".join(words).split()  # toolkits also treat some control characters as white space
        return words

    def ids(self, tokens: Sequence[str]) -> list[int]:
        """The ids of tokens of the vocabulary. Other tokens become the unknown token.

        Raises:
            TokenizerError: a token is not in the vocabulary, which has no unknown token.
        """
        return [self._id(token) for token in tokens]

    def require(self, tokens: Sequence[str]) -> None:
        """Raise TokenizerError if one of `tokens` is not in the vocabulary, even if it has an unknown token."""
        missing = [token for token in tokens if self.inner.token_to_id(token) is None]
        if missing:
            raise TokenizerError(f"the vocabulary has no {missing[0]!r}")

    @property
    def unknown_id(self) -> int | None:
        """The id of the unknown token, if the vocabulary has one."""
        unknown = self.inner.unknown if isinstance(self.inner, Pieces) else getattr(self.inner.model, "unk_token", None)
        return None if unknown is None else self.inner.token_to_id(unknown)

    def _id(self, token: str) -> int:
        number = self.inner.token_to_id(token)
        if number is None:
            number = self.unknown_id
        if number is not None:
            return number
        raise TokenizerError(f"the token {token!r} is not in the vocabulary, which has no unknown token. Replace it.")

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """The vocabulary's token for each id."""
        return [self.inner.id_to_token(index) or f"<id:{index}>" for index in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The readable text of ids. A word vocabulary joins its words with spaces."""
        with telling_of_panics("the output cannot be written as text"):
            text = str(self.inner.decode(list(ids), skip_special_tokens=self.skips_special))
        return text if self.spaces == "all" else text.strip()

    def decode_line(self, ids: Sequence[int]) -> str:
        """Readable text for one column of one line, without newlines and tabs."""
        text = self.decode(ids)
        return " ".join(text.split()) if self.spaces == "single" else _BREAK.sub(" ", text)

    @cached_property
    def word_parts(self) -> WordParts:
        """The tokens that are parts of words. Finding them takes some tenths of a second."""

        def decode(several: Sequence[Sequence[int]]) -> list[str]:
            if isinstance(self.inner, Pieces):
                return [self.decode(ids) for ids in several]
            with telling_of_panics("the vocabulary cannot be written as text"):
                texts = self.inner.decode_batch([list(ids) for ids in several], skip_special_tokens=self.skips_special)
            return [text.strip() for text in texts]

        return word_parts(decode, self.size)

    @cached_property
    def template(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that a tokenizer.json adds before and after a text, such as its bos and eos. `encode` adds none."""
        if isinstance(self.inner, Pieces) or self.inner.post_processor is None:
            return (), ()
        for text in ("a", *islice(self.inner.get_vocab(), 100)):
            with suppress(Exception):  # the library raises plain Exception for a word that it does not know
                bare, whole = (self.inner.encode(text, add_special_tokens=added).ids for added in (False, True))
                starts = [at for at in range(len(whole)) if whole[at : at + len(bare)] == bare]
                if bare and starts:
                    return tuple(whole[: starts[0]]), tuple(whole[starts[0] + len(bare) :])
        return (), ()

    def special_id(self, kind: str) -> int | None:
        """The id of the vocabulary's own token for `kind` (unk, pad, bos, eos), if it has one under a usual name."""
        ids = (self.inner.token_to_id(name) for name in SPECIAL_NAMES[kind])
        return next((index for index in ids if index is not None), None)

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
        """A tokenizer that treats all text as text, even if it spells a special token."""
        read = inner if isinstance(inner, Pieces) else _as_text_reader(inner)
        return cls(read, skips_special=skips_special, spaces=spaces)

    def framed(self, before: Iterable[int], after: Iterable[int], prefix: str) -> TextTokenizer:
        """A copy for sources with these ids before and after them, and with this text as a prefix."""
        return replace(self, before=tuple(before), after=tuple(after), prefix=prefix)

    def with_codes(self, path: Path, *, where: str) -> TextTokenizer:
        """A copy that first splits words with the subword-nmt codes of a file.

        Args:
            where: a description of the tokenizer, for messages.

        Raises:
            TokenizerError: the file has no codes, or the tokenizer is not of words.
        """
        if isinstance(self.inner, Pieces) or not isinstance(self.inner.model, models.WordLevel):
            raise TokenizerError(f"{where} splits text by itself: codes of subword-nmt have no effect. Leave them out.")
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
        """Whether text is split into words before the lookup, so that a word has the same ids anywhere."""
        if self.spacy_language is not None or self.subwords is not None:
            return True
        return not isinstance(self.inner, Pieces) and isinstance(self.inner.model, models.WordLevel)

    @cached_property
    def _splits_by_rules(self) -> bool:
        """Whether spaCy's general rules split text, rather than the splitter of a language such as Chinese."""
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
    """A tokenizer that looks up whole words, from words and their ids.

    Args:
        unknown: the word that stands for all other words.
        joins: whether readable text joins the subwords of subword-nmt, if the words are subwords: `ab@@ c` is `abc`.
        split_at: the separators of words. For `spaces`, only U+0020 separates words, other white space is part of a word,
            and between two spaces there is an unknown word. Spaces at the end of text, and with `stripped spaces` also at
            its start, make no word.
        hidden: words that readable text omits.
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
    """Make the library treat text that spells a special token as text, and disable its truncation and padding."""
    inner.encode_special_tokens = True
    inner.no_truncation()
    inner.no_padding()
    return inner
