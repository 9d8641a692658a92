"""Reloads bundles when their files change, while the server answers requests.

The new bundle is loaded next to the old one, answers a first request on each of its workers, and then takes the name. The
old bundle answers its remaining requests. If anything fails, the old bundle stays.
"""

from __future__ import annotations

import threading
from typing import Self

from tfexport.errors import TfexportError
from tfexport.serving.catalog import Catalog, Files, Served, files_of
from tfexport.serving.telemetry.logs import NOTES, log
from tfexport.serving.telemetry.metrics import Metrics


class Reloader:
    """Checks the bundles of a catalog every few seconds in its own thread.

    Changed files are loaded when two consecutive checks find them unchanged, because a copy may still be running.
    """

    def __init__(self, catalog: Catalog, metrics: Metrics, seconds: float):
        self._catalog, self._metrics = catalog, metrics
        self._seconds = seconds
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
        """Check now, and retry bundles that could not be loaded. A signal handler may call this."""
        self._asked.set()

    def check(self, *, at_once: bool = False) -> None:
        """Load the bundles that have changed.

        Args:
            at_once: do not wait for a second check, and retry bundles that could not be loaded.
        """
        for served in self._catalog.served:
            name, files = served.name, files_of(served.entry.directory)
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
        except Exception as error:  # after any error the old bundle continues
            self._refused[name] = files
            self._metrics.reloads.labels(name, "failed").inc()
            if isinstance(error, TfexportError | OSError):
                NOTES.error("%s is not reloaded, and the old bundle stays: %s", name, error)
            else:
                NOTES.exception("%s is not reloaded, and the old bundle stays", name)
        else:
            self._metrics.reloads.labels(name, "loaded").inc()
            log(NOTES, "loaded again", {"model": name, "directory": str(served.entry.directory)})

    def _run(self) -> None:
        while not self._is_over:
            asked = self._asked.wait(self._seconds)
            self._asked.clear()
            if not self._is_over:
                self.check(at_once=asked)
