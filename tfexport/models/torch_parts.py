"""Which of the matrices beside the layers of a `torch.nn.Transformer` are embeddings, output layer and positions.

Their names are the user's own. A role is given to a matrix where shapes and words of the names leave one choice, and
asked for where they do not: nothing is taken by its place in the file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tfexport.errors import ConfigError

_SOURCE = {"src", "source", "enc", "encoder", "input", "in"}
_TARGET = {"tgt", "trg", "target", "dec", "decoder", "output", "out"}
_OUTPUT = {
    "generator",
    "output",
    "out",
    "fc",
    "head",
    "lm",
    "linear",
    "final",
    "proj",
    "projection",
    "logits",
    "classifier",
}
_EMBEDDING = {"emb", "embed", "embedder", "embedding", "embeddings", "tok", "token", "tokens", "lut", "wte"}

SINUSOIDAL = "sinusoidal"
_KINDS = ("learned", "stored")

FLAGS = {
    "src_embedding": "--src-embedding",
    "tgt_embedding": "--tgt-embedding",
    "output_layer": "--output-layer",
    "positions": "--positions",
}


@dataclass
class Parts:
    """Names of weights by role; a role that is not in `unclear` has one."""

    source: str = ""
    target: str = ""
    """The source's where both sides share one."""
    output: str = ""
    """The target's embedding where there is no output layer."""
    positions: tuple[str, ...] = ()
    """Of the source and of the target; none where they are computed."""
    kind: str = "stored"
    """Of positions, as `ModelConfig` has it."""
    unclear: dict[str, str] = field(default_factory=dict)
    """What to ask for: the name of a hint and the flag that gives it."""


def find_parts(weights: Mapping[str, Tensor], d_model: int, told: Mapping[str, Any]) -> Parts:
    """The roles of `weights`, which are those beside the layers.

    Args:
        told: names that the user gives for `src_embedding`, `tgt_embedding`, `output_layer`, and for `positions` one name,
            two with a comma between them, or `sinusoidal`.

    Raises:
        ConfigError: there is no such weight, or none that could be an embedding.
    """
    given = {role: _given(role, name, weights) for role, name in told.items() if role != "positions"}
    tables = [name for name, tensor in weights.items() if _is_table(name, tensor, d_model)]
    matrices = [
        name
        for name, tensor in weights.items()
        if tensor.dim() == 2 and tensor.shape[1] == d_model and name not in tables
    ]
    matrices = list(dict.fromkeys([*matrices, *given.values()]))
    if not matrices:
        raise ConfigError(
            f"there are no embeddings of {d_model} columns beside its layers: was the torch.nn.Transformer saved alone? "
            "Save the state_dict of the whole model, model.state_dict()."
        )
    found = Parts()
    _find_output(found, matrices, weights, given)
    # An output layer that the user names may be an embedding, too.
    layers = {found.output} if not _words(found.output) & _EMBEDDING else set()
    embeddings = {role: name for role, name in given.items() if role != "output_layer"}
    rest = [name for name in matrices if name not in {*layers, *embeddings.values()}]
    _find_embeddings(found, rest, weights, embeddings)
    if not found.output and "output_layer" not in found.unclear:
        found.output = found.target  # no other matrix is left to give the logits
    if found.output == found.source != found.target:
        raise ConfigError(
            f"the output layer is the source's embedding, {found.source}. Give the target's, or one for both."
        )
    _find_positions(found, tables, weights, str(told.get("positions", "")))
    for role, flag in found.unclear.items():
        shown = tables if role == "positions" else matrices
        found.unclear[role] = flag + _candidates(shown, weights)
    return found


def _find_output(
    found: Parts, matrices: Collection[str], weights: Mapping[str, Tensor], given: Mapping[str, str]
) -> None:
    """A matrix with a bias is no embedding; without one, its name says that it is none."""
    free = [name for name in matrices if name not in given.values()]
    biased = [name for name in free if _bias_of(name) in weights]
    worded = [name for name in free if _words(name) & _OUTPUT and not _words(name) & _EMBEDDING]
    if "output_layer" in given:
        found.output = given["output_layer"]
    elif len(biased) == 1 or len(worded) == 1:
        found.output = (biased or worded)[0] if len(biased) <= 1 else worded[0]
    elif biased or worded or len(free) > 2 or (len(free) == 2 and not _sides(free)):
        found.unclear["output_layer"] = _flag("output_layer")


def _find_embeddings(found: Parts, rest: list[str], weights: Mapping[str, Tensor], given: Mapping[str, str]) -> None:
    """One is both sides'; of two, the names or the rows of the output layer say which is which."""
    found.source, found.target = given.get("src_embedding", ""), given.get("tgt_embedding", "")
    if len(rest) == 2 and not found.source and not found.target:
        found.source, found.target = _sides(rest) or _by_rows(rest, found.output, weights) or ("", "")
    elif len(rest) == 1:
        found.source, found.target = found.source or rest[0], found.target or rest[0]
    elif not rest:  # what is named is both sides', and where nothing else is there, so is the output layer
        found.source = found.source or found.target or found.output
        found.target = found.target or found.source
    for role, name in (("src_embedding", found.source), ("tgt_embedding", found.target)):
        if not name:
            found.unclear[role] = _flag(role)


def _find_positions(found: Parts, tables: list[str], weights: Mapping[str, Tensor], said: str) -> None:
    if said == SINUSOIDAL:
        found.kind = SINUSOIDAL
    elif said and said not in _KINDS:
        names = [_given("positions", name.strip(), weights) for name in said.split(",")]
        if len(names) > 2:
            raise ConfigError(
                f"--positions names {len(names)} tables. Give the source's and the target's, or one for both."
            )
        found.positions = (names[0], names[-1])
    elif len(tables) == 1:
        found.positions = (tables[0], tables[0])
    elif sides := _sides(tables):
        found.positions = sides
    else:
        found.unclear["positions"] = "--positions NAME" + (",NAME" if tables else " (or sinusoidal)")
    if said in _KINDS:
        found.kind = said


def _is_table(name: str, tensor: Tensor, d_model: int) -> bool:
    """Whether it holds a vector for each position: [length, 1, d_model], [1, length, d_model], or so by its name."""
    if tensor.dim() == 3:
        return tensor.shape[2] == d_model and 1 in tensor.shape[:2]
    by_name = any(word.startswith("pos") or word == "pe" for word in _words(name))
    return tensor.dim() == 2 and tensor.shape[1] == d_model and by_name


def _given(role: str, name: object, weights: Mapping[str, Tensor]) -> str:
    """The full name of a weight that the user names, or whose layer they name."""
    for full in (str(name), f"{name}.weight"):
        if full in weights:
            return full
    large = [known for known, tensor in weights.items() if tensor.dim() > 1]
    raise ConfigError(
        f"{FLAGS[role]} is {name}, which is not beside the layers. There are{_candidates(large, weights)}."
    )


def _sides(names: list[str]) -> tuple[str, str] | None:
    """Of two names the source's and the target's, where their words say so: one is the target's, the other is not.

    A word that both have says nothing: `pos_encoder_src` and `pos_encoder_tgt`.
    """
    if len(names) != 2:
        return None
    for source, target in (names, names[::-1]):
        own, other = _words(source) - _words(target), _words(target) - _words(source)
        if other & _TARGET and not other & _SOURCE and not own & _TARGET:
            return source, target
    return None


def _by_rows(names: list[str], output: str, weights: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """The target's embedding has as many rows as the output layer; where the source's has too, nothing is said."""
    if not output:
        return None
    target = [name for name in names if len(weights[name]) == len(weights[output])]
    return (next(name for name in names if name != target[0]), target[0]) if len(target) == 1 else None


def _bias_of(name: str) -> str:
    return f"{name.removesuffix('weight')}bias" if name.endswith("weight") else ""


def _words(name: str) -> set[str]:
    """`srcTokEmb.weight` to src, tok, emb and weight."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def _flag(role: str) -> str:
    return f"{FLAGS[role]} NAME"


def _candidates(names: Collection[str], weights: Mapping[str, Tensor]) -> str:
    shown = ", ".join(f"{name} {list(weights[name].shape)}" for name in names)
    return f" ({shown})" if shown else ""
