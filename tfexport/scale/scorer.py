"""`Scorer`: scores pairs of a sentence and its translation for filtering, also with a model of the reverse direction."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfexport.api.arguments import group_of, path_of, precision_of, require_runtime
from tfexport.api.results import Translation, scored_translation_of
from tfexport.bundle.reader import MANIFEST, Bundle, file_sha256, open_bundle
from tfexport.decoding.job import Job, Request, Setup, whole_outputs
from tfexport.decoding.request_options import RuntimeOptions
from tfexport.option import declared, with_keywords
from tfexport.runtimes import load_runtime
from tfexport.scale.options import ActorBatches, ScoreOptions
from tfexport.scale.row_function import ColumnType, Row, RowFunction, columns_read, lines_of, refuse_others

_FORWARD = ("log_prob", "cross_entropy")
_BOTH = (*_FORWARD, "reverse_log_prob", "reverse_cross_entropy", "dual_cross_entropy", "noisy_channel")


@dataclass(frozen=True)
class Score:
    """The score of a text as the output of a model for another text."""

    log_prob: float
    """The natural logarithm of the probability of the text."""
    tokens: int
    """The number of tokens, with eos."""

    @property
    def cross_entropy(self) -> float:
        """The cross-entropy, in nats per token."""
        return -self.log_prob / self.tokens


def dual_cross_entropy(forward: float, reverse: float) -> float:
    """The score of Junczys-Dowmunt (2018), "Dual Conditional Cross-Entropy Filtering of Noisy Parallel Corpora".

    It is 1 if both models give the pair a probability of 1. It falls towards 0 with higher cross-entropies, and with a
    larger difference between them.

    Args:
        forward: the cross-entropy of the target by the model, in nats per token.
        reverse: the cross-entropy of the source by the reverse model, in nats per token.
    """
    if math.isinf(forward) or math.isinf(reverse):
        return 0.0
    return math.exp(-(abs(forward - reverse) + 0.5 * (forward + reverse)))


class Scorer(RowFunction):
    """A callable class that adds scores to batches of sentence pairs. Each actor of Ray Data creates one instance.

    It adds the columns `status`, `message`, `log_prob` and `cross_entropy`, and with a reverse model `reverse_log_prob`,
    `reverse_cross_entropy`, `dual_cross_entropy` and `noisy_channel`. It takes the batches that `Translator` takes.

    Args:
        bundle: the folder of the model, from sources to targets.
        source_column: the name of the column with the sources.
        target_column: the name of the column with their translations.
        options: fields of `ScoreOptions`, `RuntimeOptions` and `ActorBatches`.

    Raises:
        TfexportError: a bundle or an option cannot be used.
    """

    @with_keywords(ScoreOptions, ActorBatches, RuntimeOptions)
    def __init__(
        self, bundle: str | Path, *, source_column: str = "source", target_column: str = "target", **options: Any
    ):
        columns = {"source_column": source_column, "target_column": target_column}
        self._made_with, self.reads = (bundle, {**columns, **options}), columns_read(**columns)
        refuse_others(options, ScoreOptions, ActorBatches, RuntimeOptions)
        self._chosen, batches = group_of(ScoreOptions, options), group_of(ActorBatches, options)
        runtime = group_of(RuntimeOptions, options)
        require_runtime(runtime.runtime, batches.threads)

        def job_of(folder: Path) -> Job:
            opened, precision = open_bundle(folder), precision_of(runtime.precision)
            loaded = load_runtime(runtime.runtime, opened, precision=precision, threads=batches.threads)
            return Job(
                setup=Setup.of(opened, _request(opened)),
                runtime=loaded,
                batch_size=batches.batch_size,
                max_batch_tokens=batches.max_batch_tokens,
            )

        self._forward = job_of(path_of("bundle", bundle))
        self._reverse = job_of(self._chosen.reverse) if self._chosen.reverse is not None else None

    @classmethod
    def described(cls, bundle: Path, options: Mapping[str, Any]) -> dict[str, Any]:
        """See `RowFunction.described`."""
        columns_read(**{name: options[name] for name in ("source_column", "target_column") if name in options})
        reverse = options.get("reverse")
        for folder in (bundle, *([Path(reverse)] if reverse is not None else [])):
            opened = open_bundle(folder)
            Setup.of(opened, _request(opened))  # raises errors of options before a run begins
        names = ("source_column", "target_column", *declared(RuntimeOptions))
        about = {name: options.get(name) for name in names}
        if reverse is None:
            return about
        weight = options.get("channel_weight", ScoreOptions().channel_weight)
        return {**about, "reverse": file_sha256(Path(reverse) / MANIFEST), "channel_weight": weight}

    @property
    def added(self) -> Mapping[str, ColumnType]:
        """See `RowFunction.added`."""
        names = _FORWARD if self._reverse is None else _BOTH
        return {"status": str, "message": str, **dict.fromkeys(names, float)}

    def rows(self, values: Sequence[object], position: str = "", *, singly: bool = False) -> Iterator[Row]:
        """The scores of pairs; see `RowFunction.rows`."""
        marked: dict[int, Row] = {}
        forward = self._scores(self._forward, values, 0, 1, marked, singly)
        pairs: Iterator[tuple[Translation, Translation | None]]
        if self._reverse is None:
            pairs = ((score, None) for score in forward)
        else:
            pairs = zip(forward, self._scores(self._reverse, values, 1, 0, {}, singly), strict=True)
        for number, (there, back) in enumerate(pairs):
            yield marked.pop(number) if number in marked else _row(there, back)

    def _scores(
        self,
        job: Job,
        values: Sequence[object],
        source: int,
        target: int,
        marked: dict[int, Row],
        singly: bool,
    ) -> Iterator[Translation]:
        """The scores of one item of each value as the output for another item.

        Args:
            source: the number of the item that the model reads.
            target: the number of the item that is scored.
            marked: see `lines_of`.
        """
        writer = job.setup.writer
        outputs = writer.reader(whole=True, lines=lines_of(values, {}, target))
        results = replace(job, window=1 if singly else None).lines(lines_of(values, marked, source), outputs=outputs)
        return (scored_translation_of(result, writer) for result in results)

    def _values(self, row: Row) -> Mapping[str, Any]:
        if not row.results:
            return {}
        forward, *others = row.results
        scores = {"log_prob": forward.log_prob, "cross_entropy": forward.cross_entropy}
        for reverse in others:
            there, back = forward.cross_entropy, reverse.cross_entropy
            scores |= {"reverse_log_prob": reverse.log_prob, "reverse_cross_entropy": back}
            scores["dual_cross_entropy"] = dual_cross_entropy(there, back)
            scores["noisy_channel"] = -there - self._chosen.channel_weight * back
        return scores

    def line(self, row: Row) -> str:
        """The scores in the order of their columns, separated by tabs."""
        scores = self._values(row)
        return "\t".join(f"{scores[name]:.6f}" for name in self.added if name in scores)


def _request(bundle: Bundle) -> Request:
    return Request(search=whole_outputs(bundle.config), input_format="text", output_format="text")


def _row(forward: Translation, reverse: Translation | None) -> Row:
    if not forward.hypotheses:
        return Row(forward.status, forward.message)
    if reverse is not None and not reverse.hypotheses:
        return Row(reverse.status, f"reverse model: {reverse.message or reverse.status}")
    outputs = [side.hypotheses[0] for side in (forward, reverse) if side is not None]
    return Row("ok", "", tuple(Score(output.log_prob, len(output.token_log_probs)) for output in outputs))
