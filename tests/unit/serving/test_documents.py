"""Texts as sentences, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfexport.serving.libretranslate.documents import PlainText
from tfexport.serving.libretranslate.html_text import Markup


def upper(document: PlainText | Markup) -> str:
    return document.text([one.text.upper() for one in document.sentences])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ein hund", "EIN HUND"),
        ("  ein hund \t\n\n zwei\r\n", "  EIN HUND \t\n\n ZWEI\r\n"),
        ("eins\rzwei\u2028drei\x0bvier", "EINS\rZWEI\u2028DREI\x0bVIER"),
        ("--- \n , \nok", "--- \n , \nOK"),
        ("", ""),
        (" \n ", " \n "),
    ],
)
def test_lines_are_translated_and_white_space_stays(text: str, expected: str) -> None:
    assert upper(PlainText(text)) == expected


def test_a_sentence_knows_its_line() -> None:
    found = PlainText("\n\nzwei\n", "q.1, ").sentences
    assert [(one.text, one.place) for one in found] == [("zwei", "q.1, line 3")]


@given(st.text(alphabet="aé \t\n\r\x0b\x1c\x85\u2028\xa0.-", max_size=30))
def test_text_that_is_not_changed_comes_back(text: str) -> None:
    document = PlainText(text)
    assert document.text([one.text for one in document.sentences]) == text
    assert not any(one.text.strip() != one.text or len(one.text.splitlines()) != 1 for one in document.sentences)


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ("<p>ein <b>hund</b>.</p>", "<p>EIN <b>HUND</b>.</p>"),
        (
            '<a href="/x?a=1&amp;b=2" Class="b  a" id=3>eins</a>',
            '<a href="/x?a=1&amp;b=2" class="b  a" id="3">EINS</a>',
        ),
        ("a &lt; b &amp;&amp; c", "A &lt; B &amp;&amp; C"),
        ("10&nbsp;km", "10&nbsp;KM"),
        ("&euro; fünf", "€ FÜNF"),
        ("eins\n  zwei", "EINS ZWEI"),
        ("\n<p>\n eins </p>\n", "\n<p>\n EINS </p>\n"),
        ("<!DOCTYPE html>\n<p>eins</p>", "<!DOCTYPE html>\n<p>EINS</p>"),
        ("<pre>eins\n  zwei</pre>", "<pre>EINS\n  ZWEI</pre>"),
        ("<script>if (a<b && c) x()</script>ja", "<script>if (a<b && c) x()</script>JA"),
        ("<style>a{b:c}</style><code>x</code><template><p>x</p></template>",) * 2,
        ("<p translate=no>x <b>y</b></p>z", '<p translate="no">x <b>y</b></p>Z'),
        ('<p translate="no">x <b translate="YES">y</b></p>', '<p translate="no">x <b translate="YES">Y</b></p>'),
        ("<!-- hund --><!DOCTYPE html><br>eins<br/>", "<!-- hund --><!DOCTYPE html><br/>EINS<br/>"),
        ("<p>eins<p>zwei", "<p>EINS<p>ZWEI</p></p>"),
        ("<b>eins, <i>zwei</b> drei</i>", "<b>EINS, <i>ZWEI</i></b> DREI"),
        ("<img alt='ein hund' src=x>", '<img alt="ein hund" src="x"/>'),
        ("", ""),
    ],
)
def test_html_keeps_its_tags(html: str, expected: str) -> None:
    assert upper(Markup(html)) == expected


def test_html_is_written_once_for_each_alternative() -> None:
    document = Markup("<p>eins <b>zwei</b></p>")
    assert document.text(["A", "B"]) == "<p>A <b>B</b></p>"
    assert document.text(["C", "D"]) == "<p>C <b>D</b></p>"


def test_a_sentence_of_html_knows_its_place() -> None:
    found = Markup("<p>eins</p><pre>zwei\ndrei</pre>", "q.0, ").sentences
    assert [one.place for one in found] == ["q.0, text 1, line 1", "q.0, text 2, line 1", "q.0, text 2, line 2"]


def test_deep_html_is_no_recursion() -> None:
    assert upper(Markup("<b>" * 3000 + "x")).count("X") == 1
