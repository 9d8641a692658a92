"""A loaded bundle: `tfexport.load("bundle").translate(["Ein Hund läuft."], beam=4)`.

`tfexport decode` and `tfexport score` do the same with files and lines: the same graphs, the same search, the same numbers.
They do not need PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import tee
from pathlib import Path
from typing import Any, overload

from numpy.typing import NDArray

from tfexport.api.arguments import (
    Keywords,
    flag_of,
    id_sources_of,
    line_of,
    lines_of,
    live_sources_of,
    pairs_of,
    path_of,
    phrases_of,
    phrases_of_one,
    precision_of,
    require_runtime,
    require_several,
    sources_of,
    texts_of,
)
from tfexport.api.asynchronous import AsyncTranslation
from tfexport.api.documents import DocumentTranslation, document_translation_of
from tfexport.api.results import Translation, scored_translation_of, translation_of
from tfexport.bundle.reader import Bundle, open_bundle
from tfexport.decoding.documents import Unit
from tfexport.decoding.glossary import Glossary
from tfexport.decoding.job import Job, Request, whole_outputs
from tfexport.decoding.line_reader import TargetReader
from tfexport.decoding.request_options import (
    AlignmentOptions,
    BatchLimits,
    InputFormat,
    KeepOptions,
)
from tfexport.decoding.shortlist import Shortlist
from tfexport.decoding.stream import Step, Streamed, refuse_several
from tfexport.documents.options import DocumentOptions
from tfexport.errors import TfexportError
from tfexport.option import with_keywords
from tfexport.runtimes import load_runtime
from tfexport.search.options import SearchOptions

__all__ = ["Model", "load"]


class Model(AsyncTranslation):
    """A loaded bundle, returned by `tfexport.load`.

    Several threads may call its methods concurrently, except with the runtime `torch-cuda`.
    """

    @overload
    def translate(  # type: ignore[overload-overlap]  # a string is many strings to the type checker
        self,
        texts: str,
        *,
        prefix: str | None = None,
        shortlist: Shortlist | None = None,
        constraints: Sequence[str] | None = None,
        glossary: Glossary | Mapping[str, str] | None = None,
        batch_size: int = 32,
        workers: int = 1,
        **options: Any,
    ) -> Translation: ...
    @overload
    def translate(
        self,
        texts: Iterable[str] | Iterable[Sequence[str]],
        *,
        prefix: Iterable[str] | str | None = None,
        shortlist: Shortlist | None = None,
        constraints: Iterable[Sequence[str]] | None = None,
        glossary: Glossary | Mapping[str, str] | None = None,
        batch_size: int = 32,
        workers: int = 1,
        **options: Any,
    ) -> list[Translation]: ...
    @with_keywords(SearchOptions, AlignmentOptions, KeepOptions, BatchLimits)
    def translate(
        self,
        texts: str | Iterable[str] | Iterable[Sequence[str]],
        *,
        prefix: Iterable[str] | str | None = None,
        shortlist: Shortlist | None = None,
        constraints: Iterable[Sequence[str]] | Sequence[str] | None = None,
        glossary: Glossary | Mapping[str, str] | None = None,
        batch_size: int = 32,
        workers: int = 1,
        **options: Any,
    ) -> Translation | list[Translation]:
        """Decode sentences: one result for each, in order. A single string has a single result.

        Args:
            texts: a sentence, several, or lists of tokens, which are not split any further.
            prefix: the prefix of the outputs: one for each sentence, or one string for all.
            shortlist: the words that outputs may contain, from `read_shortlist`.
            constraints: for each sentence, the phrases that its outputs must contain.
            glossary: the phrases that outputs must or must not contain where a source phrase occurs, from `read_glossary`,
                or a dictionary of source phrases and target phrases.
            batch_size: the largest number of sentences decoded together.
            workers: processes (Linux) or threads that decode batches concurrently, over one set of weights.
            options: fields of `SearchOptions`, such as `beam=4, nbest=2, profile="hf"` (greedy by default); `alignments`,
                `replace_unk` and `unk_dictionary`, as flags of `tfexport decode`; and `max_batch_tokens`.

        Raises:
            TfexportError: the bundle has no vocabularies (use `translate_ids`), or an argument cannot be used. A sentence
                that cannot be read does not raise: its status has the reason.
        """
        if isinstance(texts, str):
            if not (prefix is None or isinstance(prefix, str)):
                raise TfexportError("one sentence has one prefix. Give a string, or a list of sentences.")
            several = None if constraints is None else [constraints]
            return self.translate(
                [texts],
                prefix=prefix,
                shortlist=shortlist,
                constraints=several,  # type: ignore[arg-type]  # checked as it is read
                glossary=glossary,
                batch_size=batch_size,
                workers=workers,
                **options,
            )[0]
        lines, format = sources_of(texts)
        keywords = Keywords.parse(options, AlignmentOptions, KeepOptions, BatchLimits)
        terms = self._terms(keywords, glossary, None if constraints is None else phrases_of(constraints))
        outputs = None
        if prefix is not None:
            prefixes = [prefix] * len(lines) if isinstance(prefix, str) else prefix
            outputs = self._target().reader(lines=lines_of("prefix", prefixes))
        setup = self._setup_of(keywords, format, prefix is not None, terms, shortlist)
        return _translations(self._job(setup, keywords, batch_size, workers), lines, outputs)

    @with_keywords(SearchOptions, AlignmentOptions, KeepOptions, BatchLimits)
    def iterate(
        self,
        texts: Iterable[str] | Iterable[Sequence[str]],
        *,
        prefix: Iterable[str] | str | None = None,
        shortlist: Shortlist | None = None,
        constraints: Iterable[Sequence[str]] | None = None,
        glossary: Glossary | Mapping[str, str] | None = None,
        batch_size: int = 32,
        workers: int = 1,
        **options: Any,
    ) -> Iterator[Translation]:
        """`translate` for sentences that do not fit into memory, or that arrive one by one; results are in order.

        The type of the first of `texts`, string or list of tokens, must be that of all.

        No result waits for sentences that have not arrived yet. A thread reads `texts`, at most some batches ahead, and the
        sentences that have arrived are decoded together; a list is decoded in whole batches. An error of `texts` is raised
        after the results of the sentences before it. To stop early, close or drop the iterator.
        """
        several = require_several(texts)
        prefixes: bytes | Iterator[bytes] | None = None
        if prefix is not None:
            prefixes = line_of("prefix", prefix) if isinstance(prefix, str) else lines_of("prefix", prefix)
        live = not all(isinstance(values, Sequence) for values in (texts, prefix, constraints) if values is not None)
        keywords = Keywords.parse(options, AlignmentOptions, KeepOptions, BatchLimits)
        terms = self._terms(keywords, glossary, None if constraints is None else phrases_of(constraints))

        def job_of(format: InputFormat) -> Job:
            setup = self._setup_of(keywords, format, prefix is not None, terms, shortlist)
            return self._job(setup, keywords, batch_size, workers)

        job_of("text")  # raises errors before `texts` are read

        def results() -> Iterator[Translation]:
            lines, format = live_sources_of(several)  # waits for the first sentence
            outputs = None
            if isinstance(prefixes, bytes):
                lines, again = tee(lines)
                outputs = self._target().reader(lines=(prefixes for _ in again))
            elif prefixes is not None:
                outputs = self._target().reader(lines=prefixes)
            job = job_of(format)
            for result in job.lines(lines, outputs=outputs, live=live):
                yield translation_of(result, job.setup.writer)

        return results()

    @overload
    def translate_document(  # type: ignore[overload-overlap]
        self,
        texts: str,
        *,
        shortlist: Shortlist | None = None,
        glossary: Glossary | Mapping[str, str] | None = None,
        batch_size: int = 32,
        workers: int = 1,
        **options: Any,
    ) -> DocumentTranslation: ...
    @overload
    def translate_document(
        self,
        texts: Iterable[str],
        *,
        shortlist: Shortlist | None = None,
        glossary: Glossary | Mapping[str, str] | None = None,
        batch_size: int = 32,
        workers: int = 1,
        **options: Any,
    ) -> list[DocumentTranslation]: ...
    @with_keywords(DocumentOptions, SearchOptions, AlignmentOptions, KeepOptions, BatchLimits)
    def translate_document(
        self,
        texts: str | Iterable[str],
        *,
        shortlist: Shortlist | None = None,
        glossary: Glossary | Mapping[str, str] | None = None,
        batch_size: int = 32,
        workers: int = 1,
        **options: Any,
    ) -> DocumentTranslation | list[DocumentTranslation]:
        """Translate texts of any length, sentence by sentence. The text around the sentences stays unchanged.

        Args:
            texts: a text, or several, which share batches.
            shortlist: as in `translate`.
            glossary: as in `translate`.
            batch_size: as in `translate`.
            workers: as in `translate`.
            options: `split` (sentences by default), `language` and `markup`, as flags of `tfexport decode`; and those of
                `translate`. `markup` needs a bundle that was exported with `--alignments`.

        Raises:
            RuntimeUnavailable: a library that splits texts is not installed: pip install 'tfexport[documents]'.
            TfexportError: as in `translate`. A sentence that cannot be translated does not raise: it stays unchanged, and
                its status has the reason.
        """
        keywords = Keywords.parse(options, DocumentOptions, AlignmentOptions, KeepOptions, BatchLimits)
        moves_tags, terms = keywords.documents.markup is not None, self._terms(keywords, glossary, None)
        setup = self._setup_of(keywords, "text", False, terms, shortlist, moves_tags=moves_tags)
        job = self._job(setup, keywords, batch_size, workers)
        maker = job.document_maker(keywords.documents)
        units = (Unit(number, maker.document(text)) for number, text in enumerate(texts_of(texts), start=1))
        results = job.documents(units, moves_tags=moves_tags)
        documents = [document_translation_of(result, setup.writer) for result in results]
        return documents[0] if isinstance(texts, str) else documents

    @with_keywords(SearchOptions, AlignmentOptions, BatchLimits)
    def translate_ids(
        self,
        sources: Iterable[Sequence[int]] | NDArray[Any],
        *,
        shortlist: Shortlist | None = None,
        batch_size: int = 32,
        workers: int = 1,
        **options: Any,
    ) -> list[Translation]:
        """`translate` for ids as the encoder reads them, including bos and eos if the model uses them, without padding.

        Args:
            sources: the integer ids of each sentence: lists, NumPy arrays or PyTorch tensors.
        """
        lines, keywords = id_sources_of(sources), Keywords.parse(options, AlignmentOptions, BatchLimits)
        setup = self._setup_of(keywords, "ids", False, None, shortlist)
        return _translations(self._job(setup, keywords, batch_size, workers), lines)

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
        """Score `targets` as outputs of `texts`. The results have them as outputs, with `log_prob` and `token_log_probs`,
        eos last.

        Raises:
            TfexportError: the numbers of texts and targets differ, or the bundle has no vocabularies.
        """
        sources, outputs = pairs_of(texts, targets)
        reader = self._target().reader(whole=True, lines=lines_of("targets", outputs))
        request = Request(search=whole_outputs(self.config), input_format="text", output_format="jsonl")
        job = self._job(self._setup(request), Keywords.parse({}), batch_size, workers)
        results = job.lines(lines_of("texts", sources), outputs=reader)
        scores = [scored_translation_of(result, job.setup.writer) for result in results]
        return scores[0] if isinstance(texts, str) else scores

    @with_keywords(SearchOptions, KeepOptions)
    def stream(
        self,
        text: str,
        *,
        prefix: str | None = None,
        shortlist: Shortlist | None = None,
        constraints: Sequence[str] | None = None,
        glossary: Glossary | Mapping[str, str] | None = None,
        **search: Any,
    ) -> Iterator[Step]:
        """Decode one sentence and yield each token as soon as it is decided. The concatenated texts of the steps are the
        output's text.

        Raises:
            TfexportError: the sentence cannot be read, or the options request more than one output.
        """
        outputs = None if prefix is None else self._target().reader(lines=[line_of("prefix", prefix)])
        keywords = Keywords.parse(search, KeepOptions)
        terms = self._terms(keywords, glossary, None if constraints is None else [phrases_of_one(constraints)])
        setup = self._setup_of(keywords, "text", prefix is not None, terms, shortlist)
        refuse_several(setup.search)
        job, line = Job(setup=setup, runtime=self._runtime), line_of("text", text)
        return _steps(job.stream([line], outputs=outputs))


def _translations(job: Job, lines: Iterable[bytes], outputs: TargetReader | None = None) -> list[Translation]:
    return [translation_of(result, job.setup.writer) for result in job.lines(lines, outputs=outputs)]


def _steps(events: Iterable[Streamed]) -> Iterator[Step]:
    """The tokens of one sentence.

    Raises:
        TfexportError: the sentence cannot be decoded.
    """
    for event in events:
        if event.step is not None:
            yield event.step
        elif event.result is not None and not event.result.hypotheses:
            raise TfexportError(f"this sentence cannot be decoded: {event.result.message or event.result.status}.")


def load(
    directory: str | Path | Bundle,
    *,
    runtime: str = "ort-cpu",
    precision: str | None = None,
    threads: int | None = None,
    shortlist: bool = False,
) -> Model:
    """Load a bundle that `tfexport export` wrote.

    Args:
        directory: the folder, or a bundle that is open already.
        runtime: `ort-cpu`, `ort-cuda`, `tensorrt`, `torch` or `torch-cuda`.
        precision: a precision of the bundle, such as `fp32` or `int8`; by default fp32, with `tensorrt` that of its engines.
        threads: CPU threads; by default all that the process may use.
        shortlist: compute only the logits of the words of shortlists, if the bundle has graphs for it.

    Raises:
        BundleError: the bundle is missing, damaged or a classifier's.
        RuntimeUnavailable: the runtime does not exist, or its packages are not installed.
        TfexportError: the precision does not exist.
    """
    bundle = directory if isinstance(directory, Bundle) else open_bundle(path_of("directory", directory))
    chosen = precision_of(precision)
    require_runtime(runtime, threads)
    shortlist = flag_of("shortlist", shortlist)
    return Model(bundle, load_runtime(runtime, bundle, precision=chosen, threads=threads, shortlist=shortlist))
