"""`Scorer`: how likely given translations are, by a model and by one of the other direction, for filtering."""

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
from tfexport.scale.row_function import Kind, Row, RowFunction, columns_read, lines_of, refuse_others

_ONE = ("log_prob", "cross_entropy")
_BOTH = (*_ONE, "reverse_log_prob", "reverse_cross_entropy", "dual_cross_entropy", "noisy_channel")


@dataclass(frozen=True)
class Score:
    """Of a text as the output of another."""

    log_prob: float
    """Natural logarithm of its probability."""
    tokens: int
    """Their number, with eos."""

    @property
    def cross_entropy(self) -> float:
        """Nats for each token."""
        return -self.log_prob / self.tokens


def dual_cross_entropy(forward: float, reverse: float) -> float:
    """The score of Junczys-Dowmunt (2018), "Dual Conditional Cross-Entropy Filtering of Noisy Parallel Corpora".

    It is 1 for a pair of which both models are sure, and tends to 0 where one is not, or they disagree.

    Args:
        forward: cross-entropy of the target by the model, in nats for each token.
        reverse: of the source, by the reverse model.
    """
    if math.isinf(forward) or math.isinf(reverse):
        return 0.0
    return math.exp(-(abs(forward - reverse) + 0.5 * (forward + reverse)))


class Scorer(RowFunction):
    """Adds scores to batches of sentence pairs: a callable class, of which each actor of Ray Data makes one.

    It adds `status`, `message`, `log_prob` and `cross_entropy`, and with a reverse model `reverse_log_prob`,
    `reverse_cross_entropy`, `dual_cross_entropy` and `noisy_channel`. Batches are those of `Translator`.

    Args:
        bundle: the folder of the model, from sources to targets.
        source_column: the column that has the sources.
        target_column: the column that has their translations.
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
    def added(self) -> Mapping[str, Kind]:
        """The columns that it adds."""
        names = _ONE if self._reverse is None else _BOTH
        return {"status": str, "message": str, **dict.fromkeys(names, float)}

    def rows(self, values: Sequence[object], place: str = "", *, singly: bool = False) -> Iterator[Row]:
        """The scores of pairs; see `RowFunction.rows`."""
        marked: dict[int, Row] = {}
        forward = self._scores(self._forward, values, 0, 1, marked, singly)
        if self._reverse is None:
            found = ((one, None) for one in forward)
        else:
            found = zip(forward, self._scores(self._reverse, values, 1, 0, {}, singly), strict=True)  # type: ignore[assignment]
        for number, (there, back) in enumerate(found):
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
        """The scores of one part of each value as the output of another part, by a model."""
        writer = job.setup.writer
        outputs = writer.reader(whole=True, lines=lines_of(values, {}, target))
        results = replace(job, window=1 if singly else None).lines(lines_of(values, marked, source), outputs=outputs)
        return (scored_translation_of(result, writer) for result in results)

    def _values(self, row: Row) -> Mapping[str, Any]:
        if not row.found:
            return {}
        forward, *others = row.found
        found = {"log_prob": forward.log_prob, "cross_entropy": forward.cross_entropy}
        for reverse in others:
            there, back = forward.cross_entropy, reverse.cross_entropy
            found |= {"reverse_log_prob": reverse.log_prob, "reverse_cross_entropy": back}
            found["dual_cross_entropy"] = dual_cross_entropy(there, back)
            found["noisy_channel"] = -there - self._chosen.channel_weight * back
        return found

    def line(self, row: Row) -> str:
        """The scores in the order of their columns, separated by tabs."""
        found = self._values(row)
        return "\t".join(f"{found[name]:.6f}" for name in self.added if name in found)


def _request(bundle: Bundle) -> Request:
    return Request(search=whole_outputs(bundle.config), input_format="text", output_format="text")


def _row(forward: Translation, reverse: Translation | None) -> Row:
    if not forward.hypotheses:
        return Row(forward.status, forward.message)
    if reverse is not None and not reverse.hypotheses:
        return Row(reverse.status, f"reverse model: {reverse.message or reverse.status}")
    found = (forward, reverse) if reverse is not None else (forward,)
    outputs = [one.hypotheses[0] for one in found]
    return Row("ok", "", tuple(Score(one.log_prob, len(one.token_log_probs)) for one in outputs))
