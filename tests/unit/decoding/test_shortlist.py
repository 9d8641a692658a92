"""Shortlists: what their files say, and that nothing else comes, by enumeration."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fakes import (
    ATTENTION_LAYERS,
    BOS,
    EOS,
    Ids,
    ScriptedRuntime,
    attention_of,
    random_model,
    tiny_config,
)
from tfexport.decoding.shortlist import Shortlist, read_shortlist
from tfexport.errors import TfexportError
from tfexport.search.profiles import PROFILES
from tfexport.search.search import SearchOptions, Source, search
from tfexport.search.token_rules import log_softmax
from tfexport.text.tokenizers import word_tokenizer

SOURCE = word_tokenizer(
    {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", "der", "Hund", "alte", "x"])}
)
TARGET = word_tokenizer({word: index for index, word in enumerate(["</s>", "<s>", "a", "dog", "the", "old", "<unk>"])})
WORDS = tiny_config(src_vocab_size=7, tgt_vocab_size=7, bos_id=1, eos_id=0, pad_id=1)
SPECIAL = {0, 6}


def read(folder: Path, content: str | bytes, config: Any = WORDS, **options: Any) -> Shortlist:
    path = folder / "shortlist"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_shortlist(path, config, SOURCE, TARGET, **options)


def words(shortlist: Shortlist, source: str) -> set[int]:
    found = shortlist.candidates(SOURCE.ids(source.split()))
    assert sorted(set(found.tolist())) == found.tolist()
    assert set(found.tolist()) >= SPECIAL
    return set(found.tolist()) - SPECIAL


# --- files


def test_a_vmap_has_words_for_ngrams_and_for_all(tmp_path: Path) -> None:
    vmap = read(tmp_path, "\ta\nder\tthe zebra\r\nHund\tdog\nder alte\told the\n\nzebra\tdog\nx\tdog\nx\t\n")
    assert words(vmap, "x") == {2}, "the last line for an n-gram counts"
    assert words(vmap, "der") == {2, 4}
    assert words(vmap, "alte Hund der") == {2, 3, 4}, "an n-gram in its order alone"
    assert words(vmap, "Hund der alte") == {2, 3, 4, 5}


def test_a_lexicon_has_the_first_words_and_the_best_of_each_word(tmp_path: Path) -> None:
    lexicon = "dog Hund 0.5\nthe Hund 0.3\nold Hund 0.3\nNULL Hund 0.9\na NULL 0.9\n"
    lexicon += "the der 1e-3\na der 0\nzebra der 1\ndog x 0.1\n"
    for best, found in ((1, {3}), (2, {3, 5}), (3, {3, 4, 5}), (9, {3, 4, 5})):
        assert words(read(tmp_path, lexicon, first=0, best=best), "Hund") == found
    assert words(read(tmp_path, lexicon, first=3, best=1), "der x") == {2, 3, 4}
    assert words(read(tmp_path, lexicon.replace(" ", "\t"), first=0, best=1), "der") == {4}
    assert words(read(tmp_path, lexicon, WORDS.replace(tie_source_target=True), first=0, best=1), "der alte") == {
        3,
        4,
        5,
    }
    assert len(read(tmp_path, lexicon).candidates([3])) == 6, "there are no more than that, and bos"


def test_a_list_of_words_is_for_all(tmp_path: Path) -> None:
    assert words(read(tmp_path, "\ufeffdog\n\nzebra\n old \n"), "der") == {3, 5}


def test_words_that_are_passed_over_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read(tmp_path, "der\tthe zebra\nlion\tdog\n")
    read(tmp_path, "dog Hund 0.5\nNULL Hund 0.5\n")
    [told] = caplog.messages
    assert told == f"warning: 2 of 4 words in {tmp_path / 'shortlist'} are in no vocabulary, and are passed over"


def test_without_vocabularies_words_are_ids(tmp_path: Path) -> None:
    (tmp_path / "vmap").write_text("5 6\t7 8 1000 -3 x\n7\t9\n")
    shortlist = read_shortlist(tmp_path / "vmap", tiny_config(unk_id=4), None, None)
    assert shortlist.candidates([5, 6]).tolist() == [2, 4, 7, 8]
    assert shortlist.candidates([6, 5, 7]).tolist() == [2, 4, 9]


def test_bos_is_no_output_but_where_it_is_another_token_too_or_the_file_says_it(tmp_path: Path) -> None:
    lexicon, tied = "dog Hund 0.5\n", WORDS.replace(tie_source_target=True)
    source = SOURCE.ids(["<s>", "Hund"])

    def found(content: str, config: Any) -> set[int]:
        return set(read(tmp_path, content, config, first=2).candidates(source).tolist())

    assert found(lexicon, WORDS) == {0, 3, 6}
    assert found(lexicon, tied) == {0, 3, 4, 6}
    for known_as in ({"forced_first_id": 1}, {"eos_id": 1}):
        assert 1 in found(lexicon, WORDS.replace(**known_as))
        assert 1 in found(lexicon, tied.replace(**known_as))
    for content in (lexicon + "<s> Hund 0.5\n", "<s>\n", "\t<s> dog\n"):
        assert 1 in found(content, WORDS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("der\tthe\ndog Hund 0.5\n", "line 2: this shortlist is a vmap by its first line, so give source words, a tab"),
        ("dog Hund 0.5\ndog Hund\n", "line 2: this shortlist is a lexicon by its first line"),
        ("dog Hund x\n", "line 1: this shortlist is a lexicon"),
        ("dog\n\nold dog\n", "line 3: this shortlist is a list of words by its first line, so give one word"),
        ("zebra\nlion\n", "no line of the words shortlist .* has words of the vocabularies"),
        ("zebra\tdog\n", "no line of the vmap shortlist"),
        (b"\xff\xfe", "cannot read the shortlist .* Give a UTF-8 text file"),
    ],
)
def test_files_that_are_no_shortlists(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(TfexportError, match=message):
        read(tmp_path, content)
    with pytest.raises(TfexportError, match="cannot read the shortlist"):
        read_shortlist(tmp_path / "nowhere", WORDS, SOURCE, TARGET)


# --- the search


VOCAB = 7
SOURCES: list[Ids] = [(5, 6, EOS), (7, EOS), (6,)]
LISTS: list[Ids] = [(BOS, EOS, 4, 6), (BOS, EOS, 3), (BOS, EOS, 0, 3, 5, 6)]


def asked(**more: Any) -> list[Source]:
    return [Source(ids, candidates=np.array(words), **more) for ids, words in zip(SOURCES, LISTS, strict=True)]


@pytest.mark.parametrize("seed", range(4))
def test_a_shortlist_is_the_vocabulary_of_a_sentence(seed: int) -> None:
    """Against all outputs of a model that knows no other words."""
    model = random_model(seed, VOCAB)
    config = tiny_config(tgt_vocab_size=VOCAB)
    options = SearchOptions(beam=250, nbest=20, max_length=3, length_penalty=0.6)
    found = search(ScriptedRuntime(model, config), asked(), options)
    for source, listed, hypotheses in zip(SOURCES, LISTS, found, strict=True):

        def narrow(source: Ids, tokens: Ids, listed: Ids = listed) -> Any:
            return model(source, tuple(listed[token] for token in tokens))[list(listed)]

        place = listed.index(EOS)
        every = []
        for length in range(1, 4):
            for tokens in itertools.product(range(len(listed)), repeat=length):
                if place in tokens[:-1] or (tokens[-1] != place and length < 3):
                    continue
                steps = [log_softmax(narrow(source, tokens[:at])[None])[0, t] for at, t in enumerate(tokens)]
                every.append((sum(steps) / ((5 + length) / 6) ** 0.6, tuple(listed[token] for token in tokens)))
        wanted = sorted(every, key=lambda one: -one[0])[:20]
        assert [h.ids for h in hypotheses] == [ids for _, ids in wanted]
        assert [h.score for h in hypotheses] == pytest.approx([score for score, _ in wanted], abs=1e-6)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("beam", [1, 4])
def test_what_a_sentence_gives_does_not_depend_on_the_lists_of_others(beam: int, profile: Any) -> None:
    runtime = ScriptedRuntime(random_model(4, VOCAB), tiny_config(tgt_vocab_size=VOCAB))
    options = SearchOptions.for_profile(profile, beam=beam, nbest=beam, max_length=7, no_repeat_ngram=2)
    sources = [*asked(), Source((5, 5)), *asked(prefix=(EOS - 1, 3)[1:], most=5)]
    sources[-1] = Source(SOURCES[2], candidates=np.array([EOS]))
    together = search(runtime, sources, options)
    for source, hypotheses in zip(sources, together, strict=True):
        assert [h.ids for h in hypotheses] == [h.ids for h in search(runtime, [source], options)[0]]
    for listed, hypotheses in zip([*LISTS, range(VOCAB), *((*listed, 3) for listed in LISTS)], together, strict=True):
        assert not {token for h in hypotheses for token in h.ids} - set(listed)
    assert {h.ids for h in together[-1]} == {(EOS,)}
    assert len({token for h in together[3] for token in h.ids}) > 2


def test_samples_and_alternatives_are_of_the_list() -> None:
    runtime = ScriptedRuntime(random_model(3, VOCAB), tiny_config(tgt_vocab_size=VOCAB))
    for options in (SearchOptions(samples=20, max_length=6), SearchOptions(alternatives=9, max_length=6)):
        for listed, hypotheses in zip(LISTS, search(runtime, asked(), options), strict=True):
            assert {token for h in hypotheses for token in h.ids} <= set(listed)
    found = search(runtime, asked(), SearchOptions(alternatives=9, max_length=6))
    assert [len(one) for one in found] == [3, 2, 5]


def test_attention_is_told_beside_a_list_and_alternatives() -> None:
    runtime = ScriptedRuntime(
        random_model(3, VOCAB), tiny_config(tgt_vocab_size=VOCAB, n_decoder_layers=ATTENTION_LAYERS)
    )
    for given in ({"beam": 3, "nbest": 3}, {"alternatives": 2}, {"coverage_penalty": 0.3, "beam": 2}):
        options = SearchOptions(attention=True, max_length=5, **given)  # type: ignore[arg-type]
        for source, hypotheses in zip(SOURCES, search(runtime, asked(), options), strict=True):
            for found in hypotheses:
                assert found.attention is not None
                wanted = [attention_of(source, found.ids[:at])[-1].mean(axis=0) for at in range(len(found.ids))]
                np.testing.assert_allclose(found.attention, wanted, rtol=1e-6)
    with pytest.raises(TfexportError, match="opennmt does not support coverage_penalty with alternatives"):
        SearchOptions.for_profile("opennmt", alternatives=2, coverage_penalty=0.1)
