"""The options of a benchmark run."""

from __future__ import annotations

from dataclasses import dataclass

from tfexport.contract import Precision, precisions_of
from tfexport.option import Options, numbers, option

_CELLS = "What is measured"


def _batches(given: str) -> tuple[int, ...]:
    return tuple(0 if one.strip() == "best" else numbers("--batch-size", one)[0] for one in given.split(","))


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Options):
    """What is measured. Each combination of precision, threads, batch size and beam is a cell."""

    precisions: tuple[Precision, ...] = option(
        ("float32",),
        flag="--precision",
        parse=precisions_of,
        default_text="fp32",
        help="fp32, int8 and the like, or several.",
        panel=_CELLS,
    )
    threads: tuple[int, ...] = option(
        (1,),
        parse=lambda given: numbers("--threads", given),
        default_text="1",
        help="CPU threads, or several numbers of them.",
        panel=_CELLS,
    )
    batches: tuple[int, ...] = option(
        (1, 8, 32),
        flag="--batch-size",
        parse=_batches,
        default_text="1,8,32",
        help="Sentences decoded together, or several; best: what suits each contestant.",
        panel=_CELLS,
    )
    """0 stands for each contestant's best."""
    beams: tuple[int, ...] = option(
        (1,),
        flag="--beam",
        parse=lambda given: numbers("--beam", given),
        default_text="1",
        help="Beam width, or several.",
        panel=_CELLS,
    )
    tokens: int = option(32, minimum=1, help="Every output has exactly so many tokens.", panel=_CELLS)
    free: bool = option(False, help="Outputs end as the model ends them instead.", panel=_CELLS)
    max_length: int = option(256, minimum=1, help="Most tokens to generate, eos included.", panel=_CELLS)
    sentences: int | None = option(
        None, minimum=1, help="Decoded in a cell; by default at least a batch for each thread.", panel=_CELLS
    )
    rounds: int = option(5, minimum=1, help="Interleaved rounds.", panel=_CELLS)
