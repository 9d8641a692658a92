"""API keys."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.types import Message, Scope

from tfexport.errors import TfexportError
from tfexport.serving.http.forms import MOST_FIELDS, form_pairs
from tfexport.system.regular_files import read_text

SHORTEST = 16
"""The smallest number of characters of a key: shorter keys can be guessed."""

_COMMENT = re.compile(r"(?:^|\s)#")


class Keys:
    """Keys and the names of their owners.

    Args:
        names: the names by key.
    """

    def __init__(self, names: Mapping[str, str]):
        self._names = {_digest(key): name for key, name in names.items()}

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Read a file with a name and a key on each line, and comments after #.

        Raises:
            TfexportError: the file cannot be read, or a line has another form.
        """
        try:
            text = read_text(path)
        except (OSError, ValueError) as error:
            raise TfexportError(f"cannot read the keys in {path}: {error}.") from None
        names: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            words = _COMMENT.split(line)[0].split()
            if not words:
                continue
            if len(words) != 2 or len(words[1]) < SHORTEST or words[1] in names:
                raise TfexportError(
                    f"line {number} of {path} is not a name and a key of its own. Write them with a space between, and keys "
                    f"with at least {SHORTEST} characters, such as openssl rand -hex 32 prints."
                )
            names[words[1]] = words[0]
        if not names:
            raise TfexportError(f"{path} has no keys. Write a name and a key on each line, or leave --keys out.")
        return cls(names)

    def name_of(self, key: str | None) -> str | None:
        """The name of a key's owner; None for an unknown key. The time does not depend on how much of a key was guessed."""
        if key is None:
            return None
        own, owner = _digest(key), None
        for digest, name in self._names.items():
            if secrets.compare_digest(digest, own):
                owner = name
        return owner


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def key_in_headers(headers: Mapping[str, str]) -> str | None:
    """The key of `Authorization: Bearer KEY` or `X-API-Key: KEY`, in UTF-8."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    text = key.strip() if kind.lower() == "bearer" else headers.get("x-api-key")
    # Starlette decodes the bytes of headers as Latin-1.
    return None if text is None else text.encode("latin-1").decode("utf-8", "surrogateescape")


async def key_in_body(scope: Scope, body: bytes) -> str | None:
    """The `api_key` in JSON or in a form, as LibreTranslate's clients send it."""
    kind = Request(scope).headers.get("content-type", "").partition(";")[0].strip().lower()
    key: object
    if kind == "application/x-www-form-urlencoded":
        try:
            key = dict(form_pairs(body)).get("api_key")
        except TfexportError:
            return None
    elif kind == "multipart/form-data":

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        try:
            key = (await Request(scope, receive).form(max_files=0, max_fields=MOST_FIELDS)).get("api_key")
        except Exception:  # not a form, or python-multipart is missing, and then no route reads forms
            return None
    else:
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            return None
        key = document.get("api_key") if isinstance(document, dict) else None
    return key if isinstance(key, str) else None
