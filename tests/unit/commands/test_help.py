"""`--help` with the common options of a command, and `--help-all` with all of them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tfexport.cli import app, app_of
from tfexport.commands.help import HelpfulCommand, common_options

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
HELP = ["--help", "--help-all"]
MOST = 10


@cache  # rendering takes most of the time
def shown(command: str, flag: str) -> str:
    result = CliRunner().invoke(app_of(command), [command, flag], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    return result.output


def flags_in(text: str) -> list[str]:
    """The first flag of each row."""
    return re.findall(r"^│ (?:[* ]  )?(--[\w-]+)", text, re.MULTILINE)


def flags_of(command: str) -> list[str]:
    """The first long flag of each option."""
    params = [param for param in COMMANDS[command].params if param.param_type_name == "option"]
    return [next(flag for flag in param.opts if flag.startswith("--")) for param in params]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_at_most_ten_options_and_help_all_has_all(command: str) -> None:
    every = flags_of(command)
    short, whole = (flags_in(shown(command, flag)) for flag in HELP)
    is_short = len(every) > MOST
    assert len(set(short) - set(HELP)) <= MOST
    assert set(short) - set(HELP) <= set(every)
    assert sorted(whole) == sorted([*every, *HELP] if is_short else [*every, "--help"])
    assert is_short or short == whole


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns(command: str) -> None:
    for flag in HELP:
        assert max(map(len, shown(command, flag).splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_all_required_options(command: str) -> None:
    required = [param for param in COMMANDS[command].params if param.required and param.param_type_name == "option"]
    assert {flag for param in required for flag in param.opts if flag.startswith("--")} <= set(
        flags_in(shown(command, "--help"))
    )


def test_the_last_line_of_a_short_help_says_how_many_options_there_are() -> None:
    assert shown("decode", "-h").strip().splitlines()[-1].strip() == (
        f"decode --help-all shows all {len(flags_of('decode'))} options."
    )
    assert "shows all" not in shown("decode", "--help-all")
    assert "shows all" not in shown("version", "--help")


def test_a_wrong_flag_gets_suggestions_from_all_options() -> None:
    result = CliRunner().invoke(app, ["decode", "--alignmnts"])
    assert result.exit_code == 2
    assert "--alignments" in result.output
    assert "--alignments" not in shown("decode", "--help")


def test_a_command_is_parsed_without_the_others() -> None:
    for name in COMMANDS:
        assert [*typer.main.get_command(app_of(name)).commands] == [name]  # type: ignore[attr-defined]
    assert app_of("nosuch") is app


def test_an_option_that_does_not_exist_cannot_be_common() -> None:
    wrong = typer.Typer()

    @wrong.command(cls=HelpfulCommand)
    @common_options("--beam --beem")
    def command(beam: int = 1) -> None:
        pass

    assert isinstance(CliRunner().invoke(wrong, ["--help"]).exception, KeyError)
    assert CliRunner().invoke(wrong, ["--help-all"]).exit_code == 0
