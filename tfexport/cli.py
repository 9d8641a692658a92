"""The command line: all commands by name. A command imports heavy modules when it runs."""

from __future__ import annotations

import copy
from typing import Annotated

import typer
from typer.main import get_command_name

from tfexport.commands.attend import attend
from tfexport.commands.bench import bench
from tfexport.commands.build import build
from tfexport.commands.classify import classify
from tfexport.commands.corpus import corpus, corpus_classify, corpus_score
from tfexport.commands.decode import decode
from tfexport.commands.demo import demo
from tfexport.commands.export import export
from tfexport.commands.help import HelpfulCommand
from tfexport.commands.inspect import inspect
from tfexport.commands.parity import parity
from tfexport.commands.probe import probe
from tfexport.commands.score import score
from tfexport.commands.serve import serve
from tfexport.commands.standard_streams import printing
from tfexport.commands.train import train
from tfexport.commands.triton import triton
from tfexport.commands.version import version

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    help="Export trained PyTorch Transformers to ONNX and decode them, token for token as PyTorch would.",
    epilog="Exit codes: 0 done, 1 parity failed, 2 wrong use or input, 3 a fault of tfexport itself, 130 interrupted, "
    "143 ended by SIGTERM. `serve` ends with 0 after a signal when all that it took was answered.",
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from tfexport.system.version import version as number

        typer.echo(f"tfexport {number()}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Declares the global options for the help. `main` reads --debug at any place of the command line."""


for command in (
    inspect,
    export,
    build,
    triton,
    serve,
    decode,
    corpus,
    corpus_score,
    corpus_classify,
    score,
    attend,
    classify,
    parity,
    probe,
    bench,
    train,
    demo,
    version,
):
    to_file, verdict = command in (decode, score, attend, classify), command in (parity, probe)
    app.command(cls=HelpfulCommand)(printing(command, to_file=to_file, verdict=verdict))


def app_of(name: str) -> typer.Typer:
    """The application with the command of this name alone, or with all commands if there is none.

    Typer makes the parsers of all commands that an application has, which takes longer than all other work of a start.
    """
    chosen = [
        info for info in app.registered_commands if info.callback and get_command_name(info.callback.__name__) == name
    ]
    if not chosen:
        return app
    alone = copy.copy(app)
    alone.registered_commands = chosen
    return alone
