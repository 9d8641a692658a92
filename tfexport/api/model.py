"""A loaded bundle: `tfexport.load("bundle").translate(["Ein Hund läuft."], beam=4)`.

`tfexport decode` and `tfexport score` do the same with files and lines: the same graphs, the same search, the same numbers.
PyTorch is not needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import tee
from pathlib import Path
from typing import Any, overload

from tfexport.api.results import Translation, translation_of
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.config import ModelConfig
from tfexport.contract import Precision, precisions_of, short_name
from tfexport.decoding.classify import Classified, classify, read_labels
from tfexport.decoding.generation_config import options_with_defaults
from tfexport.decoding.line_reader import Reader, TargetReader
from tfexport.decoding.options import SearchOptions
from tfexport.decoding.request_options import InputFormat
from tfexport.decoding.shortlist import BEST, FIRST, Shortlist, read_shortlist
from tfexport.decoding.stream import Step, stream_lines
from tfexport.decoding.translate import Result, Writer, scored, translate
from tfexport.errors import TfexportError
from tfexport.option import with_keywords
from tfexport.runtimes import load_classifier as runtime_of_classifier
from tfexport.runtimes import load_runtime, require_workers
from tfexport.runtimes.base import ClassifierRuntime, Runtime

_log = logging.getLogger("tfexport")

__all__ = ["Classifier", "Model", "load", "load_classifier"]


class Model:
    """A bundle, loaded. `tfexport.load` makes one.

    Its methods may be called from several threads at once, but for the runtime `torch-cuda`.
    """

    def __init__(self, bundle: Bundle, runtime: Runtime[Any]):
        self._bundle, self._runtime = bundle, runtime
        for side in ("source", "target"):
            bundle.tokenizer(side)  # now: another bundle may come to its place

    def __repr__(self) -> str:
        return (
            f"<tfexport.Model {self._bundle.directory} on {self._runtime.name}, {short_name(self._runtime.precision)}>"
        )

    @property
    def config(self) -> ModelConfig:
        """Sizes, special ids and arithmetic of the model."""
        return self._runtime.config

    @property
    def precision(self) -> Precision:
        """Of the weights and products."""
        return self._runtime.precision

    def token_ids(self, tokens: str) -> tuple[int, ...]:
        """Ids of tokens of the target vocabulary, separated by spaces, such as `suppress` takes.

        Raises:
            TfexportError: one of them is not in the vocabulary, or there is none.
        """
        return self._writer().token_ids(tokens)

    @overload
    def translate(  # type: ignore[overload-overlap]  # a string is many strings to the type checker
        self,
        texts: str,
        *,
        prefix: str | None = None,
        shortlist: Shortlist | None = None,
        batch_size: int = 32,
        workers: int = 1,
        **search: Any,
    ) -> Translation: ...
    @overload
    def translate(
        self,
        texts: Iterable[str],
        *,
        prefix: Iterable[str] | str | None = None,
        shortlist: Shortlist | None = None,
        batch_size: int = 32,
        workers: int = 1,
        **search: Any,
    ) -> list[Translation]: ...
    @with_keywords(SearchOptions)
    def translate(
        self,
        texts: str | Iterable[str],
        *,
        prefix: Iterable[str] | str | None = None,
        shortlist: Shortlist | None = None,
        batch_size: int = 32,
        workers: int = 1,
        **search: Any,
    ) -> Translation | list[Translation]:
        """Decode sentences: one result for each, in order. A single string gives a single result.

        Args:
            prefix: what the outputs begin with, for each sentence, or one string for all.
            shortlist: the words that may come in the outputs, as `read_shortlist` gives it.
            batch_size: sentences decoded together, at most.
            workers: processes (Linux) or threads that decode batches at once, over one set of weights.
            search: fields of `SearchOptions`, such as `beam=4, nbest=2, profile="hf"`; greedy by default.

        Raises:
            TfexportError: the bundle has no vocabularies (use `translate_ids`), or an option cannot be used. A sentence
                that cannot be read raises nothing: its status says what is wrong.
        """
        if isinstance(texts, str):
            if not (prefix is None or isinstance(prefix, str)):
                raise TfexportError("one sentence has one prefix. Give a string, or a list of sentences.")
            return self.translate(
                [texts], prefix=prefix, shortlist=shortlist, batch_size=batch_size, workers=workers, **search
            )[0]
        return list(
            self.iterate(texts, prefix=prefix, shortlist=shortlist, batch_size=batch_size, workers=workers, **search)
        )

    @with_keywords(SearchOptions)
    def iterate(
        self,
        texts: Iterable[str],
        *,
        prefix: Iterable[str] | str | None = None,
        shortlist: Shortlist | None = None,
        batch_size: int = 32,
        workers: int = 1,
        **search: Any,
    ) -> Iterator[Translation]:
        """`translate` for more sentences than fit into memory: they are read, and results come, window by window."""
        lines: Iterable[bytes] = map(_line, texts)
        outputs = None
        if isinstance(prefix, str):
            lines, again = tee(lines)
            outputs = self._writer().reader(lines=(_line(prefix) for _ in again))
        elif prefix is not None:
            outputs = self._writer().reader(lines=map(_line, prefix))
        return self._decoded(lines, "text", outputs, shortlist, batch_size, workers, search)

    @with_keywords(SearchOptions)
    def translate_ids(
        self,
        sources: Iterable[Sequence[int]],
        *,
        shortlist: Shortlist | None = None,
        batch_size: int = 32,
        workers: int = 1,
        **search: Any,
    ) -> list[Translation]:
        """`translate` for ids as the encoder reads them, bos and eos included where the model has them."""
        lines = (_line(" ".join(map(str, source))) for source in sources)
        return list(self._decoded(lines, "ids", None, shortlist, batch_size, workers, search))

    @overload
    def score(  # type: ignore[overload-overlap]
        self, texts: str, targets: str, *, batch_size: int = 32, workers: int = 1
    ) -> Translation: ...
    @overload
    def score(
        self, texts: Iterable[str], targets: Iterable[str], *, batch_size: int = 32, workers: int = 1
    ) -> list[Translation]: ...
    def score(
        self, texts: str | Iterable[str], targets: str | Iterable[str], *, batch_size: int = 32, workers: int = 1
    ) -> Translation | list[Translation]:
        """How likely `targets` are as outputs of `texts`: results that have them as their outputs, with `log_prob` and
        `token_log_probs`, eos last.

        Raises:
            TfexportError: there are more of one than of the other, or the bundle has no vocabularies.
        """
        if isinstance(texts, str) != isinstance(targets, str):
            raise TfexportError("texts and targets are two strings, or two lists of strings. Give the same of both.")
        if isinstance(texts, str) and isinstance(targets, str):
            return self.score([texts], [targets], batch_size=batch_size, workers=workers)[0]
        reader = self._writer().reader(whole=True, lines=map(_line, targets))
        search = {
            "length_penalty": 0.0,
            "max_length": self.config.max_target_length,
            "token_scores": True,
        }
        return list(self._decoded(map(_line, texts), "text", reader, None, batch_size, workers, search, scored))

    @with_keywords(SearchOptions)
    def stream(
        self,
        text: str,
        *,
        prefix: str | None = None,
        shortlist: Shortlist | None = None,
        **search: Any,
    ) -> Iterator[Step]:
        """Decode one sentence and give each token as soon as it is decided; the texts of the steps, put together, are the
        output's text.

        Raises:
            TfexportError: the sentence cannot be read, or the options ask for more than one output.
        """
        reader, writer = Reader.of(self._bundle, "text"), self._writer()
        outputs = None if prefix is None else writer.reader(lines=[_line(prefix)])
        options = self._options(search)
        events = stream_lines(
            self._runtime, reader, [_line(text)], options, writer, outputs=outputs, shortlist=shortlist
        )
        for event in events:
            if event.step is not None:
                yield event.step
            elif event.result is not None and not event.result.hypotheses:
                raise TfexportError(f"this sentence cannot be decoded: {event.result.message or event.result.status}.")

    def read_shortlist(self, path: str | Path, *, first: int = FIRST, best: int = BEST) -> Shortlist:
        """The shortlist of a file, as `decode --shortlist` reads it, for `translate`. A bundle that was exported with
        `--shortlist`, and loaded with `load(..., shortlist=True)`, computes the logits of these words alone.

        Raises:
            TfexportError: it cannot be read, or its words are in no vocabulary.
        """
        tokenizers = (self._bundle.tokenizer("source"), self._bundle.tokenizer("target"))
        return read_shortlist(Path(path), self.config, *tokenizers, first=first, best=best)

    def _decoded(
        self,
        lines: Iterable[bytes],
        format: InputFormat,
        outputs: TargetReader | None,
        shortlist: Shortlist | None,
        batch_size: int,
        workers: int,
        search: Mapping[str, Any],
        finish: Callable[[Result], Result] = lambda result: result,
    ) -> Iterator[Translation]:
        if batch_size < 1 or workers < 1:
            raise TfexportError(f"batch_size is {batch_size} and workers {workers}. Give numbers above 0.")
        options = self._options(search)
        if outputs is not None:
            options = replace(options, scores=True)  # what begins with a prefix needs their graph
        require_workers(self._runtime.name, self._bundle, self._runtime.precision, workers)
        reader, writer = Reader.of(self._bundle, format), Writer.of(self._bundle, "jsonl")
        results = translate(
            self._runtime,
            reader,
            lines,
            options,
            batch_size=batch_size,
            workers=workers,
            outputs=outputs,
            shortlist=shortlist,
        )
        return (translation_of(finish(result), writer) for result in results)

    def _options(self, search: Mapping[str, Any]) -> SearchOptions:
        options, defaults = options_with_defaults(search, self._bundle.generation_config, self.config, self.token_ids)
        for line in defaults.notes():
            _log.info(line)
        return options

    def _writer(self) -> Writer:
        return Writer.of(self._bundle, "text")


class Classifier:
    """The bundle of an encoder classifier, loaded. `tfexport.load_classifier` makes one."""

    def __init__(self, bundle: Bundle, runtime: ClassifierRuntime, labels: Sequence[str] | None):
        self._bundle, self._runtime, self.labels = bundle, runtime, labels

    def classify(self, texts: Iterable[str], *, top: int = 1, batch_size: int = 32) -> list[Classified]:
        """The `top` most likely classes of each sentence, with their probabilities, in order.

        Raises:
            TfexportError: a number is below 1. A sentence that cannot be read raises nothing: its status says why.
        """
        if isinstance(texts, str):
            raise TfexportError("texts is one string. Give a list of sentences.")
        if batch_size < 1 or top < 1:
            raise TfexportError(f"batch_size is {batch_size} and top {top}. Give numbers above 0.")
        reader = Reader.of(self._bundle, "text")
        return list(classify(self._runtime, reader, map(_line, texts), top=top, batch_size=batch_size))


def load(
    directory: str | Path,
    *,
    runtime: str = "ort-cpu",
    precision: str | None = None,
    threads: int | None = None,
    shortlist: bool = False,
) -> Model:
    """Load a bundle that `tfexport export` wrote.

    Args:
        runtime: `ort-cpu`, `ort-cuda`, `tensorrt`, `torch` or `torch-cuda`.
        precision: one of the bundle's, `fp32`, `int8` and so on; fp32 by default, with `tensorrt` that of its engines.
        threads: CPU threads; all that the process may use by default.
        shortlist: for searches with shortlists, compute the logits of their words alone where the bundle has graphs for it.

    Raises:
        BundleError: the bundle is missing, damaged or a classifier's.
        RuntimeUnavailable: there is no such runtime, or what it needs is not installed.
        TfexportError: there is no such precision.
    """
    bundle = open_bundle(Path(directory))
    chosen = _one_precision(precision)
    _require_threads(threads)
    return Model(bundle, load_runtime(runtime, bundle, precision=chosen, threads=threads, shortlist=shortlist))


def load_classifier(
    directory: str | Path,
    *,
    runtime: str = "ort-cpu",
    precision: str | None = None,
    threads: int | None = None,
    labels: str | Path | None = None,
) -> Classifier:
    """Load the bundle of an encoder classifier; see `load`.

    Args:
        labels: a file with the names of the classes, one a line, class 0 first.
    """
    bundle = open_bundle(Path(directory))
    _require_threads(threads)
    loaded = runtime_of_classifier(runtime, bundle, precision=_one_precision(precision), threads=threads)
    return Classifier(bundle, loaded, None if labels is None else read_labels(Path(labels), bundle.config.n_classes))


def _require_threads(threads: int | None) -> None:
    if threads is not None and threads < 1:
        raise TfexportError(f"threads is {threads}. Give a number above 0, or none for all CPUs.")


def _one_precision(given: str | None) -> Precision | None:
    if given is None:
        return None
    chosen, *more = precisions_of(given)
    if more:
        raise TfexportError(f"a model is loaded in one precision, not {given}. Give one, or load it twice.")
    return chosen


def _line(text: str) -> bytes:
    # A lone surrogate is not UTF-8, as the reader of lines says.
    return text.encode("utf-8", "surrogatepass")
