"""The matrix of benchmarks/cpu/matrix.py as Markdown tables and a plot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfexport.bench.contestants import OWN
from tfexport.contract import short_name

Cell = Mapping[str, Any]

PEERS = ("ctranslate2", "optimum", "hugging-face", "torch")
STYLES = {
    "ctranslate2": ("#d55e00", "o"),
    "optimum": ("#0072b2", "s"),
    "hugging-face": ("#009e73", "^"),
    "torch": ("#999999", "D"),
}
"""Colours that are told apart with colour blindness too, and markers that are without colours."""


def row_of(cell: Cell, name: str) -> dict[str, Any] | None:
    """A contestant's row, if it was measured."""
    found = next((row for row in cell["rows"] if row["contestant"] == name), None)
    return found if found and found["tokens_per_second"] else None


def ratio_of(cell: Cell, peer: str) -> dict[str, float] | None:
    """How many times as fast ours is."""
    row = row_of(cell, peer)
    return row["ratio"] if row else None


def missing(cell: Cell) -> list[str]:
    """What was not measured, and why."""
    return [
        f"{cell['model']}, {short_name(cell['precision'])}: {row['contestant']}: {row['reason']}"
        for row in cell["rows"]
        if row["reason"]
    ]


def present(cells: Sequence[Cell]) -> list[str]:
    """The peers that were measured anywhere."""
    return [peer for peer in PEERS if any(ratio_of(cell, peer) for cell in cells)]


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(cells: Sequence[Cell], peer: str) -> tuple[int, float, float] | None:
    """Of our ratios to `peer`: how many, geometric mean, smallest; None where there are none."""
    ratios = [ratio["median"] for ratio in (ratio_of(cell, peer) for cell in cells) if ratio]
    return (len(ratios), geometric_mean(ratios), min(ratios)) if ratios else None


def markdown(cells: Sequence[Cell]) -> str:
    """How it was measured, a table of means, a table of all cells."""
    facts = cells[-1]["run"]["machine"]
    versions = {
        name: found for cell in cells for row in cell["rows"] for name, found in (row["versions"] or {}).items()
    }
    lines = [
        f"{facts['cpu']}, {facts['cpus']} CPUs, {facts['date'][:10]}, Python {facts['python']}; "
        f"{', '.join(f'{name} {found}' for name, found in sorted(versions.items()))}.",
        "",
        f"Ratios are how many times as fast `{OWN}` is, each in the best of its configurations: the median of the rounds.",
        "",
        *_means(cells),
        "",
        *_cells(cells),
    ]
    return "\n".join(lines) + "\n"


def _means(cells: Sequence[Cell]) -> list[str]:
    groups = dict.fromkeys((cell["precision"], cell["part"]) for cell in cells)
    head = ["precision", "outputs", *(f"{peer}: geometric mean (smallest, cells)" for peer in present(cells))]
    rows = []
    for precision, part in groups:
        group = [cell for cell in cells if (cell["precision"], cell["part"]) == (precision, part)]
        found = [summary(group, peer) for peer in present(cells)]
        values = [
            f"{mean:.2f} ({least:.2f}, {count})" if count else ""
            for count, mean, least in (f or (0, 0, 0) for f in found)
        ]
        rows.append([short_name(precision), part, *values])
    return table(head, rows)


def _cells(cells: Sequence[Cell]) -> list[str]:
    peers = present(cells)
    head = ["model", "outputs", "precision", "threads", "batch", "beam", f"{OWN}, tokens/s", *peers]
    rows = []
    for cell in cells:
        own = row_of(cell, OWN)
        place = [cell["model"], cell["part"], short_name(cell["precision"]), cell["threads"], cell["batch"] or "best"]
        place += [cell["beam"], f"{own['tokens_per_second']['median']:,.0f}" if own else "-"]
        ratios = [ratio_of(cell, peer) for peer in peers]
        values = [f"{r['median']:.2f} ({r['p10']:.2f} to {r['p90']:.2f})" if r else "" for r in ratios]
        own_floor = f"{own['times_floor']:.1f}" if own else "-"
        own_memory = f"{own['memory_mib']:.0f}" if own and own["memory_mib"] else "-"
        rows.append([*place, *values, own_floor, own_memory])
    return table([*head, "x floor", "MiB"], rows)


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> list[str]:
    def line(cells: Sequence[Any]) -> str:
        return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"

    return [line(head), line(["---"] * len(head)), *map(line, rows)]


def plot(cells: Sequence[Cell], path: Path) -> None:
    """A panel for each model: our ratio to each peer in every cell, with its spread, and a line where both are alike."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(cell["model"] for cell in cells))
    widest = max(sum(cell["model"] == model for cell in cells) for model in models)
    size = (max(8.0, 2.5 + 0.42 * widest), 1.2 + 4.0 * len(models))
    figure, panels = plt.subplots(len(models), 1, figsize=size, squeeze=False, layout="constrained")
    peers = present(cells)
    for panel, model in zip(panels[:, 0], models, strict=True):
        _panel(panel, [cell for cell in cells if cell["model"] == model], peers)
        panel.set_title(model, loc="left", fontweight="bold")
        panel.set_ylabel(f"{OWN} is times as fast (log)")
    drawn = {
        label: handle
        for panel in panels[:, 0]
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(drawn.values(), drawn.keys(), loc="outside upper center", ncols=len(drawn) or 1, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panel(panel: Any, cells: Sequence[Cell], peers: Sequence[str]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.set_yscale("log", base=2)
    panel.axhline(1.0, color="black", linewidth=1.2)
    for number, peer in enumerate(peers):
        colour, marker = STYLES[peer]
        found = [(place, ratio) for place, cell in enumerate(cells) if (ratio := ratio_of(cell, peer))]
        if not found:
            continue
        # Side by side, so that none hides another.
        places = [place + 0.13 * (number - (len(peers) - 1) / 2) for place, _ in found]
        medians = [ratio["median"] for _, ratio in found]
        below = [ratio["median"] - ratio["p10"] for _, ratio in found]
        above = [ratio["p90"] - ratio["median"] for _, ratio in found]
        panel.errorbar(
            places, medians, [below, above], fmt=marker, color=colour, markersize=5, elinewidth=1, capsize=0, label=peer
        )
    panel.yaxis.set_major_locator(LogLocator(base=2))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    panel.grid(axis="y", color="#dddddd", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.set_xticks(range(len(cells)), [_tick(cell) for cell in cells], rotation=90, fontsize=8)
    panel.set_xlim(-0.7, len(cells) - 0.3)
    low, high = panel.get_ylim()
    panel.set_ylim(min(low, 0.8), max(high, 2.2))
    groups = [(cell["part"], cell["precision"]) for cell in cells]
    for place in range(1, len(cells)):
        if groups[place] != groups[place - 1]:
            panel.axvline(place - 0.5, color="#bbbbbb", linewidth=0.8, linestyle=":")


def _tick(cell: Cell) -> str:
    batch = "mixed" if cell["batch"] is None else f"batch {cell['batch']}"
    return f"{short_name(cell['precision'])} {cell['threads']}t {batch} beam {cell['beam']}"
