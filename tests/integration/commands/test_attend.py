"""Pictures of attention: the right cells are dark, labels stand at their rows and columns, and a page needs nothing else."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.html import Checked
from tfexport.__main__ import main
from tfexport.decoding import attention_maps
from tfexport.decoding.attention_maps import Attention, Choice, labels_of, png, shortened
from tfexport.decoding.attention_page import page
from tfexport.errors import RuntimeUnavailable, TfexportError
from tfexport.text.tokenizers import word_tokenizer
from tfexport.training.vocabulary import train_bpe

ODD = Attention(
    ("<b>", "a&b", "$x^2$", '"', "Donaudampfschifffahrt"),
    ("<script>alert(1)</script>", "$", "</s>"),
    np.random.default_rng(0).dirichlet(np.ones(5), (2, 3, 3)).astype(np.float32),
)


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    (tmp_path / "in").write_text("de5 de6\n\nde9 Zwerg\nde30 de4\n")
    (tmp_path / "out").write_text("wört8 wört9 wört8\nwört4\nwört10\nwört11\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def run_main(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["tfexport", "attend", *map(str, arguments), "--threads", "1"])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0), capsys.readouterr().err

    return run_main


def one_cell(row: int, column: int) -> Attention:
    weights = np.zeros((1, 1, 3, 5), np.float32)
    weights[0, 0, row, column] = 1
    return Attention(tuple("abcde"), tuple("xyz"), weights)


def test_maps_are_those_of_each_layer_and_head_and_the_mean() -> None:
    rows = Choice().rows(ODD)
    assert [[title for title, _ in maps] for maps in rows] == [
        [f"layer {layer}, {what}" for what in ("mean", "head 0", "head 1", "head 2")] for layer in (0, 1)
    ]
    np.testing.assert_allclose(rows[1][0][1], ODD.weights[1].mean(axis=0))
    assert rows[1][3][1] is not rows[0][3][1]
    np.testing.assert_array_equal(rows[1][3][1], ODD.weights[1, 2])
    assert [[title for title, _ in maps] for maps in Choice(-1, 2).rows(ODD)] == [["layer 1, head 2"]]
    with pytest.raises(TfexportError, match="no decoder layer 2: this model has 2"):
        Choice(2).rows(ODD)
    with pytest.raises(TfexportError, match=r"no head 3: this model has 3\. Give 0 to 2"):
        Choice(head=3).rows(ODD)


def test_a_page_is_well_formed_and_needs_nothing_else() -> None:
    text = page("<i>bundle</i>", [ODD, one_cell(0, 0)], Choice())
    parser = Checked()
    parser.feed(text)
    assert parser.open == []
    assert not re.search(r"(?:src|href)=|url\(|@import|https?:|<script|<i>|<b>", text)
    assert text.count("<svg") == 2 * 4 + 2
    for label in ("&lt;b&gt;", "a&amp;b", "&lt;script&gt;", "Donaudampfschif…"):
        assert label in text


@pytest.mark.parametrize(("row", "column"), [(0, 4), (2, 0), (1, 3)])
def test_a_cell_of_a_page_is_in_the_row_of_its_target_and_the_column_of_its_source(row: int, column: int) -> None:
    text = page("p", [one_cell(row, column)], Choice(0, 0))
    target, source = "xyz"[row], "abcde"[column]
    [(x, y, size)] = re.findall(
        rf'<rect x="(\d+)" y="(\d+)" width="(\d+)" height="\d+" fill-opacity="1.00"><title>{source} → {target}: 1.00',
        text,
    )
    [across] = re.findall(rf'translate\((\S+) \S+\) rotate\(-90\)">{source}<', text)
    [down] = re.findall(rf'y="(\S+)" text-anchor="end">{target}<', text)
    assert float(x) < float(across) < float(x) + float(size)
    assert float(y) < float(down) < float(y) + float(size)


def drawn(sentences: list[Attention], choice: Choice) -> np.ndarray:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    return imread(io.BytesIO(png(sentences, choice)), format="png")[..., :3].sum(axis=2)


@pytest.mark.parametrize(("row", "column"), [(0, 4), (2, 0), (1, 3)])
def test_so_it_is_in_a_picture(row: int, column: int) -> None:
    attention = one_cell(row, column)
    image = drawn([attention], Choice(0, 0))
    [(*_, x, y, _)], width, height = attention_maps._placed([attention], Choice(0, 0))
    assert image.shape == (int(height * attention_maps.DPI), int(width * attention_maps.DPI))
    rows, columns = (
        [int((start + (place + 0.5) * attention_maps.CELL) * attention_maps.DPI) for place in range(count)]
        for start, count in ((y, 3), (x, 5))
    )
    middle = image[np.ix_(rows, columns)]
    assert np.unravel_index(np.argmin(middle), (3, 5)) == (row, column)
    assert np.sort(middle, axis=None)[1] > 2.5  # the others are white, or nearly


def test_pictures_hold_all_sentences_within_their_edges() -> None:
    """Nothing is drawn at the very edge; a long line of maps is broken."""
    many = Attention(tuple("abcde" * 8), tuple("xyz" * 13), np.full((1, 6, 39, 40), 1 / 40, np.float32))
    image = drawn([ODD, many], Choice())
    assert image[[0, -1]].min() == image[:, [0, -1]].min() == 3
    assert image.shape[1] < (attention_maps.WIDEST + 2) * attention_maps.DPI
    assert image.shape[0] > 3 * 39 * attention_maps.CELL * attention_maps.DPI  # seven maps of 7.6 inches in three lines


def test_a_picture_that_is_too_large_is_refused() -> None:
    wide = Attention(("a",) * 500, ("b",) * 500, np.zeros((6, 8, 500, 500), np.float32))
    with pytest.raises(TfexportError, match=r"too large\. Give --layer, --head or fewer lines, or write \.html"):
        png([wide], Choice())


def test_more_than_a_page_could_hold_is_refused_before_it_is_computed(
    run: Run, aligned_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_maps, "MOST_WEIGHTS", 3 * 4 * 3)
    code, said = run(aligned_bundle, "in", "out")
    assert code == 2
    assert "Give fewer --lines, or shorter ones." in said.splitlines()[-1]
    monkeypatch.setattr(attention_maps, "MOST_WEIGHTS", 3 * 4 * 4)
    assert run(aligned_bundle, "in", "out", "--lines", 1)[0] == 0


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeUnavailable, match=r"tfexport\[report\]"):
        png([ODD], Choice())


def test_labels_are_what_a_person_reads() -> None:
    words = word_tokenizer({"<unk>": 0, "a": 1, "</s>": 2})
    assert labels_of([1, 0, 2], words) == ("a", "<unk>", "</s>")
    assert labels_of([7, 8], None) == ("7", "8")
    subwords = train_bpe(["ein Hund läuft"] * 20, vocab_size=275)
    labels = labels_of(subwords.encode("ein Hund ß"), subwords)
    assert labels[0] == "ein"
    assert not any("�" in label or not label.strip() for label in labels)  # half a letter as the vocabulary writes it
    assert shortened("a\tb" + 20 * "c") == "a b" + 12 * "c" + "…"


def test_the_command_draws_what_is_decoded(run: Run, aligned_bundle: Path) -> None:
    code, said = run(aligned_bundle, "in")
    assert code == 0
    assert "wrote attention.html" in said
    text = Path("attention.html").read_text(encoding="utf-8")
    assert text.count("<h2>") == 3  # the empty line has no picture
    assert "<h2>&lt;sos&gt; de9 Zwerg &lt;eos&gt; → " in text
    assert text.count("<figcaption>") == 3 * 4


def test_the_command_draws_given_outputs(run: Run, aligned_bundle: Path) -> None:
    for flags in ([], ["--runtime", "torch"]):
        code, said = run(aligned_bundle, "in", "out", "-o", "a.html", "--layer", 0, "--head", 1, "--lines", 3, *flags)
        assert code == 0
        assert "note: there are more lines, which are not drawn: --lines is 3" in said
        text = Path("a.html").read_text(encoding="utf-8")
        assert "<h2>&lt;sos&gt; de5 de6 &lt;eos&gt; → wört8 wört9 wört8 &lt;eos&gt;</h2>" in text
        assert text.count("<figcaption>layer 0, head 1<") == text.count("<figcaption>") == 2


def test_the_command_writes_pictures(run: Run, aligned_bundle: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run(aligned_bundle, "in", "-o", "a.png", "--beam", 3)[0] == 0
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["in", "-o", "a.jpg"], "a.jpg is neither .html nor .png"),
        (["in", "-o", "missing/a.html"], "cannot write missing/a.html"),
        (["in", "--layer", 4], "no decoder layer 4: this model has 1"),
        (["in", "--head", 9], "no head 9: this model has 3"),
        (["none"], "cannot read none"),
        (["blank"], "no line that can be decoded"),
        (["in", "blank"], "more lines of the input than of the outputs"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(run: Run, aligned_bundle: Path, arguments: list[Any], message: str) -> None:
    Path("blank").write_text("\n")
    code, said = run(aligned_bundle, *arguments)
    assert code == 2
    assert message in said.splitlines()[-1]
    assert not Path("attention.html").exists()


def test_a_bundle_without_such_graphs_says_how_to_get_them(run: Run, tiny_bundle: Path) -> None:
    code, said = run(tiny_bundle, "in")
    assert code == 2
    assert "Export again with --alignments, or decode with --runtime torch" in said


def test_flags_of_decoding_are_refused_beside_targets(run: Run, aligned_bundle: Path) -> None:
    code, error = run(aligned_bundle, "in", "out", "--beam", 2, "-o", "a.html")
    assert code == 2
    assert "TARGETS are given" in error
    code, error = run(aligned_bundle, "-", "-", "-o", "a.html")
    assert code == 2
    assert "stdin" in error
