"""A bundle as a Python object: `tfexport.load("bundle").translate(["Ein Hund läuft."], beam=4)`.

It is what `tfexport decode` and `tfexport score` are made of, without files and lines: the same graphs, the same search, the
same numbers. PyTorch is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import tee
from pathlib import Path
from typing import Any, TypeVar, Unpack, overload

from tfexport.bundle import Bundle, open_bundle
from tfexport.config import ModelConfig
from tfexport.contract import Precision, precisions_of, short_name
from tfexport.errors import TfexportError
from tfexport.runtimes import load_runtime, require_workers
from tfexport.runtimes.base import FloatArray, Runtime
from tfexport.search import Hypothesis, SearchOptions
from tfexport.search_options import SearchSettings
from tfexport.translate import InputFormat, Reader, Result, Status, TargetReader, Writer, scored, translate

T = TypeVar("T")


@dataclass(frozen=True)
class Output:
    """One output of a source sentence."""

    text: str
    """Empty where the bundle has no target vocabulary."""
    tokens: tuple[str, ...]
    """As the vocabulary writes them, eos last when it came; empty where the bundle has no target vocabulary."""
    ids: tuple[int, ...]
    """Without bos, with eos when it came."""
    score: float
    """What outputs of one sentence are ranked by: the log-probability after length normalisation."""
    log_prob: float
    """Natural logarithm of the probability of all tokens together."""
    finished: bool
    """False where the length limit ended it, not eos."""
    token_log_probs: tuple[float, ...] = ()
    """Of each token, where `token_scores=True` asked for them."""
    attention: FloatArray | None = field(default=None, compare=False)
    """What each token attended to, [tokens, source ids], where `attention=True` asked for it: cross-attention of the layer
    `alignment_layer`, the mean of its heads. The bundle has to be exported with `--alignments`."""


@dataclass(frozen=True)
class Translation:
    """What became of one source sentence; `str()` of it is its best text."""

    status: Status
    """`ok`, or what is wrong with the sentence or its output; see the README's table."""
    message: str
    """What is wrong, in words; empty where nothing is."""
    outputs: tuple[Output, ...]
    """Best first, or in the order in which they were drawn; none where the sentence cannot be read."""

    @property
    def text(self) -> str:
        """The text of the first output; empty where there is none."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def score(self) -> float:
        """The score of the first output.

        Raises:
            TfexportError: there is none.
        """
        if not self.outputs:
            raise TfexportError(
                f"this sentence has no output: {self.message or self.status}. Look at its status first."
            )
        return self.outputs[0].score

    def __str__(self) -> str:
        return self.text


class Model:
    """A bundle, loaded. `tfexport.load` makes one.

    Its methods may be called from several threads at once, but for the runtime `torch-cuda`.
    """

    def __init__(self, bundle: Bundle, runtime: Runtime[Any]):
        self._bundle, self._runtime = bundle, runtime

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
        batch_size: int = 32,
        workers: int = 1,
        **search: Unpack[SearchSettings],
    ) -> Translation: ...
    @overload
    def translate(
        self,
        texts: Iterable[str],
        *,
        prefix: Iterable[str] | str | None = None,
        batch_size: int = 32,
        workers: int = 1,
        **search: Unpack[SearchSettings],
    ) -> list[Translation]: ...
    def translate(
        self,
        texts: str | Iterable[str],
        *,
        prefix: Iterable[str] | str | None = None,
        batch_size: int = 32,
        workers: int = 1,
        **search: Unpack[SearchSettings],
    ) -> Translation | list[Translation]:
        """Decode sentences: one result for each, in order. A single string gives a single result.

        Args:
            prefix: what the outputs begin with, for each sentence, or one string for all.
            batch_size: sentences decoded together, at most.
            workers: processes (Linux) or threads that decode batches at once, over one set of weights.
            search: as `SearchOptions` has them, such as `beam=4, nbest=2, profile="hf"`; greedy where nothing is said.

        Raises:
            TfexportError: the bundle has no vocabularies (use `translate_ids`), or an option cannot be used. A sentence
                that cannot be read raises nothing: its status says what is wrong.
        """
        if isinstance(texts, str):
            if not (prefix is None or isinstance(prefix, str)):
                raise TfexportError("one sentence has one prefix. Give a string, or a list of sentences.")
            return self.translate([texts], prefix=prefix, batch_size=batch_size, workers=workers, **search)[0]
        return list(self.iterate(texts, prefix=prefix, batch_size=batch_size, workers=workers, **search))

    def iterate(
        self,
        texts: Iterable[str],
        *,
        prefix: Iterable[str] | str | None = None,
        batch_size: int = 32,
        workers: int = 1,
        **search: Unpack[SearchSettings],
    ) -> Iterator[Translation]:
        """`translate` for more sentences than fit into memory: they are read, and results come, window by window."""
        lines: Iterable[bytes] = map(_line, texts)
        outputs = None
        if isinstance(prefix, str):
            lines, again = tee(lines)
            outputs = self._writer().reader(lines=(_line(prefix) for _ in again))
        elif prefix is not None:
            outputs = self._writer().reader(lines=map(_line, prefix))
        return self._decoded(lines, "text", outputs, batch_size, workers, search)

    def translate_ids(
        self,
        sources: Iterable[Sequence[int]],
        *,
        batch_size: int = 32,
        workers: int = 1,
        **search: Unpack[SearchSettings],
    ) -> list[Translation]:
        """`translate` for ids as the encoder reads them, bos and eos included where the model has them."""
        lines = (_line(" ".join(map(str, source))) for source in sources)
        return list(self._decoded(lines, "ids", None, batch_size, workers, search))

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
        search: SearchSettings = {
            "length_penalty": 0.0,
            "max_length": self.config.max_target_length,
            "token_scores": True,
        }
        return list(self._decoded(map(_line, texts), "text", reader, batch_size, workers, search, scored))

    def _decoded(
        self,
        lines: Iterable[bytes],
        format: InputFormat,
        outputs: TargetReader | None,
        batch_size: int,
        workers: int,
        search: SearchSettings,
        finish: Callable[[Result], Result] = lambda result: result,
    ) -> Iterator[Translation]:
        if batch_size < 1 or workers < 1:
            raise TfexportError(f"batch_size is {batch_size} and workers {workers}. Give numbers above 0.")
        profile = search.get("profile", "tfexport")
        options = SearchOptions.for_profile(profile, **{k: value for k, value in search.items() if k != "profile"})
        require_workers(self._runtime.name, self._bundle, self._runtime.precision, workers)
        reader, writer = Reader.of(self._bundle, format), Writer.of(self._bundle, "jsonl")
        results = translate(
            self._runtime, reader, lines, options, batch_size=batch_size, workers=workers, outputs=outputs
        )
        return (_translation(finish(result), writer) for result in results)

    def _writer(self) -> Writer:
        return Writer.of(self._bundle, "text")


def load(
    directory: str | Path,
    *,
    runtime: str = "ort-cpu",
    precision: str | None = None,
    threads: int | None = None,
) -> Model:
    """Load a bundle that `tfexport export` wrote.

    Args:
        runtime: `ort-cpu`, `ort-cuda`, `tensorrt`, `torch` or `torch-cuda`.
        precision: one of the bundle's, `fp32`, `int8` and so on; fp32 by default, with `tensorrt` that of its engines.
        threads: CPU threads; all that the process may use by default.

    Raises:
        BundleError: the bundle is missing, damaged or a classifier's.
        RuntimeUnavailable: there is no such runtime, or what it needs is not installed.
        TfexportError: there is no such precision.
    """
    chosen = None
    if precision is not None:
        chosen, *more = precisions_of(precision)
        if more:
            raise TfexportError(f"a model is loaded in one precision, not {precision}. Give one, or load it twice.")
    bundle = open_bundle(Path(directory))
    return Model(bundle, load_runtime(runtime, bundle, precision=chosen, threads=threads))


def _line(text: str) -> bytes:
    # A lone surrogate is not UTF-8, as the reader of lines says.
    return text.encode("utf-8", "surrogatepass")


def _translation(result: Result, writer: Writer) -> Translation:
    return Translation(result.status, result.message, tuple(_output(found, writer) for found in result.hypotheses))


def _output(found: Hypothesis, writer: Writer) -> Output:
    has_words = writer.tokenizer is not None
    return Output(
        text=writer.text(found.ids) if has_words else "",
        tokens=tuple(writer.tokenizer.tokens(found.ids)) if writer.tokenizer is not None else (),
        ids=found.ids,
        score=found.score,
        log_prob=found.log_prob,
        finished=found.finished,
        token_log_probs=found.token_log_probs,
        attention=found.attention,
    )
