"""`tfexport score`, and forced beginnings of outputs, from lines to lines."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import command
from tests.support.fakes import EOS, ScriptedRuntime, random_model, tiny_config
from tests.support.tiny import TinyCheckpoint
from tfexport.bundle.reader import MANIFEST, file_sha256, open_bundle
from tfexport.decoding.line_reader import Reader, TargetReader
from tfexport.decoding.search import Hypothesis, SearchOptions
from tfexport.decoding.token_rules import log_softmax
from tfexport.decoding.translate import Result, Writer, scored, translate
from tfexport.errors import TfexportError
from tfexport.exporter.pipeline import export
from tfexport.system.json_text import json_text
from tfexport.text.tokenizers import word_tokenizer

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "a", "b", "c", "d"]
CONFIG = tiny_config(src_vocab_size=8, tgt_vocab_size=8, max_source_length=6, max_target_length=6, unk_id=3)
VOCABULARY = word_tokenizer({word: index for index, word in enumerate(WORDS)})
MODEL = random_model(5, 8)


def results(lines: list[bytes], outputs: TargetReader, **options: Any) -> list[Result]:
    reader, runtime = Reader(CONFIG, VOCABULARY, "text"), ScriptedRuntime(MODEL, CONFIG)
    return list(translate(runtime, reader, lines, SearchOptions(**options), outputs=outputs, batch_size=3))


def written(*targets: bytes, format: Any = "text", whole: bool = True) -> TargetReader:
    return TargetReader(CONFIG, VOCABULARY, format, whole, targets)


def log_probs(source: tuple[int, ...], target: tuple[int, ...]) -> list[float]:
    return [float(log_softmax(MODEL(source, target[:at])[None])[0, token]) for at, token in enumerate(target)]


@pytest.mark.parametrize("format", ["text", "ids"])
def test_a_given_output_has_the_models_log_probabilities_and_nothing_follows(format: str) -> None:
    """One ends at the model's limit, and one of ids without eos."""
    targets = {"text": [b"a b", b"", b"d d d d d", b"a"], "ids": [b"4 5 2", b"2", b"7 7 7 7 7 2", b"4"]}[format]
    found = results([b"a", b"b c", b"d", b"a"], written(*targets, format=format), token_scores=True)
    ends = (EOS,) if format == "text" else ()
    wanted = [((4, 2), (4, 5, 2)), ((5, 6, 2), (2,)), ((7, 2), (7, 7, 7, 7, 7, 2)), ((4, 2), (4, *ends))]
    for result, (source, target) in zip(map(scored, found), wanted, strict=True):
        [hypothesis] = result.hypotheses
        assert hypothesis.ids == target
        assert hypothesis.token_log_probs == pytest.approx(log_probs(source, target), abs=1e-6)
        assert (result.status, result.message) == ("ok", "")


def test_a_line_that_cannot_be_scored_is_marked_in_its_place() -> None:
    lines = [b"a", b"", b"b", b"c", b"a b c d a b c", b"d", b"a"]
    targets = [b"\xff", b"a", b"4 99 2", b"2 4", b"4 2", b"4 4 4 4 4 4 2", b""]
    found = results(lines, written(*targets, format="ids"))
    statuses = ["invalid_utf8", "empty", "invalid_ids", "invalid_ids", "too_long", "too_long", "empty"]
    assert [result.status for result in found] == statuses
    assert found[0].message == "byte 1 of the output's part is not UTF-8"
    assert found[3].message == "the output's part goes on after the end, id 2"
    assert found[5].message == "7 ids of output, the model writes at most 6"


def test_there_is_an_output_for_each_line() -> None:
    for count, message in ((1, "more lines of the input than of the outputs"), (3, "more lines of the outputs than")):
        with pytest.raises(TfexportError, match=message):
            results([b"a", b"b"], written(*[b"c"] * count))


@pytest.mark.parametrize("beam", [1, 3])
def test_an_output_begins_as_its_line_says(beam: int) -> None:
    outputs = TargetReader(CONFIG, VOCABULARY, "text")
    lines = [b"\xef\xbb\xbfa\tb c\n", b"a b\t\r\n", b"c\n", b"d\ta a a a a a a\n", b"d\td"]
    found = results(lines, outputs, beam=beam)
    assert [result.status != "too_long" for result in found] == [True, True, True, False, True]
    starts = [result.hypotheses[0].ids[:2] if result.hypotheses else () for result in found]
    assert starts[0] == (5, 6)
    assert starts[4][0] == 7
    [first, second] = results([b"a b", b"c"], written(b"", b"", whole=False), beam=beam)
    for nothing_said, plain in ((found[1], first), (found[2], second)):
        assert nothing_said.hypotheses[0].ids == plain.hypotheses[0].ids
        assert nothing_said.hypotheses[0].score == pytest.approx(plain.hypotheses[0].score, abs=1e-6)


FORCED = CONFIG.replace(forced_first_id=7)


@pytest.mark.parametrize(
    ("format", "with_it", "without"), [("ids", b"7 4 2", b"4 2"), ("tokens", b"d a", b"a"), ("text", b"d a", b"a")]
)
def test_a_forced_first_token_is_said_once_whether_it_is_given_or_not(
    format: Any, with_it: bytes, without: bytes
) -> None:
    reader, runtime = Reader(FORCED, VOCABULARY, "text"), ScriptedRuntime(MODEL, FORCED)
    steps = [0.0, *log_probs((4, 2), (7, 4, 2))[1:]]
    outputs = TargetReader(FORCED, VOCABULARY, format, True, [with_it, without])
    for result in translate(runtime, reader, [b"a", b"a"], SearchOptions(token_scores=True), outputs=outputs):
        [found] = result.hypotheses
        assert found.ids == (7, 4, 2)
        assert found.token_log_probs == pytest.approx(steps, abs=1e-6)

    begins = [line.removesuffix(b" 2") for line in (with_it, without)]
    outputs = TargetReader(FORCED, VOCABULARY, format, lines=begins)
    one, other = translate(runtime, reader, [b"a", b"a"], SearchOptions(beam=3, max_length=6), outputs=outputs)
    assert one.hypotheses == other.hypotheses
    assert one.hypotheses[0].ids[:2] == (7, 4)
    assert one.hypotheses[0].ids[2] != 4


def test_a_forced_first_token_counts_for_the_length() -> None:
    def statuses(whole: bool, *targets: bytes) -> list[str]:
        outputs = TargetReader(FORCED, VOCABULARY, "ids", whole, targets)
        reader, runtime = Reader(FORCED, VOCABULARY, "text"), ScriptedRuntime(MODEL, FORCED)
        found = translate(runtime, reader, [b"a"] * len(targets), SearchOptions(max_length=6), outputs=outputs)
        return [scored(result).status for result in found]

    assert statuses(True, b"7 4 4 4 4 2", b"4 4 4 4 2", b"7") == ["ok"] * 3
    assert statuses(True, b"7 4 4 4 4 4 2", b"4 4 4 4 4 2", b"") == ["too_long", "too_long", "empty"]
    assert "too_long" not in statuses(False, b"7 4 4 4 4 4", b"4 4 4 4 4")
    assert statuses(False, b"7 4 4 4 4 4 4", b"4 4 4 4 4 4") == ["too_long"] * 2


def test_tokens_are_named_as_the_output_is_written() -> None:
    assert Writer(CONFIG, VOCABULARY, "text").token_ids(" a  d ") == (4, 7)
    assert Writer(CONFIG, VOCABULARY, "jsonl").token_ids("</s>") == (2,)
    assert Writer(CONFIG, VOCABULARY, "ids").token_ids("4 7") == (4, 7)
    assert Writer(CONFIG, None, "jsonl").token_ids("4") == (4,)
    assert Writer(CONFIG, None, "ids").token_ids("  ") == ()
    with pytest.raises(TfexportError, match="'8' are not ids of the target vocabulary"):
        Writer(CONFIG, None, "ids").token_ids("8")


# --- the command


def test_the_command_scores_as_pytorch_does(
    capsys: Any, monkeypatch: Any, tiny_bundle: Path, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    sources = {"de5 de6": [2, 5, 6, 3], "de9": [2, 9, 3], "": [], "de30 de4": [2, 30, 4, 3]}
    targets = {"wört8 wört9 wört8": [8, 9, 8, 3], "wört30": [30, 3], "wört7": [], "": [3]}
    (tmp_path / "in").write_text("".join(f"{line}\n" for line in sources))
    (tmp_path / "out").write_text("".join(f"{line}\n" for line in targets), encoding="utf-8")
    plain, warnings = command(
        capsys, monkeypatch, "score", tiny_bundle, tmp_path / "in", tmp_path / "out", "--threads", 1
    )
    assert warnings == ""
    told, _ = command(
        capsys, monkeypatch, "score", tiny_bundle, tmp_path / "in", tmp_path / "out", "--threads", 1, "--json"
    )
    assert plain.splitlines()[2] == ""
    records = [json.loads(line) for line in told.splitlines()]
    assert records[2] == {"line": 3, "status": "empty"}
    for source, target, line, record in zip(
        sources.values(), targets.values(), plain.splitlines(), records, strict=True
    ):
        if not source or not target:
            continue
        with torch.no_grad():
            logits = tiny_checkpoint.model(torch.tensor([source]), torch.tensor([[2, *target[:-1]]]))
        steps = logits[0].double().log_softmax(-1)[range(len(target)), target].tolist()
        assert record["ids"] == target
        assert record["tokens"][-1] == "<eos>"
        assert record["token_log_probs"] == pytest.approx(steps, abs=1e-4)
        total, each = line.split("\t")
        assert float(total) == pytest.approx(sum(steps), abs=1e-4) == record["log_prob"]
        assert [float(step) for step in each.split()] == record["token_log_probs"]


def test_what_is_no_number_is_null_in_json() -> None:
    found = Hypothesis((4, 2), math.nan, -math.inf, True, (-0.5, -math.inf))
    told = json.loads(Writer(CONFIG, None, "jsonl").line(Result(1, "ok", "", (found,))), parse_constant=pytest.fail)
    wanted = {"ids": [4, 2], "score": None, "log_prob": None, "finished": True, "token_log_probs": [-0.5, None]}
    assert told["hypotheses"] == [wanted]
    deep = {"a": [(1, math.inf), {"ü": -math.nan}], "b": True, "c": None, "d": "NaN"}
    assert json_text(deep, ensure_ascii=False) == '{"a": [[1, null], {"ü": null}], "b": true, "c": null, "d": "NaN"}'
    assert json_text([0.1], indent=1) == "[\n 0.1\n]"


def test_a_token_to_which_the_model_gives_no_probability_is_scored_and_marked(
    capsys: Any, monkeypatch: Any, tiny_bundle: Path, tmp_path: Path
) -> None:
    config = open_bundle(tiny_bundle).config

    def never(source: tuple[int, ...], tokens: tuple[int, ...]) -> Any:
        logits = random_model(1, config.tgt_vocab_size)(source, tokens)
        logits[9] = -math.inf
        return logits

    monkeypatch.setattr("tfexport.runtimes.load_runtime", lambda *_, **__: ScriptedRuntime(never, config))
    (tmp_path / "in").write_text("de5\nde6\n")
    (tmp_path / "out").write_text("wört8 wört9\nwört8\n", encoding="utf-8")
    given = ["score", tiny_bundle, tmp_path / "in", tmp_path / "out", "--workers", 1, "--threads", 1]
    plain, _ = command(capsys, monkeypatch, *given)
    first, second = plain.splitlines()
    total, steps = first.split("\t")
    assert (total, steps.split()[1]) == ("-inf", "-inf")
    assert "inf" not in second
    told, _ = command(capsys, monkeypatch, *given, "--json")
    records = [json.loads(line, parse_constant=pytest.fail) for line in told.splitlines()]
    assert [(record["status"], record["ids"]) for record in records] == [("ok", [8, 9, 3]), ("ok", [8, 3])]
    assert records[0]["log_prob"] is records[0]["token_log_probs"][1] is None
    assert None not in records[1]["token_log_probs"]

    (tmp_path / "starts").write_text("wört9\n\n", encoding="utf-8")
    begun = ["decode", tiny_bundle, tmp_path / "in", "--prefix-file", tmp_path / "starts", "--output-format", "jsonl"]
    for more in ([], ["--stream"]):
        told, _ = command(capsys, monkeypatch, *begun, "--token-scores", "--workers", 1, "--threads", 1, *more)
        lines = [json.loads(line, parse_constant=pytest.fail) for line in told.splitlines()]
        first = next(line for line in lines if "status" in line)
        assert first["hypotheses"][0]["token_log_probs"][0] is None
        assert first["hypotheses"][0]["ids"][0] == 9


def test_what_is_decoded_is_scored_the_same(capsys: Any, monkeypatch: Any, tiny_bundle: Path, tmp_path: Path) -> None:
    """Decode, with its log-probabilities, and score what came out: greedy, from a beam, drawn."""
    (tmp_path / "in").write_text("de5 de6\nde9\nde30 de4 de4\n")
    for asked in ([], ["--beam", 4, "--search-profile", "hf"], ["--samples", 1, "--seed", 5]):
        decode = ["decode", tiny_bundle, tmp_path / "in", "--threads", 1, "--output-format", "jsonl", "--token-scores"]
        out, _ = command(capsys, monkeypatch, *decode, *asked)
        decoded = [json.loads(line)["hypotheses"][0] for line in out.splitlines()]
        (tmp_path / "out").write_text("".join(" ".join(map(str, one["ids"])) + "\n" for one in decoded))
        given = ["score", tiny_bundle, tmp_path / "in", tmp_path / "out", "--target-format", "ids", "--json"]
        out, _ = command(capsys, monkeypatch, *given, "--threads", 1)
        for one, line in zip(decoded, out.splitlines(), strict=True):
            record = json.loads(line)
            assert record["ids"] == one["ids"]
            assert record["token_log_probs"] == pytest.approx(one["token_log_probs"], abs=1e-5)
            assert record["log_prob"] == pytest.approx(one["log_prob"], abs=1e-5)


@pytest.mark.parametrize("format", ["ids", "tokens", "text"])
def test_what_a_model_with_a_forced_first_token_says_is_scored_the_same(
    capsys: Any, monkeypatch: Any, tiny_checkpoint: TinyCheckpoint, tmp_path: Path, format: str
) -> None:
    checkpoint = tiny_checkpoint.load()
    forced = replace(checkpoint, config=checkpoint.config.replace(forced_first_id=7))
    bundle = export(forced, tmp_path / "forced", alignments=True).directory
    (tmp_path / "in").write_text("de5 de6\nde9\nde12\n")
    decode = ["decode", bundle, tmp_path / "in", "--threads", 1, "--token-scores", "--output-format"]
    out, _ = command(capsys, monkeypatch, *decode, "jsonl")
    decoded = [json.loads(line)["hypotheses"][0] for line in out.splitlines()]
    assert all(one["ids"][0] == 7 and one["token_log_probs"][0] == 0 for one in decoded)
    assert any(one["finished"] for one in decoded)
    written, _ = command(capsys, monkeypatch, *decode[:-2], "--output-format", format)
    (tmp_path / "out").write_text(written, encoding="utf-8")
    given = [bundle, tmp_path / "in", tmp_path / "out", "--target-format", format, "--threads", 1]
    out, _ = command(capsys, monkeypatch, "score", *given, "--json")
    for one, line in zip(decoded, out.splitlines(), strict=True):
        if one["finished"] or format == "ids":  # text and tokens do not tell that an output had no end
            record = json.loads(line)
            assert record["ids"] == one["ids"]
            assert record["log_prob"] == pytest.approx(one["log_prob"], abs=1e-5)
            assert record["token_log_probs"] == pytest.approx(one["token_log_probs"], abs=1e-5)
    command(capsys, monkeypatch, "attend", *given, "-o", tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert page.count("→ wört7 ") == 3
    assert "wört7 wört7" not in page


def test_flags_reach_the_search(capsys: Any, monkeypatch: Any, tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("de5 de6\tzebra\nde9\twört20\nde30 de4 de4\n")
    (tmp_path / "starts").write_text("wört9\nwört10 wört11\n\n", encoding="utf-8")

    def decode(*arguments: object, name: str = "plain") -> list[list[str]]:
        out, _ = command(capsys, monkeypatch, "decode", tiny_bundle, tmp_path / name, "--threads", 1, *arguments)
        return [line.split("\t") for line in out.splitlines()]

    (tmp_path / "plain").write_text("de5 de6\nde9\nde30 de4 de4\n")
    plain = decode()
    begun = decode("--prefix-file", tmp_path / "starts")
    assert begun[0][0].startswith("wört9 ")
    assert begun[1][0].startswith("wört10 wört11 ")
    assert begun[2] == plain[2]
    assert decode("--prefix-column", name="in")[1][0].startswith("wört20")
    assert decode("--prefix-column", name="in")[2] == plain[2]
    first = plain[0][0].split()[0]
    assert first not in decode("--suppress", first)[0][0].split()
    assert decode("--suppress-first", first)[0][0].split()[0] != first
    words = decode("--no-repeat-ngram", "1")[0][0].split()
    assert len(set(words)) == len(words)
    assert decode("--repetition-penalty", "3") != plain
    assert [len(line) for line in decode("--samples", "3", "--seed", "9")] == [3, 3, 3]
    assert decode("--samples", "2", "--top-k", "1") == [[line[0]] * 2 for line in plain]
    limit = ["--max-length", "3", "--output-format", "ids"]
    assert all(line[0].endswith(" 3") for line in decode(*limit, "--search-profile", "fairseq", "--beam", "3"))
    assert not all(line[0].endswith(" 3") for line in decode(*limit, "--beam", "3"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--samples", 2, "--beam", 4], "samples are drawn without a beam, and beam is 4"),
        (["--temperature", 0.5], "temperature, top_k, top_p and seed are of sampling, and samples is 0"),
        (["--early-stopping", "true"], "early_stopping is true, which only the profile hf has"),
        (["--token-scores"], "--token-scores are written in jsonl alone. Add --output-format jsonl."),
        (["--prefix-column", "--prefix-file", "x"], "Give one of them."),
        (["--prefix-file", "nowhere"], "cannot read nowhere"),
        (["--suppress", "zebra", "--output-format", "ids"], "'zebra' are not ids of the target vocabulary"),
        (["--shortlist-first", "5"], "are of a --shortlist"),
        (["--suppress", "<eos>"], "the end of a sentence cannot be suppressed. Use --min-length"),
    ],
)
def test_flags_that_do_not_go_together_are_one_line(
    capsys: Any, monkeypatch: Any, tiny_bundle: Path, tmp_path: Path, flags: list[Any], message: str
) -> None:
    (tmp_path / "in").write_text("de5\n")
    out, err = command(
        capsys, monkeypatch, "decode", tiny_bundle, tmp_path / "in", "--threads", 1, "--workers", 1, *flags
    )
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_a_beginning_with_unknown_words_is_marked_and_not_read_as_the_unknown_token() -> None:
    lines = [b"nowhere", b"a", b"<unk>", b"a nowhere"]
    found = results([b"a", b"b", b"c", b"d"], written(*lines, whole=False), max_length=4)
    assert [result.status == "unknown_token" for result in found] == [True, False, False, True]
    assert found[2].hypotheses[0].ids[0] == 3  # who writes the unknown token wants it


def test_score_tells_of_words_that_it_takes_for_the_unknown_token(
    capsys: Any, monkeypatch: Any, tiny_bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "in").write_text("de5\nde6\n")
    (tmp_path / "out").write_text("wört8 Wört9\nwört8\n", encoding="utf-8")
    scores, warning = command(capsys, monkeypatch, "score", tiny_bundle, tmp_path / "in", tmp_path / "out")
    assert len(scores.splitlines()) == 2
    assert "warning: 1 translations have words that the target vocabulary lacks" in warning


def test_scores_are_written_to_a_file_that_is_whole_and_can_be_gone_on_with(
    capsys: Any, monkeypatch: Any, tiny_bundle: Path, tmp_path: Path
) -> None:
    source, target, out = tmp_path / "in", tmp_path / "translations", tmp_path / "out"
    source.write_text("de5 de6\n" * 40)
    words = [f"wört{8 + index % 9}\n" for index in range(40)]
    given = ["score", tiny_bundle, source, target, "--workers", 1, "--threads", 1, "--batch-size", 1]
    target.write_text("".join(words), encoding="utf-8")
    for more in ([], ["--json"]):
        printed, _ = command(capsys, monkeypatch, *given, *more)
        assert command(capsys, monkeypatch, *given, *more, "-o", out) == ("", "")
        assert out.read_text(encoding="utf-8") == printed
        assert len(printed.splitlines()) == 40
    out.unlink()
    target.write_text("".join(words[:36]), encoding="utf-8")  # the run ends where they do
    assert "more lines of the input" in command(capsys, monkeypatch, *given, "-o", out)[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.partial", "out.partial.json", "translations"]
    assert len((tmp_path / "out.partial").read_text().splitlines()) == 32  # whole windows
    target.write_text("".join(words), encoding="utf-8")
    assert "begun with another outputs" in command(capsys, monkeypatch, *given, "-o", out, "--resume")[1]
    target.write_text("".join(words[:36]), encoding="utf-8")
    assert "more lines of the input" in command(capsys, monkeypatch, *given, "-o", out, "--resume")[1]
    source.write_text("de5 de6\n" * 36)
    command(capsys, monkeypatch, *given, "-o", out, "--resume")
    assert out.read_text() == "".join(line + "\n" for line in command(capsys, monkeypatch, *given)[0].splitlines())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "translations"]
    (tmp_path / "out.partial").write_text("-1.0\t-1.0\n" * 48)
    begun = {"bundle": file_sha256(tiny_bundle / MANIFEST), "runtime": "ort-cpu", "precision": "float32"}
    begun |= {"input": [str(source), "text"], "outputs": [file_sha256(target), "text"], "output": "text"}
    (tmp_path / "out.partial.json").write_text(json.dumps(begun))
    assert "36 lines, and 48 are done" in command(capsys, monkeypatch, *given, "-o", out, "--resume")[1]


def test_a_run_is_not_gone_on_with_after_its_prefixes_have_changed(
    capsys: Any, monkeypatch: Any, tiny_bundle: Path, tmp_path: Path
) -> None:
    source, prefixes = tmp_path / "in", tmp_path / "prefixes"
    source.write_text("de5\n" * 40)
    prefixes.write_text("wört8\n" * 36, encoding="utf-8")  # too few: the run ends where they do
    flags = ["decode", tiny_bundle, source, "-o", tmp_path / "out", "--prefix-file", prefixes]
    flags += ["--workers", 1, "--threads", 1, "--batch-size", 1]
    assert "more lines of the input" in command(capsys, monkeypatch, *flags)[1]
    assert "more lines of the input" in command(capsys, monkeypatch, *flags, "--resume")[1]
    prefixes.write_text("wört9\n" * 40, encoding="utf-8")
    assert "begun with another" in command(capsys, monkeypatch, *flags, "--resume")[1]
