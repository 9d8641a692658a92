"""The middleware around all routes: limits, keys, CORS, metrics, logs and traces.

request ──> Observe ──> CORS ──> Limits ──> route
"""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute

from tfexport.serving.access.keys import Keys
from tfexport.serving.access.limits import Limits, Refusals
from tfexport.serving.access.origins import origins_of
from tfexport.serving.catalog import Catalog
from tfexport.serving.options import ServerOptions
from tfexport.serving.state import State
from tfexport.serving.telemetry.metrics import Metrics
from tfexport.serving.telemetry.observe import Observe

NOT_TRACED = "health,ready,metrics"
"""Routes that are called every few seconds."""


def operate(app: FastAPI, catalog: Catalog, options: ServerOptions, state: State) -> None:
    """Add the middleware to an application that has its routes. `app.state` gets `metrics` and `refusals`.

    Raises:
        TfexportError: the file of keys cannot be used.
    """
    metrics = Metrics(catalog, state)
    keys = Keys.read(options.keys) if options.keys is not None else None
    refusals = Refusals(state, catalog, keys)
    app.state.metrics, app.state.refusals = metrics, refusals

    @app.get("/metrics", include_in_schema=False)
    def scrape() -> Response:
        """Metrics for Prometheus. It runs in a thread, because the numbers of a scheduler may have to wait for a step."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    # The middleware that is added last runs first.
    app.add_middleware(Limits, options=options, state=state, metrics=metrics, keys=keys, refusals=refusals)
    if options.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins_of(options),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-API-Key", "X-Request-ID"],
            expose_headers=["Retry-After", "X-Request-ID"],
        )
    addresses = [*app.openapi()["paths"], *(path for route in app.routes if (path := _path_of(route)))]
    app.add_middleware(Observe, state=state, metrics=metrics, addresses=addresses)
    _trace(app)


def _path_of(route: BaseRoute) -> str | None:
    return getattr(route, "path", None)


def _trace(app: FastAPI) -> None:
    """Add spans of OpenTelemetry, if its instrumentation of FastAPI is installed. Its configuration exports them."""
    try:
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
    except ImportError:
        return
    FastAPIInstrumentor.instrument_app(app, excluded_urls=NOT_TRACED)
