"""The results of `tfexport bench` as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfexport.bench.contestants import OWN
from tfexport.bench.machine import Peaks

Row = Mapping[str, Any]

HEAD = (
    *("contestant", "w x t", "batch", "tokens/s (p10 to p90)", f"{OWN} is", "call ms p50/p90/p99", "x floor", "MiB"),
    *("load s", "same outputs"),
)

EXPLANATION = f"""\
w x t: workers x threads of each, the fastest split of the cell's threads. {OWN} is: how many times as fast it is on the same
sentences, by rounds (median, 10th to 90th percentile). call: one decode of one batch. x floor: its seconds over those that
reading the weights and multiplying take at least here. MiB: the process' peak. load s: until it has decoded a sentence.
same outputs: those identical to {OWN}'s."""


def heading(record: Mapping[str, Any]) -> str:
    """The first lines of a run: machine, model and peaks."""
    machine, config = record["machine"], record["config"]
    lines = [
        f"{machine['date']}, {machine['cpu']}, {machine['cpus']} CPUs",
        f"{record['bundle']}: d_model {config['d_model']}, {config['n_encoder_layers']} + {config['n_decoder_layers']} "
        f"layers, {config['n_heads']} heads, d_ff {config['d_ff']}, vocabulary {config['tgt_vocab_size']}",
    ]
    lines += [peaks_line(Peaks.from_dict(peaks)) for peaks in record["peaks"]]
    return "\n".join(lines)


def peaks_line(peaks: Peaks) -> str:
    """A line with the peaks of a number of threads: reads in GB/s, and products of each type in operations per second."""
    smallest, largest = min(peaks.read), max(peaks.read)
    rates = ", ".join(f"{dtype} {rate / 1e9:.0f} Gop/s" for dtype, rate in peaks.operations.items())
    return (
        f"{_threads(peaks.threads)}: reads {largest / 2**20:.0f} MiB at {peaks.read[largest] / 1e9:.0f} GB/s, "
        f"{smallest / 2**20:.0f} MiB at {peaks.read[smallest] / 1e9:.0f} GB/s; multiplies {rates}"
    )


def cell_lines(cell: Mapping[str, Any], tokens: int | None) -> list[str]:
    """The lines of a cell: a heading, a line for each contestant, and the time of each part of tfexport's runtimes.

    Args:
        tokens: the number of tokens of every output; None if the model ends them.
    """
    lengths = "as the model ends them" if tokens is None else f"of {tokens} tokens"
    lines = ["", f"{cell['about']}: {cell['sentences']} sentences, outputs {lengths}{_floor(cell)}"]
    lines += ["  " + line for line in _aligned([HEAD, *(_cells_of(row) for row in cell["rows"])])]
    for row in cell["rows"]:
        if row["reason"] is not None:
            lines.append(f"  {row['contestant']}: not measured: {row['reason']}")
    lines += [f"  {row['contestant']}: {_shares(row)}" for row in cell["rows"] if row["parts"]]
    return lines


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def _floor(cell: Mapping[str, Any]) -> str:
    measured = [row for row in cell["rows"] if row["floor"]]
    if not measured:
        return ""
    least = measured[0]["floor"]
    return (
        f"; the floor is {least['step_seconds'] * 1e3:.3f} ms a step, {least['tokens_per_second']:,.0f} tokens/s, "
        f"set by {least['bound']}"
    )


def _cells_of(row: Row) -> Sequence[str]:
    if row["tokens_per_second"] is None:
        return (row["contestant"], "-", "-", "not measured", *[""] * (len(HEAD) - 4))
    speed, ratio, latency = row["tokens_per_second"], row["ratio"], row["latency_ms"]
    note = f" in {row['rounds']} rounds" if row["fewer_rounds"] else ""
    same = "" if row["identical"] is None else f"{row['identical']} of {len(row['lengths'])}"
    return (
        row["contestant"],
        row["configuration"],
        str(row["batch"]),
        f"{speed['median']:,.0f} ({speed['p10']:,.0f} to {speed['p90']:,.0f}){note}",
        f"{ratio['median']:.2f}x ({ratio['p10']:.2f} to {ratio['p90']:.2f})" if ratio else "",
        f"{latency['p50']:.1f}/{latency['p90']:.1f}/{latency['p99']:.1f}" if latency else "",
        f"{row['times_floor']:.1f}",
        "" if row["memory_mib"] is None else f"{row['memory_mib']:.0f}",
        f"{row['load_seconds']:.1f}",
        same,
    )


def _shares(row: Row) -> str:
    parts, step = row["parts"], row["step_ms"]
    whole = sum(parts.values())
    names = {"encode": "encoder", "step": "steps", "select": "reorders", "rest": "search and the rest"}
    shares = ", ".join(f"{names[part]} {seconds / whole:.0%}" for part, seconds in parts.items())
    if step is None:
        return shares
    return f"{shares}; a step {step['p50']:.2f}/{step['p90']:.2f}/{step['p99']:.2f} ms"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of rows whose columns are padded to their widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
