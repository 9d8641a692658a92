"""The options of a comparison with PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tfexport.contract import Precision, precisions_of
from tfexport.decoding.request_options import InputFormat
from tfexport.option import MOST_AT_ONCE, Options, numbers, option

_WHAT, _HOW = "Compared outputs", "Method"


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Options):
    """The inputs and the limits of a comparison."""

    precisions: tuple[Precision, ...] = option(
        (),
        flag="--precision",
        parse=lambda called, text: precisions_of(text, called),
        metavar="P,...",
        help="Precisions to compare, such as fp32,int8; by default all in the bundle.",
        panel=_WHAT,
    )
    beams: tuple[int, ...] = option(
        (1, 4),
        flag="--beam",
        parse=numbers,
        metavar="N,...",
        help="Beam widths to decode with.",
        default_text="1,4",
        panel=_WHAT,
    )
    max_length: int = option(256, minimum=1, help="Largest number of tokens to generate, eos included.", panel=_WHAT)
    input_format: InputFormat | None = option(
        None, help="Input format: raw text, tokens separated by spaces, or the ids that the encoder reads.", panel=_WHAT
    )
    expect: Path | None = option(
        None,
        metavar="FILE",
        help="Greedy outputs of your own program, which the runtimes must decode: a source, a tab and its output in each "
        "line.",
        panel=_WHAT,
    )
    float64: bool = option(False, help="Compute the reference in float64.", panel=_HOW)
    tolerance: float | None = option(
        None,
        minimum=0,
        help="Largest absolute difference that passes; by default derived from rounding.",
        panel=_HOW,
    )
    batch_size: int = option(32, minimum=1, maximum=MOST_AT_ONCE, help="Sentences in a batch.", panel=_HOW)
    threads: int | None = option(
        None, minimum=1, maximum=256, help="CPU threads; by default all CPUs that the process may use.", panel=_HOW
    )

    def conflicts(self) -> list[str]:
        wrong = [f"beams has {beam}, below 1" for beam in self.beams if beam < 1]
        return [*super().conflicts(), *wrong, *(["beams is empty"] * (not self.beams))]
