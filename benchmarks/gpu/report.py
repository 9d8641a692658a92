"""What a run found, as JSON with every number and as a Markdown table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import spread_text, table
from tfexport.contract import short_name


def write(record: Mapping[str, Any], path: Path) -> None:
    """Write `path`.json and `path`.md, in place of older ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{path}.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    Path(f"{path}.md").write_text(markdown(record), encoding="utf-8")


def markdown(record: Mapping[str, Any]) -> str:
    """The tables of a run, with what one needs to know to read them."""
    facts, options = record["machine"], record["options"]
    gpu = facts["gpu"]
    where = f"{gpu['name']}, driver {gpu['driver']}" if gpu else "no GPU, computed on the CPU"
    versions = ", ".join(f"{name} {found}" for name, found in facts["versions"].items() if found)
    lines = [
        f"# {where}",
        "",
        f"{facts['date']}, {facts['cpu']} ({facts['cpus']} CPUs), Python {facts['python']}; {versions}.",
        "",
        f"Model: {record['model']}.",
        "",
        "```",
        facts["command"],
        "```",
    ]
    if record["parity"]:
        lines += ["", *_parity(record["parity"])]
    if record["benchmark"]:
        lines += ["", *_benchmark(record["benchmark"], options)]
    return "\n".join(lines) + "\n"


def _parity(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "## Parity",
        "",
        "Against the same model in float32 PyTorch on the CPU. Tokens are decoded freely; logits are compared along "
        "PyTorch's greedy output. `passed` holds the limits of `tfexport parity`.",
        "",
    ]
    bleu = any(row.get("bleu") is not None for row in rows)
    head = ["runtime", "precision", "batch", "beam", "tokens identical", "largest logit error", "best token the same"]
    body = []
    for row in rows:
        cells = [row["runtime"], short_name(row["precision"]), row["batch"], row["beam"]]
        if row["error"]:
            body.append([*cells, row["error"], "", "", *[""] * bleu, "NO" if row.get("passed") is False else ""])
            continue
        forced, error = row["steps"] is not None, row["logits_max_error"]
        cells.append(f"{row['identical']} of {row['sentences']}")
        cells.append((error if isinstance(error, str) else f"{error:.1e}") if forced else "")
        cells.append(f"{row['top1_agree']} of {row['steps']}" if forced else "")
        if bleu:
            cells.append(f"{row['bleu']:.2f} ({row['bleu_reference']:.2f})")
        body.append([*cells, {True: "yes", False: "NO", None: ""}[row["passed"]]])
    return lines + table([*head, *["BLEU (reference)"] * bleu, "passed"], body)


def _benchmark(rows: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Speed",
        "",
        f"Every sentence is decoded to exactly {options['tokens']} tokens. {options['repeats']} repeats after "
        f"{options['warmup']} for warm-up, round robin over the runtimes of a precision; median, and 10th to 90th "
        "percentile in brackets. Tokens are those of the best hypothesis; their rate is that of the whole search, encoder "
        "included. A step is the time from tokens on the host to the best tokens on the host; of steps that a runtime makes "
        f"by itself, their mean. The ratio is that of the rates in the same round, to {options['runtimes'][0]} in the same "
        "precision. `hugging-face` computes its output projection in the precision too, the others in float32.",
        "",
        "Memory: `alloc` is the peak that PyTorch's allocator gave out, `free` how far the free GPU memory fell, both "
        "since before the runtime was loaded; earlier settings of the same runtime are in it.",
        "",
    ]
    head = ["runtime", "precision", "batch", "beam", "tokens/s", "ms a step", "ratio", "GPU memory, MiB"]
    body = []
    for row in rows:
        cells = [row["runtime"], short_name(row["precision"]), row["batch"], row["beam"]]
        if row["error"]:
            body.append([*cells, row["error"], "", "", ""])
            continue
        memory = row["memory"]
        kind = {"torch.cuda.max_memory_allocated": "alloc", "cudaMemGetInfo": "free"}
        cells += [
            spread_text(row["tokens_per_second"], 0),
            spread_text(row["step_ms"], 3),
            spread_text(row["ratio"], 2),
        ]
        body.append([*cells, f"{memory['mib']:.0f} {kind[memory['how']]}" if memory else ""])
    return lines + table(head, body)
