"""Bundles that are loaded again when their files change, while the server answers.

A bundle is loaded beside the old one, answers a first request on each of its workers, and takes the name. Requests of the
old one are answered by it. If anything fails, the old one stays.
"""

from __future__ import annotations

import threading
from typing import Self

from tfexport.errors import TfexportError
from tfexport.serving.catalog import Catalog, Files, Served, files_of
from tfexport.serving.telemetry.logs import NOTES, log
from tfexport.serving.telemetry.metrics import Metrics


class Reloader:
    """Looks at the bundles of a catalog every few seconds, in a thread of its own.

    Files that change are loaded when they are the same at two looks: somebody may still be writing.
    """

    def __init__(self, catalog: Catalog, metrics: Metrics, seconds: float):
        self._catalog, self._metrics, self._seconds = catalog, metrics, seconds
        self._asked, self._is_over = threading.Event(), False
        self._seen: dict[str, Files] = {}
        self._refused: dict[str, Files] = {}
        self._thread = threading.Thread(target=self._run, name="tfexport reloads", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._asked.set()

    def look(self) -> None:
        """Look now, and also load what could not be loaded before. May be called by the handler of a signal."""
        self._asked.set()

    def check(self, *, at_once: bool = False) -> None:
        """Load what has changed.

        Args:
            at_once: without waiting for a second look, and what could not be loaded before too.
        """
        for served in self._catalog.served:
            name, files = served.name, files_of(served.place.directory)
            if files == served.files:
                self._seen.pop(name, None)
                continue
            is_settled, is_refused = self._seen.get(name) == files, self._refused.get(name) == files
            self._seen[name] = files
            if at_once or (is_settled and not is_refused):
                self._load(served, files)

    def _load(self, served: Served, files: Files) -> None:
        name = served.name
        try:
            self._catalog.replace(name)
        except Exception as error:  # whatever it is, the old bundle goes on
            self._refused[name] = files
            self._metrics.reloads.labels(name, "failed").inc()
            if isinstance(error, TfexportError | OSError):
                NOTES.error("%s is not loaded again, and goes on as it was: %s", name, error)
            else:
                NOTES.exception("%s is not loaded again, and goes on as it was", name)
        else:
            self._metrics.reloads.labels(name, "loaded").inc()
            log(NOTES, "loaded again", {"model": name, "directory": str(served.place.directory)})

    def _run(self) -> None:
        while not self._is_over:
            asked = self._asked.wait(self._seconds)
            self._asked.clear()
            if not self._is_over:
                self.check(at_once=asked)
