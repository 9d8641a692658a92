"""Names of weights in family files: placeholders, shared and ignored tensors."""

from __future__ import annotations

import pytest
import torch

from tfexport.errors import CheckpointError
from tfexport.models.families.family import Family, count_indices
from tfexport.models.families.names import NameTemplate


def family(renames: dict[str, str | tuple[str, ...]], **more: object) -> Family:
    return Family(name="a", about="", renames=renames, signature=(), read_config=lambda weights: {}, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "name", "values"),
    [
        ("enc.{i}.w", "enc.12.w", {"i": "12"}),
        ("enc.{i}.w", "enc.x.w", None),
        ("dec.{3i}.{p}", "dec.6.bias", {"i": "2", "p": "bias"}),
        ("dec.{3i}.{p}", "dec.7.bias", None),
        ("dec.{3i+1}.{p}", "dec.7.weight", {"i": "2", "p": "weight"}),
        ("dec.{3i+2}", "dec.1", None),
        ("enc.{i+1}.{h}", "enc.1.0", {"i": "0", "h": "0"}),
        ("enc.{i+1}", "enc.0", None),
        ("enc.*", "enc.3", None),
        ("enc.{i}.w", "enc.03.w", None),
        ("enc.0{i}.w", "enc.03.w", {"i": "3"}),
        ("enc.{i}.w", "enc.٣.w", None),
        ("enc.{i}.w", f"enc.{'9' * 5000}.w", None),
    ],
)
def test_a_template_matches_names_and_makes_them_again(template: str, name: str, values: dict[str, str] | None) -> None:
    parsed = NameTemplate(template)
    assert parsed.match(name) == values
    if values is not None:
        assert parsed.fill(values) == name


@pytest.mark.parametrize("template", ["{j}", "{i}.{i}", "{0i}", "{2p}", "{i-1}", "a{", "}"])
def test_what_is_no_placeholder_is_an_error(template: str) -> None:
    with pytest.raises(ValueError, match=r"not a placeholder|comes twice"):
        _ = NameTemplate(template).placeholders


@pytest.mark.parametrize("name", ["encoder.layers.01.w", "encoder.layers.0{i}.w"])
def test_tfexports_own_names_have_no_leading_zeros(name: str) -> None:
    with pytest.raises(ValueError, match="begins with 0"):
        family({"enc.{i}.w": name}).check_names()
    family({"enc.0{i}.w": "encoder.layers.{i}.w"}).check_names()


def test_a_flat_list_of_layers_is_counted_and_renamed() -> None:
    weights = {f"decoder.{number}.w.weight": torch.full((1,), number) for number in range(6)}
    assert count_indices(weights, "decoder.{3i+1}.w.weight") == 2
    parts = ("self", "cross", "mlp")
    flat = family({f"decoder.{{3i+{k}}}.w.{{p}}": f"layers.{{i}}.{part}.{{p}}" for k, part in enumerate(parts)})
    found, unexpected = flat.convert(weights)
    assert {name: int(tensor) for name, tensor in found.items()} == {
        f"layers.{layer}.{part}.weight": 3 * layer + k for layer in range(2) for k, part in enumerate(parts)
    }
    assert unexpected == []
    assert flat.foreign_name("layers.1.cross.weight") == "decoder.4.w.weight"


def test_a_tensor_may_stand_for_several_names() -> None:
    shared = family(
        {"norm.{p}": "layers.0.norms.0.{p}"},
        shared={"layers.0.norms.1.{p}": "layers.0.norms.0.{p}", "layers.{i}.norms.0.{p}": "layers.0.norms.0.{p}"},
    )
    assert shared.shared_name("layers.0.norms.1.bias") == "layers.0.norms.0.bias"
    assert shared.shared_name("layers.7.norms.0.bias") == "layers.0.norms.0.bias"
    assert shared.shared_name("layers.0.norms.0.bias") is None
    assert shared.foreign_name("layers.7.norms.0.bias") == "norm.bias"


def test_a_wildcard_ignores_names() -> None:
    ignoring = family({"a": "b"}, ignored=("crit.*", "*.num_batches"))
    assert ignoring.convert(
        {"crit.weight": torch.ones(1), "x.num_batches": torch.ones(1), "criterion": torch.ones(1)}
    ) == (
        {},
        ["criterion"],
    )


def test_two_names_of_one_tensor_must_agree() -> None:
    twice = family({"emb.weight": "tokens", "tied.weight": "tokens"})
    one = torch.ones(2)
    assert twice.convert({"emb.weight": one, "tied.weight": one.clone()})[0]["tokens"].shape == (2,)
    with pytest.raises(CheckpointError, match=r"emb.weight and tied.weight both are tokens.*`ignored`"):
        twice.convert({"emb.weight": one, "tied.weight": one * 2})
