"""The options of a comparison with PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from tfexport.contract import Precision, precisions_of
from tfexport.decoding.request_options import InputFormat
from tfexport.option import Options, numbers, option

_WHAT, _HOW = "What is compared", "How it is compared"


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Options):
    """What is compared, and how."""

    precisions: tuple[Precision, ...] = option(
        (),
        flag="--precision",
        parse=precisions_of,
        metavar="P,...",
        help="Precisions to compare, as in fp32,int8; by default all there are.",
        panel=_WHAT,
    )
    beams: tuple[int, ...] = option(
        (1, 4),
        flag="--beam",
        parse=lambda given: numbers("--beam", given),
        metavar="N,...",
        help="Beam widths of the free decoding.",
        default_text="1,4",
        panel=_WHAT,
    )
    max_length: int = option(256, minimum=1, help="Most tokens to generate, eos included.", panel=_WHAT)
    input_format: InputFormat | None = option(
        None, help="Raw text, space-separated tokens, or ids as the encoder reads them.", panel=_WHAT
    )
    float64: bool = option(False, help="Compute the reference in float64.", panel=_HOW)
    tolerance: float | None = option(
        None,
        minimum=0,
        help="Largest absolute difference that passes; by default what follows from rounding.",
        panel=_HOW,
    )
    batch_size: int = option(32, minimum=1, help="Sentences decoded together.", panel=_HOW)
    threads: int | None = option(
        None, minimum=1, maximum=256, help="CPU threads; by default all that the process may use.", panel=_HOW
    )
