"""Finds how to call a user's module: the order of its arguments, its masks, `batch_first`, and the form of its result.

Each way is tried on small inputs. It is accepted if the result has a row of logits for each target token that is
deterministic, depends on the source, and does not depend on later target tokens or on other sequences of the batch.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tfexport.errors import CheckpointError
from tfexport.models.live.tape import Call, plain_operations

Values = Literal["hide", "keep", "add", "int"]
"""What a mask holds: True where a key is hidden, True where it is read, a number to add to scores, or 1 where it is read."""
Axes = Literal[2, 3, 4]
"""[queries, keys] and [batch, keys]; [batch, queries, keys]; [batch, 1, queries, keys]."""

ADAPTER = """    def call(model, src, tgt):  # int64 [batch, src] and [batch, tgt], padded -> logits [batch, tgt, vocab]
        src_mask, tgt_mask = (src != PAD)[:, None, None], torch.ones(len(tgt[0]), len(tgt[0])).tril().bool()
        return model.generator(model.decode(tgt, model.encode(src, src_mask), src_mask, tgt_mask))"""

_TARGET_NAMES = ("tgt", "trg", "target", "dec", "output", "look", "causal", "subsequent", "future", "peak", "nopeak")
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Ids:
    """The special ids that tests of a call need, and the number of ids that both sides have at least."""

    pad: int
    special: frozenset[int]
    source: int
    target: int

    def free(self, side: Literal["source", "target"]) -> Tensor:
        """The ids of a side that are not special."""
        return torch.tensor([i for i in range(getattr(self, side)) if i not in self.special])

    def random(self, side: Literal["source", "target"], shape: tuple[int, ...], seed: int) -> Tensor:
        """Random ids that are not special; different ones within a row, if there are enough."""
        free, generator = self.free(side), torch.Generator().manual_seed(seed)
        rows, length = shape
        if len(free) >= length:
            order = [free[torch.randperm(len(free), generator=generator)[:length]] for _ in range(rows)]
            return torch.stack(order)
        return free[torch.randint(len(free), shape, generator=generator)]


@dataclass(frozen=True)
class FoundCall:
    """A way to call a module."""

    call: Call
    about: str
    """The way in words, such as `model(src, tgt), batch first`."""
    masks_padding: bool
    """Whether padding of sources changes nothing, so that batches may be padded."""


def find_call(
    module: nn.Module, ids: Ids, vocab: int | None, adapter: Callable[..., Tensor] | None = None
) -> FoundCall:
    """Find how to call a module in evaluation mode, whose weights are float64.

    Args:
        vocab: the number of logits, if it is known.
        adapter: the user's own `call(model, src, tgt)`; then no other way is tried.

    Raises:
        CheckpointError: no way works.
    """
    if adapter is not None:
        ways: Iterator[tuple[Call, str]] = iter([(lambda src, tgt: adapter(module, src, tgt), "call(model, src, tgt)")])
    else:
        ways = _ways(module, ids.pad, vocab)
    problems: dict[str, str] = {}
    unpadded: FoundCall | None = None
    for call, about in ways:
        try:
            with plain_operations():
                problem = _problem(call, ids)
        except Exception as error:  # whatever the user's code raises, this way is none
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        if problem is None:
            return FoundCall(call, about, True)
        if problem == _READS_PADDING:
            unpadded = unpadded or FoundCall(call, about, False)
        else:
            problems[about] = problem
    if unpadded is not None:
        return unpadded
    raise _no_way(module, problems, adapter is not None)


def _no_way(module: nn.Module, problems: Mapping[str, str], has_adapter: bool) -> CheckpointError:
    name = type(module).__name__
    if has_adapter:
        problem = next(iter(problems.values()), "it was not run")
        return CheckpointError(f"`call` of your file does not work with {name}: {problem}. Correct it.")
    kinds: dict[str, str] = {}
    for about, problem in problems.items():
        kinds.setdefault(problem, about)
    shown = "; ".join(f"{about}: {problem}" for problem, about in [*kinds.items()][:4])
    tried = f"{name} was called in {len(problems)} ways, and none gives logits for each target token ({shown})"
    error = CheckpointError(
        f"{tried if problems else f'{name} has no forward with a source and a target'}. Add a function `call` to your file, "
        "which calls the model as your own decoding does, such as:"
    )
    error.example = ADAPTER
    return error


_READS_PADDING = "padding of the source changes the result"


@torch.no_grad()
def _problem(call: Call, ids: Ids) -> str | None:
    """Why a call is none of a decoder, in words; None if it is one."""
    src, tgt = ids.random("source", (3, 6), 1), ids.random("target", (3, 5), 2)
    result = call(src, tgt)
    if (
        not isinstance(result, Tensor)
        or not result.is_floating_point()
        or result.shape[:2] != tgt.shape
        or result.dim() != 3
    ):
        shape = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        return f"returns {shape}, not [3, 5, vocab] for 3 sequences of 5 tokens"
    if not bool(result.isfinite().logical_or(result == -math.inf).all()):
        return "returns NaN"
    if not torch.equal(result, call(src, tgt)):
        return "returns other values when it is called again"
    later = tgt.clone()
    later[:, 3] = _another(ids, tgt[:, 3])
    if _differs(call(src, later)[:, :3], result[:, :3]):
        return "later target tokens change earlier logits: no causal mask"
    begun = tgt.clone()
    begun[:, 0] = _another(ids, tgt[:, 0])
    if not _differs(call(src, begun)[:, :1], result[:, :1]):
        return "the first target token does not change the first logits: forward shifts the targets itself"
    other = src.clone()
    other[0, 2] = next(i for i in ids.free("source").tolist() if i != int(src[0, 2]))
    changes = (call(other, tgt) - result).nan_to_num().abs().amax((1, 2))
    if changes[0] < _TOLERANCE:
        return "the source changes nothing"
    if changes[1:].max() > _TOLERANCE:
        return "the sequences of a batch change each other"
    padded = torch.cat([src, torch.full((3, 2), ids.pad)], 1)
    try:
        reads = _differs(call(padded, tgt), result)
    except Exception:  # a module without masks may have other limits
        reads = True
    return _READS_PADDING if reads else None


def _another(ids: Ids, tokens: Tensor) -> Tensor:
    """Other target tokens than these."""
    free = ids.free("target")
    return torch.stack([free[free != token][int(token) % (len(free) - 1)] for token in tokens])


def _differs(values: Tensor, others: Tensor) -> bool:
    return values.shape != others.shape or bool(((values - others).nan_to_num().abs() > _TOLERANCE).any())


def _ways(module: nn.Module, pad: int, vocab: int | None) -> Iterator[tuple[Call, str]]:
    """Ways to call a module, the most usual first."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [p for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]
    roles = {p.name: _role(p.name) for p in parameters}
    tokens = [p.name for p in parameters if roles[p.name] == "tokens"][:2]
    if len(tokens) == 1 and len(parameters) == 1:
        for values in ("int", "keep", "hide"):
            yield _of_batch(module, tokens[0], values, pad, vocab), f"forward({tokens[0]}) with a dict by name"
    if len(tokens) < 2:
        tokens += [p.name for p in parameters if "label" in p.name.lower()][:1]
    if type(module).forward is nn.Module.forward or len(tokens) < 2:
        yield from _method_ways(module, pad, vocab)
        return
    if _is_target(tokens[0]) and not _is_target(tokens[1]):
        tokens.reverse()
    needed = [p.name for p in parameters if p.default is p.empty and p.name not in tokens]
    masks = [name for name in roles if roles[name] == "mask"]
    lengths = [name for name in roles if roles[name] == "lengths"]
    required = [name for name in needed if name in masks]
    others = [name for name in needed if name not in (*masks, *lengths)]
    choices: list[tuple[Sequence[str], Values, Axes]] = [((), "hide", 2)] if not required else []
    for named in dict.fromkeys((tuple(masks), tuple(required))):
        if named:
            order: tuple[Values, ...] = ("hide", "keep", "add", "int")
            every: tuple[Axes, ...] = (2, 4, 3)
            choices += [(named, values, axes) for axes, values in product(every, order)]
    for names in (tokens, tokens[::-1]):
        short = _Way(module, names[0], names[1], required, lengths, others, "keep", 4, True, pad, vocab)
        yield _with_another_token(short, pad), f"{short.about}, with one more target token, which forward removes"
        for given, values, axes in choices:
            for is_first in (True, False):
                way = _Way(module, names[0], names[1], given, lengths, others, values, axes, is_first, pad, vocab)
                yield way, way.about
    yield from _method_ways(module, pad, vocab)


def _with_another_token(way: Call, pad: int) -> Call:
    """A call of a module that removes the last target token itself, as training does."""
    return lambda src, tgt: way(src, torch.cat([tgt, torch.full((len(tgt), 1), pad)], 1))


def _method_ways(module: nn.Module, pad: int, vocab: int | None) -> Iterator[tuple[Call, str]]:
    """Calls of `encode` and `decode`, or of the submodules `encoder` and `decoder`."""
    for first, second in (("encode", "decode"), ("encoder", "decoder")):
        encode, decode = getattr(module, first, None), getattr(module, second, None)
        if not callable(encode) or not callable(decode) or isinstance(encode, nn.ModuleList):
            continue
        for axes, values in product((4, 3, 2), ("keep", "hide", "add", "int")):
            way = _Methods(module, first, second, values, axes, pad, vocab)  # type: ignore[arg-type]
            yield way, f"{second}({first}(src), tgt), masks ({values}, {axes} axes)"


@dataclass(frozen=True)
class _Methods:
    """A call of an encoder, a decoder and a projection, one after the other."""

    module: nn.Module
    encode: str
    decode: str
    values: Values
    axes: Axes
    pad: int
    vocab: int | None

    def __call__(self, src: Tensor, tgt: Tensor) -> Tensor:
        ran: set[int] = set()
        with _watching(self.module, ran):
            encode, decode = getattr(self.module, self.encode), getattr(self.module, self.decode)
            memory, *more = _as_tuple(encode(**self._arguments(encode, src, tgt, src)))
            result = decode(**self._arguments(decode, src, tgt, tgt, memory, more))
        result = _logits_of(result, self.vocab)
        return result if result.shape[-1] == self.vocab else _projected(self.module, result, ran)

    def _arguments(
        self, function: Any, src: Tensor, tgt: Tensor, ids: Tensor, memory: Any = None, more: Sequence[Any] = ()
    ) -> dict[str, Any]:
        """Arguments by the names of parameters. A mask that the encoder returned beside its states is given back."""
        function = function.forward if isinstance(function, nn.Module) else function
        given: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            name, role = parameter.name, _role(parameter.name)
            if role == "mask":
                given[name] = more[0] if more else mask_for(name, src, tgt, self.pad, self.values, self.axes)
            elif role == "lengths":
                given[name] = (ids != self.pad).sum(1)
            elif memory is not None and any(word in name.lower() for word in _MEMORY_NAMES):
                given[name] = memory
            elif parameter.default is parameter.empty and parameter.kind < 2:
                given[name] = ids
        return given


_MEMORY_NAMES = ("memory", "enc", "context", "hidden", "cross")


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


@contextlib.contextmanager
def _watching(module: nn.Module, ran: set[int]) -> Iterator[None]:
    """Add the ids of the submodules that run to `ran`."""
    handles = [part.register_forward_hook(lambda part, given, result: ran.add(id(part))) for part in module.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _projected(module: nn.Module, states: Tensor, ran: set[int]) -> Tensor:
    """The logits of a projection that `forward` did not call, such as `generator` of The Annotated Transformer."""
    idle = [
        child
        for child in module.children()
        if not any(id(part) in ran for part in child.modules()) and any(True for _ in child.parameters())
    ]
    if len(idle) != 1 or isinstance(idle[0], nn.ModuleList | nn.Embedding):  # an embedding's matrix may be used alone
        return states
    return idle[0](states)


def _of_batch(module: nn.Module, name: str, values: Values, pad: int, vocab: int | None) -> Call:
    """A call of a module that gets one batch, from which it takes tensors by their names."""

    def call(src: Tensor, tgt: Tensor) -> Tensor:
        result = _logits_of(module(**{name: _Batch(src, tgt, pad, values)}), vocab)
        return result.view(*tgt.shape, -1) if result.dim() == 2 and len(result) == tgt.numel() else result

    return call


class _Batch(dict[str, Any]):
    """A batch that has a tensor for every name of ids, masks or lengths."""

    def __init__(self, src: Tensor, tgt: Tensor, pad: int, values: Values):
        super().__init__()
        self._tensors, self._pad, self._values = (src, tgt), pad, values

    def __missing__(self, name: str) -> Any:
        return self.__getattr__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        src, tgt = self._tensors
        ids = tgt if _is_target(name) else src
        role = _role(name)
        if role == "mask":
            is_padded = _HIDES_PADDING in name.lower() or "pad" in name.lower()
            keep = ids != self._pad
            if is_padded:
                return {"int": keep.long(), "keep": keep, "hide": ~keep}[self._values]
            return mask_for(name, src, tgt, self._pad, self._values, 2)
        return (ids != self._pad).sum(1) if role == "lengths" else ids


_HIDES_PADDING = "attention_mask"
"""A mask of tokens, as the transformers library names it: [batch, length], 1 for tokens."""


def _role(name: str) -> Literal["mask", "lengths", "tokens", "other"]:
    lower = name.lower()
    if "mask" in lower or "pad" in lower:
        return "mask"
    if "len" in lower:
        return "lengths"
    if any(
        word in lower
        for word in ("teacher", "ratio", "return", "train", "cache", "past", "state", "pos", "label", "epoch")
    ):
        return "other"
    return "tokens"


def _is_target(name: str) -> bool:
    lower = name.lower()
    return lower == "y" or any(word in lower for word in _TARGET_NAMES[:5])


@dataclass(frozen=True)
class _Way:
    """One way to call a module."""

    module: nn.Module
    source: str
    target: str
    masks: Sequence[str]
    lengths: Sequence[str]
    others: Sequence[str]
    values: Values
    axes: Axes
    batch_first: bool
    pad: int
    vocab: int | None

    @property
    def about(self) -> str:
        names = [self.source, self.target, *self.lengths, *self.others]
        masks = [f"{', '.join(self.masks)} ({self.values}, {self.axes} axes)"] if self.masks else []
        return f"forward({', '.join([*names, *masks])}), {'batch' if self.batch_first else 'length'} first"

    def __call__(self, src: Tensor, tgt: Tensor) -> Tensor:
        given: dict[str, Any] = dict.fromkeys(self.others)
        given |= {name: mask_for(name, src, tgt, self.pad, self.values, self.axes) for name in self.masks}
        given |= {name: ((tgt if _is_target(name) else src) != self.pad).sum(1) for name in self.lengths}
        given[self.source], given[self.target] = (src, tgt) if self.batch_first else (src.T, tgt.T)
        ran: set[int] = set()
        with _watching(self.module, ran):
            result = self.module(**given)
        result = _logits_of(result, self.vocab)
        if result.shape[-1] != self.vocab:
            result = _projected(self.module, result, ran)
        if result.dim() == 2 and len(result) == tgt.numel():
            result = result.view(*(tgt.shape if self.batch_first else tgt.T.shape), -1)
        return result if self.batch_first else result.transpose(0, 1)


def _logits_of(result: Any, vocab: int | None) -> Tensor:
    """The logits among what a module returns."""
    if isinstance(result, Tensor):
        return result
    if hasattr(result, "logits"):
        return result.logits
    values = list(result.values()) if isinstance(result, Mapping) else list(result)
    tensors = [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim() in (2, 3)]
    fitting = [tensor for tensor in tensors if vocab is not None and tensor.shape[-1] == vocab]
    if not tensors:
        raise ValueError(f"it returns {type(result).__name__} without logits")
    return (fitting or tensors)[0]


def mask_for(name: str, src: Tensor, tgt: Tensor, pad: int, values: Values, axes: Axes) -> Tensor | None:
    """The mask for a parameter of this name.

    Args:
        src, tgt: int64 [batch, length].
    """
    lower, length = name.lower(), tgt.shape[1]
    of_target = any(word in lower for word in _TARGET_NAMES) and "memory" not in lower and "enc_dec" not in lower
    of_target = of_target and not ("src" in lower and "tgt" not in lower)
    is_real = {True: tgt != pad, False: src != pad}
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    if "pad" in lower or (_HIDES_PADDING in lower and axes == 2):
        keep = is_real[of_target]
        if axes != 2 and values in ("keep", "int"):
            keep = keep[:, None] if axes == 3 else keep[:, None, None]
    elif "memory" in lower:
        return None
    elif of_target:
        keep = {2: causal, 3: is_real[True][:, None] & causal, 4: is_real[True][:, None, None] & causal}[axes]
    elif axes == 2:
        keep = torch.ones(src.shape[1], src.shape[1], dtype=torch.bool)
    else:
        keep = is_real[False][:, None] if axes == 3 else is_real[False][:, None, None]
    if values == "keep":
        return keep
    if values == "hide":
        return ~keep
    if values == "int":
        return keep.long()
    return torch.zeros(keep.shape, dtype=torch.get_default_dtype()).masked_fill(~keep, -math.inf)
