"""Tokenizers of SentencePiece models whose vocabulary may change the ids of pieces, as in Marian and mBART."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tfexport.errors import RuntimeUnavailable, TokenizerError
from tfexport.system.imports import import_failure
from tfexport.system.regular_files import read_bytes

_CODE = re.compile(r">>[^<>]+<<")
"""The target language at the start of a text, in Marian's models of many languages."""


@dataclass(frozen=True)
class PieceModel:
    """A SentencePiece model and the names of its pieces, in the order of the model's ids."""

    content: bytes
    names: tuple[str, ...]
    hidden: frozenset[str]
    """Control pieces and the unknown piece. Text is never split into them."""
    unknown: str

    @staticmethod
    def bytes_of(path: Path) -> bytes:
        """Raises: TokenizerError if the file cannot be read."""
        try:
            return read_bytes(path)
        except OSError as error:
            raise TokenizerError(f"cannot read {path}: {error}. Check that it was copied completely.") from error

    @classmethod
    def read(cls, path: Path) -> PieceModel:
        """Raises: TokenizerError if the file is not a model, RuntimeUnavailable if SentencePiece is not installed."""
        content = cls.bytes_of(path)
        try:
            model = _processor(content)
            numbers = range(model.get_piece_size())
            names = tuple(model.id_to_piece(number) for number in numbers)
            unknown = names[model.unk_id()]
            hidden = {names[number] for number in numbers if model.is_control(number) or model.is_unknown(number)}
        except (RuntimeError, UnicodeError, IndexError) as error:
            raise TokenizerError(
                f"{path} is not a SentencePiece model: {_one_line(error)}. Check that it was copied completely."
            ) from error
        return cls(content, names, frozenset(hidden), unknown)

    def tokenizer(self) -> Pieces:
        """A tokenizer with the model's own ids."""
        vocabulary = {name: number for number, name in enumerate(self.names)}
        return Pieces(self.content, vocabulary, sorted(self.hidden - {self.unknown}), self.unknown)


def _processor(model: bytes) -> Any:
    """SentencePiece's processor; raises RuntimeError if it rejects the model."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        absent = (
            "this text is split by SentencePiece, which is not installed: pip install 'tfexport[sentencepiece]', "
            "or decode ids with --input-format ids."
        )
        raise import_failure(error, "sentencepiece", absent) from error
    if not model:
        raise RuntimeError("the file is empty")  # the library treats an empty file as a missing model
    return SentencePieceProcessor(model_proto=model)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


class Pieces:
    """The part of the interface of `tokenizers.Tokenizer` that a `TextTokenizer` uses.

    Args:
        model: a serialised SentencePiece model.
        vocabulary: the id of each piece and special token.
        special: tokens that are not pieces of text.
        unknown: the token for pieces that the vocabulary lacks.
    """

    def __init__(self, model: bytes, vocabulary: Mapping[str, int], special: Sequence[str], unknown: str = "<unk>"):
        self._model, self._vocabulary = model, dict(vocabulary)
        self._special, self.unknown = frozenset(special), unknown
        self._tokens = {index: token for token, index in self._vocabulary.items()}

    @cached_property
    def _splitter(self) -> Any:
        try:
            return _processor(self._model)
        except RuntimeError as error:
            raise RuntimeUnavailable(
                f"SentencePiece rejects the model of this text: {_one_line(error)}. Upgrade it, or export again."
            ) from error

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary

    def token_to_id(self, token: str) -> int | None:
        return self._vocabulary.get(token)

    def id_to_token(self, index: int) -> str | None:
        return self._tokens.get(index)

    def encode(self, text: str) -> list[int]:
        """The ids of the pieces of `text`, and of a language code at its start.

        Text that spells any other special token is plain text, even if SentencePiece has no pieces for it.
        """
        code, pieces = self._pieces(text)
        unknown = self._vocabulary[self.unknown]
        known = [unknown if piece in self._special else self._vocabulary.get(piece, unknown) for piece in pieces]
        return [*(self._vocabulary[token] for token in code), *known]

    def written(self, text: str) -> list[str]:
        """The part of the normalised `text` for each id of `encode`."""
        code, pieces = self._pieces(text)
        return [*code, *(piece.replace("▁", " ").strip() for piece in pieces)]

    def _pieces(self, text: str) -> tuple[list[str], list[str]]:
        """The language code at the start of `text`, if any, and the pieces of the rest."""
        code = _CODE.match(text)
        first, rest = ([code[0]], text[code.end() :]) if code and code[0] in self._vocabulary else ([], text)
        return first, list(self._splitter.encode(rest, out_type=str))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of ids. Special tokens are omitted, or else keep their names."""
        tokens = [self._tokens.get(index, self.unknown) for index in ids]
        if skip_special_tokens:
            tokens = [token for token in tokens if token not in self._special]
        return str(self._splitter.decode(tokens)).replace("▁", " ")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` reads it back."""
        return {
            "model": base64.b64encode(self._model).decode("ascii"),
            "vocabulary": self._vocabulary,
            "special": sorted(self._special),
            "unknown": self.unknown,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Pieces:
        """Raises: KeyError, ValueError or TypeError if the fields are not those of `to_dict`."""
        vocabulary, special = dict(fields["vocabulary"]), list(fields["special"])
        if not all(isinstance(token, str) and type(index) is int for token, index in vocabulary.items()):
            raise ValueError("its vocabulary is not a mapping of words to ids")
        if fields["unknown"] not in vocabulary:
            raise ValueError(f"its vocabulary has no {fields['unknown']!r}")
        return cls(base64.b64decode(fields["model"], validate=True), vocabulary, special, fields["unknown"])
