"""Requests and responses of LibreTranslate, with the names of its clients."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator

from tfexport.errors import TfexportError
from tfexport.serving.v1.schemas import MOST_TEXTS


class LibreRequest(BaseModel):
    """A request to `/translate`. Other fields are ignored."""

    q: str | Annotated[list[str], Field(fail_fast=True, max_length=MOST_TEXTS)] = Field(
        description="Text to translate, of any number of lines, or several texts."
    )
    source: str = Field(description="Code of the source language; auto if only one has this target.", max_length=20)
    target: str = Field(description="Code of the target language.", max_length=20)
    format: Literal["text", "html"] = Field(default="text", description="With html, tags and attributes are kept.")
    alternatives: int = Field(
        default=0, description="The number of further translations, of a beam search.", ge=0, lt=MOST_TEXTS
    )
    api_key: str | None = Field(default=None, description="The key, if the server needs one.")

    @field_validator("q")
    @classmethod
    def _whole_characters(cls, texts: str | list[str]) -> str | list[str]:
        try:
            for text in [texts] if isinstance(texts, str) else texts:
                text.encode()
        except UnicodeEncodeError:  # JSON can contain lone surrogates, which no response can repeat
            raise ValueError("it has a lone surrogate, which is not text") from None
        return texts


class DetectRequest(BaseModel):
    """A request to `/detect`."""

    q: str = Field(description="A text.")
    api_key: str | None = Field(default=None, description="The key, if the server needs one.")


class Detected(BaseModel):
    """The language of a text."""

    confidence: float = Field(description="From 0 to 100; 0, as this server does not look at the text.", ge=0, le=100)
    language: str


class LibreResponse(BaseModel):
    """Translations: strings for a text, lists for several texts."""

    translatedText: str | list[str]
    alternatives: list[str] | list[list[str]] | None = None
    detectedLanguage: Detected | list[Detected] | None = None


class Language(BaseModel):
    """A language and its target languages."""

    code: str
    name: str
    targets: list[str]


class LanguageName(BaseModel):
    """A language."""

    code: str
    name: str


class LanguagePair(BaseModel):
    """The initial languages of a client."""

    source: LanguageName
    target: LanguageName


class FrontendSettings(BaseModel):
    """The settings that clients request at their start."""

    apiKeys: bool
    charLimit: int = Field(description="-1 for none.")
    filesTranslation: bool
    frontendTimeout: int = Field(description="Milliseconds that a client waits for further typing.")
    keyRequired: bool
    language: LanguagePair
    suggestions: bool
    supportedFilesFormat: list[str]


def read(kind: type[BaseModel], fields: dict[str, Any]) -> Any:
    """Parse a client's request. Empty fields count as missing, as in LibreTranslate.

    Raises:
        TfexportError: the request does not match the schema.
    """
    present = {name: value for name, value in fields.items() if value not in (None, "", [])}
    try:
        return kind.model_validate(present)
    except ValidationError as error:
        first = error.errors()[0]
        name = first["loc"][0] if first["loc"] else "?"
        if first["type"] == "missing":
            hint = " JSON goes with the header Content-Type: application/json." if not set(present) & {"q"} else ""
            raise TfexportError(f"Invalid request: missing {name} parameter.{hint}") from None
        if name == "format":
            raise TfexportError(f"{str(present['format'])[:20]} format is not supported. Use text or html.") from None
        raise TfexportError(f"Invalid request: {name}: {first['msg']}.") from None
