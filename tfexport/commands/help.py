"""The two help texts of a command: `--help` shows its most common options, `--help-all` shows all of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

Function = TypeVar("Function", bound=Callable[..., Any])
_COMMON = "_common_options"


def common_options(flags: str) -> Callable[[Function], Function]:
    """Decorate a command to show only these options in `--help`, in this order. Without it, `--help` shows all options.

    Args:
        flags: the flags, with spaces between them.
    """

    def mark(command: Function) -> Function:
        setattr(command, _COMMON, tuple(flags.split()))
        return command

    return mark


class HelpfulCommand(TyperCommand):
    """A command with `--help` for its common options and `--help-all` for all of them."""

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self._common: tuple[str, ...] = getattr(self.callback, _COMMON, ())
        self._help_all: Any = None
        self.help = re.sub(r"(?<!\n)\n(?!\n)", " ", self.help or "")  # terminals are narrower than the source
        for param in self.params:
            if getattr(param, "is_flag", False):
                param.metavar = ""  # instead of <bool>

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, with `--help` and `--help-all` last."""
        params: list[Any] = super().get_params(ctx)
        params[-1].metavar = ""
        if self._help_all is None:  # made once: the parser compares options by identity
            self._help_all = option = copy.copy(params[-1])  # --help
            option.name, option.opts, option.callback = "help_all", ["--help-all"], _print_all
            option.help, option.hidden = "Show all options and exit.", not self._common
        return [*params, self._help_all]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the common options."""
        shown = self._with_common_options(ctx.info_name) if self._common else self
        super(HelpfulCommand, shown).format_help(ctx, formatter)

    def _with_common_options(self, name: str) -> HelpfulCommand:
        options = {flag: param for param in self.params for flag in param.opts if param.param_type_name == "option"}
        common: list[Any] = [copy.copy(options[flag]) for flag in self._common]
        for option in common:
            option.rich_help_panel = None  # ten options need no groups
        arguments = [param for param in self.params if param.param_type_name == "argument"]
        shown = copy.copy(self)
        shown.params = [*arguments, *common]
        shown.epilog = f"{name} --help-all shows all {len(self.params) - len(arguments)} options."
        return shown


def _print_all(ctx: typer.Context, _: Any, value: bool) -> None:
    """Print the help of all options, and exit. The callback of `--help-all`."""
    if not value or ctx.resilient_parsing:
        return
    command: Any = copy.copy(ctx.command)
    command._common = ()
    typer.echo(command.get_help(ctx), color=ctx.color)
    ctx.exit()
