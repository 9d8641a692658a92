"""Text that a parser would search again and again: each part is read a bounded number of times."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest
import sentencex

from tfexport.documents import splitting
from tfexport.documents.html_runs import html_runs
from tfexport.documents.splitting import sentence_spans


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the parts that sentencex gets."""
    lengths: list[int] = []
    original = sentencex.get_sentence_boundaries

    def counting(code: str, part: str) -> Any:
        lengths.append(len(part))
        return original(code, part)

    monkeypatch.setattr(sentencex, "get_sentence_boundaries", counting)
    return lengths


PATTERNS = ["'", '"', "(", "[", "<?", "<!", "![", "a", "a ", ".", ". ", "A.", "«", "。", "\u3000", "1.", "?!", "-"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_line_is_split_in_parts_of_bounded_size(pattern: str, read: list[int]) -> None:
    text = pattern * (60_000 // len(pattern))
    spans = sentence_spans(text, "sentences", "en")
    assert max(read) <= splitting._WINDOW
    assert sum(read) < 3 * len(text)
    assert all(first < last for first, last in spans)
    assert not any(char.isalpha() for char in "".join(_outside(text, spans)))


def _outside(text: str, spans: list[tuple[int, int]]) -> list[str]:
    """The parts of a text that belong to no sentence."""
    starts, ends = [0, *(last for _, last in spans)], [*(first for first, _ in spans), len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]


def test_the_sentences_of_a_long_line_are_those_of_short_ones() -> None:
    sentences = [f'Mr. Smith said "yes, {k} times" to the dog. A man (number {k}) runs!' for k in range(400)]
    text = " ".join(sentences)
    expected: list[str] = []
    for sentence in sentences:
        expected += [sentence[first:last] for first, last in sentence_spans(sentence, "sentences", "en")]
    assert [text[first:last] for first, last in sentence_spans(text, "sentences", "en")] == expected
    assert len(expected) == 800


@pytest.mark.parametrize(
    ("pattern", "method"),
    [("<!--x>", "parse_comment"), ("<![if x>", "parse_marked_section"), ("<![cdata[>", "parse_marked_section")],
)
def test_ends_that_do_not_exist_are_searched_once(pattern: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    original = getattr(HTMLParser, method)

    def counting(self: HTMLParser, i: int, report: bool = True) -> int:
        searches.append(i)
        return int(original(self, i, report))

    monkeypatch.setattr(HTMLParser, method, counting)
    html_runs(pattern * 2000)
    assert len(searches) < 5
