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
        return self.variables | {alias: self.variables[name] for alias, name in (self.aliases | scales).items()}

    def with_variables(self, **changes: Any) -> Content:
        """With others, whose names have `__` for `/`; None takes one away, and its alias."""
        named = {name.replace("__", "/"): value for name, value in changes.items()}
        kept = {name: value for name, value in (self.variables | named).items() if value is not None}
        aliases = {alias: name for alias, name in self.aliases.items() if alias not in named}
        return replace(self, variables={name: np.asarray(value) for name, value in kept.items()}, aliases=aliases)


def read(path: Path) -> Content:
    """A file of version 6."""
    data, at = path.read_bytes(), 0

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
