"""The options of a benchmark run."""

from __future__ import annotations

from dataclasses import dataclass

from tfexport.contract import Precision, precisions_of
from tfexport.option import Options, numbers, option

_CELLS = "Measurements"


def _batches(called: str, text: str) -> tuple[int, ...]:
    return tuple(0 if word.strip() == "best" else numbers(called, word)[0] for word in text.split(","))


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Options):
    """The options of a benchmark. Each combination of precision, threads, batch size and beam is a cell."""

    precisions: tuple[Precision, ...] = option(
        ("float32",),
        flag="--precision",
        parse=lambda called, text: precisions_of(text, called),
        default_text="fp32",
        metavar="P,...",
        help="One or more precisions, such as fp32,int8.",
        panel=_CELLS,
    )
    threads: tuple[int, ...] = option(
        (1,),
        parse=numbers,
        default_text="1",
        metavar="N,...",
        help="One or more numbers of CPU threads.",
        panel=_CELLS,
    )
    batches: tuple[int, ...] = option(
        (1, 8, 32),
        flag="--batch-size",
        parse=_batches,
        default_text="1,8,32",
        metavar="N,...",
        help="One or more batch sizes, in sentences; best: the best size for each contestant.",
        panel=_CELLS,
    )
    """0 means each contestant's best."""
    beams: tuple[int, ...] = option(
        (1,),
        flag="--beam",
        parse=numbers,
        default_text="1",
        metavar="N,...",
        help="One or more beam widths.",
        panel=_CELLS,
    )
    tokens: int = option(32, minimum=1, help="Force every output to this number of tokens.", panel=_CELLS)
    free: bool = option(False, help="Let outputs end where the model generates eos.", panel=_CELLS)
    max_length: int = option(256, minimum=1, help="Largest number of tokens to generate, eos included.", panel=_CELLS)
    sentences: int | None = option(
        None,
        minimum=1,
        help="Sentences in each measurement; by default at least one batch for each thread.",
        panel=_CELLS,
    )
    rounds: int = option(5, minimum=1, help="Rounds; the contestants take turns in each.", panel=_CELLS)
