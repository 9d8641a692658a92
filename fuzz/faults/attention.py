"""Faults in attention, masks, positions and caches of graphs, and in the definitions of these functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fuzz.faults.edits import (
    Nodes,
    Plant,
    find,
    in_function,
    in_model,
    inputs_swapped,
    other_constant,
    other_number,
    outputs_swapped,
    own_copy,
    readers_swapped,
    then,
    with_attribute,
    with_input,
    with_operator,
)
from fuzz.faults.fault import D0, D1, E0, E1, NEVER, ONE, ONE32, Fault, fault


def attention_faults() -> list[Fault]:
    """Of attention, masks, positions and caches."""
    told = f"{D0}.cross_attention/attention"
    mask = f"{told}/Unsqueeze_2.0"
    shapes = ("attention", "decoder_step_attention", "beam_step_attention")
    cross0, cross1 = f"{D0}.cross_attention", f"{D1}.cross_attention"
    own0, own1 = f"{D0}.self_attention", f"{D1}.self_attention"
    own = f"{E0}.self_attention"
    sources = (own, "SourceAttention")
    later, caches = then("position", "Add", ONE32, before="decoder.positions"), ("present", "self_attention")

    def definition(file: str, name: str, *changes: Callable[[Any], None]) -> Plant:
        return in_function(f"{file}.onnx", name, *changes)

    return [
        fault("beam_step.ort", "cross keys swapped", "of two layers", cross0, readers_swapped("cross.0.key", "cross.1.key")),
        fault("decoder_step.bf16", "cross keys swapped", "of two layers", cross0,
              readers_swapped("cross.0.key", "cross.1.key")),
        fault("decoder_step.ort", "values for keys", "in cross-attention", cross1,
              inputs_swapped(cross1, "CrossAttention", 1, 2)),
        fault("encoder", "decoder's scale", "in self-attention of larger heads", own,
              with_attribute(own, "Attention", "scale", 16**-0.5), base="screened"),
        fault("encoder.fp16", "values for keys", "in self-attention", f"{E1}.self_attention",
              inputs_swapped(f"{E1}.self_attention", "Attention", 1, 2)),
        fault("decoder_step.fp16", "mask dropped", "padding of sources is seen", cross0,
              with_input(cross0, "Attention", 3, "")),
        fault("decoder_step", "mask dropped", "empty slots are seen, by TensorRT", own1,
              with_input(own1, "Attention", 3, "")),
        fault("encoder.bf16", "mask inverted", "padding alone is seen", ("mask", f"{E0}.self_attention"),
              with_operator("mask", "Less", "GreaterOrEqual")),
        fault("decoder_step.fp16", "mask off by one", "one empty slot is seen", ("mask", own0),
              with_operator("mask", "Less", "LessOrEqual")),
        fault("encoder.ort", "mask off by one", "the last word of sources is not seen", f"{E0}.self_attention",
              then("src_len", "Sub", ONE32, before=f"{E0}.self_attention")),
        fault("beam_step.ort", "source off by one", "the last word of sources is not seen", cross1,
              then("src_len", "Sub", ONE32, before=cross1)),
        fault("beam_step.ort", "mask ignored", "hypotheses see each other's words", own0,
              then("mask", "Or", np.array(True), before=own0)),
        fault("beam_step.ort", "first slots", "new slots are written over the first ones", caches,
              then("slot", "Mul", np.int64(0))),
        fault("beam_step.ort", "definition: mask inverted", NEVER, (own0, "BeamAttention"),
              plant=definition("beam_step.ort", "BeamAttention", with_input(own0, "Where", 1, "planted"),
                               _planted_hidden)),
        fault("beam_step.ort", "definition: slot", NEVER, (own0, "BeamAttention", "present"),
              plant=definition("beam_step.ort", "BeamAttention", then("input.3", "Mul", np.int64(0)))),
        fault("greedy_step.ort", "definition: scale", NEVER, (own0, "GreedyAttention"),
              plant=definition("greedy_step.ort", "GreedyAttention",
                               with_attribute(own0, "GroupQueryAttention", "scale", 0.2))),
        fault("encoder.ort", "values for keys", "in self-attention", sources, inputs_swapped(own, "SourceAttention", 1, 2)),
        fault("encoder.ort", "definition: no mask", NEVER, sources,
              plant=definition("encoder.ort", "SourceAttention", with_input(own, "MultiHeadAttention", 4, ""))),
        fault("encoder.int8.ort", "definition: no mask", NEVER, sources,
              plant=definition("encoder.int8.ort", "SourceAttention", then(f"{own}/Less_1.0", "Or", np.array(True)))),
        fault("encoder.int8.ort", "definition: scale", NEVER, sources,
              plant=definition("encoder.int8.ort", "SourceAttention",
                               other_constant("constant.float32.().0.25", lambda a: a * 0.96))),
        fault("encoder.int8.ort", "definition: exponential", "a coefficient off by 3 %", sources,
              plant=definition("encoder.int8.ort", "SourceAttention",
                               other_constant("constant.float32.().0.1666", lambda a: a * 0.97))),
        fault("encoder.int8.ort", "definition: powers of two", "one of them halved", sources,
              plant=definition("encoder.int8.ort", "SourceAttention",
                               other_constant("constant.float32.(16,)", lambda a: np.where(a == 8192, 4096, a)))),
        fault("decoder_step.int8.ort", "definition: no mask", NEVER, (cross0, "CrossAttention"),
              plant=definition("decoder_step.int8.ort", "CrossAttention", then(f"{cross0}/Less_1.0", "Or", np.array(True)))),
        fault("greedy_step.int8.ort", "definition: keys for values", NEVER, (own0, "GreedyAttention"),
              plant=definition("greedy_step.int8.ort", "GreedyAttention", _keys_for_values)),
        fault("greedy_step.int8.ort", "definition: one slot fewer", NEVER, (own0, "GreedyAttention"),
              plant=definition("greedy_step.int8.ort", "GreedyAttention", then(f"{own0}/Add_2.0", "Sub", ONE))),
        fault("beam_step.int8.ort", "definition: mask ignored", NEVER, (own0, "BeamAttention"),
              plant=definition("beam_step.int8.ort", "BeamAttention", then("input.4", "Or", np.array(True)))),
        fault("decoder_step.ort", "position + 1", "positions off by one", ("decoder.positions", "decoder.tokens"), later),
        fault("beam_step.ort", "position + 1", "positions off by one", ("decoder.positions", "decoder.tokens"), later),
        fault("decoder_step.fp16", "position + 1", "positions off by one", ("decoder.positions", "decoder.tokens"),
              then("position", "Add", ONE, before="decoder.positions")),
        fault("encoder.int4.ort", "position + 1", "positions off by one", ("encoder.positions", "encoder.tokens"),
              plant=in_model("encoder.int4.ort.onnx",
                             own_copy("encoder.positions.table", lambda a: np.roll(a, -1, axis=0)))),
        fault("decoder_step.bf16", "first slot", "new slots are written over the first one", (*caches, own1),
              then("position", "Mul", np.int64(0), before=own1)),
        fault("decoder_step.bf16", "presents swapped", "caches of two layers", caches,
              outputs_swapped("present.0.key", "present.1.key")),
        fault("greedy_step.ort", "presents swapped", "caches of two layers", caches,
              outputs_swapped("present.0.value", "present.1.value")),
        fault("decoder_step", "presents swapped", "caches of two layers", caches,
              outputs_swapped("present.0.key", "present.0.value")),
        fault("encoder.fp16", "scale", "scores too small by 4 %", f"{E0}.self_attention",
              with_attribute(f"{E0}.self_attention", "Attention", "scale", 0.24)),
        fault("encoder.ort", "sharp scale", "scores too large by 0.1 %", own, _larger_queries, base="sharp"),
        fault("encoder.ort", "definition: sharp scale", "scores too large by 0.1 %", sources, base="sharp",
              plant=definition("encoder.ort", "SourceAttention",
                               with_attribute(own, "MultiHeadAttention", "scale", 0.25025))),
        fault("beam_step_attention.ort", "layers", "weights of another layer", shapes,
              inputs_swapped("", "Concat", 0, 1)),
        fault("decoder_step_attention.bf16", "layers", "weights of another layer", shapes,
              inputs_swapped("", "Concat", 0, 1)),
        fault("decoder_step_attention.ort", "not masked", "weights of padding", shapes,
              then(mask, "Or", np.array(True))),
        fault("beam_step_attention.int8.ort", "scale", "weights too flat", (*shapes, told),
              then(f"{told}/Mul_1.0", "Mul", np.float32(0.9))),
        fault("beam_step.ort", "relative distances", "clipped three too early", ("decoder.positions", own0),
              other_number("constant.int64.().15", lambda a: a - 3), base="relative"),
        fault("beam_step.ort", "relative distance", "clipped one too early", ("decoder.positions", own0),
              other_number("constant.int64.().15", lambda a: a - 1), base="relative",
              harmless="the last three distances are in one bucket, with one bias"),
        fault("encoder.ort", "relative distances", "to the other side", ("encoder.positions", f"{E0}.self_attention"),
              inputs_swapped("encoder.positions", "Sub", 0, 1), base="relative"),
        fault("decoder_step.fp16", "relative distances", "one too far", ("decoder.positions", own0),
              then("position", "Add", ONE, before="decoder.positions"), base="relative"),
    ]  # fmt: skip


def _planted_hidden(function: Nodes) -> None:
    """The Where of a function's mask hides what was to be seen, and shows the rest."""
    where = find(function, f"{D0}.self_attention", "Where")
    zero = next(n.output[0] for n in function.node if n.output[0].startswith("constant.float32.().0.0"))
    where.input[1], where.input[2] = where.input[2], zero


def _keys_for_values(function: Nodes) -> None:
    """The weighted sums are of keys."""
    keys, values = (find(function, f"{D0}.self_attention", "Gather", number) for number in (0, 1))
    values.input[0] = keys.input[0]


def _larger_queries(graph: Nodes) -> None:
    """The scores of a layer are too large by 0.1 %."""
    module = f"{E0}.self_attention"
    query = find(graph, module, "SourceAttention").input[0]
    then(query, "Mul", np.float32(1.001), before=module)(graph)
