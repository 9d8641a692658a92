"""Finds by trial the modules of a model that must stay in float32 so that its translations keep a budget.

Every trial emits graphs with these modules in float32, and decodes real text with them on ONNX Runtime.

1. Keep no module. If the budget holds, stop.
2. Put each module alone into low precision and keep the others. Sort the modules by their harm.
3. Find by bisection the smallest number of most harmful modules that is enough.
4. Release each of these again, the largest first, if the budget holds without it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfexport import contract, graph_contract
from tfexport.bundle.reader import Bundle, Graph, Origin
from tfexport.contract import Precision, short_name
from tfexport.decoding.line_reader import Reader
from tfexport.decoding.translate import Writer
from tfexport.dialects import RUNTIME_DIALECTS, runtime_dialects
from tfexport.errors import TfexportError
from tfexport.exporter.graphs import write_graphs
from tfexport.exporter.options import BudgetOptions
from tfexport.exporter.weights import write_variant
from tfexport.graphs import portable
from tfexport.graphs.projections import projections_of
from tfexport.graphs.stored_weights import StoredWeights
from tfexport.models.checkpoints.load import Checkpoint
from tfexport.models.model import EncoderClassifier, Model
from tfexport.models.transformer import Transformer
from tfexport.runtimes.base import Runtime
from tfexport.runtimes.ort_cpu.load import ort_cpu
from tfexport.system.input_files import opened
from tfexport.verification.budget_text import Metric, Text

METRICS: dict[Metric, str] = {
    "bleu": "BLEU points that greedy translations may lose against float32's",
    "chrf": "chrF points that they may lose",
    "top1": "smallest share of steps, along float32's translations, with its best token",
    "identical": "smallest share of sentences with float32's greedy tokens",
}


@dataclass(frozen=True)
class Budget:
    """The allowed loss of a low precision."""

    metric: Metric
    limit: float
    """See `METRICS`."""

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Parse a budget such as `bleu=0.1` or `top1=0.999`.

        Raises:
            TfexportError: the text has another form.
        """
        name, _, number = text.partition("=")
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        most = 1.0 if name in ("top1", "identical") else 100.0
        if name not in METRICS or not 0 <= limit <= most:
            raise TfexportError(
                f"--budget is {text!r}. Give bleu=POINTS or chrf=POINTS that may be lost, or top1=SHARE or "
                "identical=SHARE that must be the same, as in bleu=0.1 or top1=0.999."
            )
        return cls(name, limit)  # type: ignore[arg-type]

    @property
    def needs_targets(self) -> bool:
        return self.metric in ("bleu", "chrf")

    def holds(self, loss: float) -> bool:
        """Whether a loss of points, or of a share, is within the budget."""
        allowed = self.limit if self.needs_targets else 1 - self.limit
        return loss <= allowed + 1e-9

    def __str__(self) -> str:
        return f"{self.metric}={self.limit:g}"


@dataclass(frozen=True)
class Kept:
    """A module that stays in float32."""

    module: str
    loss: float
    """The loss if this module is in low precision and the others of the choice are kept; infinite if decoding failed."""
    extra_bytes: int
    """The additional size of its weights in float32."""


@dataclass(frozen=True)
class Choice:
    """The modules that stay in float32, and the effect."""

    budget: Budget
    kept: tuple[Kept, ...]
    modules: int
    """The number of modules of the model."""
    lost: float
    """The loss with this choice."""
    lost_without: float
    """The loss if no module is kept."""
    trials: int
    sentences: int

    @property
    def kept_modules(self) -> tuple[str, ...]:
        """The paths of the modules that stay in float32."""
        return tuple(kept.module for kept in self.kept)

    def summary(self, precision: str) -> list[str]:
        """Lines for the user: the modules that stay in float32, and their cost."""
        extra = sum(kept.extra_bytes for kept in self.kept) / 2**20
        first = (
            f"{precision} within {self.budget} on {self.sentences} sentences: {len(self.kept)} of {self.modules} modules "
            f"stay in fp32 ({extra:.1f} MiB more), lost {self.lost:.3g} (with none of them {self.lost_without:.3g}); "
            f"{self.trials} trials"
        )
        return [
            first,
            *(
                f"  {kept.module}: {kept.extra_bytes / 2**20:.1f} MiB more; {kept.loss:.3g} would be lost without it"
                for kept in self.kept
            ),
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, for the manifest; a loss that is not a finite number is None."""
        kept = {k.module: {"loss": _finite(k.loss), "extra_bytes": k.extra_bytes} for k in self.kept}
        losses = {"loss": _finite(self.lost), "loss_without": _finite(self.lost_without)}
        return {"budget": str(self.budget), **losses, "sentences": self.sentences, "float32": kept}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


class Trials:
    """Tries graphs with any modules in float32, in a folder that has the weights."""

    def __init__(self, model: Transformer, precision: Precision, folder: Path, text: Text, budget: Budget):
        self._model, self._precision, self._folder = model, precision, folder
        self._text, self._budget = text, budget
        # The graphs that are decoded on a CPU: int8 has no portable ones.
        dialects = RUNTIME_DIALECTS["ort-cpu"]
        self._dialects = [dialect for dialect in dialects if dialect == "ort" or precision == "float16"]
        self.count = 0

    def loss(self, keep: Collection[str]) -> float:
        return self._text.loss(self._runtime(keep), self._budget.metric)

    def harm(self, keep: Collection[str]) -> float:
        return self._text.harm(self._runtime(keep))

    def _runtime(self, keep: Collection[str]) -> Runtime:
        self.count += 1
        graphs = write_graphs(self._model.config, self._precision, self._folder, keep, dialects=self._dialects)
        bundle = Bundle(
            self._folder,
            self._model.config,
            Origin("", "", {}),
            tuple(Graph(graph.file, graph.role, graph.precision, graph.dialect) for graph in graphs),
            (),
            runtime_dialects(graphs),
            {},
            {},
        )
        return ort_cpu(bundle, precision=self._precision)


@dataclass(frozen=True)
class BudgetChooser:
    """The `exporter.pipeline.Chooser` that keeps the losses on `text` within `budget`."""

    budget: Budget
    text: Text

    def __call__(self, model: Model, precision: Precision, folder: Path) -> Choice:
        """The modules of `model` that must stay in float32 for the budget.

        Args:
            folder: has the weights of float32; those of `precision` and graphs are written there.

        Raises:
            TfexportError: the budget does not hold even with all of them in float32, or the model is a classifier.
        """
        if isinstance(model, EncoderClassifier):
            raise TfexportError(
                "encoder classifiers have no output to measure a budget on. Give a precision without auto-."
            )
        # Weights that are too large for float16 can be kept in float32.
        keep = [path for path, _ in model.named_modules()] if precision == "float16" else []
        write_variant(model, precision, folder, keep)
        return choose(model, precision, folder, self.text, self.budget)


def choose(model: Transformer, precision: Precision, folder: Path, text: Text, budget: Budget) -> Choice:
    """The modules of `model` that must stay in float32 for `budget`. None of them can be released.

    Args:
        folder: has the weights of `precision` and of float32; graphs are written there.

    Raises:
        TfexportError: the budget does not hold even with all of them in float32.
    """
    trials = Trials(model, precision, folder, text, budget)
    sizes = modules_of(model, precision, folder)
    lost = lost_without = trials.loss(())
    kept: list[str] = []
    reasons: dict[str, float] = {}
    if not budget.holds(lost):
        everything = trials.loss(sizes)
        if not budget.holds(everything):
            why = "" if precision in contract.QUANTIZED else ": the caches and the tensors between graphs stay in it"
            raise TfexportError(
                f"{short_name(precision)} does not keep {budget} even with all modules in fp32 (it loses "
                f"{everything:.3g}){why}. Allow more with --budget, or export in another precision."
            )
        harm = {module: trials.harm([other for other in sizes if other != module]) for module in sizes}
        kept = _fewest(sorted(sizes, key=lambda module: -harm[module]), lambda few: budget.holds(trials.loss(few)))
        while len(reasons) < len(kept):
            reasons = {}
            for module in sorted(kept, key=lambda module: -sizes[module]):
                rest = [other for other in kept if other != module]
                without = trials.loss(rest)
                if budget.holds(without):
                    kept, reasons = rest, {}  # earlier measurements included this module
                else:
                    reasons[module] = without
        lost = trials.loss(kept)
    chosen = tuple(Kept(module, reasons[module], sizes[module]) for module in kept)
    return Choice(budget, chosen, len(sizes), lost, lost_without, trials.count, text.sentences)


def _fewest(modules: Sequence[str], enough: Callable[[Sequence[str]], bool]) -> list[str]:
    """The shortest prefix of `modules` that is enough, by bisection. All modules are enough, an empty prefix is not."""
    too_few, high = 0, len(modules)
    while high - too_few > 1:
        middle = (too_few + high) // 2
        if enough(modules[:middle]):
            high = middle
        else:
            too_few = middle
    return list(modules[:high])


def modules_of(model: Transformer, precision: Precision, folder: Path) -> dict[str, int]:
    """The modules that may be kept in float32, with the additional bytes of their weights."""
    config = model.config
    if precision in contract.QUANTIZED:
        weights = model.state_dict()
        tied = model.output_matrix()
        bits = {"int8": 24, "int4": 28}[precision]
        return {
            projection.name: sum(weights.get(name, tied).numel() for name in projection.weights) * bits // 8
            for projection in projections_of(config)
        }
    stored = StoredWeights(folder / contract.weights_file(precision))
    graphs = graph_contract.graphs_of(config, precision)
    paths = [path for graph in graphs for path in portable.modules_in_half(graph, config, stored) if path]
    return {
        path: sum(2 * tensor.numel() for name, tensor in model.state_dict().items() if name.rpartition(".")[0] == path)
        for path in dict.fromkeys(paths)
    }


def choosers_of(
    checkpoint: Checkpoint, precisions: Sequence[Precision], options: BudgetOptions, say: Callable[[str], None]
) -> dict[Precision, BudgetChooser]:
    """The choosers of the float32 modules for each of these precisions.

    Raises:
        TfexportError: the budget or its text is missing, or the model does not decode text.
    """
    budget, source, targets = options.budget, options.budget_input, options.budget_targets
    if not precisions:
        if budget or source or targets:
            raise TfexportError("--budget needs an auto- precision. Give one, as in --precision fp32,auto-int8.")
        return {}
    if budget is None or source is None:
        raise TfexportError(
            "an auto- precision needs a budget and real text. Give both, as in --budget top1=0.999 --budget-input FILE."
        )
    parsed = Budget.parse(budget)
    if parsed.needs_targets and targets is None:
        raise TfexportError(f"{parsed.metric} compares with translations. Give them with --budget-targets FILE.")
    model, tokenizers = checkpoint.build_model(), checkpoint.tokenizers
    if not isinstance(model, Transformer):
        raise TfexportError("encoder classifiers do not decode, so they have no budget. Leave auto- out.")
    if parsed.needs_targets and tokenizers.target is None:
        raise TfexportError(
            f"{parsed.metric} needs text, and there is no target vocabulary. Give --tgt-vocab, or top1."
        )
    reader = Reader(model.config, tokenizers.source, "ids" if tokenizers.source is None else "text")
    writer = Writer(model.config, tokenizers.target, "text")
    with opened(source) as lines, contextlib.nullcontext() if targets is None else opened(targets) as wanted:
        text = Text.read(model, reader, writer, lines, wanted if parsed.needs_targets else None, say)
    return dict.fromkeys(precisions, BudgetChooser(parsed, text))
