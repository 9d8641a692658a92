"""What the runtimes of a bundle decode, beside the outputs of the owner's own program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfexport.bundle.reader import Bundle
from tfexport.contract import Precision
from tfexport.decoding.hypothesis import Hypothesis
from tfexport.decoding.search import SearchOptions, search
from tfexport.models.checkpoints.confirmation import Confirmation
from tfexport.models.checkpoints.recognise import FAMILIES
from tfexport.models.formats.native import Tokenizers
from tfexport.models.transformer import Transformer
from tfexport.runtimes.base import Runtime
from tfexport.verification.expected_outputs import Example, Examples, encoded, read_lines
from tfexport.verification.settings_search import ASSUMED, SEARCHED, Origin, Search, axes_of
from tfexport.verification.settings_trials import Trials, framed


@dataclass(frozen=True)
class Unexpected:
    """An output that differs from the expected one."""

    line: int
    index: int
    """The place of the first token that differs."""
    expected: str
    given: str


@dataclass(frozen=True)
class ExpectedReport:
    """The comparison of a runtime's greedy outputs with the expected ones."""

    runtime: str
    precision: Precision
    path: Path
    total: int
    differences: tuple[Unexpected, ...]

    @property
    def passed(self) -> bool:
        return not self.differences

    @property
    def right(self) -> int:
        """The number of outputs that are as expected."""
        return self.total - len(self.differences)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "runtime": self.runtime,
            "precision": self.precision,
            "file": str(self.path),
            "total": self.total,
            "right": self.right,
            "passed": self.passed,
            "differences": [vars(difference) for difference in self.differences],
        }


def examples_of(bundle: Bundle, path: Path) -> Examples:
    """The expected outputs of a file, in the ids of a bundle.

    Raises:
        TfexportError: a line cannot be read, or is too long for the model.
    """
    tokenizers = Tokenizers(bundle.tokenizer("source"), bundle.tokenizer("target"))
    examples = encoded(path, read_lines(path), bundle.config, tokenizers)
    examples.check_lengths(bundle.config)
    return examples


def compare_outputs(runtime: Runtime[Any], bundle: Bundle, examples: Examples, *, batch_size: int) -> ExpectedReport:
    """Decode the sources of examples by greedy search, and compare the outputs.

    Raises:
        TfexportError: the runtime returned logits that are not numbers.
    """
    config = bundle.config
    framing = examples.framing or (config.source_bos, config.source_eos)
    options = SearchOptions(beam=1, max_length=min(config.max_target_length, 2 * max(map(_goal, examples.rows)) + 8))
    size = runtime.capacity.batch_size(batch_size, 1)
    differences = []
    for start in range(0, len(examples.rows), size):
        rows = examples.rows[start : start + size]
        outputs = search(runtime, [framed(row, config, framing) for row in rows], options)
        for row, (hypothesis, *_) in zip(rows, outputs, strict=True):
            if (difference := _difference(row, hypothesis, examples, config.eos_id)) is not None:
                differences.append(difference)
    return ExpectedReport(runtime.name, runtime.precision, examples.path, len(examples), tuple(differences))


def _goal(row: Example) -> int:
    return row.goal


def _difference(row: Example, hypothesis: Hypothesis, examples: Examples, eos_id: int) -> Unexpected | None:
    """The first difference of an output; None if it is as expected, or if the owner's limit cut the expected one."""
    goal = (*row.output, eos_id)[: row.goal]
    given = hypothesis.ids[: len(goal)]
    if given == goal or _has_text(row, hypothesis, examples, eos_id):
        return None
    place = next((i for i, pair in enumerate(zip(goal, given, strict=False)) if pair[0] != pair[1]), len(given))

    def said(ids: Sequence[int]) -> str:
        if place >= len(ids):
            return "nothing"
        return "the end (eos)" if ids[place] == eos_id else str(ids[place])

    return Unexpected(row.line, place, said(goal), said(given))


def _has_text(row: Example, hypothesis: Hypothesis, examples: Examples, eos_id: int) -> bool:
    """Whether an output spells the expected text with other subwords."""
    if row.text is None:
        return False
    ids = [index for index in hypothesis.ids if index != eos_id]
    wanted, given = " ".join(row.text.split()), examples.said(ids)
    return given == wanted or (not row.ends and given.startswith(wanted))


def confirmed_by_outputs(bundle: Bundle, model: Transformer, examples: Examples) -> Confirmation:
    """The confirmation of a bundle whose runtimes give all expected outputs. Settings of which other values give the same
    outputs stay unconfirmed."""
    config, given = bundle.config, bundle.origin.given
    is_state_dict = bundle.origin.family in {family.name for family in FAMILIES}
    origins: dict[str, Origin] = {
        name: "given" if name in given else "assumed"
        for name in SEARCHED
        if name in given or (is_state_dict and name in ASSUMED)
    }
    if config.positions != "sinusoidal":
        origins.pop("positions", None)
    if config.d_head or config.positions == "relative":
        origins.pop("n_heads", None)
    known = {name: getattr(config, name) for name in SEARCHED}
    axes = axes_of(config, known, origins, examples, [config.norm])
    framing = examples.framing or (config.source_bos, config.source_eos)
    trials = Search(Trials(config, {config.norm: model.state_dict()}), axes, examples, framing)
    same = trials.changed_alone()
    total = len(examples)
    about = f"{total} of {total} expected outputs of {examples.path.name}"
    return Confirmation(by="outputs", about=about, unconfirmed={name: known[name] for name in same})
