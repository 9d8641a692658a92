"""`Translator`: a bundle that decodes the rows of batches, as `Dataset.map_batches` of Ray Data gives them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfexport.api.arguments import group_of, path_of, precision_of, require_runtime
from tfexport.api.line_decoder import LineDecoder
from tfexport.bundle.reader import open_bundle
from tfexport.decoding.generation_config import options_with_defaults
from tfexport.decoding.line_reader import Reader, TargetReader
from tfexport.decoding.request_options import InputFormat, RuntimeOptions
from tfexport.decoding.translate import Result, Writer
from tfexport.errors import TfexportError
from tfexport.option import declared, with_keywords
from tfexport.runtimes import load_runtime
from tfexport.scale.options import ActorBatches
from tfexport.scale.row_function import Kind, Row, RowFunction, columns_read, lines_of
from tfexport.search.options import SearchOptions
from tfexport.text.tokenizer_parts import PanicError

WINDOW = 16_384
"""Rows whose lengths are sorted together: all of a shard, because nobody waits for the first."""


WITHOUT_EFFECT = {
    "token_scores": "the output has no scores of tokens",
    "attention": "the output has no attention",
    "constraint_order": "rows have no required phrases",
}
"""Options of a search that rows of a corpus have no use for, and why."""


class Translator(RowFunction):
    """Adds translations to batches: a callable class, of which each actor of Ray Data makes one.

        dataset.map_batches(
            tfexport.scale.Translator,
            fn_constructor_args=["/models/de-en"],
            fn_constructor_kwargs={"text_column": "de", "beam": 4},
            batch_format="pyarrow", batch_size=4096, num_cpus=1, concurrency=8,
        )

    It takes tables of PyArrow, dictionaries of arrays (the default of Ray Data) and data frames of pandas, and gives
    back what it got with more columns: `text`, `status`, `message`, `score`, and `nbest` where several hypotheses are
    asked for. A column of the batch with one of these names is renamed to `input_NAME`.

    Args:
        bundle: the folder, on the machine of the actor.
        text_column: the column that has the text.
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
        search = {name: value for name, value in options.items() if name not in others}
        _require_effect(search)
        require_runtime(runtime.runtime, batches.threads)
        opened = open_bundle(path_of("bundle", bundle))
        self._batches = batches
        loaded = load_runtime(
            runtime.runtime, opened, precision=precision_of(runtime.precision), threads=batches.threads
        )
        self._lines, self._search = LineDecoder(opened, loaded), search
        self._options = self._lines.options(search)
        self._decoder("")  # tells of options that cannot be used

    @classmethod
    def described(cls, bundle: Path, options: Mapping[str, Any]) -> dict[str, Any]:
        """See `RowFunction.described`."""
        _require_effect(options)
        opened = open_bundle(bundle)
        Reader.of(opened, "text")
        writer = Writer.of(opened, "text")
        given = {name: value for name, value in options.items() if name in declared(SearchOptions)}
        search, _ = options_with_defaults(given, opened.generation_config, opened.config, writer.token_ids)
        chosen = {name: options.get(name) for name in ("text_column", *declared(RuntimeOptions))}
        return {**chosen, "search": asdict(search)}

    @classmethod
    def for_text(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Without scores, as in `tfexport decode`: greedy search is faster without them."""
        return {"scores": False, **options}

    @property
    def added(self) -> Mapping[str, Kind]:
        """The columns that it adds."""
        options = self._options
        one: dict[str, Kind] = {"text": str, "status": str, "message": str, "score": float}
        several = max(options.nbest, options.samples, options.alternatives) > 1
        return {**one, "nbest": [{"text": str, "score": float}]} if several else one

    def rows(self, values: Sequence[object], place: str = "", *, singly: bool = False) -> Iterator[Row]:
        """The translations of these values; see `RowFunction.rows`. Samples depend on the place, so that those of two
        places differ."""
        marked: dict[int, Row] = {}
        decoded = self._decoder(place, singly)(lines_of(values, marked), "text", None)
        for number, row in enumerate(decoded):
            yield marked.pop(number) if number in marked else row

    def _decoder(
        self, place: str, singly: bool = False
    ) -> Callable[[Iterable[bytes], InputFormat, TargetReader | None], Iterator[Row]]:
        search = dict(self._search)
        if self._options.samples:
            name = f"{self._options.seed} {place}".encode()
            search["seed"] = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest())
        window = 1 if singly else WINDOW
        given = {**search, "max_batch_tokens": self._batches.max_batch_tokens}
        return self._lines.decoder(False, None, self._batches.batch_size, 1, given, _row, window=window)

    def _place(self, values: Sequence[object]) -> str:
        if not self._options.samples:
            return ""
        # The same text is the same place, as strings and as bytes: each kind of batch draws the same samples.
        text = [one.decode("utf-8", "surrogateescape") if isinstance(one, bytes) else one for one in values]
        return hashlib.blake2b(repr(text).encode("utf-8", "surrogatepass")).hexdigest()

    def _values(self, row: Row) -> Mapping[str, Any]:
        best = {"text": row.found[0].text, "score": row.found[0].score} if row.found else {"text": ""}
        return {**best, "nbest": [{"text": one.text, "score": one.score} for one in row.found]}

    def line(self, row: Row) -> str:
        """The hypotheses, separated by tabs."""
        return "\t".join(one.text for one in row.found)


@dataclass(frozen=True, slots=True)
class Scored:
    """A hypothesis as it is written. To find its tokens too, as `Model.translate` does, takes a twentieth of the time."""

    text: str
    score: float


def _row(result: Result, writer: Writer) -> Row:
    words = writer.aligner.words
    try:
        found = [Scored(writer.text(one.ids, words(one, result.source)), one.score) for one in result.hypotheses]
    except PanicError as error:
        return Row("tokenizer_error", str(error))
    return Row(result.status, result.message, tuple(found))


def _require_effect(options: Mapping[str, Any]) -> None:
    """Raises TfexportError where an option is given that would be ignored."""
    for name, reason in WITHOUT_EFFECT.items():
        if options.get(name):
            raise TfexportError(f"{name} has no effect on a corpus: {reason}. Leave it out.")
