"""Results of the Python API as JSON values. Numbers are not rounded. NaN, which JSON lacks, becomes null."""

from __future__ import annotations

import math

from tfexport.api.results import Output, Translation
from tfexport.decoding.classify import Classified
from tfexport.decoding.stream import Step
from tfexport.serving.v1 import schemas
from tfexport.serving.v1.task_schemas import ClassifyResult, ClassProbability, Scored


def result_of(found: Translation) -> schemas.Result:
    """The result of a sentence."""
    hypotheses = [hypothesis_of(output) for output in found.hypotheses]
    return schemas.Result(status=found.status, message=found.message, hypotheses=hypotheses)


def hypothesis_of(found: Output) -> schemas.Hypothesis:
    """One output, without fields that were not requested."""
    return schemas.Hypothesis(
        text=found.text,
        tokens=list(found.tokens),
        ids=list(found.ids),
        score=_number(found.score),
        log_prob=_number(found.log_prob),
        finished=found.finished,
        token_log_probs=list(found.token_log_probs) or None,
        source_tokens=list(found.source_tokens) or None,
        source_text=found.source_text if found.source_tokens else None,
        alignment=list(found.alignment) or None,
        missing=list(found.missing) or None,
        attention=None if found.attention is None else found.attention.tolist(),
    )


def scored_of(found: Translation) -> Scored:
    """The score of a given output."""
    if not found.hypotheses:
        return Scored(status=found.status, message=found.message)
    [output] = found.hypotheses
    return Scored(
        status=found.status,
        message=found.message,
        log_prob=_number(output.log_prob),
        tokens=list(output.tokens),
        ids=list(output.ids),
        token_log_probs=list(output.token_log_probs),
    )


def classified_of(found: Classified) -> ClassifyResult:
    """The classes of a sentence."""
    classes = [
        ClassProbability(class_=one.class_, probability=one.probability, label=one.label) for one in found.classes
    ]
    return ClassifyResult(status=found.status, message=found.message, classes=classes)


def step_of(found: Step) -> schemas.Step:
    """One token of a stream."""
    return schemas.Step(id=found.id, token=found.token, text=found.text, log_prob=found.log_prob)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
