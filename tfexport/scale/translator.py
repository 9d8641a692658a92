"""`Translator`: decodes the rows of batches, for `Dataset.map_batches` of Ray Data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tfexport.api.arguments import NOT_OF_SEARCH, group_of, path_of, precision_of, require_runtime
from tfexport.bundle.reader import open_bundle
from tfexport.decoding.job import Job, Request, Setup
from tfexport.decoding.request_options import RuntimeOptions
from tfexport.decoding.translate import Result, Writer
from tfexport.errors import TfexportError
from tfexport.option import Given, declared, with_keywords
from tfexport.runtimes import load_runtime
from tfexport.scale.options import ActorBatches
from tfexport.scale.row_function import ColumnType, Row, RowFunction, columns_read, lines_of
from tfexport.search.options import SearchOptions
from tfexport.text.tokenizer_parts import PanicError

WINDOW = 16_384
"""The number of rows that are sorted by length together: all rows of a shard, because nobody waits for the first one."""
WITHOUT_EFFECT = {
    "token_scores": "the output has no scores of tokens",
    "attention": "the output has no attention",
    "constraint_order": "rows have no required phrases",
}
"""The options of a search that have no effect on a corpus, with the reasons."""


class Translator(RowFunction):
    """A callable class that adds translations to batches. Each actor of Ray Data creates one instance.

        dataset.map_batches(
            tfexport.scale.Translator,
            fn_constructor_args=["/models/de-en"],
            fn_constructor_kwargs={"text_column": "de", "beam": 4},
            batch_format="pyarrow", batch_size=4096, num_cpus=1, concurrency=8,
        )

    It takes tables of PyArrow, dictionaries of arrays (the default of Ray Data) and data frames of pandas, and returns a
    batch of the same type with more columns: `text`, `status`, `message`, `score`, and `nbest` if the options request
    several hypotheses. A column of the batch with one of these names is renamed to `input_NAME`.

    Args:
        bundle: the folder of the bundle, on the machine of the actor.
        text_column: the name of the column with the texts.
        options: fields of `SearchOptions`, `RuntimeOptions` and `ActorBatches`.

    Raises:
        TfexportError: the bundle or an option cannot be used.
    """

    @with_keywords(ActorBatches, RuntimeOptions, SearchOptions)
    def __init__(self, bundle: str | Path, *, text_column: str = "text", **options: Any):
        self.reads = columns_read(text_column=text_column)
        self._made_with = bundle, {"text_column": text_column, **options}
        batches, runtime = group_of(ActorBatches, options), group_of(RuntimeOptions, options)
        others = {*declared(ActorBatches), *declared(RuntimeOptions)}
        request = _request({name: value for name, value in options.items() if name not in others})
        require_runtime(runtime.runtime, batches.threads)
        opened = open_bundle(path_of("bundle", bundle))
        loaded = load_runtime(
            runtime.runtime, opened, precision=precision_of(runtime.precision), threads=batches.threads
        )
        self._job = Job(
            setup=Setup.of(opened, request),
            runtime=loaded,
            batch_size=batches.batch_size,
            max_batch_tokens=batches.max_batch_tokens,
            window=WINDOW,
        )

    @classmethod
    def described(cls, bundle: Path, options: Mapping[str, Any]) -> dict[str, Any]:
        """See `RowFunction.described`."""
        request = _request({name: value for name, value in options.items() if name in declared(SearchOptions)})
        chosen = {name: options.get(name) for name in ("text_column", *declared(RuntimeOptions))}
        return {**chosen, "search": asdict(Setup.of(open_bundle(bundle), request).search)}

    @classmethod
    def for_text(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options without scores, as in `tfexport decode`: greedy search is faster without them."""
        return {"scores": False, **options}

    @property
    def added(self) -> Mapping[str, ColumnType]:
        """See `RowFunction.added`."""
        search = self._job.setup.search
        columns: dict[str, ColumnType] = {"text": str, "status": str, "message": str, "score": float}
        several = max(search.nbest, search.samples, search.alternatives) > 1
        return {**columns, "nbest": [{"text": str, "score": float}]} if several else columns

    def rows(self, values: Sequence[object], position: str = "", *, singly: bool = False) -> Iterator[Row]:
        """The translations of texts; see `RowFunction.rows`. Samples at different positions differ."""
        marked: dict[int, Row] = {}
        job = self._job_at(position, singly=singly)
        for number, result in enumerate(job.lines(lines_of(values, marked))):
            yield marked.pop(number) if number in marked else _row(result, job.setup.writer)

    def _job_at(self, position: str, *, singly: bool) -> Job:
        job, setup = replace(self._job, window=1) if singly else self._job, self._job.setup
        if not setup.search.samples:
            return job
        name = f"{setup.search.seed} {position}".encode()
        seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest())
        return replace(job, setup=replace(setup, search=replace(setup.search, seed=seed)))

    def _position(self, values: Sequence[object]) -> str:
        if not self._job.setup.search.samples:
            return ""
        # Equal for strings and bytes of the same text: all types of batches draw the same samples.
        texts = [value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value for value in values]
        return hashlib.blake2b(repr(texts).encode("utf-8", "surrogatepass")).hexdigest()

    def _values(self, row: Row) -> Mapping[str, Any]:
        hypotheses = [{"text": hypothesis.text, "score": hypothesis.score} for hypothesis in row.results]
        return {**(hypotheses[0] if hypotheses else {"text": ""}), "nbest": hypotheses}

    def line(self, row: Row) -> str:
        """The hypotheses, separated by tabs."""
        return "\t".join(hypothesis.text for hypothesis in row.results)


@dataclass(frozen=True, slots=True)
class Scored:
    """The text and score of a hypothesis. Its tokens, which `Model.translate` finds too, would take 5% of the time."""

    text: str
    score: float


def _row(result: Result, writer: Writer) -> Row:
    words = writer.aligner.words
    try:
        hypotheses = [
            Scored(writer.text(hypothesis.ids, words(hypothesis, result.source)), hypothesis.score)
            for hypothesis in result.hypotheses
        ]
    except PanicError as error:
        return Row("tokenizer_error", str(error))
    return Row(result.status, result.message, tuple(hypotheses))


def _request(options: Mapping[str, Any]) -> Request:
    """The request for these options of a search.

    Raises:
        TfexportError: an option cannot be used, or would have no effect.
    """
    for name, reason in WITHOUT_EFFECT.items():
        if options.get(name):
            raise TfexportError(f"{name} has no effect on a corpus: {reason}. Leave it out.")
    return Request(
        search=Given.parse(SearchOptions, options, others=NOT_OF_SEARCH), input_format="text", output_format="text"
    )
