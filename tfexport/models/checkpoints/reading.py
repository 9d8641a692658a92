"""Reading of checkpoints with the options that describe them: configuration files, vocabularies and subword codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tfexport.errors import ConfigError, TfexportError, TokenizerError
from tfexport.models.checkpoints.hints import read_hints
from tfexport.models.checkpoints.load import Checkpoint, Inspection, inspect_checkpoint, load_checkpoint
from tfexport.models.checkpoints.options import (
    ExportedCheckpointOptions,
    FamilyOptions,
    ModelOptions,
    ReferenceOptions,
    TextSettings,
)
from tfexport.models.checkpoints.own_module import FAMILY as MODULE_FAMILY
from tfexport.models.checkpoints.own_module import OwnModule, module_of, read_own_module
from tfexport.models.checkpoints.recognise import Chosen
from tfexport.models.checkpoints.user_family import read_family_file
from tfexport.models.formats.native import Tokenizers
from tfexport.models.toolkits.toolkit import TextOptions
from tfexport.option import declared
from tfexport.text.tokenizers import TextTokenizer
from tfexport.text.vocabularies import read_vocabulary

Say = Callable[[str], None]
"""A function that shows a note to the user."""


def open_checkpoint(checkpoint: Path, options: ExportedCheckpointOptions, say: Say) -> Checkpoint:
    """Read a checkpoint with the user's options.

    Raises:
        TfexportError: the file cannot be read or is of no known family, or a required value is missing.
    """
    if options.write_family is not None and options.module is None:
        raise ConfigError("--write-family writes what --module read. Give --module FILE.py:NAME too.")
    hints, chosen = hints_of(options, checkpoint, say), family_or_module(options)
    return read_with_text(checkpoint, hints, chosen, text=options, family_file=options.write_family)


def inspected(checkpoint: Path, options: ModelOptions, say: Say) -> Inspection:
    """Describe a checkpoint with the user's options, even if some of its settings are unknown.

    Raises:
        TfexportError: the file cannot be read or is of no known family, or a vocabulary cannot be read.
    """
    hints = hints_of(options, checkpoint, say)
    return inspect_checkpoint(
        checkpoint,
        hints,
        tokenizers=read_vocabularies(options, hints.get("unk_id")),
        family=chosen_family(options),
        text=TextOptions(options.src_lang, options.tgt_lang, options.prefix),
    )


def open_module(
    module: nn.Module, call: Callable[..., Tensor] | None, options: ExportedCheckpointOptions, say: Say
) -> Checkpoint:
    """Read a live module with the user's options.

    Args:
        call: the user's `call(model, src, tgt)`, for modules with an unusual forward.

    Raises:
        TfexportError: the module cannot be read, or a required value is missing.
    """
    if options.module is not None or options.family is not None:
        raise ConfigError("a live module says all that module and family say. Leave them out.")
    if options.write_family is not None:
        raise ConfigError(
            "write_family describes a file. Save the state_dict, and export it with module='FILE.py:NAME'."
        )
    own = OwnModule.of_live(module, call)
    return read_with_text(Path(own.about), hints_of(options, None, say), own, text=options)


def chosen_family(options: FamilyOptions) -> Chosen:
    """The name of a family, or the families of the user's own family file, which is run."""
    if options.family is None or not options.family.endswith(".py"):
        return options.family
    return read_family_file(Path(options.family))


def family_or_module(options: ExportedCheckpointOptions | ReferenceOptions) -> Chosen | OwnModule:
    """The family, or the user's own module, whose file is run."""
    if options.module is None:
        return chosen_family(options)
    if options.family is not None:
        raise ConfigError("--module says all that --family says. Leave out --family.")
    return module_of(options.module)


def hints_of(options: FamilyOptions, checkpoint: Path | None, say: Say) -> dict[str, Any]:
    """The `ModelConfig` fields and names of layers that the user gives. Options override the JSON file.

    Args:
        checkpoint: the file next to which a JSON file may be; None for a live module.

    Raises:
        ConfigError: the JSON file cannot be read, or has an unknown field.
    """
    beside = None if checkpoint is None else checkpoint.parent / f"{checkpoint.stem}.json"
    hints: dict[str, Any] = {}
    if options.config is not None:
        hints = read_hints(options.config)
    elif beside is not None and beside.is_file() and beside != checkpoint:
        try:
            hints = read_hints(beside)
            say(f"note: using the configuration {beside}")
        except ConfigError as error:
            say(f"note: not using the file next to the checkpoint: {error}")
    for name, option in declared(type(options)).items():
        value = getattr(options, name)
        if value is not None:
            hints |= dict.fromkeys(option.about.gives, value)
    return hints


def read_with_text(
    checkpoint: Path,
    hints: Mapping[str, Any],
    family: Chosen | OwnModule = None,
    *,
    text: TextSettings,
    family_file: Path | None = None,
) -> Checkpoint:
    """`load_checkpoint` with text settings, which the result records.

    Args:
        family_file: where to write what was read from the user's module.

    Raises:
        TfexportError: as `load_checkpoint`; or a vocabulary cannot be read.
    """
    spoken = TextOptions(text.src_lang, text.tgt_lang, text.prefix)
    tokenizers = read_vocabularies(text, hints.get("unk_id"))
    if isinstance(family, OwnModule):
        if spoken:
            raise ConfigError("--src-lang, --tgt-lang and --prefix are for folders of toolkits. Leave them out.")
        loaded = read_own_module(checkpoint, family, hints, tokenizers=tokenizers, family_file=family_file)
    elif family == MODULE_FAMILY:
        raise ConfigError(f"{checkpoint} was exported with your own code. Give --module FILE.py:NAME too.")
    else:
        loaded = load_checkpoint(checkpoint, hints, tokenizers=tokenizers, family=family, text=spoken)
    return replace(loaded, tokenizers=with_codes(loaded.tokenizers, text), text=text.recorded(checkpoint))


def read_vocabularies(text: TextSettings, unk_id: int | None) -> Tokenizers | None:
    """The tokenizers of the given vocabularies; None if none are given.

    Raises:
        TfexportError: a vocabulary cannot be read, or settings need one that is not given.
    """
    source, target, splitter = text.src_vocab, text.tgt_vocab, text.src_tokenizer
    language = splitter.removeprefix("spacy:") if splitter.startswith("spacy:") else None
    if language is None and splitter != "whitespace":
        raise TfexportError(f"there is no tokeniser {splitter!r}. Use --src-tokenizer whitespace, or spacy:LANG.")
    if source is None and (language is not None or text.lowercase):
        raise TfexportError("--src-tokenizer and --lowercase need --src-vocab. Give --src-vocab too.")
    if source is None and target is None:
        return None
    return Tokenizers(
        None
        if source is None
        else read_vocabulary(source, lowercase=text.lowercase, spacy_language=language, unk_id=unk_id),
        None if target is None else read_vocabulary(target, unk_id=unk_id),
    )


def with_codes(tokenizers: Tokenizers, text: TextSettings) -> Tokenizers:
    """Add the subword-nmt codes to the `tokenizers` of the sides that have codes.

    Raises:
        TokenizerError: a side has no vocabulary, or its tokenizer splits words itself, or a file has no codes.
    """

    def split(side: str, flag: str, tokenizer: TextTokenizer | None, codes: Path | None) -> TextTokenizer | None:
        if codes is None:
            return tokenizer
        if tokenizer is None:
            raise TokenizerError(f"there is no {side} vocabulary for the subwords of {codes}. Give {flag}.")
        return tokenizer.with_codes(codes, where=f"the {side} vocabulary")

    return Tokenizers(
        split("source", "--src-vocab", tokenizers.source, text.src_bpe),
        split("target", "--tgt-vocab", tokenizers.target, text.tgt_bpe),
    )
