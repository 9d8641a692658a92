"""The HTTP application: routes over a catalog of bundles.

request ──> limits ──> route ──> Model.translate_async ──> scheduler
"""

from __future__ import annotations

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline

from tfexport.serving.catalog import Catalog
from tfexport.serving.health import health_router
from tfexport.serving.http.openapi import describe_bodies
from tfexport.serving.libretranslate.routes import libretranslate_router
from tfexport.serving.libretranslate.schemas import DetectRequest, LibreRequest
from tfexport.serving.operations import operate
from tfexport.serving.options import ServerOptions
from tfexport.serving.page.routes import add_page
from tfexport.serving.problems import answer_problems
from tfexport.serving.state import State
from tfexport.serving.v1.classify import classify_router
from tfexport.serving.v1.score import score_router
from tfexport.serving.v1.translate import translation_router
from tfexport.system.version import version


def create_app(catalog: Catalog, options: ServerOptions | None = None, state: State | None = None) -> FastAPI:
    """Create the application for these bundles. It does not close them.

    Args:
        state: the state of the server, which the caller changes.
    """
    options, state = options or ServerOptions(), state or State()
    # Its pages at /docs need no other server.
    app = FastAPIOffline(
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
        title="tfexport",
        version=version(),
        description="Translation whose answers equal `tfexport decode`.",
    )
    answer_problems(app, state.note_full)
    app.include_router(health_router(catalog, state))
    app.include_router(translation_router(catalog))
    app.include_router(score_router(catalog))
    app.include_router(classify_router(catalog))
    app.include_router(libretranslate_router(catalog, needs_key=options.keys is not None))
    describe_bodies(app, (LibreRequest, DetectRequest))
    if options.page:
        add_page(app)
    operate(app, catalog, options, state)  # last: it surrounds all routes
    return app
