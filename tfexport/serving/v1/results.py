"""Results of the Python API as JSON values. Numbers are not rounded. NaN, which JSON lacks, becomes null."""

from __future__ import annotations

import math

from tfexport.api.results import Output, Translation
from tfexport.decoding.classify import Classified
from tfexport.decoding.stream import Step
from tfexport.serving.v1 import schemas
from tfexport.serving.v1.task_schemas import ClassifyResult, ClassProbability, Scored


def result_of(translation: Translation) -> schemas.Result:
    """The result of a sentence."""
    hypotheses = [hypothesis_of(output) for output in translation.hypotheses]
    return schemas.Result(status=translation.status, message=translation.message, hypotheses=hypotheses)


def hypothesis_of(output: Output) -> schemas.Hypothesis:
    """One output, without fields that were not requested."""
    return schemas.Hypothesis(
        text=output.text,
        tokens=list(output.tokens),
        ids=list(output.ids),
        score=_number(output.score),
        log_prob=_number(output.log_prob),
        finished=output.finished,
        token_log_probs=list(output.token_log_probs) or None,
        source_tokens=list(output.source_tokens) or None,
        source_text=output.source_text if output.source_tokens else None,
        alignment=list(output.alignment) or None,
        missing=list(output.missing) or None,
        attention=None if output.attention is None else output.attention.tolist(),
    )


def scored_of(translation: Translation) -> Scored:
    """The score of a given output."""
    if not translation.hypotheses:
        return Scored(status=translation.status, message=translation.message)
    [output] = translation.hypotheses
    return Scored(
        status=translation.status,
        message=translation.message,
        log_prob=_number(output.log_prob),
        tokens=list(output.tokens),
        ids=list(output.ids),
        token_log_probs=list(output.token_log_probs),
    )


def classified_of(classified: Classified) -> ClassifyResult:
    """The classes of a sentence."""
    classes = [
        ClassProbability(class_=likely.class_, probability=likely.probability, label=likely.label)
        for likely in classified.classes
    ]
    return ClassifyResult(status=classified.status, message=classified.message, classes=classes)


def step_of(step: Step) -> schemas.Step:
    """One token of a stream."""
    return schemas.Step(id=step.id, token=step.token, text=step.text, log_prob=step.log_prob)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
