"""Reading of checkpoints into canonical weights and a complete `ModelConfig`. No code from a file is executed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tfexport.config import ModelConfig
from tfexport.confirmation import Confirmation
from tfexport.errors import CheckpointError, ConfigError
from tfexport.models.checkpoints.checkpoint import Checkpoint, Inspection
from tfexport.models.checkpoints.convert import convert, differently_shaped, mismatch, tie
from tfexport.models.checkpoints.hints import (
    ALWAYS,
    asking,
    check_lengths,
    check_told,
    complete,
    id_problems,
    is_same,
    parted,
    picked_of,
    read_hints,
    size_problems,
    unsplit,
    with_template,
)
from tfexport.models.checkpoints.own_fields import own_fields, with_computed_positions
from tfexport.models.checkpoints.recognise import FAMILIES, NATIVE, Chosen, family_of, refuse_leading_zeros
from tfexport.models.checkpoints.unconfirmed import SettingSources
from tfexport.models.families.family import SOURCE_ENDS, Family
from tfexport.models.formats import native
from tfexport.models.formats.files import read_file
from tfexport.models.formats.native import Tokenizers
from tfexport.models.formats.pickled_options import forget
from tfexport.models.formats.reparametrised import whole_weights
from tfexport.models.formats.shards import sha256_of, weight_files
from tfexport.models.positions import COMPUTED
from tfexport.models.toolkits import ctranslate2, fairseq, hugging_face, joeynmt, marian, opennmt
from tfexport.models.toolkits.toolkit import TextOptions, Toolkit

__all__ = [
    "FAMILIES",
    "NATIVE",
    "STAND_INS",
    "TOOLKITS",
    "Checkpoint",
    "Inspection",
    "Reading",
    "inspect_checkpoint",
    "load_checkpoint",
    "read_checkpoint",
    "read_hints",
]

TOOLKITS = (
    *(ctranslate2.TOOLKIT, marian.TOOLKIT, joeynmt.TOOLKIT),  # before the toolkit that accepts all folders
    *(hugging_face.TOOLKIT, fairseq.TOOLKIT, opennmt.TOOLKIT),
)
"""Toolkits whose checkpoints describe themselves, in the order in which they are tried."""

STAND_INS: Mapping[str, Any] = {
    **{"n_heads": 1, "embedding_scale": 1.0, "activation": "relu", "norm_first": False},
    **{"norm": "layer", "norm_eps": 1e-5},
    **dict.fromkeys(SOURCE_ENDS, False),
}
"""Any values for fields that a file cannot contain and on which no shape depends."""


def load_checkpoint(
    path: Path,
    hints: Mapping[str, Any],
    *,
    tokenizers: Tokenizers | None = None,
    family: Chosen = None,
    text: TextOptions | None = None,
) -> Checkpoint:
    """Read, recognise and convert a checkpoint.

    Args:
        path: a `.pt`/`.pth`/`.ckpt` file of plain tensors, a safetensors file, or a folder of the transformers library or of
            a toolkit.
        hints: `ModelConfig` fields that the user gives, and names of the user's layers (`hints.PARTS`). They override the
            fields of a state_dict. They must not contradict a toolkit's or tfexport's own checkpoint.
        tokenizers: the user's vocabularies; a native checkpoint has its own.
        family: the name of a family, instead of recognising it, or the user's own families.
        text: the languages and the prefix of sources and targets, for folders that know languages.

    Raises:
        CheckpointError: the file cannot be read, is of no known family, or its weights do not match its config.
        ConfigError: a required field is missing, or a given field contradicts the file.
    """
    if text and tokenizers is not None and tokenizers.source is not None and (text.prefix or text.source_language):
        raise ConfigError(
            "--src-vocab replaces the checkpoint's own tokenizer, which --prefix and --src-lang refer to. Leave them "
            "out, and put their text into the input; or leave out --src-vocab."
        )
    return read_checkpoint(path, hints, family, text).checkpoint(tokenizers)


def inspect_checkpoint(
    path: Path,
    hints: Mapping[str, Any],
    *,
    tokenizers: Tokenizers | None = None,
    family: Chosen = None,
    text: TextOptions | None = None,
) -> Inspection:
    """Describe a checkpoint, even if some of its settings are unknown; see `load_checkpoint`.

    Raises:
        CheckpointError: the file cannot be read or is of no known family.
    """
    return read_checkpoint(path, hints, family, text).inspection(tokenizers)


@dataclass(frozen=True)
class Reading:
    """The content of a file or folder, with the user's hints about it."""

    path: Path
    weights: dict[str, Tensor]
    """Weights under the names of the family."""
    family: Family | None
    """Family of the weights; None for tfexport's own checkpoints."""
    fields: dict[str, Any]
    """`ModelConfig` fields from the file or its family, and those that follow from the user's languages."""
    hints: dict[str, Any]
    """`ModelConfig` fields from the user."""
    unclear: dict[str, str]
    """Other missing hints, each with its flag."""
    tokenizers: Tokenizers
    given: dict[str, Any]
    """All hints of the user: fields, names of layers and languages."""
    describes_text: bool = False
    """Whether the config defines the special tokens. Those of the tokenizers may then differ."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Notes for a user who gives no vocabulary, by the side (source or target) whose vocabulary was not found."""
    ignored: tuple[str, ...] = ()
    """Names of tensors that belong to no layer, according to the user."""
    generation: Mapping[str, Any] | None = None
    """Default search options of the model's library, from `generation_config.json`."""
    unsaid: tuple[str, ...] = ()
    """Fields that the user's own family file should say and does not."""
    defaults: tuple[str, ...] = ()
    """The names in `fields` that a toolkit assumes because its checkpoint lacks them."""

    def telling(self, tokenizers: Tokenizers | None) -> Tokenizers:
        """The tokenizers that define the model's special tokens."""
        return (
            (tokenizers or Tokenizers(None, None)) if self.describes_text else self.tokenizers.replaced_by(tokenizers)
        )

    def notes(self, tokenizers: Tokenizers | None) -> tuple[str, ...]:
        """Notes for a user who gives these vocabularies."""
        absent = (note for side, note in self.absent.items() if tokenizers is None or getattr(tokenizers, side) is None)
        return (*dict.fromkeys(absent), *(self.family.notes if self.family else ()))

    def _confirmation(self, settings: Mapping[str, Any], tokenizers: Tokenizers) -> Confirmation:
        """Who confirms these `ModelConfig` fields."""
        sources = SettingSources(
            self.family,
            self.fields,
            self.defaults,
            self.hints,
            parted(self.family, picked_of(self.given)[1])[1],
            self.describes_text or self.family is None,
        )
        return sources.confirmation(settings, self.weights, tokenizers)

    def _id_problems(self, used: Tokenizers, chosen: Tokenizers | None, config: ModelConfig) -> Iterable[str]:
        if not self.describes_text:
            return id_problems(used, config)
        # Many models start with another token than the bos of their vocabulary.
        return id_problems(chosen or Tokenizers(None, None), config, ("unk", "pad", "eos"))

    def checkpoint(self, chosen: Tokenizers | None = None) -> Checkpoint:
        """The complete model; see `load_checkpoint`."""
        check_lengths(self.path, self.fields, self.hints)
        fields, missing = complete(self.family, self.fields, self.hints, self.telling(chosen))
        if missing := self.unclear | missing:
            unsaid = [name for name in self.unsaid if name in missing]
            raise ConfigError(asking(self.path, missing, self.family, unsaid))
        config = ModelConfig.from_dict(fields, where=str(self.path))
        weights, problems = convert(self.family, self.weights, config)
        if problems:
            raise CheckpointError(mismatch(self.path, self.family, self.weights, config, problems))
        tokenizers = self.tokenizers.replaced_by(chosen)
        unused: tuple[str, ...] = ()
        if not self.describes_text and self.family is not None:
            tokenizers, unused = with_template(self.family, {*self.fields, *self.hints}, tokenizers)
        odd = (*size_problems(tokenizers, config), *self._id_problems(tokenizers, chosen, config), *unused)
        config, weights = tie(config, weights)
        return Checkpoint(
            path=self.path,
            sha256=_sha256(self.path),
            family=NATIVE if self.family is None else self.family.name,
            config=config,
            weights=weights,
            tokenizers=tokenizers,
            given={name: fields[name] for name in (*ALWAYS, "unk_id")} | self.given,
            family_notes=self.notes(chosen),
            odd=odd,
            assumed=(
                *(name for name in self.hints if name not in self.fields),
                *(("positions",) if self.given.get("positions") in (*COMPUTED, "none") else ()),
            ),
            overridden={
                name: own
                for name, own in self.fields.items()
                if name in self.hints and not is_same(fields[name], own)  # `fields` has a number in place of "sqrt"
            },
            ignored=self.ignored,
            generation=self.generation,
            confirmation=self._confirmation(config.to_dict(), tokenizers),
        )

    def inspection(self, chosen: Tokenizers | None = None) -> Inspection:
        """The description of the checkpoint; see `inspect_checkpoint`."""
        fields, missing = complete(self.family, self.fields, self.hints, self.telling(chosen))
        tokenizers = self.tokenizers.replaced_by(chosen)
        problems: list[str] = []
        sizes: tuple[str, ...] = ()
        settings: dict[str, Any] = fields
        if not self.unclear:
            # Few shapes depend on a field that a file cannot contain, so any value is good enough to check the others.
            stand_ins = {**STAND_INS, "max_source_length": 1, "max_target_length": 1, "positions": "sinusoidal"}
            stood_in = {name: stand_ins.get(name, 0) for name in missing}
            if "n_heads" in missing:  # the encoder's heads need not divide those that stand in
                stood_in["n_encoder_heads"] = 0
            config = ModelConfig.from_dict({**fields, **stood_in}, where=str(self.path))
            settings = {name: value for name, value in config.to_dict().items() if name not in missing}
            other = config.replace(n_heads=2 if config.d_head else config.d_model) if "n_heads" in missing else config
            problems = convert(self.family, self.weights, config, unknown=differently_shaped(config, other))[1]
            sizes = tuple(size_problems(tokenizers, config))
        return Inspection(
            path=self.path,
            family=NATIVE if self.family is None else self.family.name,
            about="tfexport's own training checkpoint" if self.family is None else self.family.about,
            n_parameters=sum(tensor.numel() for tensor in self.weights.values()),
            fields=fields,
            missing=self.unclear | missing,
            problems=tuple(problems),
            vocabulary=tokenizers.source is not None or tokenizers.target is not None,
            notes=(*self.notes(chosen), *sizes, *unsplit(tokenizers)),
            ignored=self.ignored,
            confirmation=self._confirmation(settings, tokenizers),
        )


def read_checkpoint(
    path: Path, hints: Mapping[str, Any], family: Chosen = None, text: TextOptions | None = None
) -> Reading:
    """Read a file or folder and recognise its family; see `load_checkpoint`."""
    toolkit = _toolkit(path)
    if toolkit is None or (path.is_file() and family is not None and not isinstance(family, str)):
        if text:
            raise ConfigError(
                f"{path} is not of a toolkit that knows languages: --src-lang, --tgt-lang and --prefix have no effect. "
                "Leave them out."
            )
        return _read_state_dict(path, hints, family)
    folder = toolkit.read(path, text or TextOptions())
    if family not in (None, folder.family.name):
        raise CheckpointError(f"{path} is of the family {folder.family.name}, not {_name(family)}. Leave out --family.")
    picked, about = picked_of(hints)
    if picked.key is not None:
        raise ConfigError(f"{path} is of a toolkit, which has one place for its weights. Leave out --key.")
    weights, ignored = picked.without_ignored(folder.weights)
    picked.require_used(path, ignored)
    said = {**folder.given, **parted(folder.family, about)[0]}
    check_told(path, folder.fields, said, (*folder.assumed, *folder.given))
    settings = {**folder.given, **hints}
    return Reading(
        path=path,
        weights=weights,
        family=folder.family,
        fields=folder.fields,
        hints=said,
        unclear={},
        tokenizers=folder.tokenizers,
        given=settings,
        describes_text=True,
        absent=folder.absent,
        ignored=ignored,
        generation=folder.generation,
        defaults=folder.assumed,
    )


def _read_state_dict(path: Path, hints: Mapping[str, Any], chosen: Chosen) -> Reading:
    picked, about = picked_of(hints)
    raw, settings = read_file(path, picked=picked), dict(hints)
    weights = whole_weights(path, raw.weights)
    if native.is_native(raw.metadata):
        if chosen not in (None, NATIVE):
            raise CheckpointError(f"{path} is of the family {NATIVE}, not {_name(chosen)}. Leave out --family.")
        config, tokenizers = native.read_description(path, raw.metadata)
        said = parted(None, about)[0]
        check_told(path, config.to_dict(), said)
        return Reading(path, weights, None, config.to_dict(), said, {}, tokenizers, settings, ignored=raw.ignored)
    family = family_of(path, weights, chosen)
    refuse_leading_zeros(path, weights, family)
    said, parts = parted(family, about)
    fitted, unclear = family.fit(weights, {**said, **parts})
    try:
        fields = fitted.read_config(weights)
    except (KeyError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"a weight of {path} from which the sizes are read is missing or misshapen: {error}. Check that the file is "
            "complete."
        ) from error
    unsaid: tuple[str, ...] = ()
    if fitted.is_own:
        fitted, said = with_computed_positions(fitted, said)
        fields, unsaid = own_fields(fitted, weights, fields, said)
        fitted = replace(fitted, asked=tuple(dict.fromkeys((*fitted.asked, *unsaid))))
    if isinstance(offset := said.get("position_offset"), int) and "position_offset" not in fields:
        for name in fields.keys() & {"max_source_length", "max_target_length"}:
            fields[name] -= offset  # the file gives the rows of its tables
    nothing = Tokenizers(None, None)
    return Reading(path, weights, fitted, fields, said, unclear, nothing, settings, ignored=raw.ignored, unsaid=unsaid)


def _name(chosen: Chosen) -> str:
    return chosen if isinstance(chosen, str) else ", ".join(family.name for family in chosen or ())


def _toolkit(path: Path) -> Toolkit | None:
    try:
        return next((toolkit for toolkit in TOOLKITS if toolkit.recognises(path)), None)
    finally:
        forget()


def _sha256(path: Path) -> str:
    toolkit = _toolkit(path)
    files = weight_files(path) if toolkit is None else toolkit.files(path)
    forget()
    return sha256_of(path, files)
