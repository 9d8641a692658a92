"""Text to ids by a SentencePiece model whose pieces have ids of their own, in a vocabulary beside it: Marian, M2M-100."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tfexport.errors import RuntimeUnavailable

_CODE = re.compile(r">>[^<>]+<<")
"""How a text for Marian's models of many languages begins: with the language to translate to."""


class Pieces:
    """As much of `tokenizers.Tokenizer` as a `TextTokenizer` uses.

    Args:
        model: a serialised SentencePiece model.
        vocabulary: the id of each piece and special token.
        special: tokens that are no pieces of text.
        unknown: the token for pieces that the vocabulary lacks.
    """

    def __init__(self, model: bytes, vocabulary: Mapping[str, int], special: Sequence[str], unknown: str = "<unk>"):
        self._model, self._vocabulary, self._special, self.unknown = model, dict(vocabulary), list(special), unknown
        self._tokens = {index: token for token, index in self._vocabulary.items()}

    @cached_property
    def _processor(self) -> Any:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise RuntimeUnavailable(
                "this text is split by SentencePiece, which is not installed: pip install 'tfexport[sentencepiece]', "
                "or decode ids with --input-format ids."
            ) from error
        return SentencePieceProcessor(model_proto=self._model)

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary

    def token_to_id(self, token: str) -> int | None:
        return self._vocabulary.get(token)

    def id_to_token(self, index: int) -> str | None:
        return self._tokens.get(index)

    def encode(self, text: str) -> list[int]:
        """The ids of the pieces of `text`, and of the language code that it may begin with."""
        return [self._vocabulary.get(piece, self._vocabulary[self.unknown]) for piece in self._pieces(text)]

    def written(self, text: str) -> list[str]:
        """The part of `text`, normalised by the model, that each of the ids of `encode` stands for."""
        return [piece.replace("▁", " ").strip() for piece in self._pieces(text)]

    def _pieces(self, text: str) -> list[str]:
        code = _CODE.match(text)
        first = [code[0]] if code and code[0] in self._vocabulary else []
        return [*first, *self._processor.encode(text[code.end() :] if code and first else text, out_type=str)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of ids; special tokens are left out, or else stand as they are written."""
        tokens = [self._tokens.get(index, self.unknown) for index in ids]
        if skip_special_tokens:
            tokens = [token for token in tokens if token not in self._special]
        return str(self._processor.decode(tokens)).replace("▁", " ")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` reads it back."""
        return {
            "model": base64.b64encode(self._model).decode("ascii"),
            "vocabulary": self._vocabulary,
            "special": self._special,
            "unknown": self.unknown,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Pieces:
        """Raises: KeyError, ValueError or TypeError if the fields are not those of `to_dict`."""
        vocabulary, special = dict(fields["vocabulary"]), list(fields["special"])
        if not all(isinstance(token, str) and type(index) is int for token, index in vocabulary.items()):
            raise ValueError("its vocabulary is not of words and ids")
        if fields["unknown"] not in vocabulary:
            raise ValueError(f"its vocabulary has no {fields['unknown']!r}")
        return cls(base64.b64decode(fields["model"], validate=True), vocabulary, special, fields["unknown"])
