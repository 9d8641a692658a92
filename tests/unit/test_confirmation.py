"""The record of who confirms that a checkpoint was read as its owner's code computes it."""

from __future__ import annotations

from typing import Any

import pytest

from tfexport.confirmation import Confirmation

SETTINGS = {"n_heads": 8, "norm_first": False, "norm_eps": 1e-5, "activation": "relu", "positions": "none"}


@pytest.mark.parametrize(
    ("confirmation", "text", "claim"),
    [
        (
            Confirmation(by="module", about="my_code.py:build, 32 sequences in float64"),
            "confirmed by my_code.py:build, 32 sequences in float64",
            "gives the outputs of my_code.py:build",
        ),
        (
            Confirmation(by="module", about="my_code.py:build, 32 sequences", unconfirmed={"bos_id": 2}),
            "confirmed by my_code.py:build, 32 sequences, except bos_id 2",
            "gives the outputs of my_code.py:build (unconfirmed: bos_id 2)",
        ),
        (
            Confirmation(by="file", about="a Hugging Face folder"),
            "confirmed by the settings in the file (a Hugging Face folder)",
            "computes ckpt.pt as its own settings describe it",
        ),
        (
            Confirmation(by="outputs", about="60 of 60 outputs of out.tsv"),
            "confirmed by 60 of 60 outputs of out.tsv",
            "gives 60 of 60 outputs of out.tsv",
        ),
        (
            Confirmation(unconfirmed=SETTINGS),
            "unconfirmed: n_heads 8, norm_first false, norm_eps 1e-05, activation relu, positions none",
            "equals our reading of ckpt.pt (unconfirmed: n_heads 8, norm_first false, norm_eps 1e-05 and 2 more)",
        ),
        (
            Confirmation(),
            "unconfirmed: all settings, of which there is no record",
            "equals our reading of ckpt.pt (unconfirmed: all settings, of which there is no record)",
        ),
    ],
)
def test_what_it_says(confirmation: Confirmation, text: str, claim: str) -> None:
    assert (confirmation.text, confirmation.claim("ckpt.pt")) == (text, claim)
    assert confirmation.is_confirmed == (not confirmation.doubt)
    assert Confirmation.from_dict(confirmation.to_dict()) == confirmation


@pytest.mark.parametrize("record", [None, 7, [], {}, {"by": "me"}, {"by": ["file"]}])
def test_any_other_record_confirms_nothing(record: Any) -> None:
    assert Confirmation.from_dict(record) == Confirmation()


def test_a_record_without_its_settings_is_not_complete() -> None:
    assert not Confirmation.from_dict({"by": "file", "about": "x", "unconfirmed": 3}).is_confirmed


def test_control_characters_of_a_record_are_escaped() -> None:
    record = {"by": "module", "about": "\x1b[2Jm.py:build, 3", "unconfirmed": {"na\nme": "va\rlue"}}
    confirmation = Confirmation.from_dict(record)
    assert (confirmation.text + confirmation.claim("ck\npt")).isprintable()
