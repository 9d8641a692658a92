"""Pickled objects become records: nothing of a file is run, imported or made room for."""

from __future__ import annotations

import io
from typing import Any

import torch

from tfexport.models.formats.pickled_options import InertObject, plain
from tfexport.models.formats.pickles import Refused, read_pickle


def unpickled(raw: bytes) -> Any:
    def no_storage(key: str, n_bytes: int) -> torch.Tensor:
        raise Refused("none")

    return read_pickle(io.BytesIO(raw), no_storage)


def test_a_memo_of_large_numbers_takes_no_room() -> None:
    assert unpickled(b"]r\xff\xff\xff\x7f0j\xff\xff\xff\x7f.") == []


def test_omegaconf_is_read_through_its_nodes() -> None:
    def made(of: str, **state: Any) -> InertObject:
        return InertObject(f"omegaconf.{of}", state=state)

    node = made("nodes.IntegerNode", _val=4)
    heads = made("dictconfig.DictConfig", _content={"heads": node})
    colours = made("listconfig.ListConfig", _content=[InertObject("app.Colour", args=("red",))])
    config = made("dictconfig.DictConfig", _content={"model": heads, "colours": colours}, _parent=None)
    heads.state["_parent"] = config  # which is no part of what it holds
    assert plain(config, "cfg") == {"model": {"heads": 4}, "colours": ["red"]}
