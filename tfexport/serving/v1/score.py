"""`/v1/score`: the log-probabilities of given outputs, as in `tfexport score`."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from tfexport.serving.catalog import Catalog
from tfexport.serving.fitting import require_one_line
from tfexport.serving.http.responses import json_of
from tfexport.serving.problems import PROBLEMS
from tfexport.serving.v1.results import scored_of
from tfexport.serving.v1.task_schemas import ScoreRequest, ScoreResponse


def score_router(catalog: Catalog) -> APIRouter:
    """The route `/v1/score`."""
    router = APIRouter(prefix="/v1", tags=["v1"], responses=PROBLEMS)

    @router.post("/score", response_model=ScoreResponse)
    async def score(asked: ScoreRequest) -> Response:
        """Score targets as translations of texts. The numbers are those of `tfexport score`."""
        require_one_line(texts=asked.texts, targets=asked.targets)
        with catalog.use(asked.model, asked.pair) as served:
            scores = await served.translator.score_async(*asked.several, **asked.order)
            return json_of(ScoreResponse(model=served.name, results=[scored_of(score) for score in scores]))

    return router
