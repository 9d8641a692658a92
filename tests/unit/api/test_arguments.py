"""What functions of the Python API take, and how they name what they do not take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tfexport.api.arguments import (
    Keywords,
    count_of,
    flag_of,
    id_sources_of,
    line_of,
    lines_of,
    live_sources_of,
    names_of,
    path_of,
    precision_of,
    require_runtime,
    sources_of,
    tolerance_of,
)
from tfexport.decoding.request_options import AlignmentOptions
from tfexport.errors import TfexportError

IDS = [[14, 15, 3], [7, 3]]


@pytest.mark.parametrize(
    "given",
    [
        IDS,
        tuple(map(tuple, IDS)),
        iter(IDS),
        [np.array(ids) for ids in IDS],
        [torch.tensor(ids) for ids in IDS],
        [[np.int64(index) for index in ids] for ids in IDS],
        [[torch.tensor(index) for index in ids] for ids in IDS],
    ],
    ids=["lists", "tuples", "iterator", "arrays", "tensors", "numbers of NumPy", "numbers of PyTorch"],
)
def test_ids_are_lists_arrays_or_tensors(given: Any) -> None:
    assert id_sources_of(given) == [b"14 15 3", b"7 3"]


def test_an_array_has_a_row_for_each_sentence() -> None:
    for kind in (np.array, torch.tensor):
        assert id_sources_of(kind([[14, 15], [7, 3]])) == [b"14 15", b"7 3"]
    assert id_sources_of(np.array([[]], dtype=np.int64)) == [b""]


def test_sentences_are_strings_or_lists_of_tokens() -> None:
    assert sources_of(["a b", ""]) == ([b"a b", b""], "text")
    assert sources_of([["a", "b"], ("c",), []]) == ([b"a b", b"c", b""], "tokens")
    assert sources_of(np.array(["a b", "c"])) == ([b"a b", b"c"], "text")
    assert sources_of([]) == ([], "text")


def test_sentences_that_come_one_by_one_are_what_the_first_is() -> None:
    for given, lines, format in ((["a b", "c"], [b"a b", b"c"], "text"), ([["a", "b"]], [b"a b"], "tokens")):
        found, what = live_sources_of(iter(given))
        assert (list(found), what) == (lines, format)
    assert list(live_sources_of([])[0]) == []


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (id_sources_of, [14, 15], "sources has 14. Give a list of ids for each sentence"),
        (id_sources_of, np.array([14, 15]), "sources has 14. Give a list"),
        (id_sources_of, None, "sources is None"),
        (id_sources_of, "14 15", "sources is '14 15'"),
        (id_sources_of, ["14 15"], "sources has '14 15'"),
        (id_sources_of, [[1.5]], "sources has 1.5. Give ids as whole numbers"),
        (id_sources_of, np.array([[1.0, 2.0]]), "sources has 1.0"),
        (id_sources_of, [[True]], "sources has True"),
        (id_sources_of, {"a": 1}, "sources is {'a': 1}"),
        (sources_of, None, "texts is None. Give a string, a list of strings"),
        (sources_of, 5, "texts is 5"),
        (sources_of, b"a", "texts is b'a'"),
        (sources_of, [b"a"], "texts has b'a'"),
        (sources_of, [None], "texts has None"),
        (sources_of, {"a", "b"}, "texts is {"),
        (sources_of, ["a", ["b"]], "texts has 'a'. Give strings or lists of tokens, not both"),
        (sources_of, [[4, 5]], "texts has 4. Give ids to translate_ids"),
        (sources_of, [["a b"]], "texts has 'a b'. Give tokens as strings without white space"),
        (lambda given: list(lines_of("prefix", given)), ["a", 3], "prefix is 3. Give a string"),
        (lambda given: lines_of("texts", given), "a b", "texts is 'a b'. Give a list"),
        (lambda given: line_of("text", given), None, "text is None"),
        (lambda given: count_of("batch_size", given), "8", "batch_size is '8'. Give a whole number above 0"),
        (lambda given: count_of("batch_size", given), 0, "batch_size is 0"),
        (lambda given: count_of("workers", given), True, "workers is True"),
        (lambda given: count_of("top", given), 2.0, "top is 2.0"),
        (lambda given: path_of("directory", given), None, "directory is None. Give a path"),
        (lambda given: path_of("checkpoint", given), b"a", "checkpoint is b'a'. Give a path"),
        (lambda given: path_of("checkpoint", given), "", "checkpoint is ''. Give a path"),
        (lambda given: path_of("checkpoint", given), "a\0b", "checkpoint is 'a\\x00b'. No file can have this name"),
        (lambda given: path_of("checkpoint", given), "a\ud800", "checkpoint is 'a\\ud800'. No file can have"),
        (lambda given: path_of("checkpoint", given), "a" * 5000, "checkpoint is 'aaa"),
        (lambda given: count_of("first", given, minimum=0), False, "first is False. Give a whole number, or 0"),
        (lambda given: count_of("first", given, minimum=0), -1, "first is -1"),
        (lambda given: count_of("workers", given, maximum=9), 10, "workers is 10. Give at most 9"),
        (lambda given: flag_of("force", given), "yes", "force is 'yes'. Give True or False"),
        (tolerance_of, "a", "tolerance is 'a'. Give a number from 0 on"),
        (tolerance_of, -1, "tolerance is -1"),
        (tolerance_of, float("nan"), "tolerance is nan"),
        (lambda given: names_of("runtimes", given, "Give names."), [], "runtimes is []. Give names"),
        (lambda given: names_of("runtimes", given, "Give names."), [5], "runtimes is [5]"),
        (lambda given: names_of("runtimes", given, "Give names."), 5, "runtimes is 5"),
        (id_sources_of, [b"abc"], "sources has b'abc'"),
        (sources_of, np.array("a b"), "texts is array('a b'"),
        (lambda given: list(live_sources_of(given)[0]), ["a", ["b"]], "texts has ['b']. Give strings or lists"),
        (lambda given: list(live_sources_of(given)[0]), [["b"], "a"], "texts has 'a'. Give strings or lists"),
        (lambda given: list(live_sources_of(given)[0]), ["a", 5], "texts has 5. Give a string"),
        (precision_of, 8, "precision is 8"),
        (lambda given: require_runtime(given, None), 3, "runtime is 3"),
        (lambda given: require_runtime("ort-cpu", given), "2", "threads is '2'"),
    ],
)
def test_a_wrong_argument_is_named(function: Callable[[Any], Any], given: Any, message: str) -> None:
    with pytest.raises(TfexportError) as error:
        function(given)
    assert str(error.value).startswith(message)


def test_keywords_are_parsed_once_and_keep_their_types() -> None:
    first = Keywords.parse({"beam": 1, "alignments": "hard"}, AlignmentOptions)
    assert Keywords.parse({"beam": 1, "alignments": "hard"}, AlignmentOptions) is first
    assert dict(first.search) == {"beam": 1}
    assert first.alignments.alignments == "hard"
    with pytest.raises(TfexportError, match="beam is True"):  # although True == 1, and they have the same hash
        Keywords.parse({"beam": True, "alignments": "hard"}, AlignmentOptions)
    lists = Keywords.parse({"bad_words": [[4, 5]]})
    assert lists.search["bad_words"] == ((4, 5),)
