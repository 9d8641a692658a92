"""A user who follows the advice of error messages literally. Flags, paths and code come from the text of the message."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch

FLAG = re.compile(
    r"(?P<flag>--[a-z-]+)(?: (?P<value>(?!--)[^\s,;()]+))?(?: \((?P<rest>[^()]*(?:\([^()]*\)[^()]*)*)\))?"
)
"""A flag with its value and a remark in brackets, such as `--norm-first (or --no-norm-first)` or `--heads N`."""


class NoAdviceError(Exception):
    """A message gives no advice that this user can follow."""


@dataclass
class User:
    """A command line, and what its user knows about the model."""

    command: list[str]
    """Arguments of `tfexport`: the command, the checkpoint, flags."""
    knows: Mapping[str, str | bool | None] = field(default_factory=dict)
    """The values of flags. False stands for the `--no-` form."""
    model: Any = None
    """The module that was trained, for advice that is code."""

    def follow(self, message: str) -> None:
        """Change the command or the files as the message says.

        Raises:
            NoAdviceError: no part of it says what to do.
        """
        for pattern, act in _ADVICE.items():
            if (match := re.search(pattern, message)) is not None and act(self, match) is not False:
                return
        raise NoAdviceError(message)

    def give(self, text: str) -> None:
        """Add the flags in this part of a message, with the values that the user knows."""
        for match in FLAG.finditer(text):
            flag, value, rest = match["flag"], match["value"], match["rest"] or ""
            if value is None or flag in self.knows:
                known = self.knows.get(flag, True)
                if known is False:
                    flag = f"--no-{flag[2:]}"
                    assert flag in rest, f"{text!r} does not show {flag}"
                value = known if isinstance(known, str) else None
            elif not re.fullmatch(r"[a-z0-9_.*'-]+", value):
                raise NoAdviceError(f"the user does not know {flag} {value}")
            self.command += [flag] if value is None else [flag, shlex.split(value)[0]]

    def leave_out(self, flag: str) -> None:
        """Remove a flag and its value from the command."""
        while flag in self.command:
            at = self.command.index(flag)
            has_value = at + 1 < len(self.command) and not self.command[at + 1].startswith("--")
            del self.command[at : at + 1 + has_value]

    def path(self, path: str) -> None:
        """Give another checkpoint."""
        assert Path(path).exists(), f"there is no {path}"
        self.command[1] = path


def _run_code(user: User, match: re.Match[str]) -> None:
    assert user.model is not None or "model." not in match[0], (
        "the message gives code, and the test has no model for it"
    )
    exec(match[0].replace("FILE", repr(user.command[1])), {"torch": torch, "model": user.model})
    user.path("ckpt.pt")


def _leave_out(user: User, match: re.Match[str]) -> None:
    flags = {*re.findall(r"--[a-z-]+", match.string)}
    flags |= {f"--{name.replace('_', '-')}" for name in re.findall(r"\b[a-z]+_[a-z]+\b", match.string)}
    given = [flag for flag in flags if flag in user.command]
    if not given:
        raise NoAdviceError(match.string)
    for flag in given:
        user.leave_out(flag)


def _choose_key(user: User, match: re.Match[str]) -> bool:
    """Select the place that the message shows first, if the user knows that one place has the whole model."""
    if "--key" not in user.knows:
        return False
    user.leave_out("--key")
    user.command += ["--key", match[1]]
    return True


def _lower_length(user: User, match: re.Match[str]) -> None:
    user.command[user.command.index(match[2])] = match[1]


def _correct_family(user: User, match: re.Match[str]) -> None:
    """Let `read_config` of the family file return these fields."""
    file = Path(user.command[user.command.index("--family") + 1])
    text = file.read_text()
    for name, value in re.findall(r'"(\w+)": ("\w+"|[\w.\'-]+)', match[0]):
        text, count = re.subn(rf'"{name}": [^,\n]+,', f'"{name}": {value},', text)
        if not count:
            text = text.replace('"d_model": d_model,', f'"d_model": d_model,\n        "{name}": {value},')
    file.write_text(text)


def _ignore_in_family(user: User, match: re.Match[str]) -> None:
    file = Path(user.command[user.command.index("--family") + 1])
    names = tuple(match[1].split(", "))
    file.write_text(file.read_text().replace("FAMILY = Family(", f"FAMILY = Family(\n    ignored={names!r},"))


def _rename_field(user: User, match: re.Match[str]) -> None:
    file = Path(match[1])
    file.write_text(file.read_text().replace(match[2], match[3]))


def _gunzip(user: User, match: re.Match[str]) -> None:
    path = Path(user.command[1])
    path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
    user.path(str(path.with_suffix("")))


def _unzip(user: User, match: re.Match[str]) -> None:
    with ZipFile(user.command[1]) as archive:
        archive.extractall()
        folder = archive.namelist()[0].partition("/")[0]
    user.path(str(next(Path(folder).glob("**/model"))) if "`model`" in match[0] else folder)


def _download(user: User, match: re.Match[str]) -> None:
    """The test has put the model where the command would."""
    assert match["name"] == user.command[1]
    assert match["folder"] == match["exported"]
    user.path(match["folder"])


def _replace(old: str) -> Callable[[User, re.Match[str]], None]:
    def act(user: User, match: re.Match[str]) -> None:
        user.leave_out(old)
        user.command += [old, str(user.knows[old])]

    return act


_ADVICE: Mapping[str, Callable[[User, re.Match[str]], bool | None]] = {
    r"contains weights in \d+ places: (\S+) .*Choose one with --key NAME": _choose_key,
    r"it has weights in (\S+) .*Correct or leave out --key": _choose_key,
    r"torch\.save\(.*?, 'ckpt\.pt'\)": _run_code,
    r"hf download (?P<name>\S+) --local-dir (?P<folder>\S+)\. .*: tfexport export (?P<exported>\S+)\.": _download,
    r"tfexport export (\S+)\.$": lambda user, match: user.path(match[1]),
    r"does not contain .*? Give (.*), or the same fields": lambda user, match: user.give(match[1]),
    r"(?:--ignore (?:'[^']*'|\S+?)[ .]?)+$": lambda user, match: user.command.extend(shlex.split(match[0].rstrip("."))),
    r"give the path of one, such as (\S+)\.": lambda user, match: user.path(match[1]),
    r"Give their index, (\S+)\.$": lambda user, match: user.path(match[1]),
    r"Give the folder inside with the model, (\S+)\.$": lambda user, match: user.path(match[1]),
    r"of (\d+), not (\d+)\. Give at most that": _lower_length,
    r"The names show .*? let `read_config` of the family file return that": _correct_family,
    r"Put ([^`]*) into `renames`, or into `ignored`": _ignore_in_family,
    r"(\S+) has an unknown field (\w+)\. Use fields such as (\w+)": _rename_field,
    r"Extract it with gunzip": _gunzip,
    r"Extract it with unzip.*": _unzip,
    r"Give --family one of:": _replace("--family"),
    r"Give the vocabulary that|Give a UTF-8 text or JSON file": _replace("--src-vocab"),
    r"Leave (?:out --|it out|them out)|leave out --": _leave_out,
    r"Give (--[a-z-]+)(?: \S+)? too|Give (--[a-z-]+)\.$": lambda user, match: user.give(match[1] or match[2]),
    r"Give (sqrt), or a number|Use (--src-tokenizer whitespace)": (
        lambda user, match: user.command.__setitem__(slice(-1, None), [(match[1] or match[2]).split()[-1]])
    ),
    r"not valid: (pad|bos|eos)_id": lambda user, match: _replace(f"--{match[1]}")(user, match),
    r"not valid: d_model \d+ is not a multiple of n_heads": _replace("--heads"),
}
"""What a user does on each kind of advice, in the order in which they are tried; False if the user cannot."""


def missing_in(inspection: str, user: User) -> None:
    """Add the flags that the output of `inspect` asks for."""
    for flag in re.findall(r"^not in the file: \w+ \(give (.*)\)$", inspection, re.MULTILINE):
        if flag.split()[0] not in user.command:
            user.give(flag)


def config_of(message: str, values: Mapping[str, Any]) -> str:
    """A JSON file with the fields that a message asks for."""
    match = re.search(r"does not contain ([\w, ]+)\. Give", message)
    assert match is not None, message
    return json.dumps({name: values[name] for name in match[1].split(", ")})
