"""Mutations change what they are there to change."""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import zipfile
from pathlib import Path
from typing import get_args

import numpy as np
import onnx
import pytest
import torch
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, numpy_helper

from fuzz.files import mutated_containers, mutations
from fuzz.models import random_models
from tfexport.config import Activation, Positions
from tfexport.models.formats.pickles import InertObject, read_pickle


def test_mutations_differ_from_their_seeds_and_come_again_with_their_number() -> None:
    seeds = (b'{"a": [1, 2], "b": null}', b"some text\n" * 9)
    one, other = ([mutations.mutated(random.Random(seed), seeds) for seed in range(300)] for _ in range(2))
    assert one == other
    assert len(set(one)) > 250
    assert sum(data in seeds for data in one) < 15


def test_mutations_of_a_sentencepiece_model_are_models_with_another_piece_or_rule() -> None:
    """Most of them: bytes changed at random seldom get beyond the parser."""
    pytest.importorskip("sentencepiece")
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    for name in ("<unk>", "a", "b"):
        model.pieces.add(piece=name, score=0.0, type=2 if name == "<unk>" else 1)
    seed = model.SerializeToString()
    assert seed[:2] == b"\n\x0e"
    parsed = 0
    for number in range(100):
        with contextlib.suppress(DecodeError):
            found = sentencepiece_model_pb2.ModelProto.FromString(mutations.mutated(random.Random(number), (seed,)))
            parsed += found != model
    assert parsed > 50


def test_mutations_of_graphs_are_graphs_that_ask_for_much() -> None:
    """Bytes changed at random make none of these."""
    tensor = numpy_helper.from_array(np.array([2, 3], np.int64), "shape")
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
    graph = helper.make_graph([node, helper.make_node("Relu", ["y"], ["z"])], "g", values[:1], values[1:], [tensor])
    seed = helper.make_model(graph, ir_version=10).SerializeToString()
    assert seed[:2] == b"\x08\x0a"
    operators, n_functions, parsed = set(), set(), 0
    for number in range(300):
        with contextlib.suppress(DecodeError):
            found = onnx.ModelProto.FromString(mutations.mutated(random.Random(number), (seed,)))
            parsed += found.ByteSize() > 0
            operators |= {node.op_type for node in found.graph.node}
            n_functions.add(len(found.functions))
    assert parsed > 150
    assert {"ConstantOfShape", "Expand", "Range", "Pad", "Tile", "Loop", "Constant"} <= operators
    assert 25 in n_functions


def test_mutations_of_a_safetensors_header_are_headers_of_their_length(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    seed = len(header).to_bytes(8, "little") + header + bytes(4)
    found = [mutations.mutated(random.Random(number), (seed,)) for number in range(100)]
    whole = [data for data in found if data != seed and len(data) == 12 + int.from_bytes(data[:8], "little")]
    assert len(whole) > 20


def test_mutations_of_archives_are_archives_whose_pickles_and_arrays_are_others(tmp_path: Path) -> None:
    """Most of them: of bytes changed at random nothing but checksums would be read."""
    torch.save({"model": {"a": torch.ones(2, 3)}, "args": {"heads": 4, "name": None}}, tmp_path / "model.pt")
    text = np.frombuffer(b"dim-emb: 4\ntype: transformer\n\0", dtype=np.int8)
    np.savez(tmp_path / "model.npz", a=np.ones((2, 3), "f4"), **{"special:model.yml": text})
    for name in ("model.pt", "model.npz"):
        seed = (tmp_path / name).read_bytes()
        whole, others = 0, set()
        for number in range(100):
            with contextlib.suppress(Exception):
                archive = zipfile.ZipFile(io.BytesIO(mutations.mutated(random.Random(number), (seed,))))
                whole += archive.testzip() is None
                others.add(tuple((member.filename, member.CRC) for member in archive.infolist()))
        assert whole > 60
        assert len(others) > 50


def test_mutations_of_pickles_have_other_settings() -> None:
    raw = pickle.dumps({"heads": 4, "name": None, "flag": True}, 2)
    found = []
    for number in range(200):
        with contextlib.suppress(Exception):
            changed = mutated_containers.other_pickle(random.Random(number), raw)
            found.append(read_pickle(io.BytesIO(changed), lambda key, n_bytes: torch.empty(0)))
    settings = [content for content in found if isinstance(content, dict)]
    for name in ("heads", "name", "flag"):
        assert len({type(content.get(name)) for content in settings}) > 5
    assert any(isinstance(content.get("heads"), InertObject) for content in settings)


def test_mutations_of_a_file_of_several_pickles_keep_the_others(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "model.pt", _use_new_zipfile_serialization=False)
    seed = (tmp_path / "model.pt").read_bytes()
    found = [mutated_containers.other_pickles(random.Random(number), seed) for number in range(50)]
    assert sum(data[:30] == seed[:30] and data[-16:] == seed[-16:] and data != seed for data in found) > 25


def test_random_models_are_of_every_kind() -> None:
    configs = [random_models.random_config(random.Random(seed)) for seed in range(60)]
    kinds: dict[str, set[object]] = {
        **{
            name: {True, False}
            for name in ("norm_first", "final_norm", "shared_norm", "embedding_norm", "gated", "tie_output")
        },
        "activation": {*get_args(Activation)},
        "positions": {*get_args(Positions)},
        "feed_forward": {"linear", "conv1d"},
        "final_norm_in": {"both", "encoder", "decoder"},
        "embedding_norm_in": {"both", "encoder", "decoder"},
        "final_norm_eps": {0.0, 1e-4},
        "embedding_norm_eps": {0.0, 1e-4},
        "norm": {"layer", "rms"},
    }
    for field, values in kinds.items():
        assert {getattr(config, field) for config in configs} == values, field
    assert any(config.n_encoder_heads not in (0, config.n_heads) for config in configs)
