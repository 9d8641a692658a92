"""Attention as a self-contained HTML page: maps in SVG, whose cells show their weight."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tfexport.decoding.attention_maps import Attention, MapSelection, shortened
from tfexport.runtimes.outputs import FloatArray

CELL, LETTER = 17, 7
"""The side of a cell and the width of a letter of a label, in pixels."""

LEAST = 0.02
"""Smaller weights stay white: most weights are small, and would not be visible."""

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #222 }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem } .note { color: #666 }
.row { display: flex; flex-wrap: wrap; gap: .4rem 1.4rem; margin: .6rem 0 1.6rem }
figure { margin: 0 } figcaption { font-weight: 600; font-size: 13px } svg { display: block }
"""


def page(title: str, sentences: Sequence[Attention], selection: MapSelection) -> str:
    """The page of some sentences. Each sentence has a row of maps for each layer, the mean of the heads first.

    Raises:
        TfexportError: the model has no such layer or head.
    """
    parts = [
        f"<h1>{escape(title)}: attention</h1>",
        '<p class="note">Down: the output, token by token. Across: the source. The darker a cell, the more of the attention '
        "with which its token was chosen went to that source token; each row adds up to 1.</p>",
    ]
    for attention in sentences:
        parts.append(f"<h2>{escape(' '.join(attention.source))} → {escape(' '.join(attention.target))}</h2>")
        for maps in selection.rows(attention):
            figures = "".join(
                f"<figure><figcaption>{escape(name)}</figcaption>{_svg(attention, weights)}</figure>"
                for name, weights in maps
            )
            parts.append(f'<div class="row">{figures}</div>')
    head = f'<meta charset="utf-8"><title>{escape(title)}: attention</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _svg(attention: Attention, weights: FloatArray) -> str:
    rows, columns = weights.shape
    left, top = (
        round(max(len(shortened(label)) for label in labels) * LETTER) + 10
        for labels in (attention.target, attention.source)
    )
    across, down = columns * CELL, rows * CELL
    labels = [
        f'<text x="{left - 5}" y="{top + (row + 0.72) * CELL:.1f}" text-anchor="end">{escape(shortened(label))}</text>'
        for row, label in enumerate(attention.target)
    ]
    for column, label in enumerate(attention.source):
        x = left + (column + 0.72) * CELL
        labels.append(f'<text transform="translate({x:.1f} {top - 5}) rotate(-90)">{escape(shortened(label))}</text>')
    lines = [f"M{left} {top + row * CELL}h{across}" for row in range(1, rows)]
    lines += [f"M{left + column * CELL} {top}v{down}" for column in range(1, columns)]
    cells = [
        f'<rect x="{left + column * CELL}" y="{top + row * CELL}" width="{CELL}" height="{CELL}" '
        f'fill-opacity="{weights[row, column]:.2f}"><title>'
        f"{escape(attention.source[column])} → {escape(attention.target[row])}: {weights[row, column]:.2f}</title></rect>"
        for row in range(rows)
        for column in range(columns)
        if weights[row, column] >= LEAST
    ]
    # Colours are attributes, not styles, so that a map looks the same outside of the page.
    return (
        f'<svg width="{left + across + 2}" height="{top + down + 2}" role="img">'
        f'<rect x="{left}" y="{top}" width="{across}" height="{down}" fill="#fff" stroke="#bbb"></rect>'
        f'<path d="{"".join(lines)}" fill="none" stroke="#e4e4e4"></path>'
        f'<g font-family="sans-serif" font-size="12" fill="#222">{"".join(labels)}</g>'
        f'<g fill="#08306b">{"".join(cells)}</g></svg>'
    )
