"""Every reader of files over repeated patterns of two sizes: twice the size must not take much more than twice the time.

    python -m fuzz.files.costs [--size 100000] [--only checkpoint,manifest]

Each pattern of one or two characters is a file alone, stands at the beginning, in the middle and at the end of valid
content, and in its first string. Lines of the valid content are patterns too. CPU time is counted, so other programs hardly
matter. A ratio above `RATIO` is measured again, at twice and four times the size, and is a problem if both are above it. The
exit code is then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fuzz.files.target import Target
from fuzz.files.valid_files import prepare, readers
from tfexport.errors import TfexportError

RATIO = 2.5
LEAST = 0.15
"""Seconds of the larger file below which a ratio says nothing."""
MOST = 10.0
"""Seconds for one file, whatever the ratio."""

CHARACTERS = "'\"[]{}()<>,:;-_.#@|\\/%&=!*+~^$ \n\t\r\0a1\x80ä▁"
PAIRS = (
    *(
        "[]",
        "{}",
        "a ",
        "a\n",
        '"a',
        '\\"',
        "<!",
        "- ",
        ": ",
        "a:",
        "1,",
        "](",
        "<a",
        "&a",
        "\n ",
        "\n-",
        "? ",
        "*a",
        "&1",
        "\\u",
    ),
    *(
        "1 ",
        "1\n",
        "@@",
        "a\t",
        "\r\n",
        "[1",
        "{1",
        '{"',
        '["',
        "(0",
        "0.",
        "K\x01",
        "q\x00",
        "h\x00",
        "\x80\x02",
        "}(",
        "]r",
    ),
)


def patterns(seed: bytes) -> Iterator[bytes]:
    """All patterns, as bytes, for a reader with this valid content."""
    yield from dict.fromkeys(line for line in seed.splitlines(keepends=True)[:20] if len(line) < 100)
    for pattern in (*CHARACTERS, *PAIRS):
        yield b"\x80" if pattern == "\x80" else pattern.encode()


def contents(seed: bytes, pattern: bytes) -> Iterator[tuple[str, bytes, bytes]]:
    """Where a pattern stands: a name, and the valid bytes before and after it."""
    quote, half = seed.find(b'"') + 1, len(seed) // 2
    yield "alone", b"", b""
    yield "at the beginning", b"", seed
    yield "in the middle", seed[:half], seed[half:]
    yield "at the end", seed, b""
    if quote:
        yield "in a string", seed[:quote], seed[quote:]


def seconds_of(reader: Target, path: Path, data: bytes) -> float:
    """The CPU time of reading a file. Errors of ours are results."""
    shutil.rmtree(path.parent, ignore_errors=True)  # readers write files beside it
    path.parent.mkdir()
    path.write_bytes(data)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        began = time.process_time()
        with contextlib.suppress(TfexportError):
            reader.read(path)
        return time.process_time() - began


def problem_of(reader: Target, path: Path, before: bytes, pattern: bytes, after: bytes, size: int) -> str | None:
    """What is wrong with the time of a reader, if anything."""

    def time_of(length: int) -> float:
        return seconds_of(reader, path, before + pattern * (length // len(pattern)) + after)

    first, second = time_of(size), time_of(2 * size)
    if second > MOST:
        return f"{second:.1f} s for {2 * size:,} bytes"
    if second < LEAST or second < RATIO * first:
        return None
    first, second, fourth = min(time_of(size), first), min(time_of(2 * size), second), time_of(4 * size)
    ratios = second / first, fourth / second
    if min(ratios) < RATIO:
        return None
    return f"{first:.2f}, {second:.2f} and {fourth:.2f} s for {size:,} bytes, twice and four times as many"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The time of every reader of files, by the size of files.")
    parser.add_argument("--size", type=int, default=100_000)
    parser.add_argument("--only", default="", help="names of readers, separated by commas")
    options = parser.parse_args(arguments)
    bad = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder)
        for reader in readers(folder):
            if options.only and reader.name not in options.only.split(","):
                continue
            began, count, slowest = time.process_time(), 0, 0.0
            path = folder / "costly" / f"given{reader.suffix}"
            pairs = [(seed, pattern) for seed in reader.seeds for pattern in patterns(seed)]
            for content, pattern in pairs:
                for place, before, after in contents(content, pattern):
                    start = time.process_time()
                    problem = problem_of(reader, path, before, pattern, after, options.size)
                    slowest, count = max(slowest, time.process_time() - start), count + 1
                    if problem is not None:
                        bad += 1
                        print(f"{reader.name}: {pattern!r} {place}: {problem}", flush=True)
            print(
                f"{reader.name}: {count} patterns, {time.process_time() - began:.0f} s, at most {slowest:.1f} s",
                flush=True,
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
