"""`tfexport score`, and forced beginnings of outputs, from lines to lines."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from makers.tiny import TinyCheckpoint
from tests.support.commands import command
from tests.support.fakes import ScriptedRuntime, random_model, tiny_config
from tfexport.bundle.reader import MANIFEST, file_sha256, open_bundle
from tfexport.decoding.line_reader import TargetReader
from tfexport.exporter.pipeline import export
from tfexport.text.tokenizers import word_tokenizer

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "a", "b", "c", "d"]
CONFIG = tiny_config(src_vocab_size=8, tgt_vocab_size=8, max_source_length=6, max_target_length=6, unk_id=3)
VOCABULARY = word_tokenizer({word: index for index, word in enumerate(WORDS)})
MODEL = random_model(5, 8)


def written(*targets: bytes, format: Any = "text", whole: bool = True) -> TargetReader:
    return TargetReader(CONFIG, VOCABULARY, format, whole, targets)


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


def test_a_token_to_which_the_model_gives_no_probability_is_scored_and_marked(
    capsys: Any, monkeypatch: Any, tiny_bundle: Path, tmp_path: Path
) -> None:
    config = open_bundle(tiny_bundle).config

    def never(source: tuple[int, ...], tokens: tuple[int, ...]) -> Any:
        logits = random_model(1, config.tgt_vocab_size)(source, tokens)
        logits[9] = -math.inf
        return logits

    monkeypatch.setattr("tfexport.decoding.job.load_runtime", lambda *_, **__: ScriptedRuntime(never, config))
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


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("format", ["ids", "tokens", "text"])
def test_what_a_model_with_a_forced_first_token_says_is_scored_the_same(
    capsys: Any, monkeypatch: Any, tiny_checkpoint: TinyCheckpoint, tmp_path: Path, format: str
) -> None:
    checkpoint = tiny_checkpoint.load()
    forced = replace(checkpoint, config=checkpoint.config.replace(forced_first_id=7))
    bundle = export(forced, tmp_path / "forced", alignments=True, gate=None).directory
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


@pytest.mark.thorough
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
        (["--samples", 2, "--beam", 4], "sampling does not use a beam, and beam is 4"),
        (["--temperature", 0.5], "temperature, top_k, top_p and seed need sampling, and samples is 0"),
        (["--early-stopping", "true"], "early_stopping is true, which only the profile hf supports"),
        (["--token-scores"], "--token-scores needs jsonl. Add --output-format jsonl."),
        (["--prefix-column", "--prefix-file", "x"], "Give one of them."),
        (["--prefix-file", "nowhere"], "cannot read nowhere"),
        (["--suppress", "zebra", "--output-format", "ids"], "'zebra' are not ids of the target vocabulary"),
        (["--shortlist-first", "5"], "need a --shortlist"),
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
