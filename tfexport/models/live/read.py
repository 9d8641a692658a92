"""Reads a module into a config and canonical weights, and proves them.

    find the call -> record the forward -> structure -> weights -> proof

The structure is read from random parameters, whose bits name their elements (`origins.py`). It is proven with them and with
the checkpoint's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tfexport.config import ModelConfig
from tfexport.errors import CheckpointError
from tfexport.models.live.call import FoundCall, Ids, find_call
from tfexport.models.live.errors import NotCanonical
from tfexport.models.live.origins import Piece, Tags, assembled, tag
from tfexport.models.live.proof import Difference, Proof, canonical_model, prove
from tfexport.models.live.streams import Embedding, rows_of
from tfexport.models.live.structure import Structure, read_structure
from tfexport.models.live.sublayers import Scaled
from tfexport.models.live.tape import STACK_OF, Side, plain_operations, record_until

LONGEST = 1024
"""The largest length of a model that has more positions, or computes them; a longer one is proven on request."""


@dataclass(frozen=True)
class Entry:
    """The origin of a canonical tensor."""

    pieces: tuple[Piece, ...]
    """Rows of parameters or buffers; empty if arithmetic changed the user's numbers, or if it is zero."""
    factor: float
    shape: tuple[int, ...]
    is_zero: bool = False
    """A bias that the module does not have."""


@dataclass(frozen=True)
class LiveModel:
    """A model that was read from a module and proven."""

    fields: Mapping[str, Any]
    """All fields of `ModelConfig`, except for special ids and the text settings."""
    weights: Mapping[str, Tensor]
    """Canonical float32 weights."""
    table: Mapping[str, Entry]
    """The origin of each weight."""
    proof: Proof
    call: FoundCall
    notes: Sequence[str] = ()
    unused: Sequence[str] = field(default_factory=tuple)
    """Names of parameters that the forward does not read."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the user knows beside the module."""

    pad_id: int
    special_ids: frozenset[int]
    vocab: int | None = None
    """The size of the target vocabulary, if one was given."""
    max_length: int | None = None
    adapter: Callable[..., Tensor] | None = None
    """The user's own `call(model, src, tgt)`."""
    config: Callable[[Mapping[str, Any]], ModelConfig] = ModelConfig.from_dict
    """Completes the fields that were read with special ids."""


def read_module(module: nn.Module, given: Given) -> LiveModel:
    """Read a module with its weights. The module is changed: its parameters become float64.

    Raises:
        CheckpointError: no way to call it works, or the canonical model does not compute what it computes.
    """
    module = prepared(module)
    actual = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    _widen(module)
    return _Reading(module, actual, given).run()


def prepared(module: nn.Module) -> nn.Module:
    """The module itself in evaluation mode, without a wrapper of `torch.compile` or of parallel training."""
    for wrapper in ("_orig_mod", "module"):
        inner = getattr(module, wrapper, None)
        if isinstance(inner, nn.Module) and len(list(module.children())) == 1:
            module = inner
    return module.eval()


def _widen(module: nn.Module) -> None:
    """Make all floating-point tensors of a module float64, also those that are plain attributes."""
    module.double()
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
                setattr(part, name, value.double())


class _Reading:
    def __init__(self, module: nn.Module, actual: Mapping[str, Tensor], given: Given):
        self.module, self.actual, self.given = module, actual, given
        self.notes: list[str] = []

    def run(self) -> LiveModel:
        tags = tag(self.module)
        sizes = [part.num_embeddings for part in self.module.modules() if isinstance(part, nn.Embedding)]
        least = min([size for size in sizes if size >= 8] or [16])
        ids = Ids(self.given.pad_id, self.given.special_ids, least, least)
        call = find_call(self.module, ids, self.given.vocab, self.given.adapter)
        try:
            return self._proven(tags, call, ids)
        except NotCanonical as error:
            raise CheckpointError(_refusal(self.module, error)) from error

    def _proven(self, tags: Tags, call: FoundCall, ids: Ids) -> LiveModel:
        structure = self._structure(call, ids)
        table = {name: self._entry(tags, tensor) for name, tensor in structure.tensors.items()}
        sizes = (structure.fields["src_vocab_size"], structure.fields["tgt_vocab_size"])
        ids = Ids(ids.pad, ids.special, *sizes)
        positions = {side: self._position_pieces(tags, each) for side, each in structure.embeddings.items()}
        lengths = {side: self._length(pieces) for side, pieces in positions.items()}
        self._limit(call, lengths, ids)
        # With the random parameters first: those of a file may hide a difference, as biases of 0 do.
        self._prove(call, structure, table, positions, lengths, ids, thorough=False)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(self.actual[name])
        if any(not entry.pieces and not entry.is_zero for entry in table.values()):
            own = self._structure(call, ids)
            for name, value in own.fields.items():
                if value != structure.fields[name]:
                    about = f"{name} is {structure.fields[name]} with random parameters, and {value} with the file's"
                    raise NotCanonical(f"the arithmetic depends on the parameters: {about}")
            structure = own
        config, weights, proof = self._prove(call, structure, table, positions, lengths, ids, thorough=True)
        fields = {name: value for name, value in config.to_dict().items() if not name.endswith(("_id", "_ids"))}
        narrow = _unshared({name: tensor.float().contiguous() for name, tensor in weights.items()})
        for side, pieces in positions.items():
            name = f"{STACK_OF[side]}.positions.table"
            if name in weights:
                table[name] = Entry(tuple(pieces or ()), structure.embeddings[side].factor, tuple(weights[name].shape))
        self.notes += structure.notes
        if not call.masks_padding:
            self.notes.append("the module masks no padding of sources: it was compared with sources of one length")
        return LiveModel(fields, narrow, {n: table[n] for n in narrow if n in table}, proof, call, tuple(self.notes))

    def _limit(self, call: FoundCall, lengths: dict[Side, int], ids: Ids) -> None:
        """Lower the lengths to those that the forward accepts, such as the size of a mask or of a table that it computes."""
        for side, names in (("src", ("source", "target")), ("tgt", ("target", "source"))):
            problem = ""

            def runs(length: int, names: tuple[str, str] = names) -> bool:
                nonlocal problem
                long, short = ids.random(names[0], (1, length), 0), ids.random(names[1], (1, 1), 0)  # type: ignore[arg-type]
                try:
                    with plain_operations():
                        call.call(*((long, short) if names[0] == "source" else (short, long)))
                except Exception as error:  # whatever the user's code raises
                    problem = " ".join(str(error).split())[:150]
                    return False
                return True

            most = lengths[side]  # type: ignore[index]
            if runs(most):
                continue
            fewest = 1
            while most - fewest > 1:
                middle = (most + fewest) // 2
                fewest, most = (middle, most) if runs(middle) else (fewest, middle)
            lengths[side] = fewest  # type: ignore[index]
            self.notes = [note for note in self.notes if "proven for" not in note]
            self.notes.append(f"the {names[0]} has at most {fewest} tokens: for more, the forward fails ({problem})")

    def _structure(self, call: FoundCall, ids: Ids) -> Structure:
        return read_structure(
            call.call, lambda length, seed: ids.random("source" if seed % 2 == 0 else "target", (1, length), seed)
        )

    def _entry(self, tags: Tags, scaled: Scaled) -> Entry:
        tensor = scaled.tensor
        is_zero = tensor.dim() == 1 and bool((tensor == 0).all())
        pieces = None if is_zero else tags.pieces_of(tensor)
        return Entry(tuple(pieces or ()), scaled.factor, tuple(tensor.shape), is_zero)

    def _position_pieces(self, tags: Tags, embedding: Embedding) -> list[Piece] | None:
        """All rows of a position table from the first one that the forward reads; None if it is computed."""
        rows = embedding.constant
        if rows is None:
            return None
        pieces, d_model = tags.pieces_of(rows), rows.shape[1]
        if pieces is not None and len(pieces) == 1 and pieces[0].strides == (d_model, 1):
            piece = pieces[0]
            count = (dict(self.module.named_parameters())[piece.name].numel() - piece.start) // d_model
            return [Piece(piece.name, piece.start, (count, d_model), (d_model, 1))]
        for name, buffer in self.module.named_buffers():
            if not buffer.is_floating_point() or buffer.dim() == 0 or buffer.shape[-1] != d_model:
                continue
            table = buffer.reshape(-1, d_model)
            for start in (table[: len(table) - len(rows) + 1] == rows[0]).all(1).nonzero().flatten().tolist():
                if torch.equal(table[start : start + len(rows)], rows):
                    return [Piece(name, start * d_model, (len(table) - start, d_model), (d_model, 1))]
        return None

    def _length(self, pieces: Sequence[Piece] | None) -> int:
        """The largest length of a side."""
        most = pieces[0].size[0] if pieces else None
        wanted = self.given.max_length
        if wanted is not None and most is not None and wanted > most:
            raise CheckpointError(f"the module has {most} positions, not {wanted}. Give at most --max-length {most}.")
        if wanted is None and (most is None or most > LONGEST):
            about = "computes its positions" if most is None else f"has {most} positions"
            self.notes.append(f"the module {about}: proven for {LONGEST} tokens; --max-length N proves more")
            return LONGEST
        return wanted or most or LONGEST

    def _prove(
        self,
        call: FoundCall,
        structure: Structure,
        table: Mapping[str, Entry],
        positions: Mapping[Side, Sequence[Piece] | None],
        lengths: dict[Side, int],
        ids: Ids,
        *,
        thorough: bool,
    ) -> tuple[ModelConfig, dict[str, Tensor], Proof]:
        """The config, the weights and the proof, with the values that the module's parameters have now."""
        values = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        if thorough:  # float32 needs no copy, and its numbers are the same
            values |= {name: tensor for name, tensor in self.actual.items() if tensor.dtype == torch.float32}
        values = {name: value.detach() for name, value in values.items()}
        weights = {}
        for name, scaled in structure.tensors.items():
            entry = table[name]
            if entry.pieces:
                tensor = assembled(entry.pieces, values, entry.shape)
                weights[name] = tensor if entry.factor == 1.0 else tensor.double() * entry.factor
            else:
                weights[name] = torch.zeros(entry.shape) if entry.is_zero else scaled.value
        weights |= self._position_tables(call, structure, positions, lengths, ids, values)
        fields = {**structure.fields, **_of_lengths(lengths), **_positions_field(weights)}
        fields, chosen = _minimal(fields, _padded(fields, weights))
        config = self.given.config(fields)
        model = canonical_model(config, chosen, structure)
        return config, chosen, prove(call, model, structure, ids, thorough=thorough)

    def _position_tables(
        self,
        call: FoundCall,
        structure: Structure,
        positions: Mapping[Side, Sequence[Piece] | None],
        lengths: Mapping[Side, int],
        ids: Ids,
        values: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """The position tables, from parameters and buffers, or from a forward of the largest length."""
        tables = {}
        for side, embedding in structure.embeddings.items():
            pieces, length = positions[side], lengths[side]
            if pieces:
                table = assembled(pieces, values, pieces[0].size)[:length]
                table = table if embedding.factor == 1.0 else table.double() * embedding.factor
            elif bool((embedding.positions == 0).all()):
                continue
            else:
                table = _computed(call, embedding, side, length, ids)
            tables[f"{STACK_OF[side]}.positions.table"] = table
        if len(tables) == 1:  # the other side has none
            (table,) = tables.values()
            for side in STACK_OF:
                zeros = torch.zeros(lengths[side], table.shape[1], dtype=torch.float64)
                tables.setdefault(f"{STACK_OF[side]}.positions.table", zeros)
        return tables


def _computed(call: FoundCall, embedding: Embedding, side: Side, length: int, ids: Ids) -> Tensor:
    """The position vectors of a forward of a length, without the embeddings of its ids."""
    long = ids.random("source" if side == "src" else "target", (1, length), 9)
    short = torch.full((1, 1), int(ids.free("target" if side == "src" else "source")[0]))
    src, tgt = (long, short) if side == "src" else (short, long)
    nodes = record_until(call.call, src, tgt, embedding.node.index + 1)
    values = rows_of(nodes[-1].value, embedding.values.shape[1])
    if values is None or values.shape[0] != length:
        raise NotCanonical("positions depend on the length of the sequence", nodes[-1].place)
    table = values - embedding.scale * embedding.table[long[0]]
    if (table[: len(embedding.positions)] - embedding.positions).abs().max() > 1e-9:
        raise NotCanonical("positions depend on the length of the sequence", nodes[-1].place)
    return table


def _of_lengths(lengths: Mapping[Side, int]) -> dict[str, int]:
    return {"max_source_length": lengths["src"], "max_target_length": lengths["tgt"]}


def _positions_field(weights: Mapping[str, Tensor]) -> dict[str, str]:
    return {"positions": "stored" if "encoder.positions.table" in weights else "none"}


def _minimal(fields: dict[str, Any], weights: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields and weights without biases that are all zero, and with equal embeddings once."""
    kept = dict(weights)

    def drop(field_name: str, names: Iterable[str]) -> None:
        names = [*names]
        fields[field_name] = any(bool((kept[name] != 0).any()) for name in names)
        if not fields[field_name]:
            for name in names:
                del kept[name]

    drop("attention_bias", [n for n in kept if "attention." in n and n.endswith("bias")])
    drop("feed_forward_bias", [n for n in kept if "feed_forward." in n and n.endswith("bias")])
    drop("output_bias", ["output_bias"])
    source, target = kept["encoder.tokens.weight"], kept["decoder.tokens.weight"]
    fields["tie_output"] = kept["output_weight"].shape == target.shape and torch.equal(kept["output_weight"], target)
    fields["tie_source_target"] = source.shape == target.shape and torch.equal(source, target)
    if fields["tie_output"]:
        del kept["output_weight"]
    if fields["tie_source_target"]:
        del kept["decoder.tokens.weight"]
    return fields, kept


def _padded(fields: Mapping[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights with feed-forwards of one size: hidden states whose weights are zero change nothing."""
    padded = dict(weights)
    for name, tensor in weights.items():
        missing = fields["d_ff"] - (tensor.shape[-1] if "output" in name else len(tensor))
        if ".feed_forward." not in name or name.endswith("output.bias") or missing == 0:
            continue
        sides = (0, missing) if tensor.dim() == 1 or "output" in name else (0, 0, 0, missing)
        padded[name] = torch.nn.functional.pad(tensor, sides)
    return padded


def _unshared(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights without tensors that share memory, such as those of layers that are used twice."""
    seen: set[int] = set()
    for name, tensor in weights.items():
        if tensor.data_ptr() in seen:
            weights[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    return weights


def _refusal(module: nn.Module, error: NotCanonical) -> str:
    name = type(module).__name__
    if isinstance(error, Difference):
        return (
            f"{name} was read, but the model that was read does not compute the same: {error}. Nothing was exported. Report "
            "this with the module's code."
        )
    return f"{name} computes something that tfexport cannot express: {error}. Nothing was exported."
