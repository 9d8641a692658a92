"""What is streamed is what is decoded: the same tokens and text, never taken back."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.support.fakes import Ids, ScriptedRuntime, random_model, tied_model, tiny_config
from tests.support.text_models import trained_bpe
from tfexport.decoding.stream import GrowingText, Step, stream
from tfexport.decoding.translate import Writer
from tfexport.errors import TfexportError
from tfexport.search.profiles import PROFILES
from tfexport.search.search import Hypothesis, SearchOptions, Source, search, search_steps
from tfexport.text.sentencepiece import Pieces
from tfexport.text.tokenizers import TextTokenizer, word_tokenizer

SOURCES: list[Ids] = [(5, 6, 2), (7, 2), (5, 6, 7, 8, 2), (6,), (9, 5, 9, 2)]
WORDS = word_tokenizer({word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *"abcdef"])})


# --- tokens


def without_words(vocab: int) -> Writer:
    return Writer(tiny_config(tgt_vocab_size=vocab), None, "ids")


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("beam", [1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_decided_is_the_beginning_of_what_is_found(seed: int, beam: int, profile: Any) -> None:
    """At every step, of every source of a batch; and as soon as it can be told in greedy search."""
    model = (random_model if seed % 2 else tied_model)(seed, 8)
    runtime = ScriptedRuntime(model, tiny_config(tgt_vocab_size=8))
    options = SearchOptions.for_profile(profile, beam=beam, max_length=9, token_scores=True)
    wanted = [hypotheses[0] for hypotheses in search(runtime, SOURCES, options)]
    told = [0] * len(SOURCES)
    for length, decided in enumerate(search_steps(runtime, SOURCES, options), start=1):
        for index, best in enumerate(wanted):
            ids, log_probs = decided(index)
            assert tuple(ids) == best.ids[: len(ids)]
            assert list(log_probs) == pytest.approx(best.token_log_probs[: len(ids)])
            assert len(ids) >= told[index]
            assert beam > 1 or len(ids) == min(length, len(best.ids))
            told[index] = len(ids)
    if beam == 1 or options.length_penalty:  # without one all may be done before hypotheses have something in common
        assert sum(told) > (0 if beam > 1 else len(SOURCES))


@pytest.mark.parametrize(
    "options", [{}, {"beam": 3}, {"samples": 1, "seed": 4}, {"no_repeat_ngram": 1}, {"token_scores": True}], ids=str
)
def test_a_stream_is_the_search_token_by_token(options: dict[str, Any]) -> None:
    runtime = ScriptedRuntime(random_model(3, 9), tiny_config(tgt_vocab_size=9))
    asked = SearchOptions(max_length=8, **options)
    for line, ids in enumerate(SOURCES):
        source = Source(ids, prefix=(4, 6)[: line % 3], line=line)
        [[wanted]] = search(runtime, [source], asked)
        *steps, best = stream(runtime, source, asked, Writer(runtime.config, WORDS, "text"))
        assert best == wanted
        found = [step for step in steps if isinstance(step, Step)]
        assert tuple(step.id for step in found) == wanted.ids
        assert sum(step.log_prob for step in found) == pytest.approx(wanted.log_prob)
        assert [step.token for step in found] == WORDS.tokens(wanted.ids)
        assert "".join(step.text for step in found) == Writer(runtime.config, WORDS, "text").text(wanted.ids)


def test_each_token_comes_before_the_next_is_computed() -> None:
    runtime = ScriptedRuntime(random_model(3, 9), tiny_config(tgt_vocab_size=9))
    tokens = stream(runtime, SOURCES[2], SearchOptions(max_length=8, min_length=7), without_words(9))
    for count in range(1, 7):
        assert isinstance(next(tokens), Step)
        assert len(runtime.rows[-1]) == count
    tokens.close()  # type: ignore[attr-defined]
    assert len(runtime.rows[-1]) == 6


@pytest.mark.parametrize("options", [{"beam": 2, "nbest": 2}, {"samples": 2}])
def test_several_outputs_of_a_line_are_not_streamed(options: dict[str, Any]) -> None:
    runtime = ScriptedRuntime(random_model(3, 9), tiny_config(tgt_vocab_size=9))
    with pytest.raises(TfexportError, match="only one output per line can be streamed"):
        next(stream(runtime, SOURCES[0], SearchOptions(**options), without_words(9)))


# --- text


def characters(tokens: Sequence[str], decoder: Any) -> TextTokenizer:
    inner = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=tokens[0]))
    inner.decoder = decoder
    return TextTokenizer(inner)


BYTES = [f"<0x{byte:02X}>" for byte in (*b"\xe2\x82\xac", *"🙂".encode(), 0x41, 0xFF)]
PIECES = ["<unk>", "▁", "▁Hal", "lo", "▁€", "s", "▁▁", "'", ".", *BYTES]


@cache
def sentencepiece_tokenizer() -> TextTokenizer:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    text = ["the old man and the sea", "der alte Mann und das Meer", "ein Hund läuft"] * 5
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_writer=model,
        vocab_size=320,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    vocabulary = {processor.id_to_piece(index): index for index in range(processor.get_piece_size())}
    return TextTokenizer(Pieces(model.getvalue(), vocabulary, ["<unk>", "<s>", "</s>"], "<unk>"), skips_special=True)


class Joined(TextTokenizer):
    """Words whose parts end in `@@`, joined as subword-nmt documents it."""

    def decode(self, ids: Sequence[int]) -> str:
        return re.sub(r"(@@ )|(@@ ?$)", "", " ".join(self.tokens(ids))).strip()


class JoinedInside(TextTokenizer):
    """The same as a plain replacement, which leaves the last `@@`."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.tokens(ids)).replace("@@ ", "").strip()


PARTS = word_tokenizer({part: index for index, part in enumerate(["<unk>", "a@@", "b", "@@", "c@d@@", "@", "e"])}).inner
TOKENIZERS: dict[str, Callable[[], TextTokenizer]] = {
    "words": lambda: WORDS,
    "byte-level BPE": trained_bpe,
    "SentencePiece": sentencepiece_tokenizer,
    "byte fallback": lambda: characters(
        PIECES,
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    ),
    "metaspace": lambda: characters(PIECES, decoders.Metaspace()),
    "wordpiece": lambda: characters(["[UNK]", "a", "##b", ".", "n", "'", "##'t", "##@@", "##t"], decoders.WordPiece()),
    "end of word": lambda: characters(["<unk>", "a</w>", "b", ".</w>", "</w>", " "], decoders.BPEDecoder("</w>")),
    "subword-nmt": lambda: TextTokenizer(PARTS),
    "@@": lambda: Joined(PARTS),
    "@@ inside": lambda: JoinedInside(PARTS),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_the_pieces_of_a_text_are_the_text(name: str, data: st.DataObject) -> None:
    """Of any ids, sensible or not; each piece of valid text, so that half a character is never told."""
    tokenizer = TOKENIZERS[name]()
    writer = Writer(tiny_config(tgt_vocab_size=500, eos_id=2), tokenizer, "text")
    ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), min_size=1, max_size=12))
    growing = GrowingText(writer.text, tokenizer)
    pieces = [growing.add(index, last=place == len(ids) - 1) for place, index in enumerate(ids)]
    assert "".join(pieces) == writer.text(ids)
    assert all("\ufffd" not in piece[-1:] for piece in pieces[:-1])


def test_a_character_comes_when_its_last_byte_does_and_a_word_at_once() -> None:
    def pieces_of(name: str, text: str) -> list[str]:
        tokenizer = TOKENIZERS[name]()
        ids = tokenizer.encode(text)
        growing = GrowingText(tokenizer.decode, tokenizer)
        return [growing.add(index, last=index is ids[-1]) for index in ids]

    assert pieces_of("words", "a b c") == ["a", " b", " c"]
    assert [piece for piece in pieces_of("byte-level BPE", "x🙂y") if piece] == ["x", "🙂", "y"]
    assert [piece for piece in pieces_of("SentencePiece", "alte 🙂 Mann") if "🙂" in piece]
    assert len([piece for piece in pieces_of("SentencePiece", "der alte Mann") if piece]) >= 3


# --- the command


def test_a_hypothesis_is_what_ends_a_stream() -> None:
    runtime = ScriptedRuntime(random_model(1, 6), tiny_config(tgt_vocab_size=6))
    *_, last = stream(runtime, (5, 6), SearchOptions(max_length=4), without_words(6))
    assert isinstance(last, Hypothesis)
    assert last.token_log_probs == ()
