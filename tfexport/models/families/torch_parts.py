"""Which of the matrices beside the layers of a `torch.nn.Transformer` are embeddings, output layer and positions.

Their names are the user's own. A role is given to a matrix where shapes and words of the names leave one choice, and
asked for where they do not: nothing is taken by its place in the file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import torch
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
_PLAIN = {"word", "words", "vocab", "vocabulary", "table", "layer", "weight", "model", "module", "net"}
"""Of what an embedding of words may be called beside these; `speaker` and `segment` are none of them."""
_POSITIONS = re.compile("pos(n|enc.*|emb.*|it.*)?|pe|wpe")
_STORED_POSITIONS = {"encoding", "encodings", "time", "timing", "sin", "sinusoid", "sinusoids", "table"}
"""What a table with an axis of 1 may be called, too: it is kept for being added, as no matrix is."""

SINUSOIDAL = "sinusoidal"
_KINDS = ("learned", "stored")

FLAGS = {
    "src_embedding": "--src-embedding",
    "tgt_embedding": "--tgt-embedding",
    "output_layer": "--output-layer",
    "positions": "--positions",
}
_ROLES = ("src_embedding", "tgt_embedding", "output_layer")
Roles = tuple[str, str, str]
"""Names of matrices in the order of `_ROLES`."""


@dataclass
class Parts:
    """Names of weights by role; a role that is not in `unclear` has one."""

    source: str = ""
    target: str = ""
    """The source's where both sides share one."""
    output: str = ""
    """The target's embedding where there is no other output layer."""
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
    said = str(told.get("positions", ""))
    named = () if said in ("", SINUSOIDAL, *_KINDS) else _named_positions(said, weights)
    for role, name in given.items():
        if name in named:
            raise ConfigError(f"{name} is given for --positions and for {FLAGS[role]}. Give it for one of them.")
    taken = {*named, *given.values()}
    tables = [name for name, tensor in weights.items() if name not in taken and _is_table(name, tensor, d_model)]
    matrices = [
        name
        for name, tensor in weights.items()
        if tensor.dim() == 2 and tensor.shape[1] == d_model and name not in {*tables, *named}
    ]
    matrices = list(dict.fromkeys([*matrices, *given.values()]))
    if not matrices:
        raise ConfigError(
            f"there are no embeddings of {d_model} columns beside its layers: was the torch.nn.Transformer saved alone? "
            "Save the state_dict of the whole model, model.state_dict()."
        )
    found = Parts()
    _find_matrices(found, matrices, weights, given)
    if found.output == found.source != found.target:
        raise ConfigError(
            f"the output layer is the source's embedding, {found.source}. Give the target's, or one for both."
        )
    _find_positions(found, tables, named, said)
    vectors = [name for name, tensor in weights.items() if tensor.dim() > 1 and tensor.shape[-1] == d_model]
    for role, flag in found.unclear.items():
        shown = tables or vectors if role == "positions" else matrices
        found.unclear[role] = flag + _candidates(shown, weights)
    return found


def _find_matrices(found: Parts, matrices: list[str], weights: Mapping[str, Tensor], given: Mapping[str, str]) -> None:
    """Of all ways to give each matrix a role, the one that is left; what differs between several is asked for."""
    free = [role for role in _ROLES if role not in given]
    ways = (
        _ways(matrices, weights, given)
        if free
        else [(given["src_embedding"], given["tgt_embedding"], given["output_layer"])]
    )
    unclear = {role for role, names in zip(_ROLES, zip(*ways, strict=True), strict=False) if len(set(names)) > 1}
    if free and not all(_is_supported(way, weights, given) for way in ways):
        unclear |= {"src_embedding", "tgt_embedding"}
    if not ways:
        unclear = set(free)
    if not unclear:
        ((found.source, found.target, found.output),) = ways
    found.unclear.update({role: f"{FLAGS[role]} NAME" for role in free if role in unclear})


def _ways(matrices: list[str], weights: Mapping[str, Tensor], given: Mapping[str, str]) -> list[Roles]:
    """The ways that shapes and names allow, without those that only exchange equal matrices.

    Where the target's embedding has other rows than the output layer in each, the file is broken, which is told later.
    """
    if len(matrices) > len(_ROLES):  # of which one is something else: nothing says which
        return []
    candidates = [[given[role]] if role in given else matrices for role in _ROLES]
    possible = [
        (source, target, output)
        for source, target, output in product(*candidates)
        if {source, target, output} == set(matrices) and not _is_contradicted((source, target, output), weights, given)
    ]
    fitting = [way for way in possible if weights[way[1]].shape[:1] == weights[way[2]].shape[:1]] or possible
    first = {name: next(other for other in matrices if _are_equal(weights[other], weights[name])) for name in matrices}
    distinct: dict[tuple[str, ...], Roles] = {}
    for way in sorted(fitting, key=lambda way: not _words(way[1]) & _EMBEDDING):
        distinct.setdefault(tuple(first[name] for name in way), way)
    return list(distinct.values())


def _is_contradicted(way: Roles, weights: Mapping[str, Tensor], given: Mapping[str, str]) -> bool:
    """Whether names or a bias speak against it: what has a bias, or else is called an output, is no embedding."""
    source, target, output = way
    if output == source != target and "output_layer" not in given:
        return True
    layers = {name for name in way if _bias_of(name) in weights} or {name for name in way if _is_output(name)}
    if layers and output not in layers and "output_layer" not in given:
        return True
    if source in layers and "src_embedding" not in given:
        return True
    # Embeddings may be called `input` and `output`.
    may_embed = (
        _bias_of(target) not in weights
        and _words(target) & _OUTPUT <= _TARGET
        and bool(_words(source) & _SOURCE)
        and _sides([source, target]) == (source, target)
    )
    if target in layers and not may_embed and "tgt_embedding" not in given:
        return True
    sides = (_sides(list(pair)) for pair in combinations(dict.fromkeys(way), 2))
    return "src_embedding" not in given and any(pair is not None and pair[0] != source for pair in sides)


def _is_supported(way: Roles, weights: Mapping[str, Tensor], given: Mapping[str, str]) -> bool:
    """Whether two embeddings are known to be the source's and the target's: any third matrix could be called one."""
    source, target, _ = way
    if given.keys() & {"src_embedding", "tgt_embedding"} or _are_equal(weights[source], weights[target]):
        return True
    own = _words(source) - _words(target)
    says_source = bool(own & _SOURCE) and own <= _SOURCE | _EMBEDDING | _PLAIN
    by_rows = says_source and weights[source].shape[:1] != weights[target].shape[:1]
    return by_rows or _sides([source, target]) == (source, target)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether they are stored twice; a NaN in them, or what is no plain tensor, is told later."""
    if one is other:
        return True
    are_plain = all(tensor.layout == torch.strided and not tensor.is_meta for tensor in (one, other))
    return are_plain and (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(one, other)


def _is_output(name: str) -> bool:
    return bool(_words(name) & _OUTPUT) and not _words(name) & _EMBEDDING


def _named_positions(said: str, weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The tables of the source and of the target that the user names."""
    names = [_given("positions", name.strip(), weights) for name in said.split(",")]
    if len(names) > 2:
        raise ConfigError(
            f"--positions names {len(names)} tables. Give the source's and the target's, or one for both."
        )
    return names[0], names[-1]


def _find_positions(found: Parts, tables: list[str], named: tuple[str, ...], said: str) -> None:
    if said == SINUSOIDAL:
        found.kind = SINUSOIDAL
    elif named:
        found.positions = named
    elif len(tables) == 1 and not _is_of_one_side(tables[0]):
        found.positions = (tables[0], tables[0])
    elif sides := _sides(tables):
        found.positions = sides
    else:
        found.unclear["positions"] = "--positions NAME" + (",NAME" if len(tables) > 1 else " (or sinusoidal)")
    if said in _KINDS:
        found.kind = said


def _is_table(name: str, tensor: Tensor, d_model: int) -> bool:
    """Whether it holds a vector for each position, by its name: [length, d_model], [length, 1, d_model] or so."""
    words = _words(name)
    is_stored = tensor.dim() == 3 and 1 in tensor.shape[:2] and max(tensor.shape[:2]) > 1
    by_name = any(_POSITIONS.fullmatch(word) for word in words) or bool(is_stored and words & _STORED_POSITIONS)
    return (is_stored or tensor.dim() == 2) and tensor.shape[-1] == d_model and by_name and not words & {"tag", "cls"}


def _is_of_one_side(table: str) -> bool:
    """Whether a name is of the source's or of the target's positions; a `pos_encoder` is neither's."""
    return bool(_words(table) & (_TARGET | {"src", "source"}) or set(table.lower().split(".")) & _SOURCE)


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
    """Of two names the source's and the target's, where their words say so: `src_emb` and `tgt_emb`, `emb` and `tgt_emb`.

    A word that both have says nothing: `pos_encoder_src` and `pos_encoder_tgt`.
    """
    if len(names) != 2:
        return None
    for source, target in (names, names[::-1]):
        own, other = _words(source) - _words(target), _words(target) - _words(source)
        if other & _TARGET and not other & _SOURCE and not own & _TARGET and (own & _SOURCE or not own):
            return source, target
    return None


def _bias_of(name: str) -> str:
    return f"{name.removesuffix('weight')}bias" if name.endswith("weight") else ""


def _words(name: str) -> set[str]:
    """`srcTokEmb.weight` to src, tok, emb and weight."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def _candidates(names: Collection[str], weights: Mapping[str, Tensor]) -> str:
    shown = ", ".join(f"{name} {list(weights[name].shape)}" for name in names)
    return f" ({shown})" if shown else ""
