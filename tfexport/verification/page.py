"""A comparison as a self-contained HTML page: the verdicts, the sources of errors, and the sentences that differ."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfexport.contract import short_name
from tfexport.errors import TfexportError
from tfexport.graph_checks.check import GraphCheck
from tfexport.system.imports import figure_class
from tfexport.system.version import version
from tfexport.text.tokenizers import TextTokenizer
from tfexport.verification.certificates import device_of, library_of
from tfexport.verification.invariance import Arrangement, Invariance
from tfexport.verification.parity import Comparison
from tfexport.verification.report import Divergence, ParityReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_SENTENCES = 50
"""The largest number of sentences that differ, over all reports, the worst first."""

NO_PLOTS = "the plots of a report need matplotlib, which is not installed: pip install 'tfexport[report]'."
SMALLEST = 1e-9
"""The lower end of the plots of errors: an error of 0 has no logarithm."""

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top }
.passed { background: #e3f4e3 } .failed { background: #fbdcdc } .verdict { font-weight: 700 }
.note { color: #666 } svg { width: 100%; height: auto } mark { background: #fbdcdc }
"""


def write_page(path: Path, comparison: Comparison, arranged: Sequence[Invariance]) -> None:
    """Write the page of a comparison to `path`.

    Raises:
        RuntimeUnavailable: matplotlib is not installed.
        TfexportError: the file cannot be written.
    """
    try:
        path.write_text(page(comparison, arranged), encoding="utf-8")
    except OSError as error:
        raise TfexportError(f"cannot write {path}: {error.strerror}. Give another file with --report.") from error


def page(comparison: Comparison, arranged: Sequence[Invariance] = ()) -> str:
    """The HTML of a comparison, with the results of `arranged` runtimes, if any."""
    passed = comparison.passed and all(part.passed for part in arranged)
    checks = [check for checks in comparison.graphs.values() for check in checks]
    name = escape(comparison.bundle.directory.name)
    parts = [
        f"<h1>{name}: {'PASSED' if passed else 'FAILED'}</h1>",
        _wrong(comparison, checks, arranged),
        _facts(comparison),
        "<h2>Every runtime, precision and search</h2>",
        _matrix(comparison.reports),
        "<h2>Errors by step</h2>",
        '<p class="note">Distances from float64. Dashed: the allowed error in float32. Dotted: PyTorch\'s own rounding in '
        "float32, on the same input.</p>",
        _figure(
            lambda axes: _draw_steps(axes, comparison.reports), "step of the output", "largest distance of a logit"
        ),
        _figure(lambda axes: _draw_divergence(axes, comparison.reports), "step of the output", "mean KL, nats"),
    ]
    if checks:
        parts += ["<h2>Errors by layer</h2>", _layers(checks)]
        for check in checks:
            if not check.with_kernels or check.first is not None:
                parts.append(f"<h3>{escape(_file(check))}</h3>")
                about = "values of the graph in the order in which it computes them, marked where a layer begins"
                parts.append(_figure(partial(_draw_layers, check), about, "distance from float64"))
    if arranged:
        parts += ["<h2>The same sentence in other batches, caches and threads</h2>", _arrangements(arranged)]
    parts += ["<h2>Sentences that differ</h2>", _sentences(comparison)]
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>{name}: parity</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _file(check: GraphCheck) -> str:
    return f"{check.file} with kernels" if check.with_kernels else check.file


def _wrong(comparison: Comparison, checks: Sequence[GraphCheck], arranged: Sequence[Invariance]) -> str:
    """The failures, beginning with the cause if it is known."""
    lines = [escape(str(mismatch)) for mismatch in comparison.mismatches]
    lines += [
        f"{escape(_file(c))} departs from PyTorch at <b>{escape(c.first.node)}</b>: its {escape(_shortened(c.first.about))} "
        f"is off by {c.first.error:.1e}, {c.first.allowed:.1e} is allowed"
        for c in checks
        if c.first is not None
    ]
    for report in comparison.reports:
        if not report.passed:
            lines.append(f"{escape(_name(report))}: {'; '.join(map(escape, report.failures))}")
    lines += [
        f"{a.runtime} {short_name(a.precision)}, beam {a.beam}, {way.name}: "
        + (
            escape(way.error)
            if way.error
            else f"{a.sentences - way.identical - way.ties} of {a.sentences} sentences are decoded differently from alone"
        )
        for a in arranged
        for way in a.arrangements
        if way.identical + way.ties < a.sentences
    ]
    return f'<ul class="failed">{"".join(f"<li>{line}</li>" for line in lines)}</ul>' if lines else ""


def _shortened(about: str) -> str:
    """`output of a + b + c` with only the first module if there are many."""
    parts = about.split(" + ")
    return about if len(parts) < 3 else f"{parts[0]} and {len(parts) - 1} more"


def _facts(comparison: Comparison) -> str:
    inputs, origin = comparison.inputs, comparison.bundle.origin
    kind = "sentences of random ids" if inputs["random"] else "sentences"
    runtimes = dict.fromkeys(report.runtime for report in comparison.reports)
    places = "; ".join(f"{name}: {library_of(name)} on {device_of(name)}" for name in runtimes)
    precision = "float64" if any(report.reference == "fp64" for report in comparison.reports) else "float32"
    reference = "the bundle's own weights" if comparison.source == "bundle" else f"checkpoint {comparison.source[:16]}"
    return (
        f'<p class="note">{inputs["sentences"]} {kind} (sha256 {inputs["sha256"][:16]}), against PyTorch in '
        f"{precision} with {escape(reference)}. {escape(places)}. tfexport {version()}.</p>"
        f'<p class="note">Our reading of {escape(origin.file)} is {escape(origin.confirmation.text)}.</p>'
    )


def _table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A table of cells in HTML; each row has a class."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = [f'<tr class="{kind}">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>' for kind, cells in rows]
    return f"<table><tr>{titles}</tr>{''.join(lines)}</table>"


def _matrix(reports: Sequence[ParityReport]) -> str:
    has_quality = any(report.quality for report in reports)
    head = [
        "",
        "beam",
        "verdict",
        "cross, max",
        "logits, max",
        "KL, mean",
        "best token the same",
        "same outputs",
        "others within rounding",
        "outputs worse by, nats per token",
        *(["BLEU / PyTorch", "chrF / PyTorch"] if has_quality else []),
    ]
    rows = []
    for report in reports:
        verdict = "passed" if report.passed else "failed"
        cells = [
            f"{report.runtime} {short_name(report.precision)}",
            str(report.beam),
            f'<span class="verdict">{verdict}</span>{f"<br>{escape(report.error)}" if report.error else ""}',
            f"{report.cross_max:.1e}",
            f"{report.logits.error:.1e} (PyTorch {report.logits.own:.1e})",
            f"{report.divergence:.1e}",
            f"{report.top1_agree} of {report.steps} ({report.top1_agree / max(1, report.steps):.2%})",
            f"{report.identical} of {report.sentences}",
            f"{report.ties} of {len(report.divergences)}",
            f"{report.loss:.1e}, at most {report.furthest:.1e}",
        ]
        if report.quality is not None:
            reference, quality = report.quality
            cells += [f"{quality.bleu:.2f} / {reference.bleu:.2f}", f"{quality.chrf:.2f} / {reference.chrf:.2f}"]
        rows.append((verdict, cells))
    return _table(head, rows)


def _figure(draw: Callable[[Any], None], x: str, y: str) -> str:
    """A plot as inline SVG."""
    figure = figure_class(NO_PLOTS)(figsize=(10, 3), layout="constrained")
    axes: Axes = figure.add_subplot()
    draw(axes)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _draw_steps(axes: Axes, reports: Sequence[ParityReport]) -> None:
    for report in reports:
        steps = range(1, len(report.positions) + 1)
        errors = [max(SMALLEST, position.error) for position in report.positions]
        axes.plot(steps, errors, label=_name(report), marker=".", linewidth=1)
        color = axes.lines[-1].get_color()
        own = [max(SMALLEST, position.own) for position in report.positions]
        axes.plot(steps, own, label=f"PyTorch's own, beam {report.beam}", linewidth=0.8, linestyle=":", color=color)
        allowed = [report.allowed(position) for position in report.positions]
        if all(map(math.isfinite, allowed)):
            axes.plot(steps, allowed, linewidth=0.8, linestyle="--", color=color)
    axes.legend(fontsize="small", ncols=2)


def _draw_divergence(axes: Axes, reports: Sequence[ParityReport]) -> None:
    for report in reports:
        means = [max(1e-16, position.divergence / max(1, position.steps)) for position in report.positions]
        axes.plot(range(1, len(means) + 1), means, label=_name(report), marker=".", linewidth=1)
    axes.legend(fontsize="small", ncols=2)


def _name(report: ParityReport) -> str:
    return f"{report.runtime} {short_name(report.precision)}, beam {report.beam}"


def _draw_layers(check: GraphCheck, axes: Axes) -> None:
    places = range(1, len(check.values) + 1)
    errors = [max(SMALLEST, value.error) if math.isfinite(value.error) else math.nan for value in check.values]
    axes.plot(places, errors, marker=".", linewidth=1)
    axes.plot(
        places, [max(SMALLEST, value.own) for value in check.values], linewidth=0.8, linestyle=":", color="#555555"
    )
    allowed = [max(SMALLEST, value.allowed) for value in check.values]
    axes.plot(places, allowed, linewidth=0.8, linestyle="--", color="#d55e00")
    starts = _starts([value.node for value in check.values])
    axes.set_xticks([index + 1 for index in starts.values()], list(starts), fontsize="x-small")
    if check.first is not None:
        index = check.values.index(check.first)
        axes.annotate(check.first.node, (index + 1, allowed[index]), color="#d55e00")


def _starts(nodes: Sequence[str]) -> dict[str, int]:
    """The first value of each layer: `encoder 0`, `decoder 2`, ..."""
    starts: dict[str, int] = {}
    for index, node in enumerate(nodes):
        side, _, rest = node.partition(".layers.")
        if rest:
            starts.setdefault(f"{side} {rest.partition('.')[0].partition('/')[0]}", index)
    return starts


def _layers(checks: Sequence[GraphCheck]) -> str:
    rows = []
    for check in checks:
        first, value = check.first, check.largest
        cells = [
            escape(_file(check)),
            str(len(check.values)),
            f"{value.error:.1e} of {value.allowed:.1e}: {escape(_shortened(value.about))}",
            "none"
            if first is None
            else f"<mark>{escape(first.node)}</mark>: {escape(_shortened(first.about))}, {first.error:.1e}",
        ]
        rows.append(("passed" if first is None else "failed", cells))
    return _table(["graph", "values compared", "closest to its limit", "first that departs from PyTorch"], rows)


def _arrangements(arranged: Sequence[Invariance]) -> str:
    """For each runtime, the numbers of sentences with the same tokens as alone, and with the same scores to the last bit."""
    names = list(dict.fromkeys(way.name for invariance in arranged for way in invariance.arrangements))
    rows = []
    for invariance in arranged:
        ways = {way.name: way for way in invariance.arrangements}
        cells = [
            f"{invariance.runtime} {short_name(invariance.precision)}",
            str(invariance.beam),
            str(invariance.sentences),
        ]
        cells += [_arrangement(ways[name], invariance.sentences) if name in ways else "" for name in names]
        rows.append(("passed" if invariance.passed else "failed", cells))
    note = '<p class="note">Sentences with the same tokens as alone, and those with the same score to the last bit.</p>'
    return note + _table(["", "beam", "sentences", *names], rows)


def _arrangement(way: Arrangement, sentences: int) -> str:
    text = f"{way.identical}, {way.exact}{f', {way.ties} ties' if way.ties else ''}"
    if way.error is not None:
        return f"<mark>{escape(way.error)}</mark>"
    return text if way.identical + way.ties == sentences else f"<mark>{text}</mark>"


def _sentences(comparison: Comparison) -> str:
    pairs = [(report, divergence) for report in comparison.reports for divergence in report.divergences]
    if not pairs:
        return "<p>None.</p>"
    pairs.sort(key=lambda pair: (pair[0].is_tie(pair[1]), -pair[1].margin))
    source, target = (comparison.bundle.tokenizer(side) for side in ("source", "target"))
    rows = []
    for report, divergence in pairs[:MOST_SENTENCES]:
        is_tie = report.is_tie(divergence)
        cells = [
            f"{divergence.sentence}<br><span class=note>{escape(_name(report))}</span>",
            escape(_text(comparison.sources[divergence.sentence - 1], source)),
            *(_from(ids, divergence, target) for ids in divergence.outputs),
            f"{divergence.margin:.1e}{', within rounding' if is_tie else ''}",
        ]
        rows.append(("passed" if is_tie else "", cells))
    more = len(pairs) - len(rows)
    note = f"<p>{more} more are left out, closer ones.</p>" if more > 0 else ""
    return _table(["sentence", "source", "PyTorch", "this runtime", "PyTorch prefers its own by"], rows) + note


def _text(ids: Sequence[int], tokenizer: TextTokenizer | None) -> str:
    return tokenizer.decode(ids) if tokenizer is not None else " ".join(map(str, ids))


def _from(ids: Sequence[int], divergence: Divergence, tokenizer: TextTokenizer | None) -> str:
    """The text of an output, marked from the first different token on."""
    same, rest = (_text(part, tokenizer) for part in (ids[: divergence.step - 1], ids[divergence.step - 1 :]))
    return f"{escape(same)} <mark>{escape(rest)}</mark>"
