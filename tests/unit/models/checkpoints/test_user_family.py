"""What is said of family files whose Family has fields, or whose functions give values, of another type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fakes import tiny_config
from tfexport.errors import ConfigError
from tfexport.models.checkpoints.convert import convert
from tfexport.models.checkpoints.hints import asking
from tfexport.models.checkpoints.user_family import read_family_file
from tfexport.models.families.family import Family

FILE = """
from tfexport import Family

def reference(weights, config):
    return {reference}

FAMILY = Family(
    **{{
        "name": "own", "about": "", "renames": {{"a.{{i}}.{{p}}": "encoder.norm.{{p}}"}}, "signature": ("a",),
        "read_config": lambda weights: {read_config}, "adjust": lambda weights: {adjust}, **{fields}
    }}
)
"""


def family(folder: Path, fields: str = "{}", **given: str) -> Family:
    (folder / "own.py").write_text(
        FILE.format(fields=fields, **{"reference": "None", "read_config": "{}", "adjust": "weights", **given})
    )
    return read_family_file(folder / "own.py")[0]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ('{"name": 5}', "name is not a string"),
        ('{"renames": [("a", "b")]}', "renames is not a dict of names to names"),
        ('{"renames": {"a": 5}}', "renames is not a dict of names to names"),
        ('{"shared": {"a": ("b", "c")}}', "shared is not a dict of names to names"),
        ('{"signature": "a.weight"}', r"signature is not a tuple of names, as in \('a.weight',\)"),
        ('{"ignored": "crit.*"}', "ignored is not a tuple of names"),
        ('{"read_config": {"d_model": 4}}', "read_config is not a function"),
        ('{"asked": ("colour",)}', "asked has 'colour', which is not a field of the configuration"),
        (
            '{"usual": {"heads": 4}}',
            r"usual has 'heads', which is not a field of the configuration \(did you mean 'n_heads'\?\)",
        ),
    ],
)
def test_a_field_of_another_type_is_named(tmp_path: Path, fields: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"own.py has a Family whose {problem}.* Correct the family file."):
        family(tmp_path, fields)


@pytest.mark.parametrize(
    ("name", "given", "problem"),
    [
        ("read_config", "None", "returns NoneType, not a dict of configuration fields"),
        ("read_config", "[1]", "returns list, not a dict"),
        ("read_config", '{"d_modle": 4}', r"returns 'd_modle', which is not a field .*\(did you mean 'd_model'\?\)"),
        ("read_config", '{"d_ff": weights["a"].sum()}', "returns d_ff as Tensor, not as a plain value"),
        ("adjust", "None", "returns NoneType, not a dict of names to tensors. Let it return the weights"),
        ("adjust", '{"a": 1.0}', "returns float as 'a', not a tensor"),
        ("reference", "None", "returns NoneType, not an nn.Module. Let it return one"),
    ],
)
def test_what_a_function_gives_is_checked(tmp_path: Path, name: str, given: str, problem: str) -> None:
    own = family(tmp_path, **{name: given})
    arguments: list[Any] = [{"a": torch.ones(2)}, *([tiny_config()] if name == "reference" else [])]
    with pytest.raises(ConfigError, match=rf"^`{name}` of .*own.py {problem}"):
        getattr(own, name)(*arguments)


def test_an_error_of_many_lines_is_one_line(tmp_path: Path) -> None:
    own = family(tmp_path, read_config='__import__("torch").nn.LSTM(2, 2, 9).load_state_dict({})')
    with pytest.raises(ConfigError, match=r"RuntimeError: .* \[\.\.\.\]\. Correct the file; --debug") as error:
        own.read_config({})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def test_a_name_that_the_model_does_not_have_is_shown_beside_the_file_s() -> None:
    """Also one that others are to share."""
    odd = Family(
        name="own",
        about="",
        renames={"emb.weight": "encoder.token.weight"},
        shared={"output_weight": "encoder.tok.weight"},
        signature=(),
        read_config=lambda weights: {},
    )
    _, (missing, unexpected) = convert(odd, {"emb.weight": torch.ones(2, 2)}, tiny_config())
    assert "output_weight (for which `shared` has encoder.tok.weight)" in missing
    assert unexpected == "unexpected: emb.weight (as encoder.token.weight)"


def test_what_has_no_flag_is_asked_for_with_its_usual_value(tmp_path: Path) -> None:
    own = family(tmp_path, '{"asked": ("max_distance",), "usual": {"max_distance": 128}}')
    message = asking(Path("ckpt.pt"), {"max_distance": "max_distance with --config"}, own)
    assert "uses max_distance 128" in message
