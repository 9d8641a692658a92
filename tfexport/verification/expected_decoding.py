"""Compares the outputs of runtimes with those of the owner's own program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfexport.bundle.reader import Bundle
from tfexport.contract import Precision
from tfexport.models.formats.native import Tokenizers
from tfexport.runtimes.base import Runtime
from tfexport.search.search import SearchOptions, search
from tfexport.verification.expected_outputs import Difference, Example, Examples, encoded, read_lines


@dataclass(frozen=True)
class ExpectedReport:
    """The comparison of a runtime's greedy outputs with the expected ones."""

    runtime: str
    precision: Precision
    path: Path
    total: int
    differences: tuple[Difference, ...]

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


def compare_outputs(runtime: Runtime, examples: Examples, *, batch_size: int) -> ExpectedReport:
    """Decode the sources of examples by greedy search, and compare the outputs.

    Raises:
        TfexportError: the runtime returned logits that are not numbers.
    """
    size, rows = runtime.capacity.batch_size(batch_size, 1), examples.rows
    fewest: list[Difference] | None = None
    for completed in examples.completions(runtime.config):
        results = (decoded_differences(runtime, completed, rows[k : k + size]) for k in range(0, len(rows), size))
        different = [difference for part in results for difference in part if difference is not None]
        fewest = different if fewest is None else min(fewest, different, key=len)
        if not fewest:
            break
    return ExpectedReport(runtime.name, runtime.precision, examples.path, len(examples), tuple(fewest or ()))


def decoded_differences(runtime: Runtime, examples: Examples, rows: Sequence[Example]) -> list[Difference | None]:
    """The first difference of the greedy output of each row; None where there is none."""
    config, eos_id = runtime.config, runtime.config.eos_id
    longest = max(len(row.tokens(eos_id)) for row in rows)
    options = SearchOptions(beam=1, max_length=min(config.max_target_length, 2 * longest + 8))
    differences = []
    for row, (hypothesis, *_) in zip(rows, search(runtime, examples.inputs(rows, config), options), strict=True):
        difference = row.difference(hypothesis.ids, eos_id)
        if difference is not None and examples.is_spelt(row, [token for token in hypothesis.ids if token != eos_id]):
            difference = None
        differences.append(difference)
    return differences
