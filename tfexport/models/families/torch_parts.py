"""The roles of the matrices outside the layers of a `torch.nn.Transformer`: embeddings, output layer and positions.

Their names are the user's own. A matrix gets a role if shapes and words of the names leave one choice. Otherwise the user
is asked. The order in the file is never used.
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
from tfexport.models.positions import COMPUTED

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
"""Further words in names of word embeddings. `speaker` and `segment` are not among them."""
_POSITIONS = re.compile("pos(n|enc.*|emb.*|it.*)?|pe|wpe")
_STORED_POSITIONS = {"encoding", "encodings", "time", "timing", "sin", "sinusoid", "sinusoids", "table"}
"""Further words in names of position tables with an axis of 1. That axis is for the addition; matrices have none."""

NONE = "none"
_KINDS = ("learned", "stored")
_NOT_COMPUTED = ("rotary", "rope", "alibi", "relative")

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
    """Names of weights by role. Every role outside `unclear` has a name."""

    source: str = ""
    target: str = ""
    """Target embedding; the source embedding if both sides share one."""
    output: str = ""
    """Output layer; the target embedding if there is no other output layer."""
    positions: tuple[str, ...] = ()
    """Position tables of the source and of the target; empty if they are computed, or if there are none."""
    kind: str = "stored"
    """Kind of positions, a value of `ModelConfig.positions`."""
    computed: str = ""
    """Kind of table that the user's code computes, a key of `positions.COMPUTED`; empty for a table in the file."""
    unclear: dict[str, str] = field(default_factory=dict)
    """Missing hints, each with its flag."""


def find_parts(weights: Mapping[str, Tensor], d_model: int, hints: Mapping[str, Any]) -> Parts:
    """Find the roles of `weights`, the weights outside the layers.

    Args:
        hints: names that the user gives for `src_embedding`, `tgt_embedding` and `output_layer`; for `positions` one name,
            two names separated by a comma, or a kind. Other hints are ignored.

    Raises:
        ConfigError: a named weight is missing, no weight can be an embedding, or tfexport computes no such positions.
    """
    fixed = {role: _given(role, hints[role], weights) for role in _ROLES if role in hints}
    said = str(hints.get("positions", ""))
    refuse_positions(said, (*_NOT_COMPUTED, *(f"{kind}s" for kind in _NOT_COMPUTED)))
    named = () if said in ("", *COMPUTED, NONE, *_KINDS) else _named_positions(said, weights)
    for role, name in fixed.items():
        if name in named:
            raise ConfigError(f"{name} is given for --positions and for {FLAGS[role]}. Give it for one of them.")
    taken = {*named, *fixed.values()}
    tables = [name for name, tensor in weights.items() if name not in taken and _is_table(name, tensor, d_model)]
    matrices = [
        name
        for name, tensor in weights.items()
        if tensor.dim() == 2 and tensor.shape[1] == d_model and name not in {*tables, *named}
    ]
    matrices = list(dict.fromkeys([*matrices, *fixed.values()]))
    if not matrices:
        raise ConfigError(
            f"there are no embeddings of {d_model} columns outside its layers: was the torch.nn.Transformer saved alone? "
            "Save the state_dict of the whole model, model.state_dict()."
        )
    parts = Parts()
    _find_matrices(parts, matrices, weights, fixed)
    if parts.output == parts.source != parts.target:
        raise ConfigError(
            f"the output layer is the source's embedding, {parts.source}. Give the target's, or one for both."
        )
    _find_positions(parts, tables, named, said)
    vectors = [name for name, tensor in weights.items() if tensor.dim() > 1 and tensor.shape[-1] == d_model]
    for role, flag in parts.unclear.items():
        shown = tables or vectors if role == "positions" else matrices
        parts.unclear[role] = flag + _candidates(shown, weights)
        if role == "positions":
            parts.unclear[role] += " (tfexport does not compute rotary positions and ALiBi)"
    return parts


def refuse_positions(said: object, kinds: Collection[str]) -> None:
    """Raise ConfigError if the user says positions of one of these `kinds`, which no option describes."""
    if isinstance(said, str) and said.lower() in kinds:
        raise ConfigError(
            f"no option describes {said} positions. Export with --module my_code.py:build, which reads your code and names "
            "what tfexport does not compute."
        )


def _find_matrices(parts: Parts, matrices: list[str], weights: Mapping[str, Tensor], fixed: Mapping[str, str]) -> None:
    """Choose the only possible assignment of roles to matrices. If several are possible, ask for the roles that differ."""
    free = [role for role in _ROLES if role not in fixed]
    ways = (
        _ways(matrices, weights, fixed)
        if free
        else [(fixed["src_embedding"], fixed["tgt_embedding"], fixed["output_layer"])]
    )
    unclear = {role for role, names in zip(_ROLES, zip(*ways, strict=True), strict=False) if len(set(names)) > 1}
    if free and not all(_is_supported(way, weights, fixed) for way in ways):
        unclear |= {"src_embedding", "tgt_embedding"}
    if not ways:
        unclear = set(free)
    if not unclear:
        ((parts.source, parts.target, parts.output),) = ways
    parts.unclear.update({role: f"{FLAGS[role]} NAME" for role in free if role in unclear})
    outputs = {output for source, target, output in ways if source != target == output}
    if "tgt_embedding" in parts.unclear and outputs:
        parts.unclear["tgt_embedding"] += f" ({' or '.join(sorted(outputs))} if it is tied to the output layer)"


def _ways(matrices: list[str], weights: Mapping[str, Tensor], fixed: Mapping[str, str]) -> list[Roles]:
    """The assignments that shapes and names allow, except those that only exchange equal matrices.

    If the target embedding and the output layer differ in their rows in each, the file is broken. That is reported later.
    """
    if len(matrices) > len(_ROLES):  # one has another role, and it is unknown which
        return []
    candidates = [[fixed[role]] if role in fixed else matrices for role in _ROLES]
    possible = [
        (source, target, output)
        for source, target, output in product(*candidates)
        if {source, target, output} == set(matrices) and not _is_contradicted((source, target, output), weights, fixed)
    ]
    fitting = [way for way in possible if weights[way[1]].shape[:1] == weights[way[2]].shape[:1]] or possible
    first = {name: next(other for other in matrices if _are_equal(weights[other], weights[name])) for name in matrices}
    distinct: dict[tuple[str, ...], Roles] = {}
    for way in sorted(fitting, key=lambda way: not _words(way[1]) & _EMBEDDING):
        distinct.setdefault(tuple(first[name] for name in way), way)
    return list(distinct.values())


def _is_contradicted(way: Roles, weights: Mapping[str, Tensor], fixed: Mapping[str, str]) -> bool:
    """Whether names or a bias contradict the assignment: a matrix with a bias, or named an output, is no embedding."""
    source, target, output = way
    if output == source != target and "output_layer" not in fixed:
        return True
    layers = {name for name in way if _bias_of(name) in weights} or {name for name in way if _is_output(name)}
    if layers and output not in layers and "output_layer" not in fixed:
        return True
    if source in layers and "src_embedding" not in fixed:
        return True
    # Embeddings may be called `input` and `output`.
    # A matrix that is both the output layer and the target's embedding may have lost the name of the embedding.
    may_embed = target == output or (
        _bias_of(target) not in weights
        and _words(target) & _OUTPUT <= _TARGET
        and bool(_words(source) & _SOURCE)
        and _sides([source, target]) == (source, target)
    )
    if target in layers and not may_embed and "tgt_embedding" not in fixed:
        return True
    sides = (_sides(list(pair)) for pair in combinations(dict.fromkeys(way), 2))
    return "src_embedding" not in fixed and any(pair is not None and pair[0] != source for pair in sides)


def _is_supported(way: Roles, weights: Mapping[str, Tensor], fixed: Mapping[str, str]) -> bool:
    """Whether two embeddings are known to be those of source and target; any third matrix could have such a name."""
    source, target, output = way
    if source != target == output and (_is_output(output) or _bias_of(output) in weights):
        return True  # there is no other embedding than the source's
    if fixed.keys() & {"src_embedding", "tgt_embedding"} or _are_equal(weights[source], weights[target]):
        return True
    own = _words(source) - _words(target)
    says_source = bool(own & _SOURCE) and own <= _SOURCE | _EMBEDDING | _PLAIN
    by_rows = says_source and weights[source].shape[:1] != weights[target].shape[:1]
    return by_rows or _sides([source, target]) == (source, target)


def _are_equal(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal. NaN, and values other than plain tensors, are reported later."""
    if left is right:
        return True
    are_plain = all(tensor.layout == torch.strided and not tensor.is_meta for tensor in (left, right))
    return are_plain and (left.shape, left.dtype) == (right.shape, right.dtype) and torch.equal(left, right)


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


def _find_positions(parts: Parts, tables: list[str], named: tuple[str, ...], said: str) -> None:
    if said in COMPUTED:
        parts.kind, parts.computed = "sinusoidal" if said == "sinusoidal" else "stored", said
    elif said == NONE:
        parts.kind = NONE
    elif named:
        parts.positions = named
    elif len(tables) == 1 and not _is_of_one_side(tables[0]):
        parts.positions = (tables[0], tables[0])
    elif sides := _sides(tables):
        parts.positions = sides
    else:
        kinds = f" (or {', '.join((*COMPUTED, NONE))})"
        parts.unclear["positions"] = "--positions NAME" + (",NAME" if len(tables) > 1 else kinds)
    if said in _KINDS:
        parts.kind = said


def _is_table(name: str, tensor: Tensor, d_model: int) -> bool:
    """Whether a tensor is a table of position vectors, by its name and a shape such as [length, 1, d_model]."""
    words = _words(name)
    is_stored = tensor.dim() == 3 and 1 in tensor.shape[:2] and max(tensor.shape[:2]) > 1
    by_name = any(_POSITIONS.fullmatch(word) for word in words) or bool(is_stored and words & _STORED_POSITIONS)
    return (is_stored or tensor.dim() == 2) and tensor.shape[-1] == d_model and by_name and not words & {"tag", "cls"}


def _is_of_one_side(table: str) -> bool:
    """Whether a name belongs to the source's or the target's positions; `pos_encoder` belongs to neither."""
    return bool(_words(table) & (_TARGET | {"src", "source"}) or set(table.lower().split(".")) & _SOURCE)


def _given(role: str, name: object, weights: Mapping[str, Tensor]) -> str:
    """The full name of a weight, from the user's name of the weight or of its layer."""
    for full in (str(name), f"{name}.weight"):
        if full in weights:
            return full
    large = [known for known, tensor in weights.items() if tensor.dim() > 1]
    raise ConfigError(
        f"{FLAGS[role]} is {name}, which is not outside the layers. There are{_candidates(large, weights)}."
    )


def _sides(names: list[str]) -> tuple[str, str] | None:
    """The source's and the target's of two names, if their words show it: `src_emb` and `tgt_emb`, `emb` and `tgt_emb`.

    Words that both names have do not count: `pos_encoder_src` and `pos_encoder_tgt`.
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
    """The words of a name: `srcTokEmb.weight` to src, tok, emb and weight."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def _candidates(names: Collection[str], weights: Mapping[str, Tensor]) -> str:
    shown = ", ".join(f"{name} {list(weights[name].shape)}" for name in names)
    return f" ({shown})" if shown else ""
