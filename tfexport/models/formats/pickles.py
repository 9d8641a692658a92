"""Interpretation of pickles with tensors and arguments, without running any of their code.

`pickletools.genops` parses the opcodes and checks every length against the file. This module interprets them one by one. It
never imports or calls anything that a file names. Objects of classes become records of their content.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import IO, Any

import torch
from torch import Tensor

_DTYPES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
    "QInt8Storage": torch.int8,  # of quantized tensors, which become records
    "QUInt8Storage": torch.uint8,
    "QInt32Storage": torch.int32,
    "UntypedStorage": torch.uint8,
}
_NEWER = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "uint16", "uint32", "uint64")
"""Types without a storage class. A pickle names the type itself."""
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
"""The opcodes whose value is their argument."""
_CONSTANTS: Mapping[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_MOST_STEPS = 10_000_000
_MOST_BITS = 1024
"""Maximum size of an integer. Python refuses to print numbers of many thousands of digits, even in error messages."""
_MOST_BITS_OF_A_KEY = 60
"""Maximum size of an integer that is a key. The hash of a larger one is its remainder modulo 2**61 - 1."""
_MOST_TUPLES = 4096
"""Maximum number of keys that are tuples and do not begin with text."""
_MOST_VIEWS = 16
"""Maximum number of uses of a file's numbers. Layers may share weights, but the conversion may copy each tensor."""
_COSTS = {
    **dict.fromkeys(("EMPTY_LIST", "LIST", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT", "DICT"), 64),
    **dict.fromkeys(("EMPTY_SET", "FROZENSET"), 220),
    **dict.fromkeys(("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"), 100),
    **dict.fromkeys(("GLOBAL", "STACK_GLOBAL"), 160),
    **dict.fromkeys(("REDUCE", "NEWOBJ", "NEWOBJ_EX", "INST", "OBJ", "BINPERSID"), 400),
}
"""Approximate memory of an opcode's value in bytes; 32 for other opcodes."""
_MOST_MEMORY, _MEMORY_OF_A_BYTE = 2**25, 16
"""Maximum memory of a pickle's values in bytes: a fixed amount, and an amount per byte of the pickle."""
_LARGEST_EMPTY = 2**20
"""Maximum axis size of a tensor without elements. Tensors computed from it would have the same size."""


class Refused(Exception):
    """A file requests something that no checkpoint needs. The message is part of a sentence."""


@dataclass(frozen=True)
class InertClass:
    """The name of a class or function in a file. Nothing is imported for it."""

    module: str
    name: str

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, repr=False, slots=True)
class InertObject:
    """A record of an object in a file that is not a plain value."""

    of: str
    """Class of the object, or the function that would make it, such as `argparse.Namespace`."""
    args: tuple[Any, ...] = ()
    """Arguments of the class or function, in order."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    state: Any = None
    """Value that its class would restore it from, usually the attributes by name."""
    items: list[Any] = field(default_factory=list)
    """Values that would be appended to it."""
    entries: dict[Any, Any] = field(default_factory=dict)
    """Values that would be put into it, by key."""

    def __repr__(self) -> str:  # the default would descend into all values, and an object may contain itself
        return f"<inert {self.of}>"

    @property
    def attributes(self) -> dict[str, Any]:
        """The state as attributes by name, including slots; empty if the state has another form."""
        states = self.state if isinstance(self.state, tuple) and len(self.state) == 2 else (self.state,)
        return {str(name): value for state in states if isinstance(state, dict) for name, value in state.items()}


Storages = Callable[[str, int], Tensor]
"""Function that returns the bytes of a storage, uint8 [n_bytes], for its key and its size in a pickle, or raises Refused."""


def read_pickle(file: IO[bytes], storages: Storages) -> Any:
    """Read the pickle at the position of `file`, and advance the position to its end.

    Subclasses of dict and list keep only their entries. Tensors lose `requires_grad` and hooks.

    Args:
        file: a file in memory, so that declared lengths are not allocated before they are read.
        storages: function that returns the numbers of tensors.

    Raises:
        Refused: the pickle requests something that no checkpoint needs.
        Exception: the pickle is damaged.
    """
    return _Interpreter(file, storages).run()


class _Interpreter:
    """Interprets one pickle. Objects other than plain values and tensors become records."""

    def __init__(self, file: IO[bytes], storages: Storages):
        self._file, self._storages = file, storages
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._copied = 0
        self._viewed = self._stored = self._tuples = 0
        self._keys: set[str] = set()

    def run(self) -> Any:
        """The value of the pickle at the position of the file; advances the position to its end."""
        begin, stack, memory = self._file.tell(), self._stack, 0
        for step, (opcode, argument, _) in enumerate(pickletools.genops(self._file)):
            name = opcode.name
            if name in _LITERALS:
                if isinstance(argument, int) and argument.bit_length() > _MOST_BITS:
                    raise Refused(f"it has a number of {argument.bit_length()} bits")
                stack.append(argument)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name != "STOP":
                self._do(name, argument)
            memory += _COSTS.get(name, 32)
            n_bytes = self._file.tell() - begin
            too_large = memory > _MOST_MEMORY + _MEMORY_OF_A_BYTE * n_bytes
            if step > _MOST_STEPS or self._copied > n_bytes or too_large:
                raise Refused("it declares more than a file of its size can contain")
        return stack.pop()

    def _do(self, name: str, argument: Any) -> None:
        stack = self._stack
        match name:
            case "BINPUT" | "LONG_BINPUT" | "PUT":
                self._memo[argument] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET" | "GET":
                stack.append(self._memo[argument])
            case "MARK":
                self._marks.append(len(stack))
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_SET":
                stack.append(set())
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._last(int(name[-1]))))
            case "LIST":
                stack.append(self._since_mark())
            case "DICT":
                stack.append(self._pairs(self._since_mark()))
            case "FROZENSET":
                stack.append(frozenset(map(self._key, self._since_mark())))
            case "APPEND":
                self._extend(self._last(1))
            case "APPENDS" | "ADDITEMS":
                self._extend(self._since_mark())
            case "SETITEM":
                self._put(self._last(2))
            case "SETITEMS":
                self._put(self._since_mark())
            case "GLOBAL":
                module, _, attribute = argument.partition(" ")
                stack.append(InertClass(module, attribute))
            case "STACK_GLOBAL":
                stack.append(InertClass(*map(_text, self._last(2))))
            case "REDUCE" | "NEWOBJ":
                self._make(*self._last(2))
            case "NEWOBJ_EX":
                self._make(*self._last(3))
            case "INST":
                module, _, attribute = argument.partition(" ")
                self._make(InertClass(module, attribute), tuple(self._since_mark()))
            case "OBJ":
                made_by, *arguments = self._since_mark()
                self._make(made_by, tuple(arguments))
            case "BUILD":
                state = stack.pop()
                if isinstance(stack[-1], InertObject):
                    stack[-1].state = state
            case "BINPERSID":
                stack.append(self._storage(stack.pop()))
            case "DUP":
                stack.append(stack[-1])
            case "POP" if not self._marks or self._marks[-1] < len(stack):
                stack.pop()
            case "POP" | "POP_MARK":  # a mark is also on the stack
                self._since_mark()
            case "PROTO" | "FRAME":
                pass
            case _:
                raise Refused(f"it uses the pickle opcode {name}")

    def _since_mark(self) -> list[Any]:
        return self._last(len(self._stack) - self._marks.pop())

    def _last(self, count: int) -> list[Any]:
        begin = len(self._stack) - count
        values = self._stack[begin:]
        del self._stack[begin:]
        return values

    def _extend(self, values: list[Any]) -> None:
        match self._stack[-1]:
            case list() as target:
                target.extend(values)
            case set() as target:
                target.update(map(self._key, values))
            case InertObject() as target:
                target.items.extend(values)
            case target:
                raise Refused(f"it adds to a {type(target).__name__}")

    def _put(self, values: list[Any]) -> None:
        target = self._stack[-1]
        entries = target.entries if isinstance(target, InertObject) else target
        if not isinstance(entries, dict):
            raise Refused(f"it puts entries into a {type(target).__name__}")
        entries.update(self._pairs(values))

    def _pairs(self, values: list[Any]) -> dict[Any, Any]:
        return {self._key(key): value for key, value in zip(values[::2], values[1::2], strict=True)}

    def _key(self, value: Any) -> Any:
        """A key of a dict or set. Nested keys are refused: they may be too deep for Python to hash.

        Keys that all have one hash take quadratic time. A file can choose such numbers, because their hashes are not secret;
        those of text are.
        """
        parts = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(part, str | bytes | int | float | InertClass | InertObject | None) for part in parts):
            raise Refused(f"it has a {type(value).__name__} as a key")
        if any(isinstance(part, int) and part.bit_length() > _MOST_BITS_OF_A_KEY for part in parts):
            raise Refused(f"it has a number of more than {_MOST_BITS_OF_A_KEY} bits as a key")
        if isinstance(value, tuple) and not (value and isinstance(value[0], str | bytes)):
            self._tuples += 1
            if self._tuples > _MOST_TUPLES:
                raise Refused(f"it has more than {_MOST_TUPLES} tuples of numbers as keys")
        return value

    def _make(self, made_by: Any, arguments: Any, named: Any = None) -> None:
        """The result of a call of a class or function: a plain value for known ones, or else a record."""
        if not isinstance(made_by, InertClass) or not isinstance(arguments, tuple):
            raise Refused(f"it calls a {type(made_by).__name__} with a {type(arguments).__name__}")
        path = made_by.path.replace("__builtin__.", "builtins.").replace("copy_reg.", "copyreg.")  # names of Python 2
        known = None if named else self._known(path, arguments)
        if known is None and path == "copyreg._reconstructor" and isinstance(arguments[0], InertClass):
            path, arguments = arguments[0].path, ()  # protocols 0 and 1 write this instead of NEWOBJ
        self._stack.append(InertObject(path, arguments, dict(named or {})) if known is None else known)

    def _known(self, path: str, arguments: tuple[Any, ...]) -> Any:
        """The plain value that a few known functions would return; None for all others."""
        match path, arguments:
            case "torch._utils._rebuild_tensor" | "torch._utils._rebuild_tensor_v2", (Tensor() as storage, *layout):
                return self._view(storage, *layout[:3])
            case "torch._utils._rebuild_tensor_v3", (Tensor() as storage, *layout, InertClass() as kind) if (
                kind.path.removeprefix("torch.") in _NEWER and len(layout) == 5
            ):
                dtype = getattr(torch, kind.name)
                whole = len(storage) // dtype.itemsize * dtype.itemsize
                return self._view(storage[:whole].view(dtype), *layout[:3])
            case "torch._tensor._rebuild_from_type_v2", (InertClass() as rebuilt_by, InertClass(), tuple() as inner, _):
                return self._known(rebuilt_by.path, inner)  # a tensor with attributes, which are not read
            case (
                "torch._utils._rebuild_parameter"
                | "torch._utils._rebuild_parameter_with_state"
                | "torch.nn.parameter.Parameter",
                (Tensor() | InertObject() as tensor, *_),
            ):
                return tensor
            case "collections.OrderedDict" | "collections.Counter", ():
                return {}
            case "collections.defaultdict", (_,) | ():
                return {}
            case "collections.OrderedDict" | "collections.Counter" | "builtins.dict", (dict() | list() as entries,):
                self._copied += len(entries)
                pairs = entries.items() if isinstance(entries, dict) else entries
                return {self._key(key): value for key, value in pairs}
            case "builtins.list" | "builtins.set" | "builtins.frozenset", (list() | tuple() as values,):
                self._copied += len(values)
                return list(values) if path == "builtins.list" else {*map(self._key, values)}
            case "torch.Size", (tuple() as sizes,):
                return sizes
            case "_codecs.encode", (str() as text, "latin1"):  # bytes in protocol 2
                self._copied += len(text)
                return text.encode("latin-1")
        return None

    def _view(self, storage: Tensor, begin: Any, sizes: Any, strides: Any) -> Tensor:
        made = _tensor(storage, begin, sizes, strides)
        self._viewed += made.nbytes
        if self._viewed > _MOST_VIEWS * self._stored:
            raise Refused("its tensors share their numbers too often")
        return made

    def _storage(self, declared: Any) -> Tensor:
        """The elements of the storage that a persistent id declares."""
        match declared:
            case ("storage", InertClass(name=kind), str() as key, str(), int() as count, *views) if kind in _DTYPES:
                dtype = _DTYPES[kind]
                if not 0 <= count < 2**48:
                    raise Refused(f"a tensor of {count} numbers is declared")
                self._stored += 0 if key in self._keys else count * dtype.itemsize
                self._keys.add(key)
                stored = self._storages(key, count * dtype.itemsize).view(dtype)
                if not views or views == [None]:
                    return stored
                _, begin, size = views[0]  # early versions of PyTorch had storages within storages
                return _tensor(stored, begin, (size,), (1,))
            case _:
                raise Refused("it refers to something outside of it that is not a tensor")


def _tensor(stored: Tensor, begin: Any, sizes: Any, strides: Any) -> Tensor:
    numbers = (begin, *sizes, *strides)
    if len(sizes) != len(strides) or not all(type(number) is int and number >= 0 for number in numbers):
        raise Refused("a tensor's sizes are no sizes")
    last = begin + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    # Views that repeat numbers are also refused: copies of them could take any amount of memory.
    if 0 in sizes and max(sizes) > _LARGEST_EMPTY:
        raise Refused(f"an empty tensor of sizes {list(sizes)} is declared")
    if 0 not in sizes and (last >= len(stored) or prod(sizes) > len(stored)):
        raise Refused(f"a tensor of sizes {list(sizes)} is declared in a storage of {len(stored)}")
    return torch.empty(sizes, dtype=stored.dtype) if 0 in sizes else stored.as_strided(sizes, strides, begin)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Refused(f"it names a class with a {type(value).__name__}")
    return value
