"""The JSON schemas of requests and responses. The OpenAPI description is made from these classes.

Fields for options of a search follow from their declaration in `SearchOptions`: name, type, bounds and help. Options that
are file paths are not fields, because a client may not read files of the server.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator
from pydantic.fields import FieldInfo

from tfexport.decoding.line_reader import Status
from tfexport.decoding.request_options import AlignmentOptions, KeepOptions
from tfexport.errors import TfexportError
from tfexport.option import Declared, checked, declared
from tfexport.search.options import SearchOptions
from tfexport.serving.state import ServerStatus

MOST_TEXTS = 1024
"""The largest number of sentences in a request. Several smaller requests return their answers earlier."""

MOST_PHRASES = 100
"""The largest number of required phrases of a sentence."""

MOST_TOKENS = 2**16
"""The largest number of tokens of a sentence, or of an option such as `suppress`."""

MOST_TERMS = 1024
"""The largest number of entries in the glossary of a request."""

LONGEST_NAME = 64
"""The largest number of characters of an unknown name that an error quotes."""

Priority = Literal["interactive", "bulk"]


class Strict(BaseModel):
    """A request. Unknown fields are errors, because they would have no effect."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known(cls, document: Any) -> Any:
        for name in document if isinstance(document, dict) else ():
            if name not in cls.model_fields:
                raise ValueError(unknown_field(name, list(cls.model_fields)))
        return document


def unknown_field(name: str, fields: Sequence[str]) -> str:
    """The error for an unknown field, with the most similar known field."""
    name = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…"
    if declared(SearchOptions).keys() & {*fields}:
        try:
            checked(SearchOptions, {name: None}, others=fields)
        except TfexportError as error:
            return str(error)
    near = difflib.get_close_matches(name, fields, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(fields)}."
    return f"there is no field {name!r}. {hint}"


def _value_type(hint: Any, *, tokens: bool) -> Any:
    """The type of an option in JSON: lists for tuples, and ids or text for tokens."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        return reduce(or_, (_value_type(part, tokens=tokens) for part in parts if part is not type(None)))
    if origin is tuple:
        if parts[1:] != (Ellipsis,):
            inner = tuple(_value_type(part, tokens=tokens) for part in parts)
            return tuple[inner]  # type: ignore[valid-type]
        item = _value_type(parts[0], tokens=tokens)
        several = Annotated[list[item], Field(fail_fast=True, max_length=MOST_TOKENS)]  # type: ignore[valid-type]
        return several | str if tokens else several
    return hint


def _field(option: Declared) -> tuple[Any, FieldInfo]:
    """The type and the description of the field for an option."""
    about = option.about
    hint = str if about.parse else _value_type(option.hint, tokens=about.tokens)
    bounds: dict[str, Any] = {}
    if option.hint in (int, float) or {int, float} & set(get_args(option.hint)):
        bounds = {"ge": about.minimum, "le": about.maximum, "gt": about.above}
    limits = {name: value for name, value in bounds.items() if value is not None}
    if option.hint is float or float in get_args(option.hint):
        limits["allow_inf_nan"] = False
    bounded: Any = Annotated[hint, Field(**limits)]
    # For forms: the heading, and the default if the field is absent.
    form = {"x-panel": about.panel, "x-default": about.default_text or option.default}
    field: Any = Field(default=None, description=about.help, json_schema_extra=form)
    return bounded | None, field


def option_fields(*groups: type, files: bool = False) -> dict[str, tuple[Any, FieldInfo]]:
    """The fields of a request for the options of groups. None means the default.

    Args:
        files: include options that are paths, for callers that may read files.
    """
    every = {name: option for group in groups for name, option in declared(group).items()}
    return {
        name: _field(option)
        for name, option in every.items()
        if files or Path not in (option.hint, *get_args(option.hint))
    }


SEARCH_FIELDS = option_fields(SearchOptions, AlignmentOptions, KeepOptions)

SearchRequest = create_model("SearchRequest", __base__=Strict, **SEARCH_FIELDS)  # type: ignore[call-overload]
"""The options of a search."""


class Addressed(Strict):
    """A request to one of the bundles."""

    model: str | None = Field(None, description="Name of the bundle; may be left out if there is only one.")
    source: str | None = Field(None, description="Source language, instead of `model`.", max_length=20)
    target: str | None = Field(None, description="Target language, instead of `model`.", max_length=20)
    priority: Priority = Field("interactive", description="Interactive requests go before bulk requests.")
    timeout: float | None = Field(
        None, description="Seconds after which no answer is needed.", gt=0, allow_inf_nan=False
    )

    @property
    def pair(self) -> tuple[str | None, str | None]:
        """The source language and the target language."""
        return self.source, self.target

    @property
    def order(self) -> dict[str, Any]:
        """The priority and the timeout, for the scheduler."""
        return {"bulk": self.priority == "bulk", "timeout": self.timeout}


# A list ends at its first wrong item: a list of errors would be much larger than the request.
TextList = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_TEXTS)]
TokenLists = Annotated[
    list[Annotated[list[str], Field(fail_fast=True, max_length=MOST_TOKENS)]],
    Field(fail_fast=True, min_length=1, max_length=MOST_TEXTS),
]
IdLists = Annotated[
    list[Annotated[list[int], Field(fail_fast=True, max_length=MOST_TOKENS)]],
    Field(fail_fast=True, min_length=1, max_length=MOST_TEXTS),
]
Phrases = Annotated[list[str], Field(fail_fast=True, max_length=MOST_PHRASES)]
Constraints = Phrases | Annotated[list[Phrases], Field(fail_fast=True, max_length=MOST_TEXTS)]


class TranslateRequest(Addressed, SearchRequest):  # type: ignore[valid-type, misc]
    """Sentences to translate, with all options of a search."""

    text: str | TextList | None = Field(None, description="A sentence, or several.")
    tokens: TokenLists | None = Field(None, description="Instead of text: the tokens of each sentence.")
    ids: IdLists | None = Field(
        None, description="Instead of text: the ids of each sentence, as the encoder reads them."
    )
    prefix: str | TextList | None = Field(
        None, description="Prefix of the outputs: one for all sentences, or one for each."
    )
    constraints: Constraints | None = Field(
        None, description="Phrases that the output must contain: a list for a sentence, a list of lists for several."
    )
    glossary: Annotated[dict[str, str], Field(max_length=MOST_TERMS)] | None = Field(
        None, description="Source phrases, and the target phrase that the output must contain where one occurs."
    )
    stream: bool = Field(
        False, description="Answer with server-sent events: `step` for each token, `result` at the end."
    )

    @model_validator(mode="after")
    def _one_input(self) -> TranslateRequest:
        inputs = [name for name in ("text", "tokens", "ids") if getattr(self, name) is not None]
        if len(inputs) != 1:
            raise ValueError("give one of text, tokens and ids")
        if self.stream and not isinstance(self.text, str):
            raise ValueError("a stream has one sentence: give text as a string")
        if self.prefix is not None and self.text is None:
            raise ValueError("a prefix goes with text")
        if self.constraints is not None:
            self._check_constraints(self.constraints)
        if self.glossary is not None and self.text is None:
            raise ValueError("a glossary goes with text")
        if isinstance(self.text, str) and isinstance(self.prefix, list):
            raise ValueError("one sentence has one prefix: give it as a string")
        return self

    def _check_constraints(self, phrases: list[str] | list[list[str]]) -> None:
        if self.text is None:
            raise ValueError("constraints go with text")
        if any(isinstance(element, str) != isinstance(self.text, str) for element in phrases):
            raise ValueError("constraints are a list of phrases for one sentence, and a list of such lists for several")
        if isinstance(self.text, list) and len(phrases) != len(self.text):
            raise ValueError(f"there are {len(self.text)} sentences and {len(phrases)} lists of constraints")

    @property
    def phrases(self) -> list[str]:
        """All required phrases."""
        several = self.constraints or []
        return [phrase for element in several for phrase in ([element] if isinstance(element, str) else element)]

    @property
    def options(self) -> dict[str, Any]:
        """The options of the request, without those that have their defaults."""
        return {name: value for name in SEARCH_FIELDS if (value := getattr(self, name)) is not None}


class Hypothesis(BaseModel):
    """One output of a sentence; the fields of JSON lines."""

    model_config = ConfigDict(from_attributes=True)

    text: str
    tokens: list[str]
    ids: list[int]
    score: float | None = Field(description="The score that ranks the outputs of a sentence; null without scores.")
    log_prob: float | None
    finished: bool
    token_log_probs: list[float] | None = None
    source_tokens: list[str] | None = None
    source_text: tuple[int, int] | None = None
    alignment: list[tuple[int, int]] | None = None
    missing: list[str] | None = Field(None, description="Required phrases that the output lacks.")
    attention: list[list[float]] | None = None


class Result(BaseModel):
    """The result of a sentence."""

    status: Status
    message: str = ""
    hypotheses: list[Hypothesis]


class TranslateResponse(BaseModel):
    """A result for each sentence, in order."""

    model: str
    results: list[Result]


class Step(BaseModel):
    """One token of an output, in a stream."""

    id: int
    token: str
    text: str
    log_prob: float


class ModelInfo(BaseModel):
    """A bundle that is served."""

    name: str
    source: str | None = Field(None, description="Source language, of names such as de-en.")
    target: str | None = None
    task: Literal["translate", "classify"]
    runtime: str
    precision: str
    attention: bool = Field(False, description="The bundle can return attention.")
    certified: bool = Field(description="A certificate of `tfexport parity` holds for the bundle on this machine.")
    problem: str | None = Field(None, description="Why none holds.")
    reading: str = Field(
        description="What confirms that the checkpoint was read right, and which settings it does not."
    )
    confirmed: bool = Field(description="The owner's code, its outputs or the file itself confirm all settings.")


class Models(BaseModel):
    """The bundles of a server."""

    status: ServerStatus
    models: list[ModelInfo]
