"""Given outputs are scored, and outputs begin as they are told."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.support.fakes import EOS, ScriptedRuntime, random_model, tiny_config
from tfexport.decoding.line_reader import Reader, TargetReader
from tfexport.decoding.translate import Result, Writer, scored, translate
from tfexport.errors import TfexportError
from tfexport.search.search import Hypothesis, SearchOptions
from tfexport.search.token_rules import log_softmax
from tfexport.system.json_text import json_text
from tfexport.text.tokenizers import word_tokenizer

CONFIG = tiny_config(src_vocab_size=8, tgt_vocab_size=8, max_source_length=6, max_target_length=6, unk_id=3)
MODEL = random_model(5, 8)
FORCED = CONFIG.replace(forced_first_id=7)
WORDS = ["<pad>", "<s>", "</s>", "<unk>", "a", "b", "c", "d"]
VOCABULARY = word_tokenizer({word: index for index, word in enumerate(WORDS)})


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
    assert found[3].message == "the output's part continues after the end, id 2"
    assert found[5].message == "7 ids of output, the model writes at most 6"


def test_there_is_an_output_for_each_line() -> None:
    for count, message in ((1, "more lines of the input than of the outputs"), (3, "more lines of the outputs than")):
        with pytest.raises(TfexportError, match=message):
            results([b"a", b"b"], written(*[b"c"] * count))


@pytest.mark.parametrize("beam", [1, 3])
def test_an_output_begins_as_its_line_says(beam: int) -> None:
    outputs = TargetReader(CONFIG, VOCABULARY, "text")
    lines = [b"a\tb c\n", b"a b\t\r\n", b"c\n", b"d\ta a a a a a a\n", b"d\td"]
    found = results(lines, outputs, beam=beam)
    assert [result.status != "too_long" for result in found] == [True, True, True, False, True]
    starts = [result.hypotheses[0].ids[:2] if result.hypotheses else () for result in found]
    assert starts[0] == (5, 6)
    assert starts[4][0] == 7
    [first, second] = results([b"a b", b"c"], written(b"", b"", whole=False), beam=beam)
    for nothing_said, plain in ((found[1], first), (found[2], second)):
        assert nothing_said.hypotheses[0].ids == plain.hypotheses[0].ids
        assert nothing_said.hypotheses[0].score == pytest.approx(plain.hypotheses[0].score, abs=1e-6)


@pytest.mark.parametrize("beam", [1, 3])
def test_an_output_with_a_prefix_does_not_depend_on_the_number_of_its_line(beam: int) -> None:
    found = results([b"b c"] * 8, written(*[b"c"] * 8, whole=False), beam=beam)
    assert [result.hypotheses[0].ids for result in found] == [found[0].hypotheses[0].ids] * 8
    assert found[0].hypotheses[0].ids == (6, 0, 2)
    assert [source and (source.least, source.line) for source in (found[0].source, found[7].source)] == [(0, 1), (0, 8)]


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


def test_what_is_no_number_is_null_in_json() -> None:
    found = Hypothesis((4, 2), math.nan, -math.inf, True, (-0.5, -math.inf))
    told = json.loads(Writer(CONFIG, None, "jsonl").line(Result(1, "ok", "", (found,))), parse_constant=pytest.fail)
    wanted = {"ids": [4, 2], "score": None, "log_prob": None, "finished": True, "token_log_probs": [-0.5, None]}
    assert told["hypotheses"] == [wanted]
    deep = {"a": [(1, math.inf), {"ü": -math.nan}], "b": True, "c": None, "d": "NaN"}
    assert json_text(deep, ensure_ascii=False) == '{"a": [[1, null], {"ü": null}], "b": true, "c": null, "d": "NaN"}'
    assert json_text([0.1], indent=1) == "[\n 0.1\n]"


def test_a_beginning_with_unknown_words_is_marked_and_not_read_as_the_unknown_token() -> None:
    lines = [b"nowhere", b"a", b"<unk>", b"a nowhere"]
    found = results([b"a", b"b", b"c", b"d"], written(*lines, whole=False), max_length=4)
    assert [result.status == "unknown_token" for result in found] == [True, False, False, True]
    assert found[2].hypotheses[0].ids[0] == 3  # who writes the unknown token wants it
