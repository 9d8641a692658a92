"""Conversion of a family's weights to those of the canonical model, or a list of all problems."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfexport.config import ModelConfig
from tfexport.models.families.family import Family
from tfexport.models.formats.state_dicts import ignore_flags, some
from tfexport.models.model import empty_model
from tfexport.models.positions import sinusoids

_LARGEST_TABLE = 2**24
"""Maximum number of elements of a computed sinusoid table. Models with more parameters may have larger tables."""


def convert(
    family: Family | None, weights: Mapping[str, Tensor], config: ModelConfig, *, unknown: Collection[str] = ()
) -> tuple[dict[str, Tensor], list[str]]:
    """Canonical float32 weights, and all problems with them, in the names of the file.

    Args:
        unknown: canonical names whose shapes `config` does not determine; they are not checked.
    """
    used, odd = _used(family, weights)
    converted, unexpected = _canonical(family, used, odd)
    for side, most in (("encoder", config.max_source_length), ("decoder", config.max_target_length)):
        name = f"{side}.positions.table"
        if name in converted and converted[name].dim() and config.has_position_table:
            # The user may limit the lengths of a model whose table is longer.
            converted[name] = converted[name][: most + config.position_offset]
        elif name not in converted and family is not None and most > 0:
            compute = {"sinusoidal": sinusoids, "stored": family.computed_positions}.get(config.positions)
            size = (most + config.position_offset) * config.d_model
            if compute is not None and size <= sum(tensor.numel() for tensor in used.values()) + _LARGEST_TABLE:
                converted[name] = compute(most + config.position_offset, config.d_model)
    expected = {name: tuple(tensor.shape) for name, tensor in empty_model(config).state_dict().items()}
    if family is not None:
        converted |= _of_shared(family, expected, converted)

    def foreign_name(name: str) -> str:
        return name if family is None else family.foreign_name(name)

    def shown(name: str) -> str:
        """The name of a missing tensor, for messages."""
        other = None if family is None else family.shared_name(name)
        return foreign_name(name) if other is None or other in expected else f"{name} (for which `shared` has {other})"

    missing = list(dict.fromkeys(shown(name) for name in expected if name not in converted))
    left = [(foreign_name(name), name) for name in converted if name not in expected]
    unexpected += [foreign if foreign == name else f"{foreign} (as {name})" for foreign, name in left]
    shapes = [
        f"{foreign_name(name)}{family.part(name) if family else ''} is {list(tensor.shape)}, not {list(expected[name])}"
        for name, tensor in converted.items()
        if name in expected and name not in unknown and tuple(tensor.shape) != expected[name]
    ]
    bad = [foreign_name(name) for name, tensor in converted.items() if not tensor.isfinite().all()]
    problems = [
        f"{what}: {some(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("misshapen", shapes),
            ("not plain floating-point numbers", odd),
            ("NaN or infinite", bad),
        )
        if names
    ]
    return {} if problems else unshared({name: converted[name].contiguous() for name in expected}), problems


def _used(family: Family | None, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights that are not ignored, and the names of those that are not plain numbers."""
    used = {name: tensor for name, tensor in weights.items() if family is None or not family.ignores(name)}
    return used, [name for name, tensor in used.items() if not _has_plain_numbers(tensor)]


def _canonical(
    family: Family | None, used: Mapping[str, Tensor], odd: Collection[str]
) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under canonical names, and the names that the family lacks."""
    # Values that are not numbers are reported with all other problems. Until then only their shape is used.
    converted = {
        name: torch.zeros(()).expand(tensor.shape) if name in odd else tensor.float() for name, tensor in used.items()
    }
    if family is None:
        return converted, []
    converted, unexpected = family.convert(converted)
    return family.adjust(converted), unexpected


def shown_by_names(family: Family, weights: Mapping[str, Tensor], *, is_classifier: bool) -> dict[str, Any]:
    """The `ModelConfig` fields that follow from the canonical names of a file's weights: biases, ties, norms, the gate."""
    names = _canonical(family, *_used(family, weights))[0].keys()

    def has(name: str) -> bool:
        return name in names or family.shared_name(name) in names

    layer, projections = "encoder.layers.0", ("query", "key", "value", "output")

    def place(norm: str) -> str:
        """The stacks that have a norm."""
        sides = [side for side in ("encoder", "decoder") if has(f"{side}.{norm}.weight")]
        return sides[0] if len(sides) == 1 and not is_classifier else "both"

    return {
        "attention_bias": any(has(f"{layer}.self_attention.{name}.bias") for name in projections),
        "feed_forward_bias": any(has(f"{layer}.feed_forward.{name}.bias") for name in ("hidden", "output")),
        "gated": has(f"{layer}.feed_forward.gate.weight"),
        "embedding_norm": has("encoder.embedding_norm.weight") or has("decoder.embedding_norm.weight"),
        "embedding_norm_in": place("embedding_norm"),
        "final_norm": has("encoder.norm.weight") or has("decoder.norm.weight"),
        "final_norm_in": place("norm"),
        "output_bias": has("output_bias"),
        "tie_source_target": not is_classifier and not has("decoder.tokens.weight"),
        "tie_output": not is_classifier and not has("output_weight"),
    }


def _contradicted(family: Family, weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Any]:
    """The `ModelConfig` fields that the canonical names of a file's weights contradict, with what the names show."""
    names = _canonical(family, *_used(family, weights))[0].keys()
    shown = shown_by_names(family, weights, is_classifier=config.is_classifier)
    for side in ("encoder", "decoder"):
        layers = [int(name.split(".")[2]) for name in names if name.startswith(f"{side}.layers.")]
        shown[f"n_{side}_layers"] = max(layers, default=-1) + 1
    if "encoder.positions.table" in names and config.positions not in ("learned", "stored"):
        shown["positions"] = "learned"
    return {name: value for name, value in shown.items() if getattr(config, name) != value}


def mismatch(
    path: Path, family: Family | None, weights: Mapping[str, Tensor], config: ModelConfig, problems: Iterable[str]
) -> str:
    """The error for weights that are not those of a config, with what corrects it.

    Args:
        problems: those that `convert` returned.
    """
    advice = ["Check --family, --config and that the file was saved completely."]
    others = [] if family is None else [name for name in weights if not family.known(name)]
    is_complete = not convert(family, {name: weights[name] for name in weights if name not in others}, config)[1]
    if family is not None and family.is_own:
        shown = ", ".join(f'"{name}": {value!r}' for name, value in _contradicted(family, weights, config).items())
        advice = [
            *([f"The names show {shown}: let `read_config` of the family file return that."] * bool(shown)),
            *([f"Put {some(others, 3)} into `renames`, or into `ignored` if no layer has it."] * bool(others)),
        ] or ["Correct the family file."]
    elif others and is_complete:
        flags = ignore_flags(others)
        advice = [f"If what is unexpected belongs to no layer, leave it out: {flags}."]
    return f"the weights in {path} are not those of its configuration: {'; '.join(problems)}. {' '.join(advice)}"


def differently_shaped(left: ModelConfig, right: ModelConfig) -> set[str]:
    """The canonical names of tensors whose shape differs between the configs."""
    shapes = {name: tensor.shape for name, tensor in empty_model(right).state_dict().items()}
    return {name for name, tensor in empty_model(left).state_dict().items() if shapes.get(name) != tensor.shape}


def _of_shared(family: Family, expected: Iterable[str], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the names that share another name's tensor."""
    others = ((name, family.shared_name(name)) for name in expected if name not in weights)
    return {name: weights[other] for name, other in others if other is not None and other in weights}


def _has_plain_numbers(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.layout == torch.strided and not tensor.is_meta


def unshared(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory, such as those of a layer used twice: safetensors stores each name separately."""
    seen: set[int] = set()
    for name, tensor in weights.items():
        address = tensor.untyped_storage().data_ptr()
        if address in seen:
            weights[name] = tensor.clone()
        seen.add(address)
    return weights


def tie(config: ModelConfig, weights: dict[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Store equal embedding matrices once. Only the storage changes; the arithmetic uses the same numbers."""
    weights = dict(weights)
    source = weights["encoder.tokens.weight"]
    target = source if config.tie_source_target else weights.get("decoder.tokens.weight")
    if target is not None and not config.tie_source_target and torch.equal(source, target):
        del weights["decoder.tokens.weight"]
        config = config.replace(tie_source_target=True)
        target = source
    output = weights.get("output_weight")
    if output is not None and target is not None and torch.equal(output, target):
        del weights["output_weight"]
        config = config.replace(tie_output=True)
    return config, weights
