"""Where the source phrases of a glossary occur."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest

from tfexport.decoding import glossary as glossaries
from tfexport.decoding.glossary import Entry, Glossary, read_glossary, words_of
from tfexport.errors import TfexportError


def found(tmp_path: Path, glossary: str, text: str, format: Any = "text", case: Any = "exact") -> list[str | None]:
    path = tmp_path / "glossary.tsv"
    path.write_text(glossary, encoding="utf-8")
    return [term.required for term in read_glossary(path, format, case).found_in(text)]


def test_phrases_begin_and_end_with_words(tmp_path: Path) -> None:
    glossary = "Hund\tdog\nroter Ball\tred ball\nC++\tC++\nAT&T\tAT&T\n"
    for text, wanted in {
        "Ein Hund, ein Hund.": ["dog", "dog"],
        "Hunde und Bluthund": [],
        "hund HUND": [],
        "(Hund)-roter  Ball": ["dog", "red ball"],
        "roter": [],
        "Ball roter Ball": ["red ball"],
        "in C++, bei AT&T": ["C++", "AT&T"],
        "C+ +": ["C++"],  # white space is not compared
        "": [],
    }.items():
        assert found(tmp_path, glossary, text) == wanted, text
    assert found(tmp_path, glossary, "hund HUND Roter ball", case="ignore") == ["dog", "dog", "red ball"]


def test_the_longest_phrase_wins_from_left_to_right(tmp_path: Path) -> None:
    glossary = "a\tA\na b\tAB\nb c d\tBCD\nc\tC\na b c x\tno\n"
    assert found(tmp_path, glossary, "a b c d a c") == ["AB", "C", "A", "C"]
    assert found(tmp_path, glossary, "b c d") == ["BCD"]


def test_words_of_other_scripts(tmp_path: Path) -> None:
    assert words_of("我爱北京", "text", "exact") == ("我", "爱", "北", "京")
    assert words_of("हिन्दी भाषा", "text", "exact") == ("हिन्दी", "भाषा")
    assert words_of("snake_case x1", "text", "exact") == ("snake_case", "x1")
    assert found(tmp_path, "北京\tBeijing\n", "我爱北京。") == ["Beijing"]
    composed, apart = (unicodedata.normalize(form, "Café") for form in ("NFC", "NFD"))
    assert composed != apart
    assert found(tmp_path, f"{composed}\tcoffee house\n", f"Das {apart}.") == ["coffee house"]


def test_tokens_and_ids_are_compared_whole(tmp_path: Path) -> None:
    assert found(tmp_path, "Hu@@ nd\tdog\n", "ein Hu@@ nd .", "tokens") == ["dog"]
    assert found(tmp_path, "5 6\t9\n", "4 5 6 56", "ids") == ["9"]


def test_forbidden_phrases_are_of_a_phrase_or_of_all(tmp_path: Path) -> None:
    path = tmp_path / "glossary.tsv"
    path.write_text(
        "\ufeffHandy\tmobile\nHandy\thandy\tforbidden\nHandy\tcell\tforbidden\n\n\tbasically\tforbidden\r\nx\ty\trequired\n",
        encoding="utf-8",
    )
    glossary = read_glossary(path, "text")
    [term] = glossary.found_in("Mein Handy")
    assert (term.required, term.forbidden) == ("mobile", ["handy", "cell"])
    assert glossary.everywhere == ("basically",)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("", "is empty"),
        ("Hund\n", "line 1 is not a line of a glossary"),
        ("Hund\t\n", "line 1 is not a line"),
        ("a\tb\n\tdog\n", "line 2 is not a line"),
        ("a\tb\tforbiden\n", "line 1 is not a line"),
        ("a\tb\tforbidden\tx\n", "line 1 is not a line"),
        ("a\tb\na\tc\n", "'a' stands for 'b' and for 'c'"),
        (b"a\tb\nc \xff\tb\n", "line 2 of .* is not UTF-8, from byte 3 on"),
    ],
)
def test_lines_that_are_none_of_a_glossary_are_named(tmp_path: Path, content: str | bytes, error: str) -> None:
    path = tmp_path / "glossary.tsv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TfexportError, match=error):
        read_glossary(path, "text")
    with pytest.raises(TfexportError, match="cannot read the glossary"):
        read_glossary(tmp_path / "nowhere", "text")


def test_a_search_grows_with_the_text_times_the_longest_phrase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all words are the same, and no phrase is found."""
    n, n_looked_up = 60, 0

    class Word(str):
        __slots__ = ()

        def __hash__(self) -> int:
            nonlocal n_looked_up
            n_looked_up += 1
            return str.__hash__(self)

    found = Glossary.of(Entry("a " * count + "b", "x", False, "") for count in range(1, n))
    monkeypatch.setattr(glossaries, "words_of", lambda *_: (*map(Word, "a" * 2 * n),))
    assert not [*found.found_in("")]
    assert 2 * n < n_looked_up <= 2 * n * (n + 1)


def test_the_longest_phrase_wins_where_a_longer_one_breaks_off() -> None:
    entries = [Entry(source, source, False, "") for source in ("a", "a b", "a b c d", "c")]
    found = Glossary.of(entries).found_in("a b c a b c d a x")
    assert [term.required for term in found] == ["a b", "c", "a b c d", "a"]
