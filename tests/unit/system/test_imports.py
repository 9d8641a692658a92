"""What is told of a library that cannot be imported is what is wrong with it."""

from __future__ import annotations

import errno

import pytest

from tfexport.errors import RuntimeUnavailable, words_of
from tfexport.system.imports import import_failure, is_out_of_memory

ABSENT = "it needs spacy, which is not installed"


def test_a_library_that_is_not_there() -> None:
    error = ModuleNotFoundError("No module named 'spacy'", name="spacy")
    found = import_failure(error, "spacy", ABSENT)
    assert isinstance(found, RuntimeUnavailable)
    assert str(found) == ABSENT


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'thinc'", name="thinc"),
        ImportError("libstdc++.so.6: version `GLIBCXX_3.4.30' not found", name="spacy"),
    ],
)
def test_a_library_that_lacks_something_else_is_not_said_to_be_absent(error: ImportError) -> None:
    found = import_failure(error, "spacy", ABSENT)
    assert isinstance(found, RuntimeUnavailable)
    assert str(found).startswith("spacy is installed and cannot be imported: ")
    assert str(error) in str(found)


@pytest.mark.parametrize(
    "message",
    [
        "libtorch_cpu.so: failed to map segment from shared object",
        "libmkl.so: cannot allocate memory for thread-local data: ABORT",
    ],
)
def test_a_library_that_does_not_fit_into_memory(message: str) -> None:
    assert isinstance(import_failure(ImportError(message, name="spacy"), "spacy", ABSENT), MemoryError)


@pytest.mark.parametrize(
    "cause",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "no"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_what_led_to_an_error_is_looked_at(cause: Exception) -> None:
    error = ValueError("the file cannot be read")
    error.__cause__ = cause
    assert is_out_of_memory(cause)
    assert is_out_of_memory(error)
    hidden = ValueError("the file cannot be read")
    hidden.__context__, hidden.__suppress_context__ = error, True
    assert is_out_of_memory(hidden)
    assert not is_out_of_memory(ValueError("memory"))


def test_errors_that_led_to_each_other_end() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one
    assert not is_out_of_memory(one)


def test_an_error_that_cannot_be_written_ends_no_command() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    error = ValueError("the file cannot be read")
    error.__cause__ = KeyError(deep)
    assert not is_out_of_memory(error)
    assert words_of(error.__cause__) == ""
