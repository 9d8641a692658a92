"""Texts taken apart and put together: nothing is lost, and tags go with their words."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from makers.documents import backwards, exact, is_balanced, same, tags, taken_apart
from tfexport.documents.document import Document, document
from tfexport.documents.html_runs import html_runs
from tfexport.documents.markdown_text import written
from tfexport.documents.marks import nodes_of
from tfexport.documents.options import DocumentOptions, InputDocumentOptions, Markup
from tfexport.documents.placing import Aligned
from tfexport.documents.splitting import pieces, spans_between
from tfexport.errors import RuntimeUnavailable, TfexportError


def texts(document: Document) -> list[str]:
    return [one.text for one in document.segments]


def reversed_words(text: str, markup: Markup | None = None, **options: int) -> str:
    document = taken_apart(text, markup, **options)
    return document.text([backwards(one) for one in document.segments])


def unchanged(text: str, markup: Markup) -> str:
    document = taken_apart(text, markup)
    return document.text([same(one) for one in document.segments])


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Dr. Maier kam um 3.5 Uhr. Er ging.", ["Dr. Maier kam um 3.5 Uhr.", "Er ging."]),
        ("Das ist z. B. teuer, d. h. zu teuer. Nein!", ["Das ist z. B. teuer, d. h. zu teuer.", "Nein!"]),
        ("\ufeffHallo.\r\n\r\n  Du?  \n", ["Hallo.", "Du?"]),
        ("eins\fzwei\u2028drei\x85vier\x0bfünf", ["eins", "zwei", "drei", "vier", "fünf"]),
        ("--- \n … \n\u200b\n!!!", []),
        ("42\n3.14\n10 %\n2 m\n", ["2 m"]),
        ("", []),
        (" \t\n", []),
        ("Das ist Plan B\xa0. Er läuft. Ja.", ["Das ist Plan B\xa0. Er läuft.", "Ja."]),
        ("Plan B\u202f. Er läuft. Ja.", ["Plan B\u202f. Er läuft.", "Ja."]),
        ("Plan B\u3000. Er läuft. Ja.", ["Plan B\u3000. Er läuft.", "Ja."]),
        ("今日は。雨です。", ["今日は。", "雨です。"]),
        ("שלום. מה שלומך?", ["שלום.", "מה שלומך?"]),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    document = taken_apart(text)
    assert texts(document) == sentences
    assert [text[one.start : one.end] for one in document.segments] == sentences


def test_a_line_that_the_splitter_cannot_read_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    def boundaries(_: str, line: str) -> list[dict[str, int]]:
        if "Zwei" in line:
            raise panic("byte index 1 is not a char boundary")
        if "Drei" in line:
            raise KeyboardInterrupt
        return [{"end_index": len(line)}]

    monkeypatch.setattr("sentencex.get_sentence_boundaries", boundaries)
    assert texts(taken_apart("Ein Hund.\nZwei Hunde. Vier.\n")) == ["Ein Hund.", "Zwei Hunde. Vier."]
    with pytest.raises(KeyboardInterrupt):
        taken_apart("Drei Hunde.")


def test_a_lone_quotation_mark_ends_no_splitting() -> None:
    text = f'Ein 5" Nagel. {"Ein Hund bellt laut. " * 40}Er sagt "Nein". Ende.'
    assert len(taken_apart(text).segments) > 40


def test_a_region_has_the_rules_of_its_language() -> None:
    from tfexport.documents.splitting import sentence_spans

    text = "Das kostet bzw. kostete viel. Nein."
    assert len(sentence_spans(text, "sentences", "de_AT")) == len(sentence_spans(text, "sentences", "de")) == 2


def test_what_is_too_long_is_cut_where_it_hurts_least() -> None:
    text = "ein zwei drei, vier fünf sechs; sieben acht neun zehn elf"
    assert texts(taken_apart(text, most=33)) == ["ein zwei drei, vier fünf sechs;", "sieben acht neun zehn elf"]
    assert texts(taken_apart(text, most=28)) == ["ein zwei drei,", "vier fünf sechs;", "sieben acht neun zehn elf"]
    assert texts(taken_apart("ein zwei drei", most=10)) == ["ein zwei", "drei"]
    assert texts(taken_apart("abcdefgh", most=3)) == ["abc", "def", "gh"]
    assert texts(taken_apart("abce\u0301f", most=4)) == ["abc", "e\u0301f"]
    assert all(one.is_piece for one in taken_apart(text, most=33).segments)
    assert not any(one.is_piece for one in taken_apart(text).segments)


def test_a_line_of_a_megabyte() -> None:
    text = "ein kurzer Satz, " * 60_000
    found = taken_apart(text, most=500)
    assert max(map(len, texts(found))) <= 500
    assert len(found.segments) < 2.5 * len(text) / 500


def test_pieces_are_found_without_reading_the_rest_each_time() -> None:
    read = 0

    def fits(start: int, end: int) -> bool:
        nonlocal read
        read += end - start
        return end - start <= 100 + start // 100

    text = "ein kurzer Satz, " * 3000
    found = pieces(text, 0, len(text), fits)
    assert len(found) > 150
    assert read < 20 * len(text)


def test_what_touches_in_the_source_has_a_space_where_the_target_has_spaces() -> None:
    document = taken_apart("今日は。雨です。")
    assert document.text([Aligned("Today."), Aligned("It rains.")]) == "Today. It rains."
    assert document.text([Aligned("今天。"), Aligned("下雨。")]) == "今天。下雨。"
    assert taken_apart("abcdef", most=3).text([Aligned("ABC"), Aligned("DEF")]) == "ABCDEF"


def test_what_has_no_translation_stays() -> None:
    document = taken_apart(" Ein Hund. Zwei. ")
    assert document.text([None, Aligned("Two.")]) == " Ein Hund. Two. "
    document = taken_apart("<p>Ein <b>Hund</b> da. <i>Zwei</i> x.</p>", "html")
    assert document.text([None, None]) == document.source


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ("<p>eins <b>zwei drei</b> vier</p>", "<p>vier <b>drei zwei</b> eins</p>"),
        ("<p><b>eins</b> zwei</p>", "<p>zwei <b>eins</b></p>"),
        ("<p><b>eins zwei</b></p>", "<p><b>zwei eins</b></p>"),
        ("eins <i>zwei <b>drei</b></i> vier", "vier <i><b>drei</b> zwei</i> eins"),
        ('a <a href="/x?a=1&b=2" Class="b  a" id=3>zwei</a> c', 'c <a href="/x?a=1&b=2" Class="b  a" id=3>zwei</a> a'),
        ("eins <img alt='ein hund' src=x> zwei drei", "<img alt='ein hund' src=x> drei zwei eins"),
        ("eins <code>a &lt; b</code> zwei", "zwei <code>a &lt; b</code> eins"),
        ("eins <!-- c. d --> zwei", "<!-- c. d --> zwei eins"),
        ("a &lt; &auml; &nbsp;b", "b ä &lt; a"),
        ("eins\n  zwei", "zwei eins"),
        ("eins<br>zwei drei", "eins<br>drei zwei"),
        ("ein https://a.b/c?d&amp;e=1, zwei", "zwei https://a.b/c?d&amp;e=1, ein"),
        ("<pre>eins x\n  zwei</pre>", "<pre>x eins\n  zwei</pre>"),
        ("<script>if (a<b && c) x. Y()</script>ja da", "<script>if (a<b && c) x. Y()</script>da ja"),
        ("<style>a b{c:d}</style><template><p>x y</p></template>",) * 2,
        ("<textarea>a b\nc d</textarea>", "<textarea>b a\nd c</textarea>"),
        ("<p translate=no>x <b>y</b></p>z a", "<p translate=no>x <b>y</b></p>a z"),
        ("<p>eins a<p>zwei b", "<p>a eins<p>b zwei"),
        ("<![CDATA[ x y ]]>a b", "<![CDATA[ x y ]]>b a"),
        ("", ""),
    ],
)
def test_html(html: str, expected: str) -> None:
    assert unchanged(html, "html").split() == html.replace("&auml;", "ä").split()
    assert reversed_words(html, "html") == expected


@pytest.mark.parametrize("html", ["eins</b> zwei <i>drei", "<b>eins, <i>zwei</b> drei</i>", "<b>" * 50 + "eins zwei"])
def test_tags_that_are_not_balanced_stay_wherever(html: str) -> None:
    assert sorted(re.findall("<[^>]*>", reversed_words(html, "html"))) == sorted(re.findall("<[^>]*>", html))


@pytest.mark.parametrize(
    ("html", "backward"),
    [
        ("die <code>int</code>s im Park", "Park im <code>int</code>s die"),
        ("<var>n</var>x", "<var>n</var>x"),
        ("a b<var>n</var><var>m</var>c", "b<var>n</var><var>m</var>c a"),
        ("das <code>f()</code>s da", "da <code>f()</code>s das"),
        ("eine <b>Dampf</b>maschine", "<b>Dampf</b>maschine eine"),
        ("eine Donau<wbr>dampf<i>fahrt</i>", "Donau<wbr>dampf<i>fahrt</i> eine"),
        ("a Donau<b>fahrt</b> und <i>Donau</i>fahrt", "Donau<b>fahrt</b> und <i>Donau</i>fahrt a"),
        ("<b>die <code>int</code>s</b> im", "im <b><code>int</code>s die</b>"),
    ],
)
def test_parts_of_a_word(html: str, backward: str) -> None:
    assert unchanged(html, "html") == html
    assert reversed_words(html, "html") == backward


def translated(source: str, new: str, markup: Markup = "html") -> str:
    """The words of the translation are assumed to be in the order of the source."""
    return taken_apart(source, markup).text([Aligned(new)])


def test_copied_parts_have_space_beside_words() -> None:
    source = "die <code>int</code>s im Park"
    assert translated(source, "the ints in the park") == "the <code>int</code>s in the park"
    assert translated(source, "the int values in the park") == "the <code>int</code> values in the park"
    assert translated("(<code>a b</code>) oder nicht", "this one") == "<code>a b</code> this one"
    assert translated("配列<code>a b</code>の要素", "要素です") == "<code>a b</code>要素です"


def attending(source: str, new: str, to: list[int], kept: str = "") -> str:
    """The document with a translation whose words and marks attend to the words of the source with these numbers."""
    document = taken_apart(source, "markdown")
    [segment] = document.segments
    phrases = [found.span() for found in re.finditer(kept, new)] if kept else []
    targets, sources = ([word.span() for word in re.finditer(r"\w+|[^\w\s]", part)] for part in (new, segment.text))
    return document.text([Aligned(new, targets, sources, np.eye(len(sources), dtype=np.float32)[to], phrases)])


@pytest.mark.parametrize("code", ["`npm install`", "**`npm install`**", "[`npm install`](x)"])
def test_copied_parts_replace_no_punctuation(code: str) -> None:
    source = f"Sie startet {code} da."
    assert attending(source, "She starts there.", [0, 1, 4, 2]) == f"She starts there {code}."
    assert attending(source, "She starts npm, there.", [0, 1, 2, 3, 4, 5]) == f"She starts {code}, there."
    assert attending(source, "She starts it (npm) now.", [0, 1, 1, 2, 2, 2, 4, 5]) == f"She starts it ({code}) now."


def test_copied_parts_replace_their_own_punctuation() -> None:
    assert attending("Nimm `f()` da.", "Take f ( ) there.", [0, 1, 2, 3, 4, 5]) == "Take `f()` there."
    assert attending("Nimm **`...`** da.", "Take ... there.", [0, 1, 2, 3, 4, 5]) == "Take **`...`** there."


@pytest.mark.parametrize("code", ["`a`", "**`a`**"])
def test_copied_parts_replace_no_required_phrases(code: str) -> None:
    source = f"Sie nimmt {code} da."
    assert attending(source, "She takes a puppy.", [0, 1, 2, 2, 4], "puppy") == f"She takes {code} puppy."
    assert (
        attending(source, "She takes New York now.", [0, 1, 1, 2, 3, 4], "New York")
        == f"She takes New York {code} now."
    )
    assert (
        attending(source, "She takes a now.", [0, 1, 2, 3, 4], "takes a") == f"She takes {code} now."
    )  # the same words


@pytest.mark.parametrize(
    ("source", "new", "to", "expected"),
    [
        ("Nimm `a` und `b` da.", "Take there.", [0, 4, 1], "Take there `a`. `b`"),
        ("Nimm `a` und `b` da.", "取る。", [1, 3], "`a` `b`。"),
        ("Nimm **`a`** und `b` da.", "There", [4], "There **`a`** `b`"),
        ("Nimm `a` und `b` da", "Und", [2], "Und `a` `b`"),
        ("Nimm `a`<kbd>b</kbd> da", "There", [2], "There `a`<kbd>b</kbd>"),
        ("Nimm **`b` da**.", "Take there.", [0, 2, 3], "Take **there `b`**."),
        ("Nimm **`b` da**.", "Take there.", [0, 2, 1], "Take **there `b`.**"),
    ],
)
def test_copied_parts_have_space_between_them(source: str, new: str, to: list[int], expected: str) -> None:
    assert attending(source, new, to) == expected


def test_copied_parts_without_words_have_space_between_them() -> None:
    assert translated("Ein <code>a</code> und <b><code>b</code></b> da", "") == "<code>a</code> <b><code>b</code></b>"


def test_space_is_written_before_emphasis() -> None:
    document = taken_apart("execute **Array<String>**, defaults", "markdown")
    assert document.text([exact(one) for one in document.segments]) == document.source
    assert attending("Ein ![x](y) **Hund** da", "A dog", [0, 1]) == "A ![x](y) **dog**"


def test_emphasis_without_words_is_left_out() -> None:
    assert translated("<b>Ein</b> Hund da", "") == "<b></b>"
    no_attention = np.array([[1, 0, 0], [0, 0, 1]], np.float32)  # to the second word
    new = Aligned("one there", [(0, 3), (4, 9)], [(0, 3), (4, 8), (9, 11)], no_attention)
    for markdown in ("Ein **Hund** da", "Ein ***Hund*** da", "Ein ~~Hund~~ da"):
        assert taken_apart(markdown, "markdown").text([new]) == "one there"


def test_of_equal_texts_the_aligned_one_is_copied_code() -> None:
    document = taken_apart("ls und `ls`", "markdown")
    assert document.text([exact(one) for one in document.segments]) == "ls und `ls`"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Er kommt zum Bild ![Bild](x.png).", "Picture approaching. ![Bild](x.png)"),
        ("Im Park<sup>2</sup> am Haus", "in park<sup>2</sup> by house"),
        ("Ein [![x](y)](z) da", "one [![x](y)](z) there"),
        ("Ein ![x](y) da", "one ![x](y) there"),
        ("Ein![x](y) da", "one![x](y) there"),
        ("Ein ![x](y)da", "one ![x](y) there"),
    ],
)
def test_images_keep_the_space_beside_them(source: str, expected: str) -> None:
    assert translated(source, re.sub(r"\s*(!?\[.*\)|<sup.*/sup>)", "", expected), "markdown") == expected


NOTE = '<sup class=n><a href="#1">[1]</a></sup>'


@pytest.mark.parametrize(
    ("html", "sentences"),
    [
        ("Ein Mann sitzt im Park.<sup>1</sup> Ein Hund.", ["Ein Mann sitzt im Park.", "Ein Hund."]),
        (f"Ein Mann.{NOTE} Ein Hund.{NOTE}", ["Ein Mann.", "Ein Hund."]),
        ("Ein <b>Hund.<sup>&nbsp;2&dagger;</sup></b> Er da.", ["Ein Hund.", "Er da."]),
        ("H<sub>2</sub>O da", ["H2O da"]),
        ("viel CO<sub>2</sub> da", ["viel CO2 da"]),
        ("Der 1<sup>er</sup> da", ["Der 1er da"]),
        ("Ein Hund<sup>1 da", ["Ein Hund1 da"]),
        ("Ein Hund<sup>1<p>da</sup>", ["Ein Hund1", "da"]),
        ("Ein <b>Hund<sup>1</b> da</sup>", ["Ein Hund1 da"]),
    ],
)
def test_numbers_of_footnotes_are_copied(html: str, sentences: list[str]) -> None:
    is_plain = not re.search("<[ap]|&", html)  # in Markdown, a number with other marks is read
    for markup in ("html", "markdown")[: 1 + is_plain]:
        assert_copied(html, sentences, markup)


def assert_copied(html: str, sentences: list[str], markup: Markup) -> None:
    assert texts(taken_apart(html, markup)) == sentences
    assert Counter(tags(reversed_words(html, markup))) == Counter(tags(html))
    if sentences[0].endswith("."):
        assert unchanged(html, markup) == html


def test_raised_elements_without_an_end_are_searched_once() -> None:
    began = time.process_time()
    assert len(taken_apart("<sup>1" * 20_000 + "<sub><b>2" * 20_000 + "a", "html").segments) == 1
    assert time.process_time() - began < 20


def test_tags_of_a_sentence_are_placed_one_after_the_other() -> None:
    html = "eins" + "<wbr>" * 40_000 + " zwei"  # to compare each with every other takes more than a minute
    began = time.process_time()
    assert Counter(tags(reversed_words(html, "html"))) == Counter(tags(html))
    assert time.process_time() - began < 30


def test_marks_of_a_sentence_with_many_elements_are_found_at_once() -> None:
    html = "Ein " + "<i>x</i> <wbr>" * 8_000 + " da"
    [segment] = taken_apart(html, "html").segments
    run = html_runs(html)[0]
    began = time.process_time()
    assert len(nodes_of(html, run, 0, len(run.text))[1]) == len(run.marks)
    assert segment.end == len(html)
    assert time.process_time() - began < 2


@pytest.mark.parametrize("depth", [49, 51, 2000])
def test_elements_deep_within_each_other_stay_balanced(depth: int) -> None:
    html = f"Ein {'<b><i>' * depth}Hund{'</i></b>' * depth} läuft"
    found = taken_apart(html, "html")
    for translate in (same, backwards):
        after = tags(found.text([translate(one) for one in found.segments]))
        assert Counter(after) == Counter(tags(html))
        assert is_balanced(after)


def test_what_has_no_whole_tag_is_not_given_to_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    feed = HTMLParser.feed
    monkeypatch.setattr(HTMLParser, "feed", lambda self, text: (given.append(text), feed(self, text))[1])
    html = "Ein <b>Hund</b> &amp; " + "<a " * 20
    assert unchanged(html, "html").replace("&lt;", "<") == html
    assert set(given) == {"Ein <b>Hund</b>"}


def test_without_attention_tags_end_segments() -> None:
    document = taken_apart("<p>Ein <b>Hund</b> bellt <code>a b</code> laut.</p>", "html", aligned=False)
    assert texts(document) == ["Ein", "Hund", "bellt", "laut."]
    new = document.text([Aligned(one.text.upper()) for one in document.segments])
    assert new == "<p>EIN <b>HUND</b> BELLT <code>a b</code> LAUT.</p>"


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("# ein *zwei drei*", "# *drei zwei* ein"),
        ("> ein **zwei**\n> drei", "> drei **zwei** ein"),
        ("ein [zwei](http://a.b/c?d=e 'T. u') drei", "drei [zwei](http://a.b/c?d=e 'T. u') ein"),
        ("ein [zwei][r] drei\n\n[r]: http://x.y 'Z. a'\n", "drei [zwei][r] ein\n\n[r]: http://x.y 'Z. a'\n"),
        ("ein `a. b` zwei", "zwei `a. b` ein"),
        ("ein https://a.b/c?d zwei", "zwei https://a.b/c?d ein"),
        ("ein <https://a.b/c> zwei", "zwei <https://a.b/c> ein"),
        ("ein da.[^1] Zwei eins\n\n[^1]: drei vier\n", "da. ein[^1] eins Zwei\n\n[^1]: vier drei\n"),
        ("ein da. `zwei` ist eins", "da. ein eins ist `zwei`"),
        ("ein **zwei <https://a.b/c>** drei", "drei **<https://a.b/c> zwei** ein"),
        ("ein **zwei <kbd>a b</kbd>** drei", "drei **<kbd>a b</kbd> zwei** ein"),
        ("ein ![x *y*](z.png) zwei", "![x *y*](z.png) zwei ein"),
        ("- [ ] ein zwei\n- [x] drei vier", "- [ ] zwei ein\n- [x] vier drei"),
        ("| a b | c |\n|--|--|\n| *d e* f | g \\| h |\n", "| b a | c |\n|--|--|\n| f *e d* | h \\| g |\n"),
        ("```\na b. c d\n```\n", "```\na b. c d\n```\n"),
        ("    a b. c d\n", "    a b. c d\n"),
        ("---\ntitle: a b\n---\nc d", "---\ntitle: a b\n---\nd c"),
        ("+++\ntitle = 'a b'\n+++\nc d", "+++\ntitle = 'a b'\n+++\nd c"),
        ("> [!NOTE]\n> a b\n\n> [!TIP]\n> c d\n", "> [!NOTE]\n> b a\n\n> [!TIP]\n> d c\n"),
        ("<div>\na <i>b</i>\n</div>\n", "<div>\n<i>b</i> a\n</div>\n"),
        ("ein <b>zwei drei</b> vier", "vier <b>drei zwei</b> ein"),
        ("ein <kbd>a b</kbd> vier", "vier <kbd>a b</kbd> ein"),
        ("ein  \nzwei a", "ein  \na zwei"),
        ("a\n\n***\n\nb c", "a\n\n***\n\nc b"),
        ("", ""),
    ],
)
def test_markdown(markdown: str, expected: str) -> None:
    assert unchanged(markdown, "markdown").split() == markdown.replace("> drei", "drei").split()
    assert reversed_words(markdown, "markdown") == expected


DEFINED = "\n\n[eins]: http://a\n[x|y]: http://d\n[zwei drei]: http://b 'T'\n[ein hund! er da!]: c\n"


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("[eins][] a [Zwei drei] b", "b [drei Zwei][Zwei drei] a [eins][eins]"),
        ("> [zwei\n> drei] a", "> a [drei zwei][zwei drei]"),
        ("[Ein Hund! Er da!]", "[Hund! Ein da! Er][Ein Hund! Er da!]"),
        ("[eins]", "[eins][eins]"),
        ("a [zwei drei][eins]", "[drei zwei][eins] a"),
        ("a ![eins][]b c", "![eins][] c b a"),
        ("- [zwei drei][]\n- [x]", "- [drei zwei][zwei drei]\n- [x]"),
        ("**a [eins]** b", "b **[eins][eins] a**"),
        ("**a [eins][]** b", "b **[eins][eins] a**"),
        ("~~[eins][]~~ b", "b ~~[eins][eins]~~"),
        ("| [eins] | b |\n|---|---|\n| [x\\|y] | d |", "| [eins][eins] | b |\n|---|---|\n| [x\\|y][x\\|y] | d |"),
        ("Ein [](#da) hund", "[](#da) hund Ein"),
    ],
)
def test_links_keep_their_labels(markdown: str, expected: str) -> None:
    document = taken_apart(markdown + DEFINED, "markdown")
    assert document.text([backwards(one) for one in document.segments]) == expected + DEFINED
    assert document.text([None] * len(document.segments)) == markdown + DEFINED


def test_letters_of_markup_that_are_text_stay_text() -> None:
    assert reversed_words("a <b", "html") == "&lt;b a"
    assert reversed_words("5\\* a", "markdown") == "a 5*"
    assert reversed_words("5 \\*a\\* b", "markdown") == "b \\*a\\* 5"


def in_markdown(text: str, source: str = "Ein Hund.") -> str:
    return taken_apart(source, "markdown").text([Aligned(text)])


HARMLESS = (
    "snake_case a",
    "a & b",
    "[1] a",
    "2 * 3",
    "a < b",
    "Haus!",
    "x~y",
    "a | b",
    "5* a",
    "`",
    "AT&T",
    "a > b",
    "#1",
)


@pytest.mark.parametrize("text", HARMLESS)
def test_what_reads_as_text_has_no_backslashes(text: str) -> None:
    assert in_markdown(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*a* b_c * d", "\\*a\\* b_c * d"),
        ("[a](b)", "\\[a\\](b)"),
        ("<b> x", "\\<b> x"),
        ("# a", "\\# a"),
        ("1. a", "1\\. a"),
        ("- a", "\\- a"),
        ("+ a", "\\+ a"),
        ("* a", "\\* a"),
        ("> a", "\\> a"),
        ("&lt;", "\\&lt;"),
        ("`a`", "\\`a\\`"),
        ("~~a~~", "\\~\\~a\\~\\~"),
        ("_a_", "\\_a\\_"),
        ("```", "\\`\\`\\`"),
        ("a\\*", "a\\\\\\*"),
        ("---", "\\---"),
    ],
)
def test_what_reads_as_markup_has_backslashes(text: str, expected: str) -> None:
    assert in_markdown(text) == expected
    assert "".join(texts(taken_apart(expected, "markdown"))) == text or not any(map(str.isalnum, text))


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("Ein Hund. \\*Katze\\* läuft.",) * 2,
        ("Es gibt 2\\*3 Hunde. Es gibt 4\\*5 Hunde.",) * 2,
        ("Es gibt 2*3 Hunde. Es gibt 4\\*5 Hunde.", "Es gibt 2\\*3 Hunde. Es gibt 4\\*5 Hunde."),
        ("Es gibt 2\\*3. Es gibt 4\\*5.\n\nNimm 2\\*.", "Es gibt 2\\*3. Es gibt 4\\*5.\n\nNimm 2*."),
        ("> Ein \\*Hund\n> da\\* und.", "> Ein \\*Hund da\\* und."),
        ("Siehe \\[1]. Ja.\n\n[1]: x\n", "Siehe \\[1\\]. Ja.\n\n[1]: x\n"),
        ("Siehe \\[1]. Ja.\n", "Siehe [1]. Ja.\n"),
        ("| Ein\\|Hund |\n|--|\n",) * 2,
        ("---\na: '\n```\n'\n---\nNimm `.",) * 2,
        ("Ein \\*Hund **da** und\\* dort.",) * 2,
        ("Ein Hund.\n\\*Er\\* da.",) * 2,
    ],
)
def test_escapes_depend_on_the_document(markdown: str, expected: str) -> None:
    assert unchanged(markdown, "markdown") == expected


def test_a_sentence_of_markdown_without_words_in_its_translation_stays() -> None:
    empty = Aligned(" ", [], [], np.zeros((0, 0), np.float32))
    document = taken_apart("~~Ein Hund.~~\tZwei *Katzen*.", "markdown")
    assert document.text([empty, backwards(document.segments[1])]) == "~~Ein Hund.~~\t*Katzen.* Zwei"
    assert document.text([empty, empty]) == document.source


def test_escapes_leave_elements() -> None:
    # With an escaped star, two stars would begin no emphasis that one star may end: rule 9 of CommonMark's emphasis.
    document = taken_apart("***„a“ b*é* **c** d", "markdown")
    assert document.text([exact(one) for one in document.segments]) == document.source


def test_spans_of_code_of_two_segments_stay_two() -> None:
    source = "`a` 日本語 é。`b`"
    assert (
        taken_apart(source, "markdown")
        .text([backwards(taken_apart(source, "markdown").segments[0])])
        .endswith("`a` `b`")
    )


def test_an_exclamation_mark_makes_no_image_of_a_link() -> None:
    assert written([("Hund!", 0), ("[", -1), ("da!", 0), ("](x)", -1)]) == "Hund\\![da!](x)"


def test_options_that_cannot_be_used() -> None:
    with pytest.raises(TfexportError, match="is not a code"):
        DocumentOptions(split="sentences", language="../x")
    with pytest.raises(TfexportError, match="Add --split sentences"):
        DocumentOptions(language="de")
    assert InputDocumentOptions(markup="html").is_whole
    assert not InputDocumentOptions(markup="html", column="2").is_whole
    assert not InputDocumentOptions()


@pytest.mark.parametrize(("library", "markup"), [("sentencex", None), ("pyromark", "markdown")])
def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, library: str, markup: Markup | None) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(RuntimeUnavailable, match=r"tfexport\[documents\]"):
        taken_apart("Ein Hund.", markup)


KEEP = ("[[", "]]")


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Bei [[Ja! Nein.]] da. Er [[A! B]].", ["Bei [[Ja! Nein.]] da.", "Er [[A! B]]."]),
        ("Bei [[Ja! Nein. Da.\nEin Hund.]] Er.", ["Bei [[Ja!", "Nein.", "Da.", "Ein Hund.", "]] Er."]),
        ("A. ]] B. [[C. D.", ["A. ]] B. [[C.", "D."]),
        ("Er ist da. [[iPhone]] ist neu.", ["Er ist da.", "[[iPhone]] ist neu."]),
    ],
)
def test_no_sentence_ends_between_marks_on_one_line(text: str, sentences: list[str]) -> None:
    found = document(text, parts="sentences", language="de", fits=lambda _: True, keep=KEEP)
    assert [one.text for one in found.segments] == sentences


def test_a_sentence_that_is_too_long_is_not_cut_between_marks() -> None:
    text = "eins zwei drei [[vier fünf]] [[sechs sieben acht neun]] zehn"
    found = document(text, parts="sentences", language="de", fits=lambda part: len(part) <= 20, keep=KEEP)
    assert [one.text for one in found.segments] == ["eins zwei drei", "zehn"]
    assert found.text([Aligned("one"), Aligned("ten")]) == "one vier fünf sechs sieben acht neun ten"


def test_marks_without_partners_are_found_in_linear_time() -> None:
    began = time.process_time()
    assert spans_between("[[" * 500_000, KEEP) == []
    assert spans_between("[[a\n" * 200_000 + "]]", KEEP) == []
    assert time.process_time() - began < 5


def placed(source: str, new: str, to: list[int], markup: Markup = "markdown", kept: str = "", **options: Any) -> str:
    """A document of one segment with a translation, whose characters or words are aligned to the words `to` of the source.

    Args:
        kept: the part of the translation that is a required phrase.
    """
    found = taken_apart(source, markup, **options)
    [segment] = found.segments
    sources = [word.span() for word in re.finditer(r"\S+", segment.text)]
    targets = [word.span() for word in re.finditer(r"\S+", new)]
    targets = targets if len(targets) == len(to) else [(place, place + 1) for place in range(len(new))]
    attention = np.zeros((len(targets), len(sources)), np.float32)
    attention[range(len(to)), to] = 1
    spans = [(new.index(kept), new.index(kept) + len(kept))] if kept else []
    return found.text([Aligned(new, targets, sources, attention, spans)])


@pytest.mark.parametrize(
    ("text", "markup"),
    [
        ("Gebaut mit [![CI](a.svg) ![Doc](b.svg)](c) von zwei.", "markdown"),
        ("Ein [ ](x) Hund", "markdown"),
        ("Ein **![a](b) ![c](d)** Hund", "markdown"),
        ("Folge uns <a href=x> <i class=y></i> </a> <a href=z> <i></i> </a> oder schreibe.", "html"),
        ("Ein <span> </span>Hund läuft im <a name=x> </a> Park.", "html"),
        ("Ein<span> </span>Hund <i> <b> </b></i>läuft", "html"),
    ],
)
def test_elements_of_white_space_keep_their_ends(text: str, markup: Markup) -> None:
    document = taken_apart(text, markup)
    for translate in (same, exact, backwards):
        new = document.text([translate(one) for one in document.segments])
        for letter in "<>[]()*":
            assert new.count(letter) == text.count(letter), new


def test_white_space_in_an_element_stays_at_its_place() -> None:
    document = taken_apart("Ein<span> </span>Hund <i> <b> </b></i>läuft", "html")
    [segment] = document.segments
    assert document.text([exact(segment)]) == "Ein <span></span>Hund <i><b></b></i>läuft"


@pytest.mark.parametrize(
    ("source", "new", "to", "expected"),
    [
        ("Ein Hund **läuft** da.", "A dog there .", [0, 1, 3, 2], "A dog there ."),  # only a full stop is left
        ("Ein (*großer*) Hund", "A (great dog", [0, 1, 2], "A *(great* dog"),
        ("Siehe [Bild](a.png) da", "See ) there picture", [0, 0, 2, 1], "See ) there [picture](a.png)"),
        ("Das **„Haus“** ist", "「家」は", [1, 1, 1, 2], "**「家**」は"),
        ("Er _kommt_ hier", "家に来る。", [0, 0, 1, 1, 2], "家に*来る*。"),
        ("the *(big)* house", "x(y)z", [0, 1, 1, 1, 2], "x(*y*)z"),
    ],
)
def test_emphasis_is_of_words_and_is_read_as_emphasis(source: str, new: str, to: list[int], expected: str) -> None:
    assert placed(source, new, to) == expected


def test_a_space_between_segments_stands_before_an_opening_mark() -> None:
    for markup, opens, closes in (("markdown", "**", "**"), ("html", "<b>", "</b>")):
        document = taken_apart(f"今日は。{opens}雨です。{closes}", markup)
        assert document.text([Aligned("Today."), Aligned("It rains.")]) == f"Today. {opens}It rains.{closes}"
    document = taken_apart("<b>今日は。</b>雨です。", "html")
    assert document.text([Aligned("Today."), Aligned("It rains.")]) == "<b>Today.</b> It rains."


def test_a_comment_begins_no_line_of_markdown() -> None:
    assert placed("Ein <!-- x --> Hund da", "Dog there", [1, 2]) == "Dog <!-- x --> there"
    assert placed("Ein <!-- x --> *Hund* da", "Dog there", [1, 2]) == "*Dog* <!-- x --> there"
    assert placed("Ein <!-- x --> Hund da", "Dog there", [1, 2], "html") == "<!-- x --> Dog there"


def test_a_footnote_before_a_colon_does_not_become_a_definition() -> None:
    assert written([("[^1]", -1), (": yes", 0), ("\n\n[^1]: a", -1)]) == "[^1]\\: yes\n\n[^1]: a"


def test_an_element_that_stays_open_around_code_is_balanced() -> None:
    text = "<b>Ein Hund läuft. Er nimmt</b> das <i><code>foo</code> hier, und dann noch ein Hund</i> da."
    document = taken_apart(text, "html", most=16)
    after = tags(document.text([backwards(one) for one in document.segments]))
    assert Counter(after) == Counter(tags(text))
    assert is_balanced(after)


@pytest.mark.parametrize("text", ["# Nummer \\#", "# Titel C \\##"])
def test_a_number_sign_at_the_end_of_a_heading_is_text(text: str) -> None:
    assert unchanged(text, "markdown") == text
    assert unchanged("Nummer #", "markdown") == "Nummer #"


@pytest.mark.parametrize("address", ["hans.maier+x@firma-x.de", "HTTPS://Firma.de/A", "www.a.de", "https://a.b/c_d@e"])
def test_addresses_are_copied(address: str) -> None:
    for markup in ("html", "markdown"):
        document = taken_apart(f"Ein Hund {address} läuft.", markup)
        new = document.text([Aligned("x y")])
        assert address in new
        assert texts(taken_apart(f"<b>{address}</b>", markup)) == []
    assert texts(taken_apart("Ein @ da, a@b.", "html")) == ["Ein @ da, a@b."]


def test_addresses_are_found_in_linear_time() -> None:
    began = time.process_time()
    taken_apart("a." * 200_000 + "@" * 50_000, "html")
    assert time.process_time() - began < 10


def kept_between(text: str, markup: Markup | None, keep: tuple[str, str] = ("⟦", "⟧")) -> Document:
    return document(text, parts="sentences", language="de", fits=lambda _: True, markup=markup, keep=keep)


@pytest.mark.parametrize("markup", ["html", "markdown"])
def test_marks_around_an_address_do_not_belong_to_it(markup: Markup) -> None:
    found = kept_between("Ein Mann kauft ⟦https://apple.com/x⟧ heute.", markup)
    assert [mark.kind for mark in found._places[0].run.marks] == ["atom"]
    assert found.segments[0].text == "Ein Mann kauft ⟦https://apple.com/x⟧ heute."
    assert found._places[0].run.atoms == [(16, 35)]
    found = kept_between("Sieh {{https://a.b/c}} da", markup, ("{{", "}}"))
    assert found._places[0].run.atoms == [(7, 20)]


def test_what_is_only_copied_is_no_segment_and_loses_its_marks() -> None:
    assert kept_between("⟦--⟧ ⟦iPhone 15⟧", None).text([]) == "-- iPhone 15"
    found = kept_between("| ⟦iPhone 15⟧ | Ein Hund |\n|--|--|\n| ⟦4711⟧ | `⟦a⟧` |\n", "markdown")
    assert texts(found) == ["Ein Hund"]
    assert found.text([Aligned("A dog")]) == "| iPhone 15 | A dog |\n|--|--|\n| 4711 | `⟦a⟧` |\n"
    assert found.text([None]) == "| iPhone 15 | Ein Hund |\n|--|--|\n| 4711 | `⟦a⟧` |\n"


def test_marks_in_code_are_not_read() -> None:
    found = kept_between("Ein `⟦npm i⟧` da.", "markdown")
    assert texts(found) == ["Ein npm i da."]
    assert found.text([exact(found.segments[0])]) == "Ein `⟦npm i⟧` da."


def test_marks_move_out_of_required_phrases() -> None:
    assert placed("Ein Blindenhund ![x](y) läuft", "A guide dog runs", [0, 1, 2, 2], kept="guide dog") == (
        "A guide dog ![x](y) runs"
    )


def test_a_place_without_aligned_words_is_that_of_most_attention() -> None:
    found = taken_apart("Ein <b>Hund</b> da", "html")
    attention = np.array([[0.9, 0.1, 0], [0, 0.4, 0.6]], np.float32)
    new = Aligned("one there", [(0, 3), (4, 9)], [(0, 3), (4, 8), (9, 11)], attention)
    assert found.text([new]) == "one <b>there</b>"


def test_a_raised_number_within_a_word_is_read() -> None:
    assert texts(taken_apart("Trinkt H<sup>2</sup>O da.", "html")) == ["Trinkt H2O da."]


def test_html_in_a_quotation_is_read_line_by_line() -> None:
    text = "> <div>\n> Ein Hund\n> </div>\n"
    document = taken_apart(text, "markdown")
    assert texts(document) == ["Ein Hund"]
    assert document.text([Aligned("A dog")]) == "> <div>\n> A dog\n> </div>\n"
    assert texts(taken_apart("> <p>Ein\n> Hund</p>\n", "markdown")) == ["Ein", "Hund"]


def test_where_escapes_of_some_segments_are_not_enough_all_have_them() -> None:
    # Without escapes, the first line begins code, so that the second segment is code too and looks the same either way.
    parts = [("~~~ a", 0), (" \n# ", -1), ("``` &amp;", 1), ("\t", -1)]
    assert written(parts) == "\\~\\~\\~ a \n# \\`\\`\\` \\&amp;\t"


def test_an_escaped_backtick_before_code_has_no_space() -> None:
    text = "Nimm \\``a` Hund"
    assert unchanged(text, "markdown") == text


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<h2>Ein Vorwort<a class=x href=#y>¶</a></h2>", "Ein Vorwort"),
        ("Ein Hund <a href=x> <img src=y> </a> da", "Ein Hund  da"),
        ("Ein <a href=x><i>→</i></a> Hund", "Ein  Hund"),
        ("Ein Hund [<a href=x>1</a>]", "Ein Hund [1]"),
        ("Ein <a href=x><code>+</code></a> Hund", "Ein  Hund"),
        ("Ein <a href=x>Hund", "Ein Hund"),
    ],
)
def test_links_without_words_are_copied(html: str, text: str) -> None:
    document = taken_apart(html, "html")
    assert [one.text for one in document.segments] == [" ".join(text.split())]
    for translate in (exact, backwards):
        new = document.text([translate(one) for one in document.segments])
        assert Counter(tags(new)) == Counter(tags(html))
        assert Counter(new.replace(" ", "")) == Counter(html.replace(" ", ""))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Ein ~~<!-- a -->~~ Hund läuft", "~~<!-- a -->~~ Dog runs"),
        ("Ein <b><!-- a --></b> Hund läuft", "<b><!-- a --></b> Dog runs"),
        ("Ein <!-- a --><!-- b --> Hund läuft", "Dog <!-- a --><!-- b --> runs"),
    ],
)
def test_a_comment_stays_in_its_element(text: str, expected: str) -> None:
    assert placed(text, "Dog runs", [1, 2]) == expected


@pytest.mark.parametrize("text", ["お問い合わせはinfo@x.deまでお願いします。", "请发邮件到info@x.de联系我们。"])
def test_an_address_between_letters_without_spaces_ends_with_them(text: str) -> None:
    for markup in ("html", "markdown"):
        [segment] = taken_apart(text, markup).segments
        assert segment.text == text
        assert taken_apart(text, markup)._places[0].run.atoms == [(text.index("info"), text.index("info") + 9)]


@pytest.mark.parametrize("address", ["nguyễn@abc.vn", "иванов1@mail.ru", "info@почта.рф", "müller@straße.de"])
def test_addresses_of_other_scripts_are_copied(address: str) -> None:
    for markup in ("html", "markdown"):
        assert taken_apart(f"Mail an {address} heute", markup)._places[0].run.atoms == [(8, 8 + len(address))]


def test_a_part_of_an_address_is_no_address() -> None:
    assert taken_apart("Ein max\\_muster@firma.de", "markdown")._places[0].run.atoms == []
    assert taken_apart("Ein foo&amp;bar@x.de", "html")._places[0].run.atoms == []


@pytest.mark.parametrize(
    ("text", "expected", "markup"),
    [
        ("> ⟦# Titel⟧", "> \\# Titel", "markdown"),
        ("⟦- a⟧", "\\- a", "markdown"),
        ("<p>‹⟦b⟧></p>", "<p>‹b&gt;</p>", "html"),
        (
            "[⟦iPhone 15⟧]\n\n[⟦iPhone 15⟧]: http://x.y",
            "[iPhone 15][⟦iPhone 15⟧]\n\n[⟦iPhone 15⟧]: http://x.y",
            "markdown",
        ),
        ("<p><i>⟦x y⟧</i></p>", "<p><i>x y</i></p>", "html"),
        ("⟦a⟧\n ⟦b⟧ 1.", "a\n b 1.", None),
    ],
)
def test_what_is_only_copied_stays_text(text: str, expected: str, markup: Markup | None) -> None:
    found = kept_between(text, markup)
    assert found.segments == []
    assert found.text([]) == expected


@pytest.mark.parametrize(
    "html", ["<p><i>⟦A⟧</i><b>⟦B⟧</b></p>", "<p>⟦H⟧<sub>⟦2⟧</sub>⟦O⟧</p>", "<p>⟦x⟧<img src=a>⟦y⟧</p>"]
)
def test_the_places_of_tags_in_text_that_is_only_copied_are_left_to_the_model(html: str) -> None:
    assert "".join(texts(kept_between(html, "html"))) == re.sub("<.*?>", "", html)


@pytest.mark.parametrize("text", ["⟦⟧ 1", "⟦⟦a⟧⟧ 1.", "⟦a⟧ 1 ⟧", "⟦a⟧ ⟦ 1"])
def test_marks_out_of_order_are_left_to_the_model_which_names_them(text: str) -> None:
    for markup in (None, "html", "markdown"):
        assert "".join(texts(kept_between(text, markup))) == text


def test_text_that_is_only_copied_is_found_in_linear_time() -> None:
    began = time.process_time()
    assert kept_between("⟦x⟧\n" * 40_000, None).text([]) == "x\n" * 40_000
    assert time.process_time() - began < 15


@pytest.mark.parametrize(
    ("source", "new", "to", "expected"),
    [
        ("Nutze **`--foo` Option** hier", "ここで--fooオプションを", "33311111222220", "ここで**`--foo`オプション**を"),
        ("Nutze *die `[x]`* da", "その[x]を", "112223", "*その`[x]`*を"),
    ],
)
def test_emphasis_with_code_keeps_its_edges(source: str, new: str, to: str, expected: str) -> None:
    assert placed(source, new, [int(word) for word in to]) == expected


def test_a_colon_after_a_link_has_no_backslash() -> None:
    assert written([("[Hund][Hund]", -1), (": er", 0), ("\n\n[hund]: x", -1)]) == "[Hund][Hund]: er\n\n[hund]: x"
