"""The bundles of a server, each under a name or a language pair.

A bundle is loaded once. Requests hold it while they use it (`Catalog.use`). So another bundle may take its name at any time,
and the old bundle ends after its last request.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tfexport.api.classifier import Classifier, load_classifier
from tfexport.api.model import Model, load
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.contract import short_name
from tfexport.errors import TfexportError, UnavailableError
from tfexport.scheduling.options import ServingOptions
from tfexport.serving.record import note_model
from tfexport.system.processes import leave_out_of_collections
from tfexport.verification.certificates import missing, parity_command

_PAIR = re.compile(r"(?P<source>[a-z]{2,3}(_[A-Za-z]{2,4})?)-(?P<target>[a-z]{2,3}(_[A-Za-z]{2,4})?)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

FIRST_SECONDS = 60.0
"""Seconds in which a bundle must answer its first requests."""

FIRST_SEARCHES: tuple[dict[str, int], ...] = ({}, {"beam": 2})
"""The options of its first requests, which load the graphs that most requests use."""

FIRST_TEXT = "a"

Files = frozenset[tuple[str, int, int, int]]
"""The files of a folder: name, inode, size and time of each."""


class UnknownModelError(TfexportError):
    """No bundle has this name or language pair."""


@dataclass(frozen=True)
class CatalogEntry:
    """The name and the folder of a bundle."""

    name: str
    directory: Path

    @classmethod
    def parse(cls, text: str) -> CatalogEntry:
        """Parse `NAME=DIR`, or `DIR`. Without a name, the bundle has the name of its folder.

        Raises:
            TfexportError: the name cannot be part of a URL.
        """
        name, equals, directory = text.partition("=")
        if not equals:
            directory, name = text, Path(text).resolve().name
        if not _NAME.fullmatch(name) or not directory:
            raise TfexportError(
                f"{text!r} is not a folder with a name. Give NAME=DIR, with letters, digits, dots and dashes in the name."
            )
        return cls(name, Path(directory))

    @property
    def pair(self) -> tuple[str, str] | None:
        """The languages of a name such as `de-en`; None for other names."""
        match = _PAIR.fullmatch(self.name)
        return (match["source"], match["target"]) if match else None


def files_of(directory: Path) -> Files:
    """An identifier of each file of a bundle, which changes when the file is written or replaced; empty without a bundle."""
    try:
        files = [(path.name, path.stat()) for path in directory.iterdir() if path.is_file()]
    except OSError:
        return frozenset()
    return frozenset((name, about.st_ino, about.st_size, about.st_mtime_ns) for name, about in files)


@dataclass(frozen=True)
class HowToLoad:
    """The settings that all bundles of a server share."""

    runtime: str = "ort-cpu"
    precision: str | None = None
    threads: int | None = 1
    certified: bool = False
    scheduling: ServingOptions = field(default_factory=ServingOptions)

    def load(self, entry: CatalogEntry) -> Served:
        """Load a bundle and start its workers.

        The bundle is opened once, so the certificate is compared with the checksums of the files that the runtime has
        loaded. See `bundle/verified_files.py` for the files that may change meanwhile.

        Raises:
            TfexportError: the bundle cannot be loaded, or lacks a required certificate.
        """
        files = files_of(entry.directory)  # read before loading, so that a change during loading is detected
        bundle = open_bundle(entry.directory)
        kind: Callable[..., Model | Classifier] = load_classifier if bundle.config.is_classifier else load
        model = kind(bundle, runtime=self.runtime, precision=self.precision, threads=self.threads)
        problem = missing(bundle, self.runtime, model.precision)
        if problem and self.certified:
            raise TfexportError(
                f"{entry.directory} is not served: {problem}. Run {parity_command(entry.directory, self.runtime)}, or "
                "leave --certified out."
            )
        if isinstance(model, Model):
            model.start(self.scheduling)
        slots = self.scheduling.slots
        return Served(entry, bundle, model, self.runtime, short_name(model.precision), problem, files, slots=slots)


@dataclass
class Served:
    """A loaded bundle."""

    entry: CatalogEntry
    bundle: Bundle
    model: Model | Classifier
    runtime: str
    precision: str
    uncertified: str | None
    """The reason why no certificate holds for it; None if one holds."""
    files: Files = frozenset()
    """The files at the time of loading."""
    users: int = 0
    """The number of requests that hold it."""
    is_retired: bool = False
    """Another bundle has its name. It ends when no request holds it."""
    slots: int = ServingOptions.slots
    """The number of rows that a worker decodes at once."""

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def translator(self) -> Model:
        """The model of the bundle.

        Raises:
            TfexportError: the bundle is a classifier.
        """
        if not isinstance(self.model, Model):
            raise TfexportError(f"{self.name} is a classifier. Use /v1/classify.")
        return self.model

    @property
    def classifier(self) -> Classifier:
        """The classifier of the bundle.

        Raises:
            TfexportError: the bundle is not a classifier.
        """
        if not isinstance(self.model, Classifier):
            raise TfexportError(f"{self.name} is not a classifier. Use /v1/translate.")
        return self.model

    @property
    def tells_attention(self) -> bool:
        """Whether it can return attention: PyTorch can, and graphs that were exported for it."""
        return isinstance(self.model, Model) and self.model.tells_attention

    def warm_up(self, workers: int, seconds: float = FIRST_SECONDS) -> None:
        """Let each worker answer a request, and load the text processing: spaCy takes seconds.

        Raises:
            TfexportError: a worker does not answer in time.
        """
        model, reads_text = self.model, self.bundle.tokenizer("source") is not None
        if not isinstance(model, Model):
            model.classify_ids([[self.bundle.config.eos_id]])
            if reads_text:
                model.classify(FIRST_TEXT)
            return
        writes_text = self.bundle.tokenizer("target") is not None
        sources = [[model.config.eos_id]] * workers

        async def ask() -> None:
            async with asyncio.timeout(seconds):
                for search in FIRST_SEARCHES:
                    await model.translate_ids_async(sources, max_length=4, **search)
                if reads_text and writes_text:
                    await model.translate_async(FIRST_TEXT, max_length=4)

        try:
            asyncio.run(ask())
        except TimeoutError:
            raise TfexportError(
                f"the workers of {self.name} did not answer within {seconds:g} seconds. Load it again, with fewer --workers "
                "if the machine is busy."
            ) from None

    def close(self) -> None:
        """End the workers of the bundle."""
        if isinstance(self.model, Model):
            self.model.close()


class Catalog:
    """All bundles of a server, by name.

    Raises:
        TfexportError: two bundles have the same name, or one cannot be loaded.
    """

    def __init__(self, entries: Sequence[CatalogEntry], how: HowToLoad):
        names = [entry.name for entry in entries]
        if twice := {name for name in names if names.count(name) > 1}:
            raise TfexportError(f"two bundles are called {min(twice)}. Give them names: NAME=DIR.")
        self._how, self._lock = how, threading.RLock()
        self._served: dict[str, Served] = {}
        self._retired: list[Served] = []
        self._is_closed = False
        try:
            for entry in entries:
                self._served[entry.name] = how.load(entry)
        except BaseException:
            self.close()
            raise

    @property
    def served(self) -> list[Served]:
        """The current bundles, in their original order."""
        with self._lock:
            return list(self._served.values())

    def find(self, name: str | None = None, pair: tuple[str | None, str | None] = (None, None)) -> Served:
        """The bundle of a name or of a pair of languages. Without both, the only bundle.

        Raises:
            UnknownModelError: no bundle matches, or several do.
        """
        matches = self.served
        if name is not None:
            matches = [served for served in matches if served.name == name]
        if any(code is not None for code in pair):
            matches = [served for served in matches if _matches(served.entry.pair, pair)]
        if len(matches) != 1:
            asked = name or ("-".join(code or "?" for code in pair) if any(pair) else None)
            there = ", ".join(served.name for served in self.served)
            problem = f"no bundle here is called {asked}" if not matches else "several bundles match"
            raise UnknownModelError(f"{problem}. Name one of {there}.")
        return matches[0]

    @contextmanager
    def use(self, name: str | None = None, pair: tuple[str | None, str | None] = (None, None)) -> Iterator[Served]:
        """`find` a bundle and hold it until the block ends."""
        with self._lock:
            served = self.find(name, pair)
            served.users += 1
        note_model(served.name, served.bundle.directory)
        try:
            yield served
        finally:
            with self._lock:
                served.users -= 1
                is_over = served.is_retired and not served.users
            if is_over:
                threading.Thread(target=self._end, args=(served,), name="tfexport closes a bundle", daemon=True).start()

    def warm_up(self) -> None:
        """Let all bundles answer a request.

        Raises:
            TfexportError: a bundle does not answer.
        """
        for served in self.served:
            served.warm_up(self._how.scheduling.workers)

    def replace(self, name: str) -> Served:
        """Load the folder of a bundle again. Earlier requests are answered by the bundle that they hold.

        Raises:
            TfexportError: the new bundle cannot be loaded, or does not answer. The old bundle stays.
        """
        old = self.find(name)
        new = self._how.load(old.entry)
        try:
            new.warm_up(self._how.scheduling.workers)
            with self._lock:
                if self._is_closed:
                    raise UnavailableError("the server is shutting down and loads no more bundles.")
                self._served[name] = new
                self._retired.append(old)
                old.is_retired = True
                is_over = not old.users
        except BaseException:
            new.close()
            raise
        if is_over:
            self._end(old)
        return new

    def require_health(self) -> None:
        """Check that every bundle answers.

        Raises:
            UnavailableError: the workers of a bundle have ended or hang, and cannot be replaced.
        """
        translators = [served for served in self.served if isinstance(served.model, Model)]
        ended = [served.name for served in translators if not served.translator.is_serving]
        if ended:
            raise UnavailableError(
                f"the workers of {ended[0]} have ended or hang, and cannot be replaced. Start the server again."
            )

    def _end(self, retired: Served) -> None:
        retired.close()
        with self._lock:
            self._retired = [served for served in self._retired if served is not retired]
        leave_out_of_collections()  # freeze the objects of the new bundle instead of the old one's

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            self._is_closed = True
            every = [*self._served.values(), *self._retired]
        for served in every:
            served.close()


def _matches(pair: tuple[str, str] | None, wanted: tuple[str | None, str | None]) -> bool:
    """Whether a bundle's languages match: a language that is None matches any."""
    return pair is not None and all(code in (None, own) for own, code in zip(pair, wanted, strict=True))
