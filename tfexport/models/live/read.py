"""Reads a module into a config and canonical weights, and proves them.

    find the call -> record the forward -> structure -> weights -> proof

The structure is read from random parameters, whose bits name their elements (`origins.py`). It is proven with them and with
the checkpoint's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from tfexport.config import ModelConfig, Side
from tfexport.errors import CheckpointError
from tfexport.models.live.call import WorkingCall, call_of, find_call
from tfexport.models.live.conditions import conditions_on
from tfexport.models.live.errors import NotCanonical
from tfexport.models.live.ids import Ids
from tfexport.models.live.origins import Tags, tag
from tfexport.models.live.own_types import DependsOnType, Widened, doubts_in_own_types
from tfexport.models.live.positions import position_table, stored_rows
from tfexport.models.live.proof import Difference, Proof, canonical_model, prove
from tfexport.models.live.python_reads import lines_that_read_tokens
from tfexport.models.live.recording import plain_operations
from tfexport.models.live.structure import Structure, read_structure
from tfexport.models.live.sublayers import Scaled
from tfexport.models.model import build_model
from tfexport.models.pieces import Made
from tfexport.models.transformer import Transformer

LONGEST = 1024
"""The largest length of a model that has more positions, or computes them; a longer one is proven on request."""
_MOST_LINES = 3
"""Number of lines of the user's code that a message shows."""
_FEWEST_WORDS = 8
"""Embeddings with fewer rows, such as those of segments, are not those of tokens."""


@dataclass(frozen=True)
class LiveModel:
    """A model that was read from a module and proven."""

    config: ModelConfig
    weights: dict[str, Tensor]
    """Canonical float32 weights."""
    proof: Proof
    notes: Sequence[str]
    made: Mapping[str, Made | None]
    """How each of the weights is made of parameters and buffers; None for what the module computes."""
    doubts: Mapping[str, str]
    """The parts that the comparison does not cover, with the reason."""
    called: str
    """How the module was called; see `WorkingCall.about`."""


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """Settings of the user that no module has."""

    pad_id: int
    bos_id: int
    special_ids: frozenset[int]
    with_ids: Callable[[Mapping[str, Any]], ModelConfig]
    """Completes the fields that were read with special ids."""
    vocab: int | None = None
    """The size of the target vocabulary, if one was given."""
    max_lengths: Mapping[Side, int] = field(default_factory=dict)
    adapter: Callable[..., Tensor] | None = None
    """The user's own `call(model, src, tgt)`."""


def read_module(module: nn.Module, options: ReadingOptions) -> LiveModel:
    """Read a module with its weights. The module computes in float64 meanwhile, and has its own tensors again after that.

    Raises:
        CheckpointError: no way to call it works, or the canonical model does not compute what it computes.
    """
    module = _unwrapped(module).eval()
    widened = Widened(module)
    tags = tag(module)
    sizes = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    words = min([size for size in sizes if size >= _FEWEST_WORDS], default=_FEWEST_WORDS)
    ids = Ids(options.pad_id, options.special_ids, dict.fromkeys(get_args(Side), words))
    call = find_call(module, ids, options.vocab, options.adapter)
    ids = replace(ids, start=options.bos_id if call.fixes_start else None)
    try:
        return _Reading(widened, options, tags, call, ids).run()
    except NotCanonical as error:
        name = type(module).__name__
        if isinstance(error, Difference):
            about = f"{name} was read, but the model that was read does not compute the same: {error}"
            if call.fixes_start:
                start = f"the first target token, which must be bos ({options.bos_id})"
                raise CheckpointError(
                    f"{about}. Its forward puts {start}: correct bos. Nothing was exported."
                ) from error
            advice = f"Check --pad {options.pad_id}. If it is right, report this with the module's code."
            raise CheckpointError(f"{about}. Nothing was exported. {advice}") from error
        about = f"{name} computes something that tfexport cannot express: {error}"
        raise CheckpointError(f"{about}. Nothing was exported.") from error


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module itself, without wrappers of `torch.compile`, parallel training and averaging, which compute nothing."""
    while True:
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return module
        if type(module) in (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel):
            module = module.module  # type: ignore[assignment]
        elif type(module).__name__ == "OptimizedModule" and type(module).__module__.startswith("torch."):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def computes_the_same(module: nn.Module, copy: nn.Module, live: LiveModel, options: ReadingOptions) -> bool:
    """Whether a module in evaluation mode and its copy give the same for a few tokens, in their own types."""
    config, generator = live.config, torch.Generator().manual_seed(0)
    src = torch.randint(config.src_vocab_size, (1, min(6, config.max_source_length)), generator=generator)
    tgt = torch.randint(config.tgt_vocab_size, (1, min(5, config.max_target_length)), generator=generator)
    with torch.no_grad():
        results = [
            call_of(_unwrapped(each), live.called, options.pad_id, options.vocab, options.adapter)(src, tgt)
            for each in (module, copy)
        ]
    return torch.allclose(results[0].float(), results[1].float(), rtol=1e-4, atol=1e-5, equal_nan=True)


class _Reading:
    """The steps after the call is known."""

    def __init__(
        self,
        widened: Widened,
        options: ReadingOptions,
        tags: Tags,
        call: WorkingCall,
        ids: Ids,
    ):
        self.widened, self.module, self.options, self.call = widened, widened.module, options, call
        self.structure = self._read(ids)
        fields = self.structure.fields
        sizes: dict[Side, int] = {"encoder": fields["src_vocab_size"], "decoder": fields["tgt_vocab_size"]}
        self.ids = replace(ids, sizes=sizes)
        self.made = {name: _made(tags, scaled) for name, scaled in self.structure.tensors.items()}
        embeddings = self.structure.embeddings
        self.positions = {side: stored_rows(self.module, tags, embedding) for side, embedding in embeddings.items()}
        self.notes = [f"called as {call.about}", *self.structure.notes]
        self.lengths = {side: self._length(side) for side in embeddings}
        self.lines = self._lines_that_read_tokens()
        pair = self.ids.random("encoder", (3, 8), 2), self.ids.random("decoder", (3, 6), 3)
        self.conditions = conditions_on(self.call.call, *pair, self.ids.pad)
        self.learned: set[str] = set()
        """The tensors with a factor that a parameter determines: the factor of another checkpoint is another one."""

    def run(self) -> LiveModel:
        # With the random parameters first: those of a file may hide a difference, as biases of 0 do.
        self._prove(self._values(), has_random_parameters=True)
        with torch.no_grad():
            for name, parameter in self.widened.named.items():
                parameter.copy_(self.widened.parameters[name])
        has_factors = any(parameter.numel() == 1 for parameter in self.widened.named.values())
        if has_factors or None in self.made.values():
            self.structure = self._read_again()
            self.made = {name: self._with_factor(name, made) for name, made in self.made.items()}
        # Float32 needs no copy, and its numbers are the same.
        exact = {name: tensor for name, tensor in self.widened.parameters.items() if tensor.dtype == torch.float32}
        config, weights, proof = self._prove({**self._values(), **exact}, has_random_parameters=False)
        if not self.call.masks_padding:
            about = "padding of sources changes the logits, called like this: compared with sequences of one length"
            self.notes.append(about)
        if self.call.one_at_a_time:
            about = "a sequence has other logits in a batch than alone, called like this: compared one at a time"
            self.notes.append(about)
        if self.call.fixes_start:
            about = "forward puts the first target token itself: compared with targets that begin with bos"
            self.notes.append(about)
        made = {name: self._made_as(name, tensor) for name, tensor in weights.items()}
        self.widened.restore()
        weights = {name: tensor.float() for name, tensor in weights.items()}
        exported = build_model(config, weights)
        assert isinstance(exported, Transformer)
        doubts = self._doubts(exported)
        return LiveModel(config, weights, proof, self.notes, made, doubts, self.call.about)

    def _doubts(self, exported: Transformer) -> dict[str, str]:
        """The parts that the comparison does not confirm, with the reason."""
        structure = self.structure
        try:
            doubts = doubts_in_own_types(self.call, exported, structure.returns, self.ids)
        except DependsOnType as error:
            if structure.norm_kind.startswith("std"):
                about = f"norms that divide by the standard deviation plus {exported.config.norm_eps**0.5:g}"
                raise NotCanonical(f"{about}: LayerNorm is too far from them for this model, {error}") from error
            raise
        on_tokens, on_states = self.conditions
        if lines := dict.fromkeys([*self.lines, *on_tokens]):
            doubts["branches on tokens"] = f"of {_first([*lines])}"
        if limits := [*structure.limits, *(f"condition, {line}" for line in on_states)]:
            doubts["limits of values"] = f"that no sequence may have reached ({_first(limits)})"
        if self.call.guessed:
            doubts["arguments"] = f"of forward that are needed and unknown: {', '.join(self.call.guessed)}, given None"
        return doubts

    def _lines_that_read_tokens(self) -> list[str]:
        """The lines of the user's code that read tokens in Python, for a batch with padding if the module masks it."""
        src, tgt = self.ids.random("encoder", (2, 6), 0), self.ids.random("decoder", (2, 4), 1)
        if self.call.masks_padding:
            src[1, 4:] = self.ids.pad
        return lines_that_read_tokens(self.call.call, src, tgt)

    def _with_factor(self, name: str, made: Made | None) -> Made | None:
        """How a tensor is made with the factor that the file's parameters give it."""
        factor = self.structure.tensors[name].factor
        if made is None or math.isclose(made.factor, factor, rel_tol=1e-9):
            return made
        self.learned.add(name)
        return replace(made, factor=factor)

    def _made_as(self, name: str, tensor: Tensor) -> Made | None:
        """How a canonical tensor of the result is made: also a position table, and also with a padded shape."""
        shape = tuple(tensor.shape)
        if name in self.made:
            made = None if name in self.learned else self.made[name]
            return None if made is None else replace(made, shape=shape)
        side: Side = "encoder" if name.startswith("encoder") else "decoder"
        stored, embedding = self.positions[side], self.structure.embeddings[side]
        if stored is None:
            return None if bool((tensor != 0).any()) else Made(shape, 1.0, ())
        rows = replace(stored.piece, size=(shape[0], stored.piece.size[1]))
        return Made(shape, embedding.factor, (rows,))

    def _read(self, ids: Ids) -> Structure:
        sides: tuple[Side, Side] = get_args(Side)
        return read_structure(self.call.call, lambda length, seed: ids.random(sides[seed % 2], (1, length), seed))

    def _read_again(self) -> Structure:
        """The structure with the file's parameters, for tensors that arithmetic changes, such as weight norm.

        Raises:
            NotCanonical: it is another one.
        """
        again = self._read(self.ids)
        for name, value in again.fields.items():
            if name == "embedding_scale":  # a parameter may determine it
                continue
            before = self.structure.fields[name]
            if not (math.isclose(value, before, rel_tol=1e-9) if isinstance(value, float) else value == before):
                about = f"{name} is {before} with random parameters, and {value} with the file's"
                raise NotCanonical(f"the arithmetic depends on the parameters: {about}")
        return again

    def _length(self, side: Side) -> int:
        """The largest length of a side that is proven."""
        stored, wanted = self.positions[side], self.options.max_lengths.get(side)
        most = stored.count if stored else None
        if wanted is not None and most is not None and wanted > most:
            raise CheckpointError(f"the module has {most} positions, not {wanted}. Give at most --max-length {most}.")
        length = wanted or min(most or LONGEST, LONGEST)
        if (problem := self._failure(side, length)) is not None:
            works, fails = 1, length
            while fails - works > 1:
                middle = (works + fails) // 2
                works, fails = (middle, fails) if self._failure(side, middle) is None else (works, middle)
            about = f"the {side} takes at most {works} tokens: with {length}, the forward fails ({problem})"
            if wanted is not None:
                raise CheckpointError(f"{about}. Give at most --max-length {works}.")
            length = works
            self.notes.append(about)
        elif wanted is None and (most is None or most > length):
            has = "computes its positions" if most is None else f"has {most:,} positions"
            self.notes.append(f"the {side} {has}: compared for {length:,} tokens; --max-length N compares more")
        return length

    def _failure(self, side: Side, length: int) -> str | None:
        """The error of a forward with so many tokens on a side; None if there is none."""
        try:
            with plain_operations():
                self.call.call(*self.ids.with_other_side(side, self.ids.random(side, (1, length), 0)))
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            return " ".join(str(error).split())[:150]
        return None

    def _values(self) -> dict[str, Tensor]:
        """The parameters and buffers of the module as they are now."""
        named = [*self.widened.named.items(), *self.module.named_buffers()]
        return {name: value.detach() for name, value in named}

    def _prove(
        self, values: Mapping[str, Tensor], *, has_random_parameters: bool
    ) -> tuple[ModelConfig, dict[str, Tensor], Proof]:
        """The config, the weights and the proof for these parameters, which the module has now."""
        structure, weights = self.structure, dict[str, Tensor]()
        for name, scaled in structure.tensors.items():
            made = self.made[name]
            weights[name] = scaled.value if made is None else made.of(values)
        tables = self._tables(values)
        fields = {**structure.fields, "positions": "stored" if tables else "none"}
        fields |= {"max_source_length": self.lengths["encoder"], "max_target_length": self.lengths["decoder"]}
        weights = _of_one_size(weights, structure.fields["d_ff"]) | tables
        for name, names in _biases(weights).items():
            fields[name] = any(bool((weights[bias] != 0).any()) for bias in names)
            if not fields[name]:
                weights = {name: tensor for name, tensor in weights.items() if name not in names}
        config = self.options.with_ids(fields)
        model = canonical_model(config, weights, structure)
        proof = prove(
            self.call,
            model,
            structure,
            self.ids,
            has_random_parameters=has_random_parameters,
            reads_tokens=bool(self.lines),
        )
        return config, weights, proof

    def _tables(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The position tables by their canonical names. A side without positions beside one with them has zeros."""
        tables: dict[str, Tensor] = {}
        for side, embedding in self.structure.embeddings.items():
            stored, length = self.positions[side], self.lengths[side]
            table = position_table(self.call.call, side, embedding, stored, length, self.ids, values)
            if table is not None:
                tables[side] = table
        if not tables:
            return {}
        width = next(iter(tables.values())).shape[1]
        return {
            f"{side}.positions.table": tables.get(side, torch.zeros(length, width))
            for side, length in self.lengths.items()
        }


def _first(lines: Sequence[str]) -> str:
    """The first lines, and how many there are."""
    more = f" and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    return f"{'; '.join(lines[:_MOST_LINES])}{more}"


def _made(tags: Tags, scaled: Scaled) -> Made | None:
    """How a canonical tensor is made of the module's parameters; None if arithmetic changes them."""
    is_zero = scaled.tensor.dim() == 1 and bool((scaled.tensor == 0).all())  # a bias that the module does not have
    pieces = [] if is_zero else tags.pieces_of(scaled.tensor)
    return None if pieces is None else Made(tuple(scaled.tensor.shape), scaled.factor, tuple(pieces))


def _biases(weights: Iterable[str]) -> dict[str, list[str]]:
    """The names of the biases that each field of the config is about."""
    kinds = {"attention_bias": "attention.", "feed_forward_bias": "feed_forward.", "output_bias": "output_bias"}
    return {
        field_name: [name for name in weights if part in name and name.endswith("bias")]
        for field_name, part in kinds.items()
    }


def _of_one_size(weights: Mapping[str, Tensor], d_ff: int) -> dict[str, Tensor]:
    """The weights with feed-forwards of one size: hidden states whose weights are zero change nothing."""
    padded = dict(weights)
    for name, tensor in weights.items():
        if ".feed_forward." not in name or name.endswith("output.bias"):
            continue
        is_output = name.endswith("output.weight")
        missing = d_ff - tensor.shape[-1 if is_output else 0]
        if missing:
            padded[name] = F.pad(tensor, (0, missing) if is_output or tensor.dim() == 1 else (0, 0, 0, missing))
    return padded
