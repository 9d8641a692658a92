"""What toolkits save, with one thing in it changed and all around it still right: archives, arrays, pickles and YAML.

Bytes changed at random seldom get beyond a checksum, a length or the first line that does not parse.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickletools
import random
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from fuzz.files.mutated_values import other_value

YAML = re.compile(rb'[-\w"</>]+:\s')
"""How the files of YAML that mutations begin with begin, and no others."""


def other_archive(chosen: random.Random, data: bytes) -> bytes:
    """A zip archive of torch.save or NumPy of which one member is another one; its checksums are those of its content."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
    arrays = [name for name in members if name.endswith(".npy")]
    packed, changed = zipfile.ZIP_STORED, set[str]()
    for _ in range(chosen.choice((1, 1, 1, 2, 4))):
        name = chosen.choice(arrays or [*members])
        if name in changed:
            continue
        changed.add(name)
        match chosen.randrange(10):
            case 0:
                packed = zipfile.ZIP_DEFLATED
                members[name] = bytes(chosen.choice((0, 1000, 5_000_000)))
            case 1:
                members.pop(name, None)
            case 2:
                new = chosen.choice(("../../x", "/tmp/x", "x\x00", name.upper(), *members))
                members[new] = members.pop(name, b"")
                changed.add(new)
            case 3:
                members[name] = members.get(name, b"")[: chosen.choice((0, 1, 7, 70))]
            case _ if arrays:
                if chosen.random() < 0.5:  # the settings, which are one of many
                    name = next((name for name in arrays if "model.yml" in name and name not in changed), name)
                    changed.add(name)
                members[name] = other_array(chosen, members[name])
            case _:
                name = next((name for name in members if name.endswith("data.pkl")), name)
                members[name] = other_pickle(chosen, members[name])
    return _archive(members, packed)


def _archive(members: Mapping[str, bytes], packed: int) -> bytes:
    """A zip archive whose members begin where torch.save lets them begin, at multiples of 64."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", packed) as archive:
        for name, content in members.items():
            member = zipfile.ZipInfo(name)
            member.compress_type = packed
            begin = file.tell() + 30 + len(member.filename.encode()) + 4
            padding = -begin % 64
            member.extra = struct.pack("<HH", 0x4246, padding) + bytes(padding)
            archive.writestr(member, content)
    return file.getvalue()


def other_array(chosen: random.Random, data: bytes) -> bytes:
    """A .npy file that declares what it does not hold, or that holds other numbers; settings in YAML are other ones."""
    array = np.load(io.BytesIO(data))
    if array.dtype == np.int8 and chosen.random() < 0.9:
        text = other_yaml(chosen, array.tobytes().rstrip(b"\0"))
        return _npy(np.frombuffer(text + b"\0" * chosen.randrange(3), dtype=np.int8))
    if chosen.random() < 0.4:
        shape = chosen.choice(("(-1,)", "(2**40,)", f"({2**62},)", "(1, 2)", "()", "(1.5,)", "None", f"{'(' * 300}1"))
        descr = chosen.choice(("<f4", "|O", "<U1000000000", "<f16", "<i8", ">f4", "|V8", "x", "<c8", "|b1", "<f2"))
        told = {"descr": repr(descr), "fortran_order": chosen.choice(("True", "False", "2")), "shape": shape}
        if chosen.random() < 0.3:
            told |= {"shape": str(array.shape)}
        if chosen.random() < 0.2:
            told["descr"] = "[('a', '<f4', (2**30,))]"
        header = ("{" + ", ".join(f"'{key}': {value}" for key, value in told.items()) + "}\n").encode()
        size = chosen.choice((len(header), len(header), 0, 65535))
        version = chosen.choice((b"\1\0", b"\1\0", b"\2\0", b"\3\0", b"\x09\0"))
        return b"\x93NUMPY" + version + struct.pack("<H", size) + bytes(2 * (version == b"\2\0")) + header + data[80:]
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: array.T,
        lambda: array.flatten(),
        lambda: array[None],
        lambda: array[:0],
        lambda: array[:1],
        lambda: array.flatten()[0],
        lambda: array.astype(chosen.choice(("f8", "f2", ">f4", "i4", "c8", "S4", "?", "M8[s]"))),
        lambda: np.full(array.shape, chosen.choice((0, np.nan, np.inf, 3e38)), "f4"),
        lambda: np.zeros((1,) * 33, "f4"),  # more axes than PyTorch prints
        lambda: np.zeros((0, 2**40), "f4"),
    )
    return _npy(chosen.choice(kinds)())


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def other_pickles(chosen: random.Random, data: bytes) -> bytes:
    """A file of PyTorch before 1.6, of whose pickles one is another one."""
    stream, parts = io.BytesIO(data), []
    while len(parts) < 5:  # a number, a version, the machine, the object, and the keys of what follows
        begin = stream.tell()
        for _ in pickletools.genops(stream):
            pass
        parts.append(data[begin : stream.tell()])
    rest = data[stream.tell() :]
    which = chosen.choice((3, 3, 3, 3, 0, 1, 2, 4))
    parts[which] = other_pickle(chosen, parts[which])
    return b"".join(parts) + rest


def _text(text: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text


def _number(number: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", number)


_CALL = _text(b"touch escaped") + b"\x85R"
VALUES = (
    *(_number(number) for number in (-1, 0, 1, 3, 7, 1000, 10**6, 10**9, 2**40, 2**62)),
    *(b"G" + struct.pack(">d", number) for number in (-1.0, 0.5, 1e308, float("nan"), float("inf"))),
    *(
        _text(text)
        for text in (b"", b"x", b"../../x", b"/etc/passwd", b"\0", b"x" * 100_000, b"\xed\xa0\x80", b"${a.b}")
    ),
    b"\x8b" + struct.pack("<i", 50_000) + b"\x7f" * 50_000,
    *(b"N", b"\x88", b"\x89", b")", b"]", b"}", b"\x8f", b"\x8a\xff" + b"\x7f" * 255),
    *(b"cposix\nsystem\n", b"cposix\nsystem\n" + _CALL, b"cbuiltins\neval\n" + _CALL, b"carg\nNamespace\n)\x81"),
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuK\2tQK\0K\2\x85K\1\x85\x89NtR",
    b"]r\xff\xff\xff\x7fj\xff\xff\xff\x7fa",  # a list in itself
    b"]" * 3000 + b"a" * 2999,
    b"}" + (b"X\1\0\0\0a}") * 3000 + b"s" * 3000,
    b")" + b"\x85" * 3000,
)
"""What may stand in a pickle where a value does."""
_OPCODES = tuple(bytes([code]) for code in b"012(tRbaesuQ.\x81\x85\x93")
_NAMES = (
    b"posix system",
    b"torch FloatStorage",
    b"torch._utils _rebuild_tensor_v2",
    b"collections OrderedDict",
    b"a b",
)


def other_pickle(chosen: random.Random, raw: bytes) -> bytes:
    """A pickle with an opcode, a value, or what a name stands for, changed, left out or doubled."""
    try:
        found = list(pickletools.genops(raw))
    except (ValueError, EOFError, IndexError):  # an earlier change
        return raw
    begins = [*(begin for *_, begin in found), len(raw)]
    parts = [raw[begin:end] for begin, end in pairwise(begins)]
    values = [at for at, (opcode, argument, _) in enumerate(found) if argument is not None and "PUT" not in opcode.name]
    settings = [at for at in range(2, len(found)) if _is_setting(found, at)]
    for _ in range(chosen.choice((1, 1, 2, 3))):
        at = chosen.randrange(len(parts))
        match chosen.randrange(10):
            case 0:
                parts[at] = b""
            case 1:
                parts[at] *= chosen.choice((2, 2, 500))
            case 2:
                parts[at] = chosen.choice(_OPCODES)
            case 3:
                parts[at] += chosen.choice((*VALUES, *_OPCODES))
            case 4 if names := [at for at, (opcode, *_) in enumerate(found) if opcode.name == "GLOBAL"]:
                parts[chosen.choice(names)] = b"c" + chosen.choice(_NAMES).replace(b" ", b"\n") + b"\n"
            case 5 | 6 if values:
                parts[chosen.choice(values)] = chosen.choice(VALUES)
            case _ if settings:
                parts[chosen.choice(settings)] = chosen.choice(VALUES)
            case _:
                parts[at] = chosen.choice(VALUES)
    return b"".join(parts)


def _is_setting(found: list[Any], at: int) -> bool:
    """Whether a number, text, flag or None follows a name, which its place in the memo may follow."""
    before = at - 2 if "PUT" in found[at - 1][0].name else at - 1
    is_named = re.search("UNICODE|GET", found[before][0].name) and found[before][1] not in ("storage", "cpu")
    is_simple = re.search("INT|FLOAT|UNICODE|NONE|NEW(TRUE|FALSE)|EMPTY_LIST", found[at][0].name)
    return bool(is_named and is_simple and "PUT" not in found[at][0].name)


_BOMB = "".join(f"b{k}: &b{k} [{f'*b{k - 1}, ' * 9 if k else 'x'}]\n" for k in range(12))
LINES = (
    _BOMB,
    "a: &a {b: *a}\n<<: *a\n",
    "model: &m [*m]\n",
    '!!python/object/apply:os.system ["touch escaped"]\n',
    'x: !!python/object/apply:os.system ["touch escaped"]\n',
    "x: !!python/name:os.system\n",
    "x: !<tag:yaml.org,2002:python/module:os> y\n",
    f"x: {'[' * 3000}\n",
    f"x: {'[' * 2000}{']' * 2000}\n",
    f"x: {'{a: ' * 2000}\n",
    "".join(f"{' ' * k}a:\n" for k in range(1500)),
    f"x: {'9' * 100_000}\n",
    f"{'9' * 5000}: 1\n",
    "x: 190:20:30\n",
    "x: 2001-99-99\n",
    "x: 2001-01-01 99:99:99\n",
    "x: 0b\n0x: 0o9\n",
    "x: .inf\n-: .nan\n",
    "? [a, b]\n: 1\n? {a: b}\n: 2\n",
    "x: !!binary '='\n",
    "x: !!int y\n",
    "x: !!float y\n",
    "x: !!timestamp y\n",
    "x: !!bool y\n",
    "x: !!omap [1]\n",
    "x: !!set [1]\n",
    "x: !!null y\n",
    "---\n---\n",
    "...\n%YAML 9.9\n---\n",
    "%TAG ! tag:x,\n---\n",
    "\tx: 1\n",
    "\ufeff",
    "\x85\u2028\u2029",
    '"\\U0000d800": 5\n',
    '"\\x00": 5\n',
    "x: |\n  y\n",
    "'x\n",
    "*x : 1\n",
)
"""What YAML can say and no file of a toolkit does."""


def other_yaml(chosen: random.Random, data: bytes) -> bytes:
    """YAML of which one value or one line is another one."""
    text = data.decode(errors="replace")
    if chosen.random() < 0.6:
        with contextlib.suppress(Exception):  # an earlier change
            return _other_settings(chosen, text).encode()
    lines = text.splitlines(keepends=True) or ["\n"]
    at = chosen.randrange(len(lines))
    match chosen.randrange(4):
        case 0:
            lines[at] = chosen.choice(LINES)
        case 1:
            name, _, _ = lines[at].partition(":")
            lines[at] = f"{name}: {chosen.choice(LINES).partition(': ')[2].strip() or '*x'}\n"
        case 2:
            lines[at] = lines[at] * 2
        case _:
            lines.insert(at, chosen.choice(LINES))
    return "".join(lines).encode()


def _other_settings(chosen: random.Random, text: str) -> str:
    import yaml

    content = yaml.load(text, yaml.CSafeLoader)
    for _ in range(chosen.choice((1, 1, 2))):
        content = other_value(chosen, content)
    if chosen.random() < 0.7:
        return "".join(f"{json.dumps(key)}: {json.dumps(value)}\n" for key, value in content.items())
    return json.dumps(content)
