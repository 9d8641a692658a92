"""The fuzzers of costs find what they are there for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fuzz.files import costs
from fuzz.files.target import Target
from fuzz.server import body_costs

pytestmark = pytest.mark.thorough


def linear(path: Path) -> None:
    sum(path.read_bytes())


def quadratic(path: Path) -> None:
    text = path.read_bytes()
    while text:
        text = text[1:]


@pytest.mark.parametrize(("read", "is_found"), [(linear, False), (quadratic, True)])
def test_a_reader_that_searches_again_and_again_is_found(read: object, is_found: bool, tmp_path: Path) -> None:
    reader = Target("reader", (b"",), read)  # type: ignore[arg-type]
    problem = costs.problem_of(reader, tmp_path / "work" / "given.bin", b"", b"'", b"", 60_000)
    assert (problem is not None) == is_found


def test_readers_over_some_patterns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "CHARACTERS", "'<[0")
    monkeypatch.setattr(costs, "PAIRS", ("<!",))
    assert costs.main(["--size", "50000", "--only", "config,vocabulary,codes"]) == 0, capsys.readouterr().out


def test_bodies_cost_little(capsys: pytest.CaptureFixture[str]) -> None:
    assert body_costs.main(["--cases", "15", "--seed", "3"]) == 0, capsys.readouterr().out


def test_each_field_of_each_address_gets_each_value() -> None:
    schemas = {"One": {"properties": {"a": {"type": "string"}, "b": {"items": {"$ref": "#/components/schemas/Two"}}}}}
    schemas["Two"] = {"properties": {"c": {"anyOf": [{"type": "string"}]}}}
    assert list(body_costs.fields_of(schemas["One"], schemas)) == [("a",), ("b",), ("b", "c")]
    small = {"a": "w4", "b": [{"c": 1, "d": 2}]}
    assert json.loads(body_costs.placed(small, ("a",), "[[]]")) == {**small, "a": [[]]}
    assert json.loads(body_costs.placed(small, ("b", "c"), '"x"')) == {"a": "w4", "b": [{"c": "x", "d": 2}]}
