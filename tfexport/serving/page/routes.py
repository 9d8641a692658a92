"""`/`: a web page to try the bundles. Its files are in `assets/`; nothing is built or fetched."""

from __future__ import annotations

import mimetypes
from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).resolve().parent / "assets"

HEADERS = {
    # The page has no inline script or style. So a model's text cannot run even if it reached the page as HTML.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    # File names have no version, so a browser checks whether its copy is current, which costs a 304.
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def add_page(app: FastAPI) -> None:
    """Add `/`, the page, and `/page/...`, its files, to an app."""
    # Some machines have no type for this suffix, or text/plain, and browsers run no module of that type.
    mimetypes.add_type("text/javascript", ".js")
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page() -> FileResponse:
        return FileResponse(FOLDER / "index.html", headers=HEADERS)

    app.include_router(router)
    app.mount("/page", _Files(directory=FOLDER))
