"""Requests and responses of `/v1/score` and `/v1/classify`."""

from __future__ import annotations

from pydantic import BaseModel, Field, model_validator

from tfexport.decoding.line_reader import Status
from tfexport.serving.v1.schemas import Addressed, TextList

_OneOrMore = str | TextList


class ScoreRequest(Addressed):
    """Outputs to score."""

    texts: _OneOrMore = Field(description="A sentence, or several.")
    targets: _OneOrMore = Field(description="The output of each text: a string, or a list of the same length.")

    @model_validator(mode="after")
    def _pairs(self) -> ScoreRequest:
        if isinstance(self.texts, str) != isinstance(self.targets, str):
            raise ValueError("texts and targets are two strings, or two lists of strings")
        if len(self.several[0]) != len(self.several[1]):
            raise ValueError(f"there are {len(self.texts)} texts and {len(self.targets)} targets: give one for each")
        return self

    @property
    def several(self) -> tuple[list[str], list[str]]:
        """The texts and the targets, as lists."""
        return _several(self.texts), _several(self.targets)


class Scored(BaseModel):
    """The score of an output."""

    status: Status
    message: str = ""
    log_prob: float | None = Field(
        default=None, description="Natural logarithm of the probability; null without tokens."
    )
    tokens: list[str] | None = None
    ids: list[int] | None = None
    token_log_probs: list[float] | None = Field(
        default=None, description="The log-probability of each token, eos last."
    )


class ScoreResponse(BaseModel):
    """A result for each pair, in order."""

    model: str
    results: list[Scored]


class ClassifyRequest(Addressed):
    """Sentences to classify."""

    texts: _OneOrMore = Field(description="A sentence, or several.")
    top: int = Field(default=1, description="Number of classes to return, the most likely first.", ge=1, le=2**31)

    @property
    def several(self) -> list[str]:
        """The texts, as a list."""
        return _several(self.texts)


class ClassProbability(BaseModel):
    """A class and its probability."""

    class_: int = Field(serialization_alias="class", description="The number of the class, from 0.")
    probability: float
    label: str | None = None


class ClassifyResult(BaseModel):
    """The result of a sentence."""

    status: Status
    message: str = ""
    classes: list[ClassProbability]


class ClassifyResponse(BaseModel):
    """A result for each sentence, in order."""

    model: str
    results: list[ClassifyResult]


def _several(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
