"""Values that a file lacks and the user gives: fields of `ModelConfig`, names of layers, and their flags."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import models

from tfexport.config import ModelConfig
from tfexport.errors import ConfigError
from tfexport.models.checkpoints.options import USAGE
from tfexport.models.families.family import SOURCE_ENDS, Family
from tfexport.models.formats.native import Tokenizers
from tfexport.models.formats.state_dicts import Picked
from tfexport.system.regular_files import read_text
from tfexport.text.sentencepiece import Pieces
from tfexport.text.subword_nmt import has_subwords

ALWAYS = ("n_heads", "pad_id", "bos_id", "eos_id")
"""Fields that every model needs. The files of most families do not contain them."""

PARTS = ("src_embedding", "tgt_embedding", "output_layer")
"""Keys of a configuration other than the fields of `ModelConfig`: names of the user's own layers."""

PICKS = ("key", "ignore")
"""Keys of a configuration that select the model's tensors in the file."""


def complete(
    family: Family | None, stated: Mapping[str, Any], hints: Mapping[str, Any], tokenizers: Tokenizers
) -> tuple[dict[str, Any], dict[str, str]]:
    """Config fields from the file, the vocabularies and the user (later sources win), and the flags of missing fields."""
    # Only text has unknown tokens. Text needs a vocabulary, which then gives the id.
    fields: dict[str, Any] = {"unk_id": -1}
    sides = [side for side in (tokenizers.source, tokenizers.target) if side is not None]
    differing: dict[str, str] = {}
    for kind in ("unk", "pad", "bos", "eos"):
        ids = [number for side in sides if (number := side.special_id(kind)) is not None]
        if len(set(ids)) == 1:
            fields[f"{kind}_id"] = ids[0]
        elif ids:
            differing[f"{kind}_id"] = f" (the source vocabulary has {ids[0]}, the target vocabulary {ids[1]})"
    fields = {**fields, **stated, **hints}
    if fields.get("embedding_scale") == "sqrt" and "d_model" in fields:  # missing fields are reported together
        fields["embedding_scale"] = math.sqrt(fields["d_model"])
    if fields.get("n_classes"):  # a classifier needs bos and eos only if its input has them
        unused = {name for name in ("bos", "eos") if not fields.get(f"source_{name}")}
        fields = {**{f"{name}_id": -1 for name in unused}, **fields}
    needed = [name for name in (*ALWAYS, *(family.asked if family else ())) if name not in fields]
    if tokenizers.source is None:  # lines of ids are complete by themselves
        needed = [name for name in needed if name not in SOURCE_ENDS]
    elif any(tokenizers.source.template):
        fields |= {name: False for name in needed if name in SOURCE_ENDS}
        needed = [name for name in needed if name not in SOURCE_ENDS]
    return fields, {name: USAGE.get(name, f"{name} with --config") + differing.get(name, "") for name in needed}


def with_template(
    family: Family | None, said: Collection[str], tokenizers: Tokenizers
) -> tuple[Tokenizers, tuple[str, ...]]:
    """The tokenizers, the source's with the ids of its own template, and notes about a template that is not used.

    The template of a tokenizer.json decides where neither the user nor the family does.

    Args:
        said: fields that the user or the family gives.
    """
    source = tokenizers.source
    if source is None or not any(source.template):
        return tokenizers, ()
    left_open = [name for name in SOURCE_ENDS if family is not None and name in family.asked and name not in said]
    before, after = (ids if name in left_open else () for name, ids in zip(SOURCE_ENDS, source.template, strict=True))
    unused = " and ".join(
        name for name, ids in zip(SOURCE_ENDS, source.template, strict=True) if ids and name not in left_open
    )
    notes = (f"the source vocabulary's own template is not used where {unused} decides",) if unused else ()
    return Tokenizers(source.framed(before, after, source.prefix), tokenizers.target), notes


def picked_of(hints: Mapping[str, Any]) -> tuple[Picked, dict[str, Any]]:
    """The selection of the model's tensors in a file, and all other hints.

    Raises:
        ConfigError: the configuration's `key` or `ignore` has the wrong type.
    """
    key, ignore = hints.get("key"), hints.get("ignore", ())
    patterns = (ignore,) if isinstance(ignore, str) else ignore
    is_list = isinstance(patterns, list | tuple) and all(isinstance(pattern, str) for pattern in patterns)
    if not is_list or not isinstance(key, str | None):
        raise ConfigError("the configuration's key is not a name, or its ignore not a list of patterns. Correct them.")
    return Picked(key, tuple(patterns)), {name: value for name, value in hints.items() if name not in PICKS}


def asking(path: Path, missing: Mapping[str, str], family: Family | None, unsaid: Sequence[str] = ()) -> str:
    """The message that asks for missing fields, with the values that the family's own code uses.

    Args:
        unsaid: those of the missing fields that a user's own family file should say.
    """
    usual = {} if family is None else family.usual
    known = ", ".join(as_flag(name, usual[name]) for name in missing if name in usual)
    flags = " ".join(dict.fromkeys(missing.values()))
    own = ", ".join(f'"{name}": {_WRITTEN[name]}' for name in unsaid)
    return (
        f"{path} does not contain {', '.join(missing)}. Give {flags}, or the same fields in a JSON "
        f"file with --config{f' (the original code of this family uses {known})' if known else ''}."
        f"{f' Or let `read_config` of the family file return what your code does: {own}.' if own else ''}"
    )


_FLAG_VALUE = "True (or False)"
_WRITTEN = {
    "norm_first": _FLAG_VALUE,
    "activation": '"relu" (or "gelu", "gelu_tanh", "silu")',
    "positions": '"learned" (or "stored", "sinusoidal", "relative", "none")',
    "norm": '"layer" (or "rms")',
    "norm_eps": "1e-5",
    "embedding_scale": "1.0 (or d_model**0.5)",
    **dict.fromkeys(SOURCE_ENDS, _FLAG_VALUE),
}
"""The lines that a family file writes for arithmetic that no weight shows."""
ARITHMETIC = tuple(name for name in _WRITTEN if name not in SOURCE_ENDS)
"""Fields that neither a file nor the canonical names of its weights show, beside heads, special ids and `SOURCE_ENDS`."""


def as_flag(name: str, value: object) -> str:
    """A field and its value as a flag."""
    if name not in USAGE:
        return f"{name} {value}"
    flag = USAGE[name].split()[0]
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return f"{flag} {value}"


def parted(family: Family | None, hints: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The user's hints about fields, and those about the layers that a family asks for.

    Raises:
        ConfigError: layers are named although the family defines their names.
    """
    taken = () if family is None else family.told_by_user
    idle = [name for name in hints if name in PARTS and name not in taken]
    if idle:
        name = "native" if family is None else family.name
        raise ConfigError(f"the family {name} defines its names: {', '.join(idle)} has no effect. Leave it out.")
    return (
        {name: value for name, value in hints.items() if name not in taken},
        {name: value for name, value in hints.items() if name in taken},
    )


def read_hints(path: Path) -> dict[str, Any]:
    """Read the `ModelConfig` fields and names of layers of a JSON file.

    Raises:
        ConfigError: it is not a JSON object of such fields.
    """
    try:
        fields = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}. Give a JSON object.") from error
    known = [*(field.name for field in dataclasses.fields(ModelConfig)), *PARTS, *PICKS]
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} is not a configuration. Give a JSON object.")
    for name in fields:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=5, cutoff=0.4) or known
            raise ConfigError(f"{path} has an unknown field {name}. Use fields such as {', '.join(nearest)}.")
    return fields


_WORD_BEGINS = "\u2581"
"""SentencePiece's character for the space before a word."""
_USERS_OWN = ("max_source_length", "max_target_length", "forced_first_id", "suppressed_ids", "suppressed_first_ids")
"""Fields that the user may override although a file contains them: maximum lengths, and forced or suppressed tokens."""


def check_told(path: Path, stated: Mapping[str, Any], hints: Mapping[str, Any], assumed: Collection[str] = ()) -> None:
    """Check the user's hints about a file that describes itself.

    Args:
        stated: fields that the file contains.
        hints: fields that the user gives.
        assumed: fields of `stated` that are only defaults, which the user may override.

    Raises:
        ConfigError: the user contradicts the file.
    """
    for name in [name for name in hints if name in stated and name not in (*_USERS_OWN, *assumed)]:
        in_file, hint = stated[name], hints[name]
        if name == "embedding_scale" and hint == "sqrt":
            hint = math.sqrt(stated["d_model"])
        is_none = in_file is None or (name.endswith("_id") and in_file == -1)
        if not (is_none or is_same(hint, in_file)):
            flag = USAGE.get(name, "").split(" ")[0] or f"{name} of --config"
            raise ConfigError(f"{path} says that {name} is {in_file}, not {hints[name]}. Leave out {flag}.")


def is_same(left: object, right: object) -> bool:
    """Whether two values of a field are equal. JSON has lists instead of tuples, and floats may be rounded."""
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right)
    left, right = (list(value) if isinstance(value, tuple) else value for value in (left, right))
    return left == right


def check_lengths(path: Path, stated: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise ConfigError if the user gives lengths for which the file has no positions."""
    is_unlimited = stated.get("positions") in ("relative", "none")
    if is_unlimited or stated.get("n_decoder_layers") == 0:  # or a classifier
        return
    for name in ("max_source_length", "max_target_length"):
        if isinstance(wanted := hints.get(name), int) and wanted > stated.get(name, wanted):
            raise ConfigError(f"{path} has positions for a {name} of {stated[name]}, not {wanted}. Give at most that.")


def size_problems(tokenizers: Tokenizers, config: ModelConfig) -> Iterator[str]:
    """Notes about vocabularies that have fewer words than the model.

    Raises:
        ConfigError: a vocabulary has ids that the model lacks.
    """
    for side, tokenizer, size in (
        ("source", tokenizers.source, config.src_vocab_size),
        ("target", tokenizers.target, config.tgt_vocab_size),
    ):
        if tokenizer is not None and tokenizer.size > size:
            raise ConfigError(
                f"the {side} vocabulary has ids up to {tokenizer.size - 1}, the model's embedding has {size} rows. "
                "Give the vocabulary that this model was trained with."
            )
        # The last row may belong to a first token that is not a word, as in Marian.
        words = size - 1 if config.bos_id == size - 1 else size
        if tokenizer is not None and tokenizer.size < words:
            yield f"the {side} vocabulary has {tokenizer.size} words, the model's embedding {size} rows"


def id_problems(
    tokenizers: Tokenizers, config: ModelConfig, kinds: Sequence[str] = ("unk", "pad", "bos", "eos")
) -> Iterator[str]:
    """Notes about special tokens of these kinds whose ids differ between a vocabulary and the model."""
    for side, tokenizer in (("source", tokenizers.source), ("target", tokenizers.target)):
        for kind in kinds:
            vocabulary_id, config_id = tokenizer and tokenizer.special_id(kind), getattr(config, f"{kind}_id")
            if vocabulary_id is not None and config_id not in (vocabulary_id, -1):
                yield f"{kind}_id is {config_id}, the {side} vocabulary's own is {vocabulary_id}"


def unsplit(tokenizers: Tokenizers) -> Iterator[str]:
    """The note for a source vocabulary of subwords whose tokenizer looks up whole words."""
    tokenizer = tokenizers.source
    if tokenizer is None or tokenizer.subwords is not None or isinstance(tokenizer.inner, Pieces):
        return
    if not isinstance(tokenizer.inner.model, models.WordLevel):
        return
    words = tokenizer.inner.get_vocab()
    if has_subwords(words):
        yield (
            "the source vocabulary has subwords, which end with @@: give the codes of subword-nmt that split them with "
            "--src-bpe, or split the input of `decode` before; whole words are unknown to it"
        )
    elif any(word.startswith(_WORD_BEGINS) and word != _WORD_BEGINS for word in words):
        yield (
            "the source vocabulary has pieces of SentencePiece, which begin with U+2581: first split the input of `decode` "
            "with its model, and give it with --input-format tokens; whole words are unknown to it"
        )
