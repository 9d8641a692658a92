"""Every input line has its result, in its place, whatever is wrong with it, and lines stream."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from tests.support.fakes import (
    EOS,
    Model,
    ScriptedRuntime,
    ScriptedState,
    constant_model,
    echo_model,
    random_model,
    tiny_config,
)
from tfexport.bundle.reader import Bundle, Origin
from tfexport.config import ModelConfig
from tfexport.decoding.line_reader import Reader, Unreadable, source_lengths
from tfexport.decoding.translate import WINDOW_BATCHES, Result, Writer, translate
from tfexport.errors import TfexportError
from tfexport.runtimes.base import BaseRuntime, Capacity
from tfexport.runtimes.outputs import Best, IntArray
from tfexport.search.search import Hypothesis, SearchOptions
from tfexport.text.tokenizers import TextTokenizer, word_tokenizer

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "a", "b", "c", "d"]
A, B, C, D, UNK = 4, 5, 6, 7, 3
SIZE = len(WORDS)
CONFIG = tiny_config(src_vocab_size=SIZE, tgt_vocab_size=SIZE, max_source_length=6, max_target_length=20, unk_id=UNK)
VOCABULARY = word_tokenizer({word: index for index, word in enumerate(WORDS)})


def run(
    lines: Iterable[bytes],
    reader: Reader | None = None,
    *,
    model: Model | None = None,
    batch_size: int = 32,
    window: int | None = None,
    workers: int = 1,
    **options: Any,
) -> Iterator[Result]:
    reader = reader or Reader(CONFIG, VOCABULARY, "text")
    runtime = ScriptedRuntime(model or echo_model(SIZE), reader.config)
    search = SearchOptions(**options)
    return translate(runtime, reader, lines, search, batch_size=batch_size, window=window, workers=workers)


def status_of(raw: bytes, reader: Reader) -> str:
    [result] = run([raw], reader)
    return result.status


def hypothesis(*ids: int, score: float = -0.5, log_prob: float = -1.0) -> Hypothesis:
    return Hypothesis(ids, score, log_prob, ids[-1] == EOS)


def written(format: Any, *hypotheses: Hypothesis, tokenizer: TextTokenizer | None = VOCABULARY) -> str:
    return Writer(CONFIG, tokenizer, format).line(Result(1, "ok", "", hypotheses))


# --- lines


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
@pytest.mark.parametrize("window", [None, 1, 2, 7])
def test_each_line_has_its_result_in_its_place(batch_size: int, window: int | None, workers: int) -> None:
    """Lengths go up and down, and lines that cannot be decoded stand between the others."""
    words = ["a b c d a", "b", "", "c c c", "zebra d", "\xff", "d d", "a", "b a", "a b c d a b c", "c", "d c b a", "b"]
    lines = [word.encode("latin-1") + b"\n" for word in words]
    results = list(run(lines, batch_size=batch_size, window=window, workers=workers))
    assert [result.line for result in results] == list(range(1, len(lines) + 1))
    writer = Writer(CONFIG, VOCABULARY, "text")
    expected = ["a b c d a", "b", "", "c c c", "<unk> d", "", "d d", "a", "b a", "", "c", "d c b a", "b"]
    assert [writer.line(result) for result in results] == expected
    undecoded = {3: "empty", 6: "invalid_utf8", 10: "too_long"}
    assert [result.status for result in results] == [undecoded.get(line, "ok") for line in range(1, len(lines) + 1)]


def test_a_batch_holds_lines_of_like_length() -> None:
    """The first two of four lines are the longest, but they are not decoded with the others."""
    asked: list[list[int]] = []

    class Notes(ScriptedRuntime):
        def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> Any:
            asked.append(src_len.tolist())
            return super().encode(src_ids, src_len, beam=beam, attention=attention)

    reader = Reader(CONFIG, VOCABULARY, "text")
    lines = [b"a b c d", b"a", b"b c d a", b"b", b"c"]
    list(translate(Notes(echo_model(SIZE), CONFIG), reader, lines, SearchOptions(), batch_size=2))
    assert asked == [[5, 5], [2, 2], [2]]


def test_line_ends_are_not_part_of_a_line() -> None:
    results = run([b"a b\r\n", b" c \t\n", b"\r\n", b"d"])
    assert [(result.status, *(h.ids for h in result.hypotheses)) for result in results] == [
        ("ok", (A, B, EOS)),
        ("ok", (C, EOS)),
        ("empty",),
        ("ok", (D, EOS)),
    ]


def test_no_lines_no_results() -> None:
    assert list(run([])) == []


# --- statuses


def test_a_hypothesis_cut_by_the_limit_is_given_and_marked() -> None:
    [cut, whole] = run([b"a b c", b"a"], max_length=3)
    assert (cut.status, cut.hypotheses[0].ids) == ("length_limit", (A, B, C))
    assert "limit of 3 tokens" in cut.message
    assert (whole.status, whole.message) == ("ok", "")


@pytest.mark.parametrize("raw", [b"", b"\n", b"\r\n", b"  \t \n", "\u00a0\u2028\n".encode()])
@pytest.mark.parametrize("format", ["text", "tokens", "ids"])
def test_a_line_of_white_space_is_empty(raw: bytes, format: Any) -> None:
    [result] = run([raw], Reader(CONFIG, VOCABULARY, format))
    assert (result.status, result.message, result.hypotheses) == ("empty", "", ())


@pytest.mark.parametrize("source_eos", [True, False])
def test_text_of_which_the_tokenizer_makes_no_ids_is_empty(source_eos: bool) -> None:
    """A BPE without an unknown token drops what it does not know; nothing is left for the encoder to attend to."""
    drops = TextTokenizer(Tokenizer(models.BPE({"<pad>": 0, "<s>": 1, "</s>": 2, "a": 3}, [])))
    reader = Reader(CONFIG.replace(source_eos=source_eos), drops, "text")
    results = list(run([b"a", b"zzz", b"a"], reader))
    assert [result.status for result in results] == ["ok", "empty", "ok"]


def test_the_length_that_counts_includes_what_the_model_adds() -> None:
    reader = Reader(CONFIG, VOCABULARY, "text")  # reads at most 6 ids
    assert status_of(b"a a a a a", reader) == "ok"
    assert status_of(b"a a a a a a", reader) == "too_long"
    with_both = Reader(CONFIG.replace(source_bos=True), VOCABULARY, "text")
    assert status_of(b"a a a a", with_both) == "ok"
    assert status_of(b"a a a a a", with_both) == "too_long"
    with_none = Reader(CONFIG.replace(source_eos=False), VOCABULARY, "tokens")
    assert status_of(b"a a a a a a", with_none) == "ok"
    assert status_of(b"a a a a a a a", with_none) == "too_long"
    given = Reader(CONFIG, None, "ids")
    assert status_of(b"4 4 4 4 4 4", given) == "ok"
    assert status_of(b"4 4 4 4 4 4 4", given) == "too_long"
    [result] = run([b"4 " * 7], given)
    assert result.message == "7 ids, the model reads at most 6: split the line"


@pytest.mark.parametrize("format", ["text", "tokens", "ids"])
def test_bytes_that_are_not_utf8_are_marked_with_their_place(format: Any) -> None:
    for raw, place in ((b"4 \xff 5\n", 3), (b"\xc3\n", 1), (b"a \xed\xa0\x80", 3)):
        [result] = run([raw], Reader(CONFIG, VOCABULARY, format))
        assert (result.status, result.message) == ("invalid_utf8", f"byte {place} is not UTF-8")


@pytest.mark.parametrize(
    "word",
    ["1_000", "+1", "\u0661", "-1", "\u00b2", "1.0", "1e1", "0x1", "8", "999999999", "9" * 5000, "a", "1,2", "\ufeff1"],
)
def test_what_is_not_an_id_of_the_vocabulary_is_marked(word: str) -> None:
    [result] = run([f"4 {word} 5".encode()], Reader(CONFIG, None, "ids"))
    assert (result.status, result.hypotheses) == ("invalid_ids", ())
    assert "is not an id from 0 to 7" in result.message
    assert len(result.message) < 100


def test_a_word_without_an_unknown_token_to_stand_for_it_is_marked() -> None:
    closed = word_tokenizer({word: index for index, word in enumerate(WORDS) if word != "<unk>"})
    for format in ("text", "tokens"):
        results = list(run([b"a", b"a zebra", b"b"], Reader(CONFIG, closed, format)))
        assert [result.status for result in results] == ["ok", "unknown_token", "ok"]
        assert results[1].message
    assert status_of(b"a zebra", Reader(CONFIG, VOCABULARY, "tokens")) == "ok"


# --- reading


def test_ids_are_given_to_the_model_as_they_are() -> None:
    """Nothing is added and nothing taken away: who gives ids gives bos and eos as well."""
    with_both = CONFIG.replace(source_bos=True)
    assert Reader(with_both, VOCABULARY, "ids").ids(b" 4 7\t02 3 3 \n") == [4, 7, 2, 3, 3]


@pytest.mark.parametrize("format", ["text", "tokens"])
def test_text_gets_the_bos_and_eos_that_the_model_reads(format: Any) -> None:
    for bos, eos, expected in (
        (False, True, [A, B, 2]),
        (True, True, [1, A, B, 2]),
        (True, False, [1, A, B]),
        (False, False, [A, B]),
    ):
        config = CONFIG.replace(source_bos=bos, source_eos=eos)
        assert Reader(config, VOCABULARY, format).ids(b"a  b\n") == expected


def test_tokens_are_looked_up_as_they_stand_and_text_is_tokenized() -> None:
    lower = word_tokenizer({word: index for index, word in enumerate(WORDS)}, lowercase=True)
    assert Reader(CONFIG, lower, "text").ids(b"A b") == [A, B, EOS]
    assert Reader(CONFIG, lower, "tokens").ids(b"A b") == [UNK, B, EOS]


def test_the_lengths_to_plan_for_are_those_of_the_lines_that_can_be_decoded() -> None:
    reader = Reader(CONFIG, VOCABULARY, "text")  # adds an eos, reads at most 6 ids
    lines = [b"a b\n", b"\n", b"a\n", b"\xff\n", b"a a a a a\n", b"a a a a a a\n"]
    assert source_lengths(reader, lines) == [3, 2, 6]


# --- writing


def test_ids_have_no_bos_and_the_eos_that_came() -> None:
    [ended, cut] = run([b"a b", b"a b c d"], max_length=3)
    writer = Writer(CONFIG, None, "ids")
    assert writer.line(ended) == f"{A} {B} {EOS}"
    assert writer.line(cut) == f"{A} {B} {C}"


def test_text_and_tokens_have_no_eos() -> None:
    assert written("text", hypothesis(A, B, EOS)) == "a b"
    assert written("tokens", hypothesis(A, UNK, EOS)) == "a <unk>"
    assert written("text", hypothesis(A, B)) == "a b"
    assert written("text", hypothesis(EOS)) == ""


def test_several_hypotheses_are_separated_by_tabs() -> None:
    several = [hypothesis(A, B, EOS), hypothesis(EOS), hypothesis(C, EOS)]
    assert written("text", *several) == "a b\t\tc"
    assert written("tokens", *several) == "a b\t\tc"
    assert written("ids", *several) == f"{A} {B} {EOS}\t{EOS}\t{C} {EOS}"
    [result] = run([b"a b"], model=random_model(0, SIZE), beam=3, nbest=3, max_length=4)
    assert len(Writer(CONFIG, VOCABULARY, "ids").line(result).split("\t")) == 3


@pytest.mark.parametrize("format", ["text", "tokens", "ids", "jsonl"])
def test_a_vocabulary_cannot_break_a_line_or_a_column(format: Any) -> None:
    nasty = word_tokenizer({"</s>": EOS, "x\ty": 4, "\n": 5, "\r\n": 6, "z\u2028": 7, "\x1c": 8, "\x85": 9, "\x0b": 10})
    line = written(format, hypothesis(4, 5, 6, 7, 8, 9, 10, EOS), hypothesis(4, EOS), tokenizer=nasty)
    # jsonl is one record a line for whoever splits at newlines, as JSON readers do.
    assert (line.split("\n") if format == "jsonl" else line.splitlines()) == [line]
    if format != "jsonl":
        assert line.count("\t") == 1


def test_an_undecoded_line_is_an_empty_line_but_a_record_of_jsonl() -> None:
    [result] = run([b"\xff"])
    assert [Writer(CONFIG, VOCABULARY, format).line(result) for format in ("text", "tokens", "ids")] == ["", "", ""]
    assert json.loads(Writer(CONFIG, VOCABULARY, "jsonl").line(result)) == {
        "line": 1,
        "status": "invalid_utf8",
        "message": "byte 1 is not UTF-8",
        "hypotheses": [],
    }


def test_a_record_of_jsonl_has_all_facts() -> None:
    first = hypothesis(A, UNK, EOS, score=-0.12345678, log_prob=-2.0000004)
    result = Result(3, "ok", "", (first, hypothesis(B)))
    assert json.loads(Writer(CONFIG, VOCABULARY, "jsonl").line(result)) == {
        "line": 3,
        "status": "ok",
        "hypotheses": [
            {
                "text": "a <unk>",
                "tokens": ["a", "<unk>", "</s>"],  # one for each id
                "ids": [A, UNK, EOS],
                "score": -0.123457,
                "log_prob": -2.0,
                "finished": True,
            },
            {"text": "b", "tokens": ["b"], "ids": [B], "score": -0.5, "log_prob": -1.0, "finished": False},
        ],
    }
    record = json.loads(Writer(CONFIG, None, "jsonl").line(result))
    assert [set(found) for found in record["hypotheses"]] == [{"ids", "score", "log_prob", "finished"}] * 2


def test_jsonl_is_readable_in_every_script() -> None:
    words = word_tokenizer({"</s>": EOS, "größe": 4, '"': 5, "数": 6})
    line = written("jsonl", hypothesis(4, 5, 6, EOS), tokenizer=words)
    assert "größe" in line
    assert json.loads(line)["hypotheses"][0]["text"] == 'größe " 数'


# --- bundles with and without vocabularies


def bundle(folder: Path, config: ModelConfig = CONFIG, **tokenizers: TextTokenizer) -> Bundle:
    """As much of a bundle as a reader and a writer look at."""
    for side, tokenizer in tokenizers.items():
        (folder / f"{side}.json").write_text(json.dumps(tokenizer.to_dict()), encoding="utf-8")
    names = {side: f"{side}.json" for side in tokenizers}
    return Bundle(folder, config, Origin("", "", {}), graphs=(), engines=(), dialects={}, tokenizers=names, files={})


def test_text_is_the_format_where_there_is_a_vocabulary_and_ids_where_there_is_none(tmp_path: Path) -> None:
    one_sided = bundle(tmp_path, source=VOCABULARY)
    assert Reader.of(one_sided, None).format == "text"
    assert Writer.of(one_sided, None).format == "ids"
    assert Reader.of(one_sided, None).ids(b"a b") == [A, B, EOS]
    other_side = bundle(tmp_path, target=VOCABULARY)
    assert Reader.of(other_side, None).format == "ids"
    assert Writer.of(other_side, None).format == "text"
    assert Writer.of(other_side, None).line(Result(1, "ok", "", (hypothesis(A, EOS),))) == "a"
    both = bundle(tmp_path, source=VOCABULARY, target=VOCABULARY)
    assert [Reader.of(both, format).format for format in ("text", "tokens", "ids")] == ["text", "tokens", "ids"]
    formats: tuple[Any, ...] = ("text", "tokens", "ids", "jsonl")
    assert tuple(Writer.of(both, format).format for format in formats) == formats


def test_a_format_that_needs_a_missing_vocabulary_is_refused(tmp_path: Path) -> None:
    bare = bundle(tmp_path)
    assert Reader.of(bare, "ids").ids(b"4 5") == [4, 5]
    assert Writer.of(bare, "jsonl").format == "jsonl"
    for format in ("text", "tokens"):
        with pytest.raises(TfexportError, match=r"no source vocabulary .* --src-vocab"):
            Reader.of(bare, format)
        with pytest.raises(TfexportError, match=r"no target vocabulary .* --tgt-vocab"):
            Writer.of(bare, format)


# --- streaming


class EndsAtOnce(BaseRuntime):
    """The cheapest runtime: eos, whatever the sentence."""

    name = "ends-at-once"
    config = CONFIG
    capacity = Capacity.of_model(CONFIG)
    cross: tuple[()] = ()
    rows = 0

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> EndsAtOnce:
        self.rows = len(src_len)
        return self

    def best(self, state: EndsAtOnce, tokens: IntArray, count: int) -> tuple[Best, EndsAtOnce]:
        shape = (len(tokens), count)
        return Best(np.zeros(shape, dtype=np.float32), np.full(shape, EOS)), self


def test_a_window_of_one_answers_each_line_before_it_reads_the_next() -> None:
    read: list[bytes] = []

    def lines() -> Iterator[bytes]:
        for line in (b"a", b"", b"\xff", b"b"):
            read.append(line)
            yield line

    for number, result in enumerate(run(lines(), window=1), start=1):
        assert result.line == number == len(read)


@pytest.mark.thorough
def test_a_hundred_thousand_lines_stream() -> None:
    """No line is read before the window that it belongs to is due."""
    count, batch_size, read = 100_000, 512, 0

    def lines() -> Iterator[bytes]:
        nonlocal read
        for read in range(1, count + 1):
            yield b"4 5" if read % 4 == 0 else b"\n"

    reader = Reader(CONFIG, None, "ids")
    results = translate(EndsAtOnce(), reader, lines(), SearchOptions(), batch_size=batch_size)
    window, last = batch_size * WINDOW_BATCHES, 0
    for result in results:
        last += 1
        assert result.line == last
        assert read - last < window
    assert last == read == count


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_input() -> None:
    reader = Reader(CONFIG, None, "ids")

    def peak(count: int) -> int:
        lines = (b"4 5" for _ in range(count))
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        for _ in translate(EndsAtOnce(), reader, lines, SearchOptions(), batch_size=16):
            pass
        return tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    try:
        peak(1_000)  # whatever is made once is made now
        few, many = peak(1_000), peak(10_000)
    finally:
        tracemalloc.stop()
    assert many < 1.5 * few


def test_the_random_fake_gives_what_it_gave_before() -> None:
    """All these tests lean on logits that depend on the sentence and its tokens alone."""
    model = random_model(0, 5)
    assert model((4,), (5, 6)).tolist() == random_model(0, 5)((4,), (5, 6)).tolist()
    assert len({model(source, tokens).tobytes() for source in [(4,), (5,)] for tokens in [(), (4,), (4, 5)]}) == 6
    assert constant_model([1, 2])((4,), ()).dtype == np.float32


def test_padding_in_a_source_is_marked(tmp_path: Path) -> None:
    """PyTorch code hides padding by its id and these graphs by length, so the two would differ."""
    reader = Reader(CONFIG, None, "ids")
    with pytest.raises(Unreadable, match=f"padding id {CONFIG.pad_id}"):
        reader.ids(f"5 6 {CONFIG.pad_id}".encode())
    one_id = CONFIG.replace(pad_id=CONFIG.eos_id)  # there it is an ordinary id too
    assert Reader(one_id, None, "ids").ids(f"5 {one_id.pad_id}".encode()) == [5, one_id.pad_id]


# --- a runtime that takes less than the model


class SmallRuntime(ScriptedRuntime):
    """Takes 4 source ids, 3 tokens and 6 rows."""

    def __init__(self) -> None:
        super().__init__(echo_model(100), tiny_config())
        self.capacity = Capacity(source=4, target=3, batch=5, rows=6)
        self.batches: list[tuple[int, int]] = []

    def encode(self, src_ids: IntArray, src_len: IntArray, *, beam: int = 1, attention: bool = False) -> ScriptedState:
        assert src_ids.shape[1] <= 4
        self.batches.append((len(src_len), beam))
        return super().encode(src_ids, src_len, beam=beam, attention=attention)


@pytest.mark.parametrize(("beam", "largest"), [(1, 5), (2, 3), (3, 2), (6, 1)])
def test_lines_that_a_runtime_does_not_take_are_marked_and_the_others_decoded_in_its_sizes(
    beam: int, largest: int
) -> None:
    runtime = SmallRuntime()
    reader = Reader(runtime.config, None, "ids")
    lines = [b"5 6", b"5 6 7 8 9", b"7", b"5 6 7 8", b"6", b"9", b"8", b"7 7"]
    results = list(translate(runtime, reader, lines, SearchOptions(beam=beam)))
    assert [r.status for r in results] == ["ok", "too_long", "ok", "length_limit", "ok", "ok", "ok", "ok"]
    assert results[1].message == "5 ids, this runtime takes at most 4: build with a larger --max-source"
    assert results[3].hypotheses[0].ids == (5, 6, 7)
    assert max(size for size, _ in runtime.batches) == largest
    assert sum(size for size, _ in runtime.batches) == 7
