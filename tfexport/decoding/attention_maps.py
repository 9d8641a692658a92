"""Pictures of the cross-attention of outputs, in every layer and head."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tfexport.config import ModelConfig
from tfexport.errors import TfexportError
from tfexport.runtimes.base import Runtime
from tfexport.runtimes.outputs import FloatArray
from tfexport.search.attention_trace import resolve_layer
from tfexport.system.imports import figure_class
from tfexport.text.tokenizers import TextTokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST_LABEL = 16
"""The largest number of characters of a token that are shown."""

CELL = 0.19
"""The side of a cell in a PNG, in inches."""
LETTER = 0.068
"""The width of a letter of a label, in inches."""
GAP = 0.3
"""The space between maps, in inches."""
WIDEST = 24.0
"""The largest width of a PNG, in inches. Further maps of a layer begin a new line."""
DPI = 110
MOST_PIXELS = 60_000_000
"""The largest number of pixels of a PNG: a quarter of a gigabyte while it is drawn."""


MOST_WEIGHTS = 25_000_000
"""The largest number of attention weights of all sentences that are drawn at once: 100 MB."""


@dataclass(frozen=True)
class Attention:
    """The cross-attention of one sentence."""

    source: tuple[str, ...]
    """The labels of the source ids."""
    target: tuple[str, ...]
    """The labels of the output tokens."""
    weights: FloatArray
    """[layers, heads, target, source]: the attention of each token when it was chosen."""


@dataclass(frozen=True)
class MapSelection:
    """The layers and heads whose maps are drawn."""

    layer: int | None = None
    """Layer number from 0; negative numbers count from the last. None shows all layers."""
    head: int | None = None
    """Head number from 0. None shows all heads and their mean."""

    def rows(self, attention: Attention) -> list[list[tuple[str, FloatArray]]]:
        """For each layer, the title and the weights [target, source] of each map.

        Raises:
            TfexportError: the model has no such layer or head.
        """
        layers, heads, *_ = attention.weights.shape
        if self.head is not None and not 0 <= self.head < heads:
            raise TfexportError(f"there is no head {self.head}: this model has {heads}. Give 0 to {heads - 1}.")
        chosen = range(layers) if self.layer is None else [resolve_layer(self.layer, layers)]
        rows = []
        for layer in chosen:
            maps = [(f"layer {layer}, head {head}", attention.weights[layer, head]) for head in range(heads)]
            mean = (f"layer {layer}, mean", attention.weights[layer].mean(axis=0))
            rows.append([mean, *maps] if self.head is None else [maps[self.head]])
        return rows


def require_drawable(config: ModelConfig, sizes: Iterable[tuple[int, int]]) -> None:
    """Check the size of maps before they are drawn.

    Args:
        sizes: the numbers of source ids and output tokens of each sentence.

    Raises:
        TfexportError: the maps of all sentences are too large for a page.
    """
    weights = config.n_decoder_layers * config.n_heads * sum(source * target for source, target in sizes)
    if weights > MOST_WEIGHTS:
        raise TfexportError(
            f"{weights:,} attention weights are too many for one page. Give fewer --lines, or shorter ones."
        )


def attention_maps(runtime: Runtime, source: Sequence[int], target: Sequence[int]) -> FloatArray:
    """The cross-attention [layers, heads, target, source] of a model along `target`, given the encoder's ids `source`.

    `target` has no bos, and need not be an output that the model would choose.

    Raises:
        RuntimeUnavailable, BundleError: the runtime or the bundle does not return attention.
    """
    state = runtime.encode(np.array([source]), np.array([len(source)]), attention=True)
    steps = []
    for token in [runtime.config.bos_id, *target[:-1]]:
        _, state = runtime.best(state, np.array([token]), 1)
        steps.append(state.attention[:, 0].copy())
    return np.stack(steps, axis=2)


def labels_of(ids: Sequence[int], tokenizer: TextTokenizer | None) -> tuple[str, ...]:
    """The label of each id: its text, or its token in the vocabulary if it has no text."""
    if tokenizer is None:
        return tuple(str(index) for index in ids)
    texts = (tokenizer.decode([index]).strip() for index in ids)
    return tuple(
        text if text and "�" not in text else token for text, token in zip(texts, tokenizer.tokens(ids), strict=True)
    )


NO_PNG = "a PNG needs matplotlib, which is not installed: pip install 'tfexport[report]'. Or write .html."


def shortened(label: str) -> str:
    """A label cut to `LONGEST_LABEL` characters."""
    label = " ".join(label.split())
    return label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"


def png(sentences: Sequence[Attention], selection: MapSelection) -> bytes:
    """A picture of all sentences, one under the other: a row of maps for each layer, sources across, outputs down.

    Raises:
        RuntimeUnavailable: matplotlib is not installed.
        TfexportError: the layer or head does not exist, or the picture would be too large.
    """
    maps, width, height = _placed(sentences, selection)
    if width * height * DPI**2 > MOST_PIXELS or max(width, height) * DPI > 2**16:
        raise TfexportError("the picture would be too large. Give --layer, --head or fewer lines, or write .html.")
    figure = figure_class(NO_PNG)(figsize=(width, height))
    for placed in maps:
        _draw(figure, placed, (width, height))
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI, metadata={"Software": None})
    return out.getvalue()


class PlacedMap(NamedTuple):
    """A map with its position in a picture."""

    attention: Attention
    """The sentence of the map."""
    title: str
    weights: FloatArray
    """[target, source]."""
    x: float
    """The left edge of the cells, in inches from the left."""
    y: float
    """The upper edge of the cells, in inches from the top."""
    is_first: bool
    """Whether the map is the first of its line. Only this map has labels for the target tokens."""


def _placed(sentences: Sequence[Attention], selection: MapSelection) -> tuple[list[PlacedMap], float, float]:
    """All maps of a picture, and the picture's width and height in inches."""
    placed: list[PlacedMap] = []
    width, y = 0.0, GAP
    for attention in sentences:
        y += GAP if placed else 0.0
        across, down = len(attention.source) * CELL, len(attention.target) * CELL
        left, top = (max(map(_letters, labels)) * LETTER + 0.15 for labels in (attention.target, attention.source))
        for maps in selection.rows(attention):
            # A title may be wider than its cells.
            step = max(across, max(len(title) for title, _ in maps) * LETTER) + GAP
            in_line = max(1, int((WIDEST - left) / step))
            for index, (title, weights) in enumerate(maps):
                if index % in_line == 0:
                    y += top + 0.25 + (index > 0) * (down + GAP)  # the title is above the labels
                x = GAP + left + index % in_line * step
                placed.append(PlacedMap(attention, title, weights, x, y, index % in_line == 0))
                width = max(width, x + step)
            y += down + GAP
    return placed, width, y


def _letters(label: str) -> int:
    return len(shortened(label))


def _draw(figure: Figure, placed: PlacedMap, size: tuple[float, float]) -> None:
    attention, (width, height) = placed.attention, size
    rows, columns = placed.weights.shape
    left, bottom = placed.x / width, 1 - (placed.y + rows * CELL) / height
    axes = figure.add_axes((left, bottom, columns * CELL / width, rows * CELL / height))
    axes.imshow(placed.weights, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.xaxis.tick_top()
    axes.set_xticks(range(columns), _literal(attention.source), rotation=90, fontsize=8)
    axes.set_yticks(range(rows), _literal(attention.target) if placed.is_first else [""] * rows, fontsize=8)
    axes.tick_params(length=0, pad=2)
    axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="#dddddd", linewidth=0.4)
    axes.tick_params(which="minor", length=0)
    top = max(map(_letters, attention.source)) * LETTER + 0.1
    figure.text(left, 1 - (placed.y - top) / height, placed.title, fontsize=9, fontweight="bold", va="bottom")


def _literal(labels: Sequence[str]) -> list[str]:
    """Labels in which a dollar sign does not begin a formula."""
    return [shortened(label).replace("$", r"\$") for label in labels]
