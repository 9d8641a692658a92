"""Random documents, taken apart and put together: nothing is lost, nothing comes twice, tags stay balanced, text stays text.

python -m fuzz.files.documents --documents 10000
"""

from __future__ import annotations

import argparse
from collections import Counter

from makers.documents import (
    backwards,
    codes,
    exact,
    gaps,
    is_balanced,
    noise,
    random_document,
    same,
    seen,
    tags,
    taken_apart,
)
from tfexport.documents.html_runs import html_runs


def check(number: int) -> Counter[str]:
    """Check the document of a number; what was in it.

    Raises:
        AssertionError: a part is lost, comes twice, or stands where it must not.
    """
    text, markup = random_document(number)
    most = 10 + number % 50
    found = taken_apart(text, markup, most=most)
    around = gaps(found)
    parts = [text[one.start : one.end] for one in found.segments]
    assert "".join(part for pair in zip(around, [*parts, ""], strict=True) for part in pair) == text
    assert found.text([None] * len(parts)) == text, "what has no translation must stay"
    assert all(len(one.text) <= most for one in found.segments)
    if markup is None:
        assert [one.text for one in found.segments] == parts
        assert not any(letter.isalpha() for gap in around for letter in gap), "words are outside of segments"
        assert all(part == part.strip() and len(part.splitlines()) == 1 for part in parts)
        assert "".join(found.text([same(one) for one in found.segments]).split()) == "".join(text.split())
    for translate in (same, backwards, noise):
        new = found.text([translate(one) for one in found.segments])
        if markup is not None:
            assert new.count("https://a.b/c") >= text.count("https://a.b/c")
        if markup == "html":
            before, after = tags(text), tags(new)
            assert Counter(before) == Counter(after), f"{before} {after}"
            assert is_balanced(after) or not is_balanced(before), f"{text!r} {new!r}"
            html_runs(new)
        if markup == "markdown":
            links = ("http://x.y T. U", "http://z.y")
            before, after = (Counter(one for one in seen(part) if one in links) for part in (text, new))
            assert before == after, "links have lost their address or title"
            assert Counter(codes(text)) == Counter(codes(new)), f"code has changed: {new!r}"
            assert new.count("x. y\n```") == text.count("x. y\n```")
    if markup == "markdown":
        before, after = seen(text), seen(found.text([exact(one) for one in found.segments]))
        assert Counter(before) == Counter(after), f"{Counter(before)} {Counter(after)}"
    return Counter(
        documents=1, segments=len(parts), pieces=sum(one.is_piece for one in found.segments), characters=len(text)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    counted: Counter[str] = Counter()
    for number in range(asked.first, asked.first + asked.documents):
        try:
            counted += check(number)
        except Exception as error:
            raise SystemExit(
                f"document {number}: {random_document(number)!r}: {type(error).__name__}: {error}"
            ) from error
    print(", ".join(f"{count:,} {name}" for name, count in counted.items()))


if __name__ == "__main__":
    main()
