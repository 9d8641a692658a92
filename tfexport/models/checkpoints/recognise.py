"""Recognition of the family of a file's weights, and the error for weights of no known family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from tfexport.errors import CheckpointError
from tfexport.models.families import annotated, per_head, torch_transformer, tutorial
from tfexport.models.families.family import Family
from tfexport.models.families.names import has_leading_zero
from tfexport.models.formats.state_dicts import some

FAMILIES = (*tutorial.FAMILIES, annotated.FAMILY, per_head.FAMILY, torch_transformer.FAMILY)
NATIVE = "native"

Chosen = str | Sequence[Family] | None
"""The family that the user gives: its name, or one or more of the user's own. A name is never a path to a file."""


def family_of(path: Path, weights: Mapping[str, Tensor], chosen: Chosen) -> Family:
    """The family of the weights in `path`.

    Raises:
        CheckpointError: no family matches the weights, or the chosen family does not.
    """
    if chosen is None:
        match = next((family for family in FAMILIES if family.matches(weights)), None)
        if match is None:
            refuse_leading_zeros(path, weights)
            raise CheckpointError(_no_family(path, weights))
        return match
    versions = [known for known in FAMILIES if known.name == chosen] if isinstance(chosen, str) else list(chosen)
    if not versions:
        raise CheckpointError(
            f"{path} cannot be read as {chosen!r}. Give --family one of: {_names()}; or a family file of your own, such as "
            "--family my_family.py."
        )
    named = next((version for version in versions if version.matches(weights)), versions[-1])
    if absent := named.lacking(weights):
        refuse_leading_zeros(path, weights, named)
        advice = "Leave out --family." if isinstance(chosen, str) else "Correct its signature, or give its checkpoint."
        prefix = next((name[: -len(absent[0])] for name in weights if name.endswith(f".{absent[0]}")), "")
        if others := sorted({f"{name.partition('.')[0]}.*" for name in weights if not name.startswith(prefix)}):
            flags = " ".join(f"--ignore '{other}'" for other in others[:3])
            advice = f"Its names begin with {prefix} in this file: leave out what belongs to no layer, such as {flags}."
        raise CheckpointError(f"{path} is not of the family {named.name}: it has no {some(absent)}. {advice}")
    return named


def refuse_leading_zeros(path: Path, names: Iterable[str], family: Family | None = None) -> None:
    """Raise CheckpointError if names that a family does not know have numbers such as `01`."""
    odd = [name for name in names if has_leading_zero(name) and not (family and family.known(name))]
    if odd:
        raise CheckpointError(
            f"{path} has numbers that begin with 0 in its names: {some(odd, 3)}. Save it with plain numbers, as in layers.1 "
            "for layers.01; or write them as in layers.0{i} in a family file of your own, --family my_family.py; or leave "
            "these out with --ignore."
        )


def _no_family(path: Path, weights: Mapping[str, Tensor]) -> str:
    def likeness(family: Family) -> tuple[int, float]:
        """The number of names that the family knows, and for equal numbers the share of common words."""
        family_words, words = (_words(names) for names in (family.renames, weights))
        return sum(map(family.known, weights)), len(family_words & words) / len(family_words | words)

    if any(name.endswith("self_attn.in_proj_weight") for name in weights):
        return (
            f"{path} has layers of torch.nn.Transformer, and none of a decoder with cross-attention (multihead_attn): an "
            "encoder or a decoder alone is not read. Give the checkpoint of an encoder-decoder model. An encoder with a "
            "linear layer on its first token can be read with a family file of your own that says n_classes, --family "
            "my_family.py: see Encoder classifiers in docs/guides/own-model.md."
        )
    if any(".make_embedding.emb_luts." in name for name in weights):
        return (
            f"{path} has the weights of an OpenNMT-py model alone. Give the .pt beside it, which has its options and "
            "vocabularies."
        )
    nearest = max(FAMILIES, key=likeness)
    other = [name for name in weights if not nearest.known(name)]
    absent = nearest.lacking(weights)
    differs = [f"it has no {some(absent)}"] * bool(absent) + [f"the family has no {some(other, 6)}"] * bool(other)
    known = len(weights) - len(other)
    comparison = (
        f" Nearest is {nearest.name}, {nearest.about}, which knows {known} of its {len(weights)} names: "
        f"{'; '.join(differs)}."
    )
    is_near = known >= _NEAR * len(weights)
    return (
        f"{path} is of no known family ({_names()}).{_settings_beside(weights)} Export it with the code that it was trained "
        "with: --module my_code.py:build, with a function that returns your module. Without the code, describe its names in "
        "a family file: --family my_family.py. Leave out names that belong to no layer with --ignore."
        f"{comparison if is_near else ''}"
    )


_NEAR = 0.5
"""Share of the names of a file that a family must know to be called near. Fewer are alike by chance."""
_LIBRARY_NAMES = ("encoder_attn.q_proj.weight", "EncDecAttention.q.weight")
"""Endings of the names of the cross-attention in the libraries transformers and fairseq."""


def _settings_beside(weights: Mapping[str, Tensor]) -> str:
    """The advice for weights of a library whose settings are in another file."""
    if not any(name.endswith(_LIBRARY_NAMES) for name in weights):
        return ""
    return (
        " Its names are those of the libraries transformers and fairseq: give the folder that save_pretrained wrote, with "
        "its config.json, or the .pt that fairseq wrote."
    )


def _names() -> str:
    return ", ".join(dict.fromkeys([*(family.name for family in FAMILIES), NATIVE]))


def _words(names: Iterable[str]) -> set[str]:
    return {word for name in names for word in name.split(".") if not word.isdecimal() and "{" not in word}
