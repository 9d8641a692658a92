"""Ids of pieces as the tokenizers of transformers 4 over SentencePiece give them, written from their rules one by one."""

from __future__ import annotations

from typing import Any


def t5(model: Any, piece: str) -> int:
    """Sentinels count down from the end; else the model's own number."""
    if piece.startswith("<extra_id_"):
        return len(model) + 100 - 1 - int(piece[len("<extra_id_") : -1])
    return int(model.piece_to_id(piece))


def pegasus(model: Any, piece: str) -> int:
    """<pad> 0, </s> 1, two masks, <unk_2> to <unk_102> from 4, then the model's numbers, moved by 103."""
    first = {"<pad>": 0, "</s>": 1, "<mask_1>": 2, "<mask_2>": 3, **{f"<unk_{n}>": n + 2 for n in range(2, 103)}}
    return first[piece] if piece in first else int(model.piece_to_id(piece)) + 103


def fairseq(model: Any, piece: str, languages: list[str]) -> int:
    """fairseq's first four; then the model's numbers, moved by 1; then languages; then <mask>."""
    first = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    if piece in first:
        return first[piece]
    if piece in languages:
        return len(model) + 1 + languages.index(piece)
    if piece == "<mask>":
        return len(model) + 1 + len(languages)
    number = int(model.piece_to_id(piece))
    return number + 1 if number else 3
