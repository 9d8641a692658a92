"""Parallel text is read line by line, and batches hold every pair once within their size."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from tests.support.fakes import BOS, EOS, PAD, tiny_config
from tfexport.errors import TfexportError
from tfexport.text.subword_nmt import Subwords
from tfexport.text.tokenizers import LONGEST_WORD, TextTokenizer, word_tokenizer
from tfexport.training.data import (
    POOL_BATCHES,
    Batch,
    IdPair,
    TextPair,
    TokenBatches,
    encode_pairs,
    loader,
    read_either,
    read_parallel,
    read_tsv,
)
from tfexport.training.vocabulary import train_bpe

# Where Python's splitlines() would split, and a carriage return that ends no line.
ODD = "one\u2028two\x0b\x0c\x1c\x85\u2029\rthree"


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def random_pairs(count: int, seed: int = 0) -> list[IdPair]:
    """Pairs of 1 to 12 ids; either side may be the longer."""
    random = np.random.default_rng(seed)
    return [IdPair(*([3 + index % 5] * int(random.integers(1, 13)) for _ in "st")) for index in range(count)]


def tokens_of(batch: list[int], pairs: list[IdPair]) -> int:
    """Of the longer side, padding included."""
    return len(batch) * max(len(side) for index in batch for side in pairs[index])


# --- files


def test_lines_of_two_files_are_paired(tmp_path: Path) -> None:
    source = write(tmp_path / "de", f"\ufeffein Hund\r\n\n{ODD}\n  zwei\t\n")
    target = write(tmp_path / "en", "a dog\n\nodd\ntwo")
    expected = [TextPair("ein Hund", "a dog"), TextPair("", ""), TextPair(ODD, "odd"), TextPair("  zwei\t", "two")]
    assert read_parallel(source, target) == expected
    assert read_either(source, target, None, "--src and --tgt") == expected


def test_files_of_different_lengths_are_refused(tmp_path: Path) -> None:
    source, target = write(tmp_path / "de", "a\nb\nc\n"), write(tmp_path / "en", "a\nb\n")
    with pytest.raises(TfexportError, match=r"de has 3 lines and .*en 2"):
        read_parallel(source, target)
    with pytest.raises(TfexportError, match=r"en has 2 lines and .*de 3"):
        read_parallel(target, source)
    # An empty line at the end is a line.
    assert len(read_parallel(source, write(tmp_path / "en", "a\nb\n\n"))) == 3


def test_a_file_without_a_byte_has_no_lines(tmp_path: Path) -> None:
    empty, one = write(tmp_path / "de", ""), write(tmp_path / "en", "a\n")
    assert read_parallel(empty, empty) == []
    assert read_tsv(empty) == []
    with pytest.raises(TfexportError, match="de has 0 lines"):
        read_parallel(empty, one)


def test_columns_are_paired(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.tsv", f"\ufeffein Hund\ta dog\r\n{ODD}\todd\n\tleft out\nnichts\t")
    expected = [("ein Hund", "a dog"), (ODD, "odd"), ("", "left out"), ("nichts", "")]
    assert read_tsv(path) == expected
    assert read_either(None, None, path, "--tsv") == expected


@pytest.mark.parametrize(("line", "columns"), [("", 1), ("ein Hund", 1), ("a\tb\tc", 3), ("a\tb\t", 3)])
def test_a_line_that_has_not_two_columns_is_named(line: str, columns: int, tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.tsv", f"a\tb\n{line}\nc\td\n")
    with pytest.raises(TfexportError, match=rf"pairs.tsv, line 2, has {columns} columns"):
        read_tsv(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    good, latin = write(tmp_path / "good", "a\tb\n"), write(tmp_path / "latin", "größe\tsize\n".encode("latin-1"))
    for bad in (latin, tmp_path / "missing", tmp_path):
        with pytest.raises(TfexportError, match=f"cannot read {bad}"):
            read_tsv(bad)
        with pytest.raises(TfexportError, match=f"cannot read {bad}"):
            read_parallel(good, bad)
        with pytest.raises(TfexportError, match=f"cannot read {bad}"):
            read_parallel(bad, good)


def test_either_two_files_or_one_must_be_given(tmp_path: Path) -> None:
    path = write(tmp_path / "file", "a\tb\n")
    for source, target, tsv in (
        (None, None, None),
        (path, None, None),
        (None, path, None),
        (path, None, path),
        (None, path, path),
        (path, path, path),
    ):
        with pytest.raises(TfexportError, match="Give --these or --those"):
            read_either(source, target, tsv, "--these or --those")


# --- ids

WORDS = word_tokenizer({"<pad>": PAD, "<s>": BOS, "</s>": EOS, "<unk>": 3, "a": 4, "b": 5})


def test_pairs_get_the_ids_that_the_model_reads() -> None:
    texts = [TextPair("a b", "b zebra a")]
    for source_bos, source_eos, source in (
        (False, True, [4, 5, EOS]),
        (True, True, [BOS, 4, 5, EOS]),
        (False, False, [4, 5]),
    ):
        encoded = encode_pairs(texts, WORDS, WORDS, tiny_config(source_bos=source_bos, source_eos=source_eos))
        assert encoded.pairs == [IdPair(source, [BOS, 5, 3, 4, EOS])]


def test_pairs_that_are_empty_or_too_long_stay_out_and_are_counted() -> None:
    """The encoder reads 4 ids, eos included; the decoder 3, of which bos is one and eos none."""
    config = tiny_config(max_source_length=4, max_target_length=3)
    texts = [
        TextPair("a a a", "b b"),
        TextPair("a a a a", "b"),
        TextPair("a", "b b b"),
        TextPair("a a a a", "b b b"),
        TextPair("", "b"),
        TextPair("a", " \t"),
        TextPair("a a a a a a", ""),
        TextPair("b", "a"),
    ]
    encoded = encode_pairs(texts, WORDS, WORDS, config)
    assert encoded.pairs == [IdPair([4, 4, 4, EOS], [BOS, 5, 5, EOS]), IdPair([5, EOS], [BOS, 4, EOS])]
    assert (encoded.empty, encoded.too_long) == (3, 3)
    nothing = encode_pairs([], WORDS, WORDS, config)
    assert (nothing.pairs, nothing.empty, nothing.too_long) == ([], 0, 0)


def test_pairs_with_a_word_that_cannot_be_split_are_too_long() -> None:
    """Codes of subword-nmt and rules of spaCy take a time that grows with the square of a word."""
    pytest.importorskip("subword_nmt")
    by_codes = replace(WORDS, subwords=Subwords("#version: 0.2\na b\n"))
    long = "a" * (LONGEST_WORD + 1)
    texts = [
        TextPair("a", "b"),
        TextPair(long, "b"),
        TextPair("a", f"b {long}"),
        TextPair(long, long),
        TextPair("b", "a"),
    ]
    encoded = encode_pairs(texts, by_codes, by_codes, tiny_config())
    assert encoded.pairs == [IdPair([4, EOS], [BOS, 5, EOS]), IdPair([5, EOS], [BOS, 4, EOS])]
    assert (encoded.empty, encoded.too_long) == (0, 3)
    assert len(encode_pairs(texts, by_codes, WORDS, tiny_config()).pairs) == 3, "a vocabulary of words has no limit"


def test_white_space_is_empty_also_where_it_has_ids() -> None:
    bpe = train_bpe(["a b"], vocab_size=260)
    assert bpe.encode(" \t") != []
    texts = [TextPair("a", "b"), TextPair(" \t", "b"), TextPair("a", " \t")]
    encoded = encode_pairs(texts, bpe, bpe, tiny_config(src_vocab_size=260, tgt_vocab_size=260))
    assert (len(encoded.pairs), encoded.empty) == (1, 2)


def test_text_of_which_a_tokenizer_makes_no_ids_is_empty() -> None:
    """A BPE without an unknown token drops what it does not know; without eos nothing is left to attend to."""
    drops = TextTokenizer(Tokenizer(models.BPE({"a": 3}, [])))
    texts = [TextPair("a", "a"), TextPair("zzz", "a"), TextPair("a", "zzz")]
    encoded = encode_pairs(texts, drops, drops, tiny_config(source_eos=False))
    assert encoded.pairs == [IdPair([3], [BOS, 3, EOS])]
    assert encoded.empty == 2


# --- batches


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=60),
    max_tokens=st.integers(1, 80),
    seed=st.none() | st.integers(0, 1000),
    pool_batches=st.sampled_from([1, 3, POOL_BATCHES]),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_pair_comes_once_in_batches_of_no_more_than_their_size(
    lengths: list[tuple[int, int]], max_tokens: int, seed: int | None, pool_batches: int
) -> None:
    pairs = [IdPair([3] * source, [4] * target) for source, target in lengths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tfexport.training.data.POOL_BATCHES", pool_batches)  # 60 pairs are several pools, too
        batches = list(TokenBatches(pairs, max_tokens, None if seed is None else [seed, 1]))
    assert sorted(chain(*batches)) == list(range(len(pairs)))
    for batch in batches:
        assert len(batch) == 1 or tokens_of(batch, pairs) <= max_tokens


def test_batches_are_nearly_full_and_of_like_length() -> None:
    pairs = random_pairs(2000)
    batches = TokenBatches(pairs, 120, [0])
    assert len(batches) == len(list(batches))
    used = sum(max(map(len, pair)) for pair in pairs)
    padded = sum(tokens_of(batch, pairs) for batch in batches)
    # The longer side alone has little padding; more than a quarter would mean that nothing was sorted.
    assert used / padded > 0.75
    assert padded / (120 * len(batches)) > 0.85


def test_the_order_depends_on_the_seed_alone() -> None:
    pairs = random_pairs(500)

    def batches(seed: list[int] | None) -> list[list[int]]:
        np.random.seed(len(batches_seen))  # neither global generator has a say
        torch.manual_seed(len(batches_seen))
        batches_seen.append(list(TokenBatches(pairs, 60, seed)))
        return batches_seen[-1]

    batches_seen: list[list[list[int]]] = []
    assert batches([1, 0]) == batches([1, 0])
    assert batches(None) == batches(None)
    orders = [batches(seed) for seed in ([1, 0], [1, 1], [2, 0], None)]
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))
    # Another epoch has other batches, not the same ones in another order.
    assert len(set(map(frozenset, orders[0])) & set(map(frozenset, orders[1]))) < len(orders[0]) / 2


def test_random_batches_do_not_come_by_length() -> None:
    pairs = random_pairs(500)
    longest = [max(len(pairs[index].target) for index in batch) for batch in TokenBatches(pairs, 60, [0])]
    assert longest != sorted(longest)
    assert len(longest) < POOL_BATCHES, "all pairs are sorted together, so only the shuffle can mix these batches"


def test_a_batch_is_padded_to_its_longest_pair() -> None:
    pairs = [IdPair([5, 6, EOS], [BOS, 7, EOS]), IdPair([8, EOS], [BOS, 4, 9, 9, EOS])]
    [batch] = loader(pairs, tiny_config(), max_tokens=10, seed=None)
    assert isinstance(batch, Batch)
    assert all(tensor.dtype == torch.int64 for tensor in batch)
    assert batch.src_ids.tolist() == [[5, 6, EOS], [8, EOS, PAD]]
    assert batch.src_len.tolist() == [3, 2]
    assert batch.tgt_ids.tolist() == [[BOS, 7, EOS, PAD, PAD], [BOS, 4, 9, 9, EOS]]
    assert batch.tgt_len.tolist() == [3, 5]


def test_padding_is_the_pad_id_of_the_model() -> None:
    pairs = [IdPair([5], [BOS, EOS]), IdPair([5, 5], [BOS, 5, EOS])]
    [batch] = loader(pairs, tiny_config(pad_id=3), max_tokens=10, seed=None)
    assert batch.src_ids.tolist() == [[5, 3], [5, 5]]
    assert batch.tgt_ids.tolist() == [[BOS, EOS, 3], [BOS, 5, EOS]]


def test_a_loader_gives_every_pair_in_the_order_of_its_batches() -> None:
    pairs = random_pairs(60)
    seen = []
    for batch in loader(pairs, tiny_config(), max_tokens=40, seed=[3]):
        for src, src_len, tgt, tgt_len in zip(*batch, strict=True):
            seen.append(IdPair(src[:src_len].tolist(), tgt[:tgt_len].tolist()))
    assert seen == [pairs[index] for index in chain(*TokenBatches(pairs, 40, [3]))]
