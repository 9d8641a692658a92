"""Flags of several commands that are not in a group of options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CKPT", help="A state_dict (.pt, .pth, .ckpt or .safetensors), or the file or folder of a toolkit."
    ),
]
BundleDir = Annotated[Path, typer.Argument(metavar="DIR", help="A bundle that `tfexport export` wrote.")]
Input = Annotated[
    Path | None, typer.Argument(metavar="INPUT", help="One sentence per line; by default, or with -, stdin.")
]
OutputFile = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to this file instead of stdout.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the -o FILE of an interrupted run of the same command.")
]
InputFormatOption = Annotated[
    Literal["text", "tokens", "ids"] | None,
    typer.Option(
        "--input-format", help="Input format: raw text, tokens separated by spaces, or the ids that the encoder reads."
    ),
]
RuntimeOption = Annotated[
    str, typer.Option("--runtime", metavar="NAME", help="Runtime; `tfexport version` lists those that work here.")
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        min=1,
        max=256,
        help="CPU threads of each worker; by default an equal share of the CPUs.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", metavar="N", min=1, max=256, help="Batches to decode in parallel; by default one for each CPU."
    ),
]
BatchSize = Annotated[int, typer.Option("--batch-size", metavar="N", min=1, help="Sentences in a batch.")]
MaxLength = Annotated[
    int, typer.Option("--max-length", metavar="N", min=1, help="Largest number of tokens to generate, eos included.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PrecisionOption = Annotated[
    Literal["fp32", "fp16", "bf16", "int8", "int4"] | None,
    typer.Option("--precision", help="Precision of the graphs or engines to use."),
]
ServedBy = Annotated[str, typer.Option("--runtime", metavar="NAME", help="Runtime of the Triton server.")]
ServedBeam = Annotated[int, typer.Option("--beam", metavar="N", min=1, help="Beam width of a Triton server.")]
