"""The runs of a load test as a Markdown table and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serve import OURS
from benchmarks.serve.ladder import TRIES, Ladder
from benchmarks.tables import table

Run = Mapping[str, Any]

STYLES = {
    OURS: ("#000000", "*"),
    "tfexport, LitServe": ("#0072b2", "s"),
    "ctranslate2, LitServe": ("#d55e00", "o"),
    "transformers, LitServe": ("#009e73", "^"),
}
"""Colours that are told apart with colour blindness too, and markers that are without colours."""
OTHER = ("#999999", "D")


def groups(runs: Sequence[Run]) -> dict[tuple[str, str], dict[str, list[Run]]]:
    """Runs by model and precision, then by server in the order of the record, each by rates."""
    found: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for run in sorted(runs, key=lambda one: (one["model"] != "small", one["precision"])):
        found.setdefault((run["model"], run["precision"]), {}).setdefault(run["system"], []).append(run)
    for servers in found.values():
        for several in servers.values():
            several.sort(key=lambda run: run["rate"])
    return found


def search(runs: Sequence[Run]) -> Ladder:
    """What runs without streams found."""
    found = Ladder(start=0.0)
    for run in runs:
        if not run["stream"]:
            found.note(run["rate"], kept=run["kept"])
    return found


def sustained(runs: Sequence[Run]) -> Run | None:
    """The run of the highest rate that was kept, below all that are broken."""
    best = search(runs).best
    return next((run for run in runs if run["kept"] and not run["stream"] and run["rate"] == best), None)


def is_found(runs: Sequence[Run]) -> bool:
    """Whether a higher rate broke the limit: otherwise the search ended too early."""
    return bool(search(runs).missed)


def markdown(record: Mapping[str, Any]) -> str:
    """How it was measured, and a table."""
    about, lines = record["about"], list[str]()
    if machine := about.get("machine"):
        lines += [f"{machine['cpu']}, {machine['cpus']} CPUs, {machine['date'][:10]}, Python {machine['python']}.", ""]
    if about.get("preliminary"):
        lines += [f"**Preliminary: {about['preliminary']}**", ""]
    rows = []
    for (model, precision), servers in groups(record["runs"]).items():
        rates = {name: found["rate"] for name, runs in servers.items() if (found := sustained(runs))}
        others = [rate for name, rate in rates.items() if not name.startswith(OURS)]
        for name, runs in servers.items():
            best = sustained(runs)
            place = [model, precision, f"{1e3 * runs[0]['limit']:g} ms", name]
            if best is None:
                rows.append([*place, f"below {min(run['rate'] for run in runs):.0f}", "", "", "", "", ""])
                continue
            ratio = f"{best['rate'] / max(others):.2f}" if others and name.startswith(OURS) else ""
            rows.append(
                [
                    *(*place, f"{best['rate']:.0f}" + ("" if is_found(runs) else " or more"), ratio),
                    *(f"{1e3 * best[key]:.1f}" for key in ("p50", "p99", "cpu_per_request")),
                    f"{best['memory'] / 2**20:.0f}",
                ]
            )
    head = ["model", "precision", "p99 limit", "server", "requests/s", "x best other", "p50, ms", "p99, ms"]
    lines += table([*head, "CPU ms/request", "MiB"], rows)
    lines += ["", *_first_tokens(record["runs"]), *_bounds(record)]
    client = max((run["client_cpu"] for run in record["runs"]), default=0.0)
    lines += ["", f"A rate is beyond a server when {TRIES} runs of it break the limit, and none keeps it."]
    lines += ["", f"The load generator used at most {client:.2f} of a core."]
    return "\n".join(lines) + "\n"


def _first_tokens(runs: Sequence[Run]) -> list[str]:
    rows = [
        [
            *(run["model"], run["precision"], f"{run['rate']:.0f}"),
            *(f"{1e3 * run[key]:.1f}" for key in ("first_p50", "first_p99", "p50", "p99")),
        ]
        for run in runs
        if run["stream"] and run.get("first_p50") is not None
    ]
    head = ["streams of", "precision", "requests/s", "first token p50, ms", "p99, ms", "last token p50, ms", "p99, ms"]
    return table(head, rows) if rows else []


def _bounds(record: Mapping[str, Any]) -> list[str]:
    """The rate that the CPUs allow if nothing but decoding and the load generator takes time."""
    rows, every = [], groups(record["runs"])
    for one in record.get("offline", []):
        servers = every.get((one["model"], one["precision"]), {})
        rates = {name: found["rate"] for name, runs in servers.items() if (found := sustained(runs))}
        others = [rate for name, rate in rates.items() if not name.startswith(OURS)]
        # A request of a higher rate takes the generator less time: each of its wakings serves more of them.
        client = min(run["client_cpu"] / run["rate"] for runs in servers.values() for run in runs if not run["stream"])
        most = record["about"]["machine"]["cpus"] / (one["cpu_seconds"] + client)
        times = (f"{1e3 * one['cpu_seconds']:.2f}", f"{1e3 * client:.2f}", f"{most:.0f}")
        rows.append([one["model"], one["precision"], *times, f"{2 * max(others):.0f}" if others else ""])
    head = ["only decoding", "precision", "CPU ms/sentence", "load generator, CPU ms", "most requests/s"]
    return ["", *table([*head, "2 x best other"], rows)] if rows else []


def plot(runs: Sequence[Run], path: Path) -> None:
    """A panel for each model and precision: p99 as lines, p50 dashed, against the rate of requests."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    every = groups(runs)
    figure, panels = plt.subplots(1, len(every), figsize=(4.6 * len(every), 4.2), squeeze=False)
    for panel, ((model, precision), servers) in zip(panels[0], every.items(), strict=True):
        for name, found in servers.items():
            plain = [run for run in found if not run["stream"]]
            colour, marker = STYLES.get(name, OTHER)
            rates = [run["rate"] for run in plain]
            panel.plot(rates, [1e3 * run["p99"] for run in plain], color=colour, marker=marker, label=name)
            panel.plot(rates, [1e3 * run["p50"] for run in plain], color=colour, linestyle=":", linewidth=1)
        limit = next(iter(servers.values()))[0]["limit"]
        panel.axhline(1e3 * limit, color="#bbbbbb", linewidth=0.8)
        panel.set_yscale("log")
        panel.set_title(f"{model}, {precision}")
        panel.set_xlabel("requests per second")
        panel.grid(color="#eeeeee")
    panels[0][0].set_ylabel("latency in ms: p99, p50 dotted")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
