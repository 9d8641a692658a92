"""What a dry run found, as a table, and the limits that it must keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]

LONG_TEXT = 1000
"""Lines."""


@dataclass(frozen=True)
class Measure:
    """A column of the table."""

    name: str
    value: Callable[[Row], float | None]
    """None where a case does not measure it."""
    most: float | None = None
    """More of it is a failure."""
    ahead: float | None = None
    """The same where the device makes several steps by itself; `most` where None."""
    cases: Mapping[tuple[str, str, int], float] = field(default_factory=dict)
    """The same for some cases: model, precision, beam."""

    def limit(self, row: Row) -> float | None:
        """More of it in this row is a failure."""
        case = row["model"], row["precision"], row["beam"]
        if row.get("ahead") and case in self.cases:
            return self.cases[case]
        return self.ahead if self.ahead is not None and row.get("ahead") else self.most


def _a_step(*kinds: str) -> Callable[[Row], float]:
    """How often these happen in a step of the second batch, the reorder of beams included."""
    return lambda row: float(sum(row["second"]["step"][kind] for kind in kinds) / row["second"]["steps"])


def _in_text(kind: str) -> Callable[[Row], float | None]:
    return lambda row: row["text"]["total"][kind] if "text" in row else None


def _waits_in_text(row: Row) -> float | None:
    """Of text, where batches also begin and become smaller. In a short one the waits of the first runs count most."""
    text = row.get("text", {"lines": 0})
    return None if text["lines"] < LONG_TEXT else float(text["total"]["waits"] / text["steps"])


def _violations(row: Row) -> float:
    return float(row["all"]["violations"])


MEASURES = (
    Measure(
        "nodes a step",
        _a_step("kernels", "on_device", "fills"),
        most=240,
        ahead=160,
        cases={("base", precision, 1): 120 for precision in ("fp16", "bf16")},
    ),
    Measure("launches a step", _a_step("launches"), most=4, ahead=1 / 5),
    Measure("copies to the GPU a step", _a_step("to_device"), most=1, ahead=1 / 5),
    Measure("copies to the host a step", _a_step("to_host"), most=1, ahead=1 / 8),
    Measure("waits a step", _a_step("waits"), most=1, ahead=1 / 8),
    Measure("allocations, second batch", lambda row: row["second"]["total"]["allocations"], most=0),
    Measure("recordings, second batch", lambda row: row["second"]["total"]["recordings"], most=0),
    Measure("recordings, new threads", lambda row: row["threads"]["recordings"], most=0),
    Measure("waits a step, text", _waits_in_text, ahead=1 / 4),
    Measure("recordings, text", _in_text("recordings"), most=12),
    Measure("cuDNN plans", lambda row: row["all"]["plans"], most=0),
    Measure("violations", _violations, most=0),
)


MOST_NODES = {
    **{("base", precision, "decoder_step"): most for precision, most in (("fp32", 160), ("fp16", 120), ("bf16", 120))},
    **{("base", precision, "beam_step"): 140 for precision in ("fp32", "fp16", "bf16")},
}
"""Nodes of a step of the dialect `ort-cuda`, by model, precision and role; more of them is a failure."""


def step_failures(rows: Sequence[Row]) -> list[str]:
    """The steps of the dialect `ort-cuda` that launch more than their limit, or what is not all on the GPU."""
    found = []
    for row in rows:
        most = MOST_NODES.get((row["model"], row["precision"], row["role"]))
        case = f"{row['model']} {row['precision']} {row['dialect']} {row['role']} batch {row['batch']}"
        if row["dialect"] == "ort-cuda" and most is not None and nodes(row["counts"]) > most:
            found.append(f"{case}: {nodes(row['counts'])} nodes are more than {most}")
        crossed = row["counts"]["to_device"] + row["counts"]["to_host"]
        if crossed:
            found.append(f"{case}: {crossed} copies between host and GPU within a step")
    return found


def nodes(counts: Mapping[str, int]) -> int:
    """Kernels, copies within the GPU and fills."""
    return counts["kernels"] + counts["on_device"] + counts["fills"]


def step_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the table of single steps: nodes by the number of sentences."""
    batches = sorted({row["batch"] for row in rows})
    cells: dict[tuple[str, ...], dict[int, int]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("model", "precision", "dialect", "role"))
        cells.setdefault(key, {})[row["batch"]] = nodes(row["counts"])
    head = ["model", "precision", "dialect", "graph", *(f"batch {batch}" for batch in batches)]
    return head, [[*key, *(str(found.get(batch, "")) for batch in batches)] for key, found in cells.items()]


def size_table(sizes: Mapping[str, Mapping[str, int]]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the table of bytes by kind of file."""
    kinds = list(dict.fromkeys(kind for found in sizes.values() for kind in found))
    rows = [[kind, *(f"{found.get(kind, 0):,}" for found in sizes.values())] for kind in kinds]
    return ["bytes of", *sizes], rows


def failures(rows: Sequence[Row]) -> list[str]:
    """What is above its limit."""
    found = []
    for row in rows:
        for measure in MEASURES:
            value = measure.value(row)
            limit = measure.limit(row)
            if limit is not None and value is not None and value > limit:
                case = f"{row['model']} {row['precision']} beam {row['beam']}"
                found.append(f"{case}: {measure.name}: {value:g} is more than {limit:g}")
    return found


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the table; the last rows have the limits, on the host and ahead."""
    head = ["model", "precision", "beam", *(measure.name for measure in MEASURES)]
    cells = [
        [row["model"], row["precision"], str(row["beam"]), *(_text(measure.value(row)) for measure in MEASURES)]
        for row in rows
    ]
    return head, [
        *cells,
        ["limit", "", "", *(_text(measure.most) for measure in MEASURES)],
        [
            "limit, ahead",
            "",
            "",
            *(_text(measure.most if measure.ahead is None else measure.ahead) for measure in MEASURES),
        ],
    ]


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}".rstrip("0").rstrip(".")
