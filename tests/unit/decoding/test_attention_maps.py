"""Pictures of attention: the right cells are dark, labels stand at their rows and columns, and a page needs nothing else."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest

from tests.support.html import Checked
from tfexport.decoding import attention_maps
from tfexport.decoding.attention_maps import Attention, MapSelection, labels_of, png, shortened
from tfexport.decoding.attention_page import page
from tfexport.errors import RuntimeUnavailable, TfexportError
from tfexport.text.tokenizers import word_tokenizer
from tfexport.training.vocabulary import train_bpe

ODD = Attention(
    ("<b>", "a&b", "$x^2$", '"', "Donaudampfschifffahrt"),
    ("<script>alert(1)</script>", "$", "</s>"),
    np.random.default_rng(0).dirichlet(np.ones(5), (2, 3, 3)).astype(np.float32),
)


def one_cell(row: int, column: int) -> Attention:
    weights = np.zeros((1, 1, 3, 5), np.float32)
    weights[0, 0, row, column] = 1
    return Attention(tuple("abcde"), tuple("xyz"), weights)


def drawn(sentences: list[Attention], selection: MapSelection) -> np.ndarray:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    return imread(io.BytesIO(png(sentences, selection)), format="png")[..., :3].sum(axis=2)


def test_maps_are_those_of_each_layer_and_head_and_the_mean() -> None:
    rows = MapSelection().rows(ODD)
    assert [[title for title, _ in maps] for maps in rows] == [
        [f"layer {layer}, {what}" for what in ("mean", "head 0", "head 1", "head 2")] for layer in (0, 1)
    ]
    np.testing.assert_allclose(rows[1][0][1], ODD.weights[1].mean(axis=0))
    assert rows[1][3][1] is not rows[0][3][1]
    np.testing.assert_array_equal(rows[1][3][1], ODD.weights[1, 2])
    assert [[title for title, _ in maps] for maps in MapSelection(-1, 2).rows(ODD)] == [["layer 1, head 2"]]
    with pytest.raises(TfexportError, match="no decoder layer 2: this model has 2"):
        MapSelection(2).rows(ODD)
    with pytest.raises(TfexportError, match=r"no head 3: this model has 3\. Give 0 to 2"):
        MapSelection(head=3).rows(ODD)


def test_a_page_is_well_formed_and_needs_nothing_else() -> None:
    text = page("<i>bundle</i>", [ODD, one_cell(0, 0)], MapSelection())
    parser = Checked()
    parser.feed(text)
    assert parser.open == []
    assert not re.search(r"(?:src|href)=|url\(|@import|https?:|<script|<i>|<b>", text)
    assert text.count("<svg") == 2 * 4 + 2
    for label in ("&lt;b&gt;", "a&amp;b", "&lt;script&gt;", "Donaudampfschif…"):
        assert label in text


@pytest.mark.parametrize(("row", "column"), [(0, 4), (2, 0), (1, 3)])
def test_a_cell_of_a_page_is_in_the_row_of_its_target_and_the_column_of_its_source(row: int, column: int) -> None:
    text = page("p", [one_cell(row, column)], MapSelection(0, 0))
    target, source = "xyz"[row], "abcde"[column]
    [(x, y, size)] = re.findall(
        rf'<rect x="(\d+)" y="(\d+)" width="(\d+)" height="\d+" fill-opacity="1.00"><title>{source} → {target}: 1.00',
        text,
    )
    [across] = re.findall(rf'translate\((\S+) \S+\) rotate\(-90\)">{source}<', text)
    [down] = re.findall(rf'y="(\S+)" text-anchor="end">{target}<', text)
    assert float(x) < float(across) < float(x) + float(size)
    assert float(y) < float(down) < float(y) + float(size)


@pytest.mark.parametrize(("row", "column"), [(0, 4), (2, 0), (1, 3)])
def test_so_it_is_in_a_picture(row: int, column: int) -> None:
    attention = one_cell(row, column)
    image = drawn([attention], MapSelection(0, 0))
    [(*_, x, y, _)], width, height = attention_maps._placed([attention], MapSelection(0, 0))
    assert image.shape == (int(height * attention_maps.DPI), int(width * attention_maps.DPI))
    rows, columns = (
        [int((start + (place + 0.5) * attention_maps.CELL) * attention_maps.DPI) for place in range(count)]
        for start, count in ((y, 3), (x, 5))
    )
    middle = image[np.ix_(rows, columns)]
    assert np.unravel_index(np.argmin(middle), (3, 5)) == (row, column)
    assert np.sort(middle, axis=None)[1] > 2.5  # the others are white, or nearly


@pytest.mark.thorough
def test_pictures_hold_all_sentences_within_their_edges() -> None:
    """Nothing is drawn at the very edge; a long line of maps is broken."""
    many = Attention(tuple("abcde" * 8), tuple("xyz" * 13), np.full((1, 6, 39, 40), 1 / 40, np.float32))
    image = drawn([ODD, many], MapSelection())
    assert image[[0, -1]].min() == image[:, [0, -1]].min() == 3
    assert image.shape[1] < (attention_maps.WIDEST + 2) * attention_maps.DPI
    assert image.shape[0] > 3 * 39 * attention_maps.CELL * attention_maps.DPI  # seven maps of 7.6 inches in three lines


def test_a_picture_that_is_too_large_is_refused() -> None:
    wide = Attention(("a",) * 500, ("b",) * 500, np.zeros((6, 8, 500, 500), np.float32))
    with pytest.raises(TfexportError, match=r"too large\. Give --layer, --head or fewer lines, or write \.html"):
        png([wide], MapSelection())


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeUnavailable, match=r"tfexport\[report\]"):
        png([ODD], MapSelection())


def test_labels_are_what_a_person_reads() -> None:
    words = word_tokenizer({"<unk>": 0, "a": 1, "</s>": 2})
    assert labels_of([1, 0, 2], words) == ("a", "<unk>", "</s>")
    assert labels_of([7, 8], None) == ("7", "8")
    subwords = train_bpe(["ein Hund läuft"] * 20, vocab_size=275)
    labels = labels_of(subwords.encode("ein Hund ß"), subwords)
    assert labels[0] == "ein"
    assert not any("�" in label or not label.strip() for label in labels)  # half a letter as the vocabulary writes it
    assert shortened("a\tb" + 20 * "c") == "a b" + 12 * "c" + "…"
