"""How speed grows with batch, source length, output length and vocabulary, beside the least time that each can take.

    python -m benchmarks.cpu.growth [--threads 1] [--precision fp32] [--only batch,vocabulary] [--quick]

Random models of the paper's base size, exported for it; one number changes at a time.
The lower bound is tfexport/bench/lower_bound.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.base_model import BASE, random_checkpoint
from benchmarks.paths import RESULTS
from tfexport.bench.contestants import OWN, Contestant, Failed, Process, ProcessLayout, hire
from tfexport.bench.lower_bound import lower_bound
from tfexport.bench.machine import Peaks, facts
from tfexport.bench.plan import Plan
from tfexport.bench.run import peaks_of
from tfexport.bundle.reader import MANIFEST
from tfexport.config import ModelConfig
from tfexport.contract import Precision, precisions_of
from tfexport.errors import TfexportError


@dataclass(frozen=True)
class Point:
    """What is decoded: `batch` sentences of `source` ids to `tokens` tokens of so many words."""

    batch: int = 8
    source: int = 24
    tokens: int = 32
    vocabulary: int = 8000


SWEEPS: dict[str, tuple[int, ...]] = {
    "batch": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "source": (8, 16, 32, 64, 128, 256),
    "tokens": (16, 32, 64, 128, 256, 512),
    "vocabulary": (1000, 4000, 16000, 64000),
}
QUICK: dict[str, tuple[int, ...]] = {
    "batch": (1, 4),
    "source": (8, 16),
    "tokens": (8, 16),
    "vocabulary": (1000, 2000),
}
LABELS = {
    "batch": "sentences in a batch",
    "source": "source ids",
    "tokens": "output tokens",
    "vocabulary": "target vocabulary",
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How speed grows with sizes.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", help=f"of {','.join(SWEEPS)}")
    parser.add_argument("--quick", action="store_true", help="few and small sizes, to see that all of it runs")
    parser.add_argument("--models", type=Path, help="keep the exported models in this folder, and use those there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.only = options.only.split(",") if options.only else list(SWEEPS)
    unknown = sorted({*options.only} - set(SWEEPS))
    if unknown:
        parser.error(f"there is no sweep {unknown[0]}")
    return options


def model_of(options: argparse.Namespace) -> ModelConfig:
    """The model whose sizes vary; a small one for --quick."""
    return (
        BASE.replace(d_model=64, n_heads=4, d_ff=128, n_encoder_layers=2, n_decoder_layers=2) if options.quick else BASE
    )


def bundle_of(config: ModelConfig, precision: Precision, folder: Path) -> Path:
    """A random model of this config, exported into `folder` unless it is there."""
    from tfexport.exporter.pipeline import export

    directory = folder / f"d{config.d_model}-v{config.tgt_vocab_size}-{precision}"
    if not (directory / MANIFEST).exists():
        say(f"exporting {directory.name}")
        path = folder / f"{directory.name}.safetensors"
        export(random_checkpoint(config, path), directory, precisions=tuple(dict.fromkeys(("float32", precision))))
        path.unlink()
    return directory


def points_of(options: argparse.Namespace) -> Iterator[tuple[str, Point]]:
    """The points of each sweep; those of one vocabulary one after the other."""
    base = Point(batch=2, source=12, tokens=8, vocabulary=1000) if options.quick else Point()
    for sweep in options.only:
        for value in (QUICK if options.quick else SWEEPS)[sweep]:
            yield sweep, replace(base, **{sweep: value})


def measure(process: Process, config: ModelConfig, point: Point, repeats: int) -> dict[str, Any]:
    """Seconds of whole decodes, and of each step of one more.

    Raises:
        Failed: it cannot be decoded, or not to this length.
    """
    random = np.random.default_rng(0)
    sources = random.integers(4, config.src_vocab_size, (point.batch, point.source)).tolist()
    plan = Plan(tokens=point.tokens)
    request = plan.request("decode", sources, point.batch, 1)
    answers = [process.ask(request) for _ in range(repeats + 1)][1:]
    wrong = sorted({length for answer in answers for length in answer["lengths"]} - {point.tokens})
    if wrong:
        raise Failed(f"it gave outputs of {wrong} tokens where {point.tokens} were asked for.")
    profile = process.ask(plan.request("profile", sources, point.batch, 1))
    seconds = [answer["seconds"] for answer in answers]
    return {
        "seconds": seconds,
        "tokens_per_second": point.batch * point.tokens / float(np.median(seconds)),
        "step_seconds": profile["steps"],
        "step_ms": float(np.median(profile["steps"])) * 1e3,
        "parts": profile["parts"],
        "memory_mib": answers[-1]["memory"] and answers[-1]["memory"] / 2**20,
    }


def least(config: ModelConfig, precision: str, peaks: Peaks, point: Point) -> dict[str, Any]:
    """The floor of a point."""
    lengths = {"sources": [point.source] * point.batch, "outputs": [point.tokens] * point.batch}
    found = lower_bound(config, precision, peaks, **lengths, batch=point.batch, beam=1)
    return {**asdict(found), "tokens_per_second": point.batch * point.tokens / found.seconds}


def run(options: argparse.Namespace, folder: Path, record: dict[str, Any]) -> None:
    """Fill the rows of `record`; a point that fails has its reason."""
    (precision,) = precisions_of(options.precision)
    peaks = peaks_of([options.threads])[options.threads]
    record |= {"machine": facts(), "peaks": peaks.to_dict(), "precision": precision, "threads": options.threads}
    record |= {"config": model_of(options).to_dict(), "base": asdict(Point())}
    for sweep, point in points_of(options):
        config = model_of(options).replace(tgt_vocab_size=point.vocabulary)
        row: dict[str, Any] = {"sweep": sweep, "value": getattr(point, sweep), **asdict(point), "reason": None}
        row["floor"] = least(config, precision, peaks, point)
        process = None
        try:
            setup = ProcessLayout(Contestant(OWN, bundle_of(config, precision, folder)), precision, 1, options.threads)
            process = hire(setup)  # one for each point: a process keeps memory that it once had
            process.ask(setup.load_request([4, 5, 6]))
            row |= measure(process, config, point, options.repeats)
            found = f"{row['tokens_per_second']:10,.0f} tokens/s {row['step_ms']:9.3f} ms a step"
            say(f"{sweep} {row['value']:6}: {found}, floor {row['floor']['step_seconds'] * 1e3:.3f} ms")
        except TfexportError as error:
            row["reason"] = str(error)
            say(f"{sweep} {row['value']}: {error}")
        finally:
            if process is not None:
                process.close()
        record["rows"].append(row)


def plot(record: dict[str, Any], path: Path) -> None:
    """Tokens a second and milliseconds a step for each sweep, with the floor's as a dashed line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    rows = [row for row in record["rows"] if row["reason"] is None]
    sweeps = list(dict.fromkeys(row["sweep"] for row in rows))
    figure, panels = plt.subplots(
        2, len(sweeps), figsize=(1.5 + 3.4 * len(sweeps), 6.4), squeeze=False, layout="constrained", sharey="row"
    )
    for column, sweep in enumerate(sweeps):
        mine = [row for row in rows if row["sweep"] == sweep]
        values = [row["value"] for row in mine]
        lines = [
            ([row["tokens_per_second"] for row in mine], [row["floor"]["tokens_per_second"] for row in mine]),
            ([row["step_ms"] for row in mine], [row["floor"]["step_seconds"] * 1e3 for row in mine]),
        ]
        for panel, (found, limit) in zip(panels[:, column], lines, strict=True):
            panel.loglog(values, found, "o-", color="#0072b2", label=OWN)
            panel.loglog(
                values, limit, "--", color="#d55e00", label="floor: bandwidth and multiplications of this machine"
            )
            panel.grid(which="major", color="#dddddd")
            panel.set_xticks(
                values, [f"{value // 1000}k" if value >= 1000 else str(value) for value in values], fontsize=8
            )
            panel.xaxis.set_minor_formatter(NullFormatter())
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            panel.yaxis.set_minor_formatter(NullFormatter())
        panels[1, column].set_xlabel(LABELS[sweep])
    panels[0, 0].set_ylabel("tokens a second")
    panels[1, 0].set_ylabel("milliseconds a step")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    record: dict[str, Any] = {"rows": []}
    try:
        with tempfile.TemporaryDirectory() as temporary:
            run(options, options.models or Path(temporary), record)
    except TfexportError as error:
        say(f"error: {error}")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "growth.json").write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")
    if all(row["reason"] for row in record["rows"]):
        say(f"error: nothing could be measured: {record['rows'][0]['reason']}")
        return 2
    plot(record, options.out / "growth.png")
    say(f"written: {options.out / 'growth'}.json and .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
