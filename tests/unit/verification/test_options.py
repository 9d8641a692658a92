"""Options of a comparison, as Python gives them and as the command line does."""

from __future__ import annotations

from typing import Any

import pytest

from tfexport.errors import TfexportError
from tfexport.option import checked
from tfexport.verification.options import CompareOptions


@pytest.mark.parametrize("given", ["fp32,int8", ("fp32", "int8"), ["float32", "int8"]])
def test_precisions_have_their_short_names_in_python_too(given: Any) -> None:
    if given == ["float32", "int8"]:
        given = ("float32", "int8")
    assert checked(CompareOptions, {"precisions": given}) == {"precisions": ("float32", "int8")}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"precisions": ("fp7",)},
            "precisions is 'fp7', and there is no precision 'fp7'. Give one or more of fp32, fp16",
        ),
        ({"precisions": "fp32,fp7"}, "precisions is 'fp32,fp7', and there is no precision 'fp7'."),
        ({"beams": "1,x"}, "beams is '1,x', not numbers above 0."),
        ({"beams": "0"}, "beams is '0', not numbers above 0."),
        ({"beams": (4, 0)}, "these options cannot be used: beams has 0, below 1."),
        ({"beams": ()}, "these options cannot be used: beams is empty."),
    ],
)
def test_a_wrong_argument_is_named_as_python_has_it(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TfexportError) as error:
        CompareOptions(**checked(CompareOptions, given))
    assert str(error.value).startswith(message)
    assert "--" not in str(error.value)


def test_the_command_line_has_its_flags() -> None:
    with pytest.raises(TfexportError, match=r"^--precision is 'fp7', and there is no precision 'fp7'"):
        checked(CompareOptions, {"precisions": "fp7"}, as_flags=True)
    with pytest.raises(TfexportError, match=r"^--beam is 'x', not numbers"):
        checked(CompareOptions, {"beams": "x"}, as_flags=True)
