"""Flags that several commands have beside their groups of options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CKPT", help="A state_dict: .pt, .pth, .ckpt or .safetensors; or a toolkit's file or folder."
    ),
]
BundleDir = Annotated[Path, typer.Argument(metavar="DIR", help="A bundle that `tfexport export` wrote.")]
Input = Annotated[Path | None, typer.Argument(metavar="[INPUT]", help="A sentence a line; - or nothing reads stdin.")]
OutputFile = Annotated[Path | None, typer.Option("-o", "--output", help="Write here instead of stdout.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the -o FILE that an interrupted run of the same command began.")
]
InputFormatOption = Annotated[
    Literal["text", "tokens", "ids"] | None,
    typer.Option("--input-format", help="Raw text, space-separated tokens, or ids as the encoder reads them."),
]
RuntimeOption = Annotated[str, typer.Option("--runtime", help="ort-cpu, ort-cuda, tensorrt, torch or torch-cuda.")]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=256, help="CPU threads of a worker; by default its share of the CPUs."),
]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, max=256, help="Batches decoded at once; by default as many as CPUs.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Sentences decoded together.")]
MaxLength = Annotated[int, typer.Option("--max-length", min=1, help="Most tokens to generate, eos included.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PrecisionOption = Annotated[
    Literal["fp32", "fp16", "bf16", "int8", "int4"] | None,
    typer.Option("--precision", help="Of the graphs or engines to use."),
]
ServedBy = Annotated[str, typer.Option("--runtime", help="What a Triton server decodes with.")]
ServedBeam = Annotated[int, typer.Option("--beam", min=1, help="Beam width of a Triton server.")]
