"""Groups of options as flags of a command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from tfexport.cli import app as tfexport
from tfexport.commands.signature import with_options
from tfexport.option import Given, Options, declared, numbers, option
from tfexport.search.options import SearchOptions


@dataclass(frozen=True, kw_only=True)
class Lengths(Options):
    longest: int = option(9, minimum=1, help="Most tokens.")
    ratio: float | None = option(None, above=0, help="A ratio.")
    widths: tuple[int, ...] = option((1,), parse=numbers, help="Widths.")
    quiet: bool = option(False, help="Quiet.")
    check: bool = option(True, flag="--check/--no-check", help="Check.")
    hidden: int = option(3, flag="", help="Of Python alone.")


def command(seen: list[Any]) -> typer.Typer:
    app = typer.Typer()

    @app.command()
    @with_options
    def run(
        place: Path,
        lengths: Lengths,
        *,
        search: Given[SearchOptions],
        force: Annotated[bool, typer.Option("--force")] = False,
    ) -> None:
        seen.append((place, lengths, dict(search), force))

    return app


def test_a_group_becomes_flags_and_comes_back_as_an_instance_or_as_what_was_given() -> None:
    seen: list[Any] = []
    app = command(seen)
    flags = [
        "x",
        "--longest",
        "4",
        "--widths",
        "1,8",
        "--quiet",
        "--no-check",
        "--beam",
        "4",
        "--suppress",
        "a b",
        "--force",
    ]
    assert CliRunner().invoke(app, flags).exit_code == 0
    assert seen == [
        (
            Path("x"),
            Lengths(longest=4, widths=(1, 8), quiet=True, check=False),
            {"beam": 4, "suppress": "a b"},
            True,
        )
    ]
    assert CliRunner().invoke(app, ["x"]).exit_code == 0
    assert seen[1] == (Path("x"), Lengths(), {}, False)


@pytest.mark.parametrize("flags", [["--longest", "0"], ["--longest", "x"], ["--hidden", "3"], ["--profile", "hf"]])
def test_wrong_flags_are_wrong_use(flags: list[str]) -> None:
    assert CliRunner().invoke(command([]), ["x", *flags]).exit_code == 2


def test_decode_has_a_flag_for_every_search_option_of_the_command_line() -> None:
    shown = CliRunner().invoke(tfexport, ["decode", "--help-all"], env={"COLUMNS": "200"}).stdout
    wanted = {found.flag for found in declared(SearchOptions).values() if found.about.flag != ""}
    assert len(wanted) > 20
    assert {flag for flag in wanted if flag not in shown} == set()
