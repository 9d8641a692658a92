"""Finds how to call a user's module: the order of its arguments, its masks, `batch_first`, and the form of its result.

Each way is tried on small inputs. It is accepted if the result has a row of logits for each target token that is
deterministic, depends on the source, and does not depend on later target tokens or on other sequences of the batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from tfexport.config import Side
from tfexport.errors import CheckpointError
from tfexport.models.live.arguments import (
    Arguments,
    MaskAxes,
    MaskValues,
    NamedBatch,
    is_of_source,
    is_of_target,
    of_tensorflow,
    role_of,
)
from tfexport.models.live.ids import Ids
from tfexport.models.live.recording import Call, plain_operations
from tfexport.models.live.results import logits_of_run

ADAPTER = """    def call(model, src, tgt):  # int64 [batch, src] and [batch, tgt], padded -> logits [batch, tgt, vocab]
        src_mask, tgt_mask = (src != PAD)[:, None, None], torch.ones(len(tgt[0]), len(tgt[0])).tril().bool()
        return model.decode(tgt, model.encode(src, src_mask), src_mask, tgt_mask)  # the calls of your own code"""

_TOLERANCE = 1e-9
_READS_PADDING = "padding of the source changes the result"
_READS_BATCH = "a sequence has other logits in a batch than alone"
_SHIFTS = "the first target token does not change the first logits"


@dataclass(frozen=True)
class WorkingCall:
    """A way to call a module."""

    call: Call
    about: str
    """The way in words, such as `forward(src, tgt), batch first`."""
    masks_padding: bool
    """Whether padding of sources changes nothing, so that batches may be padded."""
    guessed: tuple[str, ...] = ()
    """Arguments that are needed, and that nobody knows: they are None."""
    one_at_a_time: bool = False
    """Whether the module is called with one sequence at a time, because its logits in a batch are others."""
    fixes_start: bool = False
    """Whether forward puts the first target token before the targets. Then `call` gives it the other tokens."""


class Way(NamedTuple):
    """A way to call a module."""

    about: str
    """The way in words."""
    call: Call
    guessed: tuple[str, ...] = ()
    """Arguments that are needed, and that nobody knows: they are None."""


def find_call(
    module: nn.Module, ids: Ids, vocab: int | None, adapter: Callable[..., Tensor] | None = None
) -> WorkingCall:
    """Find how to call a module in evaluation mode, whose weights are float64.

    Args:
        vocab: the number of logits, if it is known.
        adapter: the user's own `call(model, src, tgt)`; then no other way is tried.

    Raises:
        CheckpointError: no way works.
    """
    ways: Iterator[Way] = _ways(module, ids.pad, vocab)
    if adapter is not None:
        ways = iter([Way("call(model, src, tgt)", lambda src, tgt: adapter(module, src, tgt))])
    problems: dict[str, str] = {}
    others: list[WorkingCall] = []
    for about, call, guessed in ways:
        problem = _tried(call, ids)
        if problem is None:
            return WorkingCall(call, about, True, guessed)
        if problem == _READS_PADDING:
            others.append(WorkingCall(call, about, False, guessed))
        elif problem == _READS_BATCH and (again := _tried(_alone(call), ids)) in (None, _READS_PADDING):
            others.append(WorkingCall(_alone(call), about, again is None, guessed, one_at_a_time=True))
        elif problem == _SHIFTS and (again := _tried(_after_start(call), ids, place=1)) in (None, _READS_PADDING):
            others.append(WorkingCall(_after_start(call), about, again is None, guessed, fixes_start=True))
        problems.setdefault(problem, about)
    if not others:
        raise _no_way(module, problems, ids.pad, has_adapter=adapter is not None)
    return min(others, key=lambda way: (way.one_at_a_time, way.fixes_start, not way.masks_padding))


def call_of(module: nn.Module, about: str, pad: int, vocab: int | None, adapter: Callable[..., Tensor] | None) -> Call:
    """The call of another module of the same class that is made in the same way.

    Args:
        about: `WorkingCall.about`.
    """
    if adapter is not None:
        return lambda src, tgt: adapter(module, src, tgt)
    return next(way.call for way in _ways(module, pad, vocab) if way.about == about)


def _tried(call: Call, ids: Ids, place: int = 0) -> str | None:
    """Why a call is none of a decoder, in words; None if it is one. See `_problem`."""
    try:
        with plain_operations():
            return _problem(call, ids, place)
    except (Exception, SystemExit) as error:  # whatever the user's code raises, this way is none
        return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def _alone(call: Call) -> Call:
    """The same call for each sequence of a batch alone."""

    def each(src: Tensor, tgt: Tensor) -> Tensor:
        return torch.cat([call(src[row : row + 1], tgt[row : row + 1]) for row in range(len(src))])

    return each


def _after_start(call: Call) -> Call:
    """The same call without the first token of each target. Another one at the end keeps the length; forward removes it."""
    return lambda src, tgt: call(src, tgt.roll(-1, 1))


def _no_way(module: nn.Module, problems: Mapping[str, str], pad: int, *, has_adapter: bool) -> CheckpointError:
    """The error for a module that no way calls. `problems` has the first way with each problem."""
    name = type(module).__name__
    if has_adapter:
        return CheckpointError(f"`call` of your file does not work with {name}: {next(iter(problems))}. Correct it.")
    shown = "; ".join(f"{about}: {problem}" for problem, about in [*problems.items()][:2])
    tried = f"no way to call {name} gives logits for each target token ({shown})"
    parameters = inspect.signature(module.forward).parameters.values()
    tokens = [each for each in parameters if each.default is each.empty and role_of(each.name) == "tokens"]
    classifier = " --module reads no encoder classifiers: see Encoder classifiers in docs/guides/own-model.md."
    error = CheckpointError(
        f"{tried if problems else f'{name} has no forward with a source and a target'}.{classifier * (len(tokens) == 1)} "
        f"Check --pad {pad}. If it is right, add a function `call` to your file, which calls the model as your own decoding "
        "does, such as:"
    )
    error.example = ADAPTER.replace("PAD", str(pad))
    return error


@torch.no_grad()
def _problem(call: Call, ids: Ids, place: int) -> str | None:
    """Why a call is none of a decoder, in words; None if it is one.

    Args:
        place: the first target token that must change the logits at its place.
    """
    src, tgt = ids.random("encoder", (3, 6), 1), ids.random("decoder", (3, 5), 2)
    result = call(src, tgt)
    if not isinstance(result, Tensor) or result.dim() != 3 or result.shape[:2] != tgt.shape:
        shape = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        return f"returns {shape}, not [3, 5, vocab] for 3 sequences of 5 tokens"
    if not result.is_floating_point() or not bool(result.isfinite().logical_or(result == -math.inf).all()):
        return "returns NaN, or no floating-point numbers"
    if _differs(result, call(src, tgt)):
        return "returns other values when it is called again"
    if _differs(call(src[1:2], tgt[1:2]), result[1:2]):
        return _READS_BATCH
    if _differs(call(src, _changed(ids, "decoder", tgt, 3))[:, :3], result[:, :3]):
        return "later target tokens change earlier logits: no causal mask"
    if not _differs(call(src, _changed(ids, "decoder", tgt, place))[:, place], result[:, place]):
        return _SHIFTS
    other = torch.cat([_changed(ids, "encoder", src, 2)[:1], src[1:]])
    changes = (call(other, tgt) - result).nan_to_num().abs().amax((1, 2))
    if changes[0] < _TOLERANCE:
        return "the source changes nothing"
    if changes[1:].max() > _TOLERANCE:
        return "the sequences of a batch change each other"
    padded = torch.cat([src, torch.full((3, 2), ids.pad)], 1)
    try:
        return _READS_PADDING if _differs(call(padded, tgt), result) else None
    except (Exception, SystemExit):  # a module without masks may accept no other length
        return _READS_PADDING


def _changed(ids: Ids, side: Side, batch: Tensor, place: int) -> Tensor:
    """The batch with another token at a place of each row."""
    free, changed = ids.free(side), batch.clone()
    for row in range(len(batch)):
        others = free[free != batch[row, place]]
        changed[row, place] = others[row % len(others)]
    return changed


def _differs(values: Tensor, others: Tensor) -> bool:
    return values.shape != others.shape or bool(((values - others).nan_to_num().abs() > _TOLERANCE).any())


def _ways(module: nn.Module, pad: int, vocab: int | None) -> Iterator[Way]:
    """Ways to call a module, the most usual first."""
    try:
        parameters = inspect.signature(module.forward).parameters
    except ValueError:  # a forward that is not Python, as of a scripted module
        return
    names = [name for name, parameter in parameters.items() if _is_named(parameter)]
    tokens = [name for name in names if role_of(name) == "tokens"]
    if len(names) == len(tokens) == 1:
        yield from _batch_ways(module, names[0], pad, vocab)
    if len(tokens) < 2:  # training code may call the target `labels`
        tokens += [name for name in names if "label" in name.lower()]
    if type(module).forward is not nn.Module.forward and len(tokens) >= 2:
        source, target = tokens[:2]
        swapped = is_of_target(source) and not is_of_target(target)
        for pair in ((source, target), (target, source))[:: -1 if swapped else 1]:
            yield from _forward_ways(module, pair, pad, vocab)
    yield from _method_ways(module, pad, vocab)


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _batch_ways(module: nn.Module, name: str, pad: int, vocab: int | None) -> Iterator[Way]:
    """Calls of a `forward` with one batch, from which it takes tensors by their names."""
    for values in ("int", "keep", "hide"):

        def call(src: Tensor, tgt: Tensor, values: MaskValues = values) -> Tensor:  # type: ignore[assignment]
            batch = NamedBatch(Arguments(src, tgt, pad, values))
            return logits_of_run(module, lambda: module(**{name: batch}), tuple(tgt.shape), vocab)

        yield Way(f"forward({name}) with a dict of tensors by their names", call)


def _forward_ways(module: nn.Module, pair: tuple[str, str], pad: int, vocab: int | None) -> Iterator[Way]:
    """Calls of `forward` with a source and a target under these names."""
    parameters = inspect.signature(module.forward).parameters
    needed = [n for n, p in parameters.items() if p.default is p.empty and _is_named(p) and n not in pair]
    masks = [name for name in parameters if role_of(name) == "mask"]
    lengths = tuple(name for name in parameters if role_of(name) == "lengths")
    required = [name for name in needed if name in masks]
    unknown = tuple(name for name in needed if name not in (*masks, *lengths))
    known = {*pair, *masks, *lengths, *unknown}
    left_out = [name for name, parameter in parameters.items() if _is_named(parameter) and name not in known]
    every: tuple[MaskAxes, ...] = (2, 4, 3)
    conventions = list(product(every, get_args(MaskValues)))

    def way(masks: Sequence[str], values: MaskValues, axes: MaskAxes, *, is_batch_first: bool) -> Way:
        about = ", ".join(
            [*pair, *lengths, *unknown, *([f"{', '.join(masks)} ({values}, {axes} axes)"] if masks else [])]
        )

        def call(src: Tensor, tgt: Tensor) -> Tensor:
            arguments = Arguments(src, tgt, pad, values, axes)
            keywords: dict[str, Any] = dict.fromkeys(unknown)
            keywords |= {name: arguments.named(of_tensorflow(name, masks)) for name in (*masks, *lengths)}
            keywords |= dict(zip(pair, (src, tgt) if is_batch_first else (src.T, tgt.T), strict=True))
            shape = tgt.shape if is_batch_first else tgt.T.shape
            result = logits_of_run(module, lambda: module(**keywords), tuple(shape), vocab)
            return result if is_batch_first else result.transpose(0, 1)

        order = f"{'batch' if is_batch_first else 'length'} first"
        without = f", without {', '.join(left_out)}" if left_out else ""
        return Way(f"forward({about}), {order}{without}", call, unknown)

    if not required:
        for is_batch_first in (True, False):
            yield way((), "keep", 2, is_batch_first=is_batch_first)
    for chosen in dict.fromkeys((tuple(masks), tuple(required))):
        for axes, values in conventions if chosen else ():
            for is_batch_first in (True, False):
                yield way(chosen, values, axes, is_batch_first=is_batch_first)
    about, call, guessed = way(required, "keep", 4, is_batch_first=True)
    longer = f"{about}, with one more target token, which forward removes"
    yield Way(longer, lambda src, tgt: call(src, torch.cat([tgt, torch.full((len(tgt), 1), pad)], 1)), guessed)


def _method_ways(module: nn.Module, pad: int, vocab: int | None) -> Iterator[Way]:
    """Calls of `encode` and `decode`, or of the submodules `encoder` and `decoder`, and of an idle projection."""
    for first, second in (("encode", "decode"), ("encoder", "decoder")):
        encode, decode = getattr(module, first, None), getattr(module, second, None)
        if not callable(encode) or not callable(decode) or isinstance(encode, nn.ModuleList):
            continue
        for axes, values in product((4, 3, 2), get_args(MaskValues)):

            def call(
                src: Tensor,
                tgt: Tensor,
                encode: Callable[..., Any] = encode,
                decode: Callable[..., Any] = decode,
                convention: tuple[MaskValues, MaskAxes] = (values, axes),  # type: ignore[assignment]
            ) -> Tensor:
                arguments = Arguments(src, tgt, pad, *convention)

                def run() -> Any:
                    memory = encode(**_by_name(encode, arguments, src))
                    return decode(**_by_name(decode, arguments, tgt, memory))

                return logits_of_run(module, run, tuple(tgt.shape), vocab)

            yield Way(f"{second}({first}(src), tgt), masks ({values}, {axes} axes)", call)


def _by_name(function: Callable[..., Any], arguments: Arguments, ids: Tensor, memory: Any = None) -> dict[str, Any]:
    """Arguments of a method by the names of its parameters. A mask that the encoder returned is given back."""
    states, *rest = memory if isinstance(memory, tuple | list) else (memory,)
    parameters = inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters
    keywords: dict[str, Any] = {}
    for name, parameter in parameters.items():
        role = role_of(name)
        if role == "mask":
            keywords[name] = rest[0] if rest else arguments.mask(name)
        elif role == "lengths":
            keywords[name] = (ids != arguments.pad).sum(1)
        elif states is not None and any(
            word in name.lower() for word in ("memory", "enc", "context", "hidden", "cross")
        ):
            keywords[name] = states
        elif parameter.default is parameter.empty and _is_named(parameter):
            keywords[name] = arguments.src if is_of_source(name) else ids
    return keywords
