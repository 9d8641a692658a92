"""CTranslate2's model.bin as variables, to be written again with others, or as an older version wrote it."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TYPES = ("<f4", "<i1", "<i2", "<i4", "<f2", "<u2")
"""By type id; the last stands for bfloat16."""


@dataclass(frozen=True)
class Content:
    """What a file holds."""

    variables: dict[str, NDArray[Any]]
    aliases: dict[str, str] = field(default_factory=dict)
    spec: str = "TransformerSpec"
    revision: int = 7
    version: int = 6

    def whole(self) -> dict[str, NDArray[Any]]:
        """The variables, those with several names under each."""
        scales = {
            f"{alias}_scale": f"{name}_scale"
            for alias, name in self.aliases.items()
            if f"{name}_scale" in self.variables
        }
        named = (self.aliases | scales).items()
        return self.variables | {alias: self.variables[name] for alias, name in named if name in self.variables}

    def with_variables(self, **changes: Any) -> Content:
        """With others, whose names have `__` for `/`; None takes one away, and its alias."""
        named = {name.replace("__", "/"): value for name, value in changes.items()}
        kept = {name: value for name, value in (self.variables | named).items() if value is not None}
        aliases = {alias: name for alias, name in self.aliases.items() if alias not in named}
        return replace(self, variables={name: np.asarray(value) for name, value in kept.items()}, aliases=aliases)


def read(data: bytes) -> Content:
    """A file of version 4 to 6, or of version 3 without numbers that this version cannot tell apart."""
    at = 0

    def number(kind: str) -> int:
        nonlocal at
        (found,) = struct.unpack_from(f"<{kind}", data, at)
        at += struct.calcsize(f"<{kind}")
        return found

    def text() -> str:
        nonlocal at
        size = number("H")
        at += size
        return data[at - size : at - 1].decode()

    version, spec, revision = number("I"), text(), number("I")
    variables: dict[str, NDArray[Any]] = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        kind, size = number("B"), number("I")
        if version < 4:
            kind, size = {4: 0, 2: 2, 1: 1}[kind], size * kind
        variables[name] = np.frombuffer(data, TYPES[kind], size // int(TYPES[kind][2]), at).reshape(shape)
        at += size
    aliases = {text(): text() for _ in range(number("I"))}
    assert at == len(data)
    return Content(variables, aliases, spec, revision, version)


def to_bytes(content: Content) -> bytes:
    """As the `version` of the content writes it."""

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value.encode()) + 1) + value.encode() + b"\0"

    version = content.version
    variables = content.variables if version >= 3 else content.whole()
    parts = [struct.pack("<I", version)]
    if version >= 2:
        parts += [text(content.spec), struct.pack("<I", content.revision)]
    parts.append(struct.pack("<I", len(variables)))
    for name, array in variables.items():
        shape = struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        kind = TYPES.index(array.dtype.newbyteorder("<").str.replace("|", "<"))
        told = (kind, array.nbytes) if version >= 4 else (array.itemsize, array.size)
        parts += [text(name), shape, struct.pack("<BI", *told), array.tobytes()]
    if version >= 3:
        parts.append(struct.pack("<I", len(content.aliases)))
        parts += [text(alias) + text(name) for alias, name in content.aliases.items()]
    return b"".join(parts)


def write(folder: Path, content: Content, config: dict[str, Any] | None = None) -> Path:
    """A folder's model.bin, and its config.json where one is given; before version 6 its settings are in model.bin."""
    if config is not None and content.version < 6:
        (folder / "config.json").unlink(missing_ok=True)
        flags = {
            "with_source_bos": np.int8(config["add_source_bos"]),
            "with_source_eos": np.int8(config["add_source_eos"]),
            "with_target_bos": np.int8(config["decoder_start_token"] == config["bos_token"]),
            "user_decoder_start_tokens": np.int8(config["decoder_start_token"] is None),
        }
        names = {
            name: np.frombuffer(config[name].encode(), np.int8) for name in ("unk_token", "bos_token", "eos_token")
        }
        content = replace(content, variables=content.variables | {n: np.asarray(v) for n, v in flags.items()} | names)
    elif config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.bin").write_bytes(to_bytes(content))
    return folder


def small(*, seed: int = 1, in_integers: bool = False, relative: bool = False) -> Content:
    """A random encoder-decoder of one layer for 12 words on both sides, tied, with position tables for 20 tokens, or with
    relative positions.
    """
    random, d = np.random.default_rng(seed), 8
    variables: dict[str, NDArray[Any]] = {}

    def matrix(name: str, *shape: int) -> None:
        array = random.standard_normal(shape).astype(np.float32)
        if in_integers:
            scale = (127 / np.abs(array).max(axis=1)).astype(np.float32)
            variables[f"{name}_scale"], array = scale, np.rint(array * scale[:, None]).astype(np.int8)
        variables[name] = array

    def linear(name: str, n_out: int, n_in: int) -> None:
        matrix(f"{name}/weight", n_out, n_in)
        variables[f"{name}/bias"] = random.standard_normal(n_out).astype(np.float32)

    def norm(name: str) -> None:
        variables[f"{name}/gamma"] = random.standard_normal(d).astype(np.float32)
        variables[f"{name}/beta"] = random.standard_normal(d).astype(np.float32)

    matrix("decoder/embeddings/weight", 12, d)
    variables["decoder/projection/bias"] = random.standard_normal(12).astype(np.float32)
    for side in ("decoder", "encoder"):
        own = f"{side}/layer_0/self_attention"
        if relative:
            variables[f"{own}/relative_attention_bias"] = random.standard_normal((8, 2)).astype(np.float32)
            variables[f"{own}/relative_attention_max_distance"] = np.asarray(np.int32(16))
        else:
            variables[f"{side}/position_encodings/encodings"] = random.standard_normal((20, d)).astype(np.float32)
        for name, value in (("num_heads", np.int16(2)), ("pre_norm", np.int8(1)), ("activation", np.int8(0))):
            variables[f"{side}/{name}"] = np.asarray(value)
        variables[f"{side}/scale_embeddings"] = np.asarray(np.float32(2.5))
        norm(f"{side}/layer_norm")
        layer = f"{side}/layer_0"
        for attention, parts in (("self_attention", (3, 1)), ("attention", (1, 2, 1))):
            if side == "decoder" or attention == "self_attention":
                norm(f"{layer}/{attention}/layer_norm")
                for k, part in enumerate(parts):
                    linear(f"{layer}/{attention}/linear_{k}", part * d, d)
        norm(f"{layer}/ffn/layer_norm")
        linear(f"{layer}/ffn/linear_0", 12, d)
        linear(f"{layer}/ffn/linear_1", d, 12)
    tied = dict.fromkeys(("decoder/projection/weight", "encoder/embeddings_0/weight"), "decoder/embeddings/weight")
    return Content(variables, tied)


WORDS = ["<unk>", "<s>", "</s>", *(f"w{index}" for index in range(9))]
SETTINGS = {
    **{"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "decoder_start_token": "<s>"},
    **{"add_source_bos": False, "add_source_eos": True, "layer_norm_epsilon": None, "multi_query_attention": False},
}


def write_small(folder: Path, **options: Any) -> Path:
    """A folder of `small`."""
    folder.mkdir(parents=True)
    (folder / "shared_vocabulary.json").write_text(json.dumps(WORDS))
    return write(folder, small(**options), SETTINGS)
