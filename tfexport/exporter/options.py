"""The options of an export, and of the engines that are built from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tfexport.errors import TfexportError
from tfexport.option import Options, option

_GRAPHS, _BUDGET, _ENGINES = "Graphs", "Budget of auto- precisions", "TensorRT engines"


def _sizes(given: str) -> tuple[int, ...]:
    """`32,64,128` to numbers of cache slots, in order."""
    sizes = given.split(",")
    if not all(size.strip().isdecimal() for size in sizes):
        raise TfexportError(f"--cache is {given!r}, not numbers of slots. Give them as in 32,64,128.")
    return tuple(sorted({int(size) for size in sizes}))


def _generations(given: str) -> tuple[str, ...]:
    """`sm89,SM120` to the names of GPU generations."""
    names = tuple(name.strip().lower() for name in given.split(","))
    if not all(names):
        raise TfexportError(f"--gpu is {given!r}, with an empty name. Give names as in sm89,sm120.")
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True)
class GraphOptions(Options):
    """Which graphs a bundle has, and how they are checked."""

    precision: str | None = option(
        None,
        help="Of graphs and engines: fp32, fp16, bf16, int8, int4, or several, as in fp32,int8. With auto- before fp16, "
        "int8 or int4, what --budget needs stays in fp32.",
        panel=_GRAPHS,
    )
    alignments: bool = option(
        False, help="Add graphs that return what outputs attend to: decode --alignments, attend.", panel=_GRAPHS
    )
    shortlist: bool = option(
        False, help="Add graphs that compute the logits of a shortlist alone: fp32, int8.", panel=_GRAPHS
    )
    parity: bool = option(
        True,
        flag="--parity/--no-parity",
        help="Compute every value and decode a few sentences as PyTorch does, or export nothing.",
        panel=_GRAPHS,
    )
    tolerance: float | None = option(
        None,
        minimum=0,
        help="Largest absolute difference that --parity accepts; by default what follows from rounding.",
        panel=_GRAPHS,
    )


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(Options):
    """What a low precision may lose, and on which text."""

    budget: str | None = option(
        None,
        metavar="METRIC=N",
        help="What auto- may lose: bleu=POINTS, chrf=POINTS, or top1=SHARE, identical=SHARE to be the same.",
        panel=_BUDGET,
    )
    budget_input: Path | None = option(
        None, metavar="FILE", help="Source text that the budget is held on, a sentence a line.", panel=_BUDGET
    )
    budget_targets: Path | None = option(
        None, metavar="FILE", help="A translation of each of its lines, for bleu and chrf.", panel=_BUDGET
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """The sizes of TensorRT engines, and the GPUs that they are built for."""

    gpu: tuple[str, ...] = option(
        (),
        parse=_generations,
        metavar="NAME,...",
        help="GPU generations to build for, such as sm89,sm120; portable; here. By default the GPU here.",
        panel=_ENGINES,
    )
    library: Literal["auto", "tensorrt", "tensorrt_rtx"] = option(
        "auto", help="tensorrt builds on the GPU itself, tensorrt_rtx anywhere.", panel=_ENGINES
    )
    max_batch: int = option(32, minimum=1, help="Most sentences at once in an engine.", panel=_ENGINES)
    max_beam: int = option(4, minimum=1, help="Widest beam in an engine.", panel=_ENGINES)
    max_source: int | None = option(
        None, minimum=1, help="Most source ids in an engine; by default 128.", panel=_ENGINES
    )
    cache: tuple[int, ...] = option(
        (),
        parse=_sizes,
        metavar="N,...",
        help="Cache slots of the engines; by default 32,64,128.",
        panel=_ENGINES,
    )
    gpu_memory: float | None = option(
        None, minimum=0.1, maximum=1e6, help="GiB of the GPU that will run the engines.", panel=_ENGINES
    )
