"""Bundles behind the HTTP application, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from tfexport.scheduling.options import ServingOptions
from tfexport.serving.app import create_app
from tfexport.serving.catalog import Catalog, CatalogEntry, HowToLoad


@contextmanager
def application(bundles: Mapping[str, Path], precision: str | None = None, **scheduling: Any) -> Iterator[Any]:
    """The application over bundles by name, without a socket. It is closed when the block ends."""
    how = HowToLoad(precision=precision, scheduling=ServingOptions(**scheduling))
    catalog = Catalog([CatalogEntry(name, folder) for name, folder in bundles.items()], how)
    try:
        yield create_app(catalog)
    finally:
        catalog.close()


@contextmanager
def client(bundles: Mapping[str, Path], **scheduling: Any) -> Iterator[TestClient]:
    """A client of `application`. What it raises is an answer with the status 500, as a client sees it."""
    with application(bundles, **scheduling) as app, TestClient(app, raise_server_exceptions=False) as found:
        yield found
