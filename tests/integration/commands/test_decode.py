"""`tfexport decode`: a line out for every line in."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import tfexport
from makers.tiny import (
    EOS,
    TinyCheckpoint,
)
from tests.support.commands import (
    SENTENCES,
    TEXT,
    Run,
    naive_ids,
    naive_text,
    one_error,
    wanted_text,
)


def test_decode_reads_stdin_or_a_file_and_writes_stdout_or_a_file(
    decode: Run, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    wanted = wanted_text(tiny_checkpoint)
    assert len(set(wanted.splitlines())) > 2  # the sentences can be told apart
    (tmp_path / "in.txt").write_bytes(TEXT)
    for arguments, stdin in (((), TEXT), (("-",), TEXT), ((tmp_path / "in.txt",), b"")):
        outcome = decode(*arguments, stdin=stdin)
        assert outcome.code == 0
        assert outcome.stdout == wanted
        outcome = decode(*arguments, "-o", tmp_path / "out.txt", stdin=stdin)
        assert outcome.raw == b""
        assert (tmp_path / "out.txt").read_text(encoding="utf-8") == wanted
    assert {path.name for path in tmp_path.iterdir()} == {"in.txt", "out.txt"}


def test_both_runtimes_write_the_same(decode: Run) -> None:
    for beam in (1, 3):
        one, other = (decode("--runtime", name, "--beam", beam, stdin=TEXT) for name in ("ort-cpu", "torch"))
        assert one.raw == other.raw != b""


def test_nbest_is_separated_by_tabs(decode: Run) -> None:
    outcome = decode("--beam", "3", "--nbest", "2", "--output-format", "ids", stdin=TEXT)
    assert [len(line.split("\t")) for line in outcome.lines] == [2] * len(SENTENCES)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("raw", "lines"),
    [
        (b"", 0),
        (b"\n", 1),
        (b"de5", 1),
        (b"de5\n\n", 2),
        (b"de5\r\nde6\r\n", 2),
        (b"\n\n \t\nde5\n\n", 5),
        (b"\xff\xfe\n\xc3\n", 2),
        (b"de5 \x00 de6\nde7\n", 2),
        ("de5\u2028de6\x0cde7\x85\nde8\n".encode(), 2),
        (b"de5 " * 30 + b"\nde6\n", 2),
        (b"\xef\xbb\xbfde5\n", 1),
    ],
)
def test_as_many_lines_come_out_as_go_in(decode: Run, raw: bytes, lines: int) -> None:
    for output_format in ("text", "ids", "tokens", "jsonl"):
        outcome = decode("--output-format", output_format, stdin=raw)
        assert outcome.code == 0
        assert outcome.raw.count(b"\n") == lines


def test_line_ends_do_not_change_a_line(decode: Run, tiny_checkpoint: TinyCheckpoint) -> None:
    windows = TEXT.replace(b"\n", b"\r\n").removesuffix(b"\r\n")
    assert decode(stdin=windows).stdout == wanted_text(tiny_checkpoint)


def test_what_is_wrong_with_a_line_is_told_in_its_place(decode: Run, tiny_checkpoint: TinyCheckpoint) -> None:
    raw = b"de5 de6\n\nde9 \xff\n" + b"de4 " * 19 + b"\nde5 nothing\n"
    outcome = decode("--output-format", "jsonl", stdin=raw)
    records = [json.loads(line) for line in outcome.lines]
    assert [record["line"] for record in records] == [1, 2, 3, 4, 5]
    ends = {index: naive_ids(tiny_checkpoint.model, ids)[-1] == EOS for index, ids in ((0, [5, 6]), (4, [5, 0]))}
    decoded = {index: "ok" if done else "length_limit" for index, done in ends.items()}
    assert [record["status"] for record in records] == [decoded[0], "empty", "invalid_utf8", "too_long", decoded[4]]
    assert records[0]["hypotheses"][0]["ids"] == naive_ids(tiny_checkpoint.model, [5, 6])
    assert records[0]["hypotheses"][0]["text"] == naive_text(tiny_checkpoint.model, [5, 6])
    assert [record["hypotheses"] for record in records[1:4]] == [[], [], []]
    assert records[2]["message"] == "byte 5 is not UTF-8"
    assert records[3]["message"] == "21 ids, the model reads at most 20: split the line"
    warnings = outcome.stderr.splitlines()
    assert "warning: line 3: invalid_utf8: byte 5 is not UTF-8" in warnings
    assert "warning: line 4: too_long: 21 ids, the model reads at most 20: split the line" in warnings
    assert warnings[-1].startswith("warning: of 5 lines: ")
    assert not any("line 2" in warning for warning in warnings)  # an empty line is nothing to warn of


def test_the_length_limit_is_a_status(decode: Run, tiny_checkpoint: TinyCheckpoint) -> None:
    outcome = decode("--max-length", "3", "--output-format", "jsonl", stdin=TEXT)
    for line, ids in zip(outcome.lines, SENTENCES.values(), strict=True):
        record = json.loads(line)
        wanted = naive_ids(tiny_checkpoint.model, ids, max_length=3)
        assert record["hypotheses"][0]["ids"] == wanted
        assert record["status"] == ("ok" if wanted[-1] == EOS else "length_limit")
        assert record["hypotheses"][0]["finished"] == (wanted[-1] == EOS)


def test_only_the_first_warnings_are_printed_and_all_are_counted(decode: Run) -> None:
    outcome = decode(stdin=b"\xff\n" * 40)
    assert outcome.stderr.count("warning: line ") == 10
    last = "warning: of 40 lines: 40 invalid_utf8; --output-format jsonl marks them"
    assert outcome.stderr.splitlines()[-1] == last


def test_no_ratio_of_lengths_is_no_limit(decode: Run) -> None:
    """An infinite ratio either means no limit or is refused; it must not mean one token."""
    free, outcome = decode(stdin=TEXT), decode("--max-length-ratio", "inf", stdin=TEXT)
    assert outcome.code == 2 or outcome.raw == free.raw


def test_decode_in_half_precision(run: Run, half_bundle: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    """Rounded, a sum of log-probabilities is another one, but on this model and input the tokens are the same."""
    records = {}
    for precision in ("fp32", "fp16"):
        arguments = ("--precision", precision, "--threads", "1", "--output-format", "jsonl", "--beam", "2")
        outcome = run("decode", half_bundle, *arguments, stdin=TEXT)
        assert outcome.code == 0
        records[precision] = [json.loads(line)["hypotheses"][0] for line in outcome.lines]
    for exact, rounded in zip(records["fp32"], records["fp16"], strict=True):
        assert rounded["ids"] == exact["ids"]
        assert rounded["log_prob"] != exact["log_prob"]
        assert rounded["log_prob"] == pytest.approx(exact["log_prob"], abs=0.1)
    outcome = run("decode", half_bundle, "--precision", "fp16", "--threads", "1", stdin=TEXT)
    assert outcome.stdout == wanted_text(tiny_checkpoint)


def test_a_precision_that_cannot_be_decoded_is_one_line(run: Run, tiny_bundle: Path, half_bundle: Path) -> None:
    missing = one_error(run("decode", tiny_bundle, "--precision", "fp16", stdin=TEXT))
    assert missing.endswith("Export again with --precision fp16.")
    on_gpu = one_error(run("decode", half_bundle, "--precision", "int8", "--runtime", "torch", stdin=TEXT))
    assert on_gpu.endswith("Use --runtime ort-cpu, or --precision fp32.")


@pytest.mark.parametrize("command", ["decode", "parity"])
def test_runtimes_of_a_gpu_name_what_brings_them(
    run: Run, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    for library in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, library, None)
    for runtime, extra in (("ort-cuda", "cuda"), ("tensorrt", "tensorrt-rtx")):
        line = one_error(run(command, tiny_bundle, "-", "--runtime", runtime, stdin=TEXT))
        assert f"the runtime {runtime} needs " in line
        assert f"pip install 'tfexport[{extra}]'" in line


def test_flags_of_sequences_are_given_several_times(decode: Run, tiny_bundle: Path) -> None:
    model = tfexport.load(tiny_bundle, threads=1)
    texts = TEXT.decode().splitlines()
    plain = [result.hypotheses[0].tokens for result in model.translate(texts, beam=2)]
    first, second, last = plain[0][0], plain[0][1], plain[-1][0]
    flags = ("--bad-words", f"{first} {second}", "--bad-words", last, "--sequence-bias", f"{plain[1][0]}=-3")
    done = decode(*flags, "--end-tokens", plain[2][1], "--beam", "2", "--max-batch-tokens", "8", stdin=TEXT)
    words = {"bad_words": [f"{first} {second}", last], "sequence_bias": {plain[1][0]: -3}}
    wanted = model.translate(texts, beam=2, end_tokens=plain[2][1], max_batch_tokens=8, **words)
    assert done.code == 0, done.stderr
    assert done.lines == [str(result) for result in wanted]
    found = [result.hypotheses[0].tokens for result in wanted]
    assert (first, second) != found[0][:2]
    assert all(last not in tokens for tokens in found)
    assert all(plain[2][1] not in tokens[:-1] for tokens in found)
    assert "not tokens, = and a number" in one_error(decode("--sequence-bias", "w1", stdin=TEXT))
