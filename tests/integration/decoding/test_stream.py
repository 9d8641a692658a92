"""Streams on a bundle and from the command line."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import command
from tfexport.bundle.reader import open_bundle
from tfexport.decoding.line_reader import Reader
from tfexport.decoding.stream import stream_lines
from tfexport.decoding.translate import Writer, translate
from tfexport.runtimes import load_runtime
from tfexport.search.search import SearchOptions


@pytest.mark.parametrize("options", [{}, {"beam": 4}, {"samples": 1}], ids=str)
def test_a_bundle_streams_what_it_decodes(tiny_bundle: Path, options: dict[str, Any]) -> None:
    bundle = open_bundle(tiny_bundle)
    runtime = load_runtime("ort-cpu", bundle, threads=1)
    reader, writer = Reader.of(bundle, None), Writer.of(bundle, None)
    lines = [b"de5 de6\n", b"\xff\n", b"\n", b"de30 de4 de4\n", b"de9"]
    asked = SearchOptions(max_length=12, **options)
    wanted = list(translate(runtime, reader, lines, asked, batch_size=1))
    events = list(stream_lines(runtime, reader, lines, asked, writer))
    found = [event.result for event in events if event.result]
    assert [(r.line, r.status, [h.ids for h in r.hypotheses]) for r in found] == [
        (r.line, r.status, [h.ids for h in r.hypotheses]) for r in wanted
    ]
    for result in wanted:
        text = "".join(event.step.text for event in events if event.step and event.line == result.line)
        assert text == writer.line(result)
    assert sum(event.step is not None for event in events) == sum(len(h.ids) for r in wanted for h in r.hypotheses)


@pytest.mark.thorough
def test_the_command_streams_the_lines_that_it_decodes(
    capsys: Any, monkeypatch: Any, tiny_bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(b"de5 de6\n\xff\n\nde30 de4 de4\nde9\n")
    decode = ["decode", tiny_bundle, tmp_path / "in", "--threads", 1]
    for flags in ([], ["--beam", 3], ["--samples", 1, "--seed", 3]):
        for format in ("text",) if flags else ("text", "tokens", "ids"):
            asked = [*decode, *flags, "--output-format", format]
            plain, streamed = command(capsys, monkeypatch, *asked), command(capsys, monkeypatch, *asked, "--stream")
            assert streamed[0] == plain[0]
            assert streamed[1].splitlines()[-3:] == plain[1].splitlines()[-3:]
        out, _ = command(capsys, monkeypatch, *decode, *flags, "--output-format", "jsonl", "--stream")
        wanted, _ = command(capsys, monkeypatch, *decode, *flags, "--output-format", "jsonl")
        events = [json.loads(line) for line in out.splitlines()]
        assert [event for event in events if "status" in event] == [json.loads(line) for line in wanted.splitlines()]
        for line, steps in itertools.groupby(events, key=lambda event: event["line"]):
            *tokens, end = steps
            if end["hypotheses"]:
                [best] = end["hypotheses"]
                assert [step["id"] for step in tokens] == best["ids"], line
                assert "".join(step["text"] for step in tokens) == best["text"]
                assert sum(step["log_prob"] for step in tokens) == pytest.approx(best["log_prob"], abs=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-o", "x"], "--stream writes to stdout"),
        (["--workers", 2], "with one worker"),
        (["--alignments", "hard"], "need the whole output. Leave --stream out"),
        (["--nbest", 2, "--beam", 2], "only one output per line can be streamed"),
    ],
)
def test_flags_that_do_not_go_with_a_stream(
    capsys: Any, monkeypatch: Any, tiny_bundle: Path, flags: list[Any], message: str
) -> None:
    out, err = command(capsys, monkeypatch, "decode", tiny_bundle, "nowhere", "--stream", *flags)
    assert out == ""
    assert message in err


@pytest.mark.thorough
def test_a_reader_that_goes_away_and_an_interruption_end_a_stream_in_silence(tiny_bundle: Path) -> None:
    decode = [sys.executable, "-m", "tfexport", "decode", str(tiny_bundle), "--stream", "--threads", "1"]
    for ends in ("reader", "interrupt"):
        process = subprocess.Popen(decode, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"de5 de6\n")
        process.stdin.flush()
        assert process.stdout.read(1), "the first line is answered while the second is not there"
        if ends == "reader":
            process.stdout.close()
            process.stdin.write(b"de5 de6\n" * 3)
            process.stdin.close()
        else:
            os.kill(process.pid, signal.SIGINT)
        code = process.wait(timeout=60)
        told = process.stderr.read().decode()
        assert code == (141 if ends == "reader" else 130)
        assert [line for line in told.splitlines() if not line.startswith(("note:", "warning:"))] in ([], ["Aborted."])
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
