"""What a user says of a checkpoint's text: vocabularies, subword codes and languages. The bundle records it, so that parity
reads the checkpoint again as the export read it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfexport.commands.flags import split_by_codes, vocabularies_of

if TYPE_CHECKING:
    from tfexport.models.checkpoints.load import Checkpoint
    from tfexport.models.checkpoints.recognise import Chosen

_FILES = ("src_vocab", "tgt_vocab", "src_bpe", "tgt_bpe")
_SAYS_HOW = {"src_tokenizer": "src_vocab", "lowercase": "src_vocab", "src_bpe": "src_vocab", "tgt_bpe": "tgt_vocab"}
"""What a vocabulary is used with; where it was recorded and is lost, these are, too."""


@dataclass(frozen=True)
class TextSettings:
    """The flags of `tfexport export` that are about text, by their names."""

    src_vocab: Path | None = None
    tgt_vocab: Path | None = None
    src_tokenizer: str = "whitespace"
    lowercase: bool = False
    src_bpe: Path | None = None
    tgt_bpe: Path | None = None
    src_lang: str | None = None
    tgt_lang: str | None = None
    prefix: str = ""

    def load(self, checkpoint: Path, hints: Mapping[str, Any], family: Chosen = None) -> Checkpoint:
        """`load_checkpoint` with these settings, which the result records.

        Raises:
            TfexportError: what `load_checkpoint` raises, or a vocabulary cannot be read.
        """
        from tfexport.models.checkpoints.load import load_checkpoint
        from tfexport.models.toolkits.toolkit import TextOptions

        tokenizers = vocabularies_of(
            self.src_vocab, self.tgt_vocab, self.src_tokenizer, self.lowercase, hints.get("unk_id")
        )
        text = TextOptions(self.src_lang, self.tgt_lang, self.prefix)
        loaded = load_checkpoint(checkpoint, hints, tokenizers=tokenizers, family=family, text=text)
        tokenizers = split_by_codes(loaded.tokenizers, self.src_bpe, self.tgt_bpe)
        return replace(loaded, tokenizers=tokenizers, text=self.recorded(checkpoint))

    def recorded(self, checkpoint: Path) -> dict[str, Any]:
        """The settings that are not the default, JSON-ready; files relative to the checkpoint's folder."""
        said = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }
        return {
            name: os.path.relpath(value, checkpoint.parent) if name in _FILES else value for name, value in said.items()
        }

    def or_recorded(self, recorded: Mapping[str, Any], checkpoint: Path) -> tuple[TextSettings, list[str]]:
        """These settings, and of others those `recorded` of an export, with the files that are no longer where they were."""
        said: dict[str, Any] = {}
        lost, gone = [], set()
        for field in fields(self):
            value: Any = recorded.get(field.name)
            is_open = getattr(self, field.name) == field.default and _SAYS_HOW.get(field.name) not in gone
            wanted = bool if isinstance(field.default, bool) else str
            if not is_open or type(value) is not wanted:  # a manifest may have anything
                continue
            if field.name in _FILES:
                value = checkpoint.parent / str(value)
                if not value.is_file():
                    lost.append(f"--{field.name.replace('_', '-')} {value}")
                    gone.add(field.name)
                    continue
            said[field.name] = value
        return replace(self, **said), lost
