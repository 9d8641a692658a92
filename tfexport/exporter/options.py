"""The options of an export, and of the engines that are built from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tfexport.errors import TfexportError
from tfexport.option import Options, option

_GRAPHS, _BUDGET, _ENGINES = "Graphs", "Budget of auto- precisions", "TensorRT engines"


def _sizes(called: str, text: str) -> tuple[int, ...]:
    """`32,64,128` to numbers of cache slots, in order."""
    sizes = text.split(",")
    if not all(size.isascii() and size.isdecimal() and len(size) < 10 for size in map(str.strip, sizes)):
        raise TfexportError(f"{called} is {text!r}, not numbers of slots. Give them as in 32,64,128.")
    return tuple(sorted({int(size) for size in sizes}))


def _generations(called: str, text: str) -> tuple[str, ...]:
    """`sm89,SM120` to the names of GPU generations."""
    names = tuple(name.strip().lower() for name in text.split(","))
    if not all(names):
        raise TfexportError(f"{called} is {text!r}, with an empty name. Give names as in sm89,sm120.")
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True)
class GraphOptions(Options):
    """The graphs of a bundle, and their checks."""

    precision: str | None = option(
        None,
        metavar="P,...",
        help="One or more of fp32, fp16, bf16, int8, int4, such as fp32,int8. auto-fp16, auto-int8 and auto-int4 keep the "
        "layers in fp32 that --budget needs.",
        panel=_GRAPHS,
    )
    alignments: bool = option(
        False, help="Add graphs that return cross-attention, for decode --alignments and attend.", panel=_GRAPHS
    )
    shortlist: bool = option(
        False, help="Add graphs that compute only the logits of a shortlist (fp32, int8).", panel=_GRAPHS
    )
    parity: bool = option(
        True,
        flag="--parity/--no-parity",
        help="Compare every value and a few decoded sentences with PyTorch; export nothing if they differ.",
        panel=_GRAPHS,
    )
    tolerance: float | None = option(
        None,
        minimum=0,
        help="Largest absolute difference that --parity accepts; by default derived from rounding.",
        panel=_GRAPHS,
    )


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(Options):
    """The allowed loss of a low precision, and the text to measure it on."""

    budget: str | None = option(
        None,
        metavar="METRIC=N",
        help="Allowed loss of auto- precisions: bleu=POINTS, chrf=POINTS; or equal share: top1=SHARE, identical=SHARE.",
        panel=_BUDGET,
    )
    budget_input: Path | None = option(
        None, metavar="FILE", help="Source text to measure the budget on, one sentence per line.", panel=_BUDGET
    )
    budget_targets: Path | None = option(
        None, metavar="FILE", help="Reference translations of --budget-input, for bleu and chrf.", panel=_BUDGET
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """The sizes of TensorRT engines, and the GPUs that they are built for."""

    gpu: tuple[str, ...] = option(
        (),
        parse=_generations,
        metavar="NAME,...",
        help="GPU generations to build for, such as sm89,sm120; portable; here. By default the GPU of this machine.",
        panel=_ENGINES,
    )
    library: Literal["auto", "tensorrt", "tensorrt_rtx"] = option(
        "auto", help="tensorrt builds on the GPU itself, tensorrt_rtx anywhere.", panel=_ENGINES
    )
    max_batch: int = option(32, minimum=1, help="Largest batch of an engine, in sentences.", panel=_ENGINES)
    max_beam: int = option(4, minimum=1, help="Largest beam width of an engine.", panel=_ENGINES)
    max_source: int | None = option(
        None, minimum=1, help="Longest source of an engine, in ids; by default 128.", panel=_ENGINES
    )
    cache: tuple[int, ...] = option(
        (),
        parse=_sizes,
        metavar="N,...",
        help="Cache sizes of the engines, in tokens; by default 32,64,128.",
        panel=_ENGINES,
    )
    gpu_memory: float | None = option(
        None, minimum=0.1, maximum=1e6, help="Memory of the GPU that will run the engines, in GiB.", panel=_ENGINES
    )
