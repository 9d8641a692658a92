"""Bytes that are almost those of a valid file: flipped, cut, spliced, or with one value of their structure changed."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fuzz.files.mutated_containers import YAML, other_archive, other_pickles, other_yaml
from fuzz.files.mutated_values import other_value

INTERESTING = (
    b"\x00",
    b"\xff" * 8,
    b"\x7f\xff\xff\xff",
    b"-1",
    b"1e999",
    b"NaN",
    b"null",
    b"../../x",
    b"[" * 2000,
    b'"',
    b"\\u0000",
)


def mutated(chosen: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A seed with a few changes, or bytes of no seed at all."""
    if chosen.random() < 0.05:
        return chosen.randbytes(chosen.choice((0, 1, 8, 100, 4000)))
    data = bytearray(chosen.choice(seeds))
    if data[:2] == b"\x08\x0a" and chosen.random() < 0.7:
        from fuzz.files.mutated_graphs import other_graph  # onnx takes a while to load

        return other_graph(chosen, bytes(data))
    if data[:2] == b"\n\x0e" and chosen.random() < 0.7:
        return _other_pieces(chosen, bytes(data))
    if data[8:9] == b"{" and chosen.random() < 0.4:
        return _other_header(chosen, bytes(data))
    if data[6:21] == b"TransformerSpec" and chosen.random() < 0.8:
        return _other_variables(chosen, bytes(data))
    if data[:2] == b"PK" and chosen.random() < 0.8:
        return other_archive(chosen, bytes(data))
    if data[:2] == b"\x80\x02" and chosen.random() < 0.8:
        return other_pickles(chosen, bytes(data))
    if YAML.match(data) and chosen.random() < 0.8:
        return other_yaml(chosen, bytes(data))
    if data[:1] in b"{[" and chosen.random() < 0.5:
        with contextlib.suppress(ValueError):
            return _other_json(chosen, bytes(data))
    for _ in range(chosen.choice((1, 1, 2, 4, 16))):
        at = chosen.randrange(len(data) + 1)
        match chosen.randrange(6):
            case 0 if data:
                data[at % len(data)] ^= 1 << chosen.randrange(8)
            case 1 if data:
                data[at % len(data)] = chosen.randrange(256)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + chosen.choice((1, 4, 64))]
            case 4:
                data[at:at] = chosen.choice(INTERESTING)
            case _:
                other = chosen.choice(seeds)
                begin = chosen.randrange(len(other) + 1)
                data[at:at] = other[begin : begin + chosen.choice((8, 200))]
    return bytes(data)


def _other_json(chosen: random.Random, data: bytes) -> bytes:
    """JSON of which one value is another one, is missing, or has another name."""
    return json.dumps(other_value(chosen, json.loads(data))).encode()


def _other_header(chosen: random.Random, data: bytes) -> bytes:
    """A safetensors file with another entry in its header."""
    size = int.from_bytes(data[:8], "little")
    header = _other_json(chosen, data[8 : 8 + size])
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def _other_pieces(chosen: random.Random, data: bytes) -> bytes:
    """A SentencePiece model with another piece, other rules of normalisation, or settings that contradict it."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(data)
    for _ in range(chosen.choice((1, 1, 2, 4))):
        piece, rules = chosen.choice(model.pieces), bytearray(model.normalizer_spec.precompiled_charsmap)
        match chosen.randrange(7):
            case 0:
                piece.type = chosen.randint(1, 6)
            case 1:
                piece.score = chosen.choice((float("nan"), float("inf"), -1e38, 1e38, 0.0))
            case 2:
                names = ("", "<0x00>", "<0xFF>", "x" * 100_000, "\x00", "▁", "▁▁▁", "<s>", "</s>", "<pad>", "eng_Latn")
                piece.piece = chosen.choice(names)
            case 3:
                del model.pieces[chosen.randrange(len(model.pieces)) :]
                model.pieces.add(piece="<unk>", type=2)
            case 4 if rules:
                for _ in range(chosen.choice((1, 10, 1000))):
                    rules[chosen.randrange(len(rules))] = chosen.randrange(256)
                model.normalizer_spec.precompiled_charsmap = bytes(rules)
            case 5:
                settings = model.trainer_spec
                name = chosen.choice(("unk_id", "bos_id", "eos_id", "pad_id"))
                setattr(settings, name, chosen.choice((-1, 0, 5, 2**31 - 1, -(2**31))))
                settings.byte_fallback = chosen.random() < 0.3
                settings.model_type = chosen.randint(1, 4)
            case _:
                name = chosen.choice(("add_dummy_prefix", "remove_extra_whitespaces", "escape_whitespaces"))
                setattr(model.normalizer_spec, name, chosen.random() < 0.5)
    return model.SerializeToString()


def _other_variables(chosen: random.Random, data: bytes) -> bytes:
    """CTranslate2's model.bin with other variables, names, kinds of numbers or versions, whole or almost."""
    from makers import model_bin

    content = model_bin.read(data)
    for _ in range(chosen.choice((1, 1, 2, 4))):
        variables, aliases = dict(content.variables), dict(content.aliases)
        name = chosen.choice(list(variables))
        array = variables.pop(name)
        match chosen.randrange(8):
            case 0:
                variables[
                    chosen.choice((name + "x", "", "a" * 9000, "decoder/layer_999999999/ffn/linear_0/weight"))
                ] = array
            case 1:
                variables[name] = array.astype(
                    chosen.choice(("<f4", "<i1", "<i2", "<i4", "<f2", "<u2")), casting="unsafe"
                )
            case 2:
                shape = chosen.choice(((array.size,), (1, array.size), (array.size, 1), (1, 1, array.size)))
                variables[name] = array.reshape(shape)
            case 3:
                number = chosen.choice((0, 1, 2, 127, -128, 2**31 - 1, -(2**31), 1e-30, 1e30, math.nan, math.inf))
                kind = "<f4" if isinstance(number, float) else chosen.choice(("<i1", "<i2", "<i4"))
                scalars = [other for other in variables if not variables[other].ndim] or [name]
                with np.errstate(over="ignore"):
                    variables[chosen.choice(scalars)] = np.array(number).astype(kind)
                variables[name] = array
            case 4:
                variables[name] = array
                aliases[chosen.choice((name + "x", "decoder/layer_1/ffn/linear_0/weight", name))] = chosen.choice(
                    [*variables, "nothing"]
                )
            case 5:
                variables[name] = array
                scope = chosen.choice(("encoder", "decoder", "decoder/layer_0/self_attention", "encoder/layer_0"))
                kind = chosen.choice(
                    ("rotary_dim", "num_heads_kv", "alibi", "queries_scale", "scale_outputs", "head_dim")
                )
                value = chosen.choice((0, 1, -1, 2.5, math.nan, math.inf))
                variables[f"{scope}/{kind}"] = np.array(value, chosen.choice(("<f4", "<f2")))
            case 6:
                variables[name] = array
                spec = chosen.choice(("TransformerSpec", "", "TransformerBig", "WhisperSpec", "x" * 5000))
                changes = {"version": chosen.randrange(8), "revision": chosen.randrange(9), "spec": spec}
                content = replace(content, **changes)
            case _:
                pass  # it is missing
        content = replace(content, variables=variables, aliases=aliases)
    found = bytearray(model_bin.to_bytes(content))
    if chosen.random() < 0.3 and found:
        found[chosen.randrange(len(found))] = chosen.randrange(256)
    return bytes(found)
