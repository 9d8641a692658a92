"""`/v1/classify`: the most likely classes of sentences, as in `tfexport classify`."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from tfexport.serving.catalog import Catalog
from tfexport.serving.fitting import require_one_line
from tfexport.serving.http.responses import json_of
from tfexport.serving.problems import PROBLEMS
from tfexport.serving.v1.classifying import Classifying
from tfexport.serving.v1.results import classified_of
from tfexport.serving.v1.task_schemas import ClassifyRequest, ClassifyResponse


def classify_router(catalog: Catalog) -> APIRouter:
    """The route `/v1/classify`."""
    router = APIRouter(prefix="/v1", tags=["v1"], responses=PROBLEMS)
    classifying = Classifying()

    @router.post("/classify", response_model=ClassifyResponse)
    async def classify(asked: ClassifyRequest) -> Response:
        """Classify sentences. The classes and probabilities are those of `tfexport classify`."""
        require_one_line(texts=asked.texts)
        with catalog.use(asked.model, asked.pair) as served:
            results = await classifying.classify(served.classifier, asked.several, top=asked.top, timeout=asked.timeout)
            return json_of(ClassifyResponse(model=served.name, results=[classified_of(result) for result in results]))

    return router
