"""Faults in the graphs of a bundle, of all dialects and precisions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from fuzz.faults.attention import attention_faults
from fuzz.faults.edits import (
    Array,
    Nodes,
    Plant,
    bypassed,
    constant,
    every,
    find,
    in_function,
    in_graph,
    in_model,
    inputs_swapped,
    other_constant,
    other_number,
    own_copy,
    places_swapped,
    read_instead,
    then,
    with_attribute,
    with_input,
    with_operator,
)
from fuzz.faults.fault import D0, D1, E0, E1, ONE, Fault, fault
from fuzz.faults.weights import slower_sinusoids


def _row_zero(row: int) -> Callable[[Array], Array]:
    def change(array: Array) -> Array:
        array[row] = 0
        return array

    return change


def _kept_rows(graph: onnx.GraphProto) -> None:
    """`index` becomes 0, 1, 2, ..."""
    names = [constant(graph, 0, np.asarray(value)) for value in (np.int64(0), ONE)]
    made = [
        helper.make_node("Size", ["index"], ["planted.size"], name="planted/Size"),
        helper.make_node("Range", [names[0], "planted.size", names[1]], ["planted.rows"], name="planted/Range"),
    ]
    for offset, node in enumerate(made):
        graph.node.insert(2 + offset, node)
    find(graph, "", "Gather").input[1] = "planted.rows"


def _without_residual(norm: str, op_type: str = "ResidualNorm") -> Callable[[Nodes], None]:
    """A sum adds the branch to itself."""

    def change(graph: Nodes) -> None:
        node = find(graph, norm, op_type)
        node.input[0] = node.input[1]

    return change


def _best() -> list[Fault]:
    """Of the best tokens that steps tell."""
    best, more = ("best.", "BestToken", "TopK", "planted"), then("best.ids", "Add", ONE)
    screening = ("screening", "best.", "greedy_step")
    zero = np.int64(0)
    return [
        *(
            fault(file, "best.ids + 1", "the token after the best one", best, more)
            for file in ("greedy_step.ort", "decoder_step.ort", "beam_step.ort", "decoder_step", "decoder_step.fp16")
        ),
        fault("decoder_step.bf16", "best.ids + 1", "the token after the best one", best, more),
        fault("beam_step.int4.ort", "best.ids + 1", "the token after the best one", best, more),
        fault("greedy_step.int8.ort", "best.ids + 1", "the token after the best one", best, more),
        fault("greedy_step.ort", "screened best.ids + 1", "the token after the best one", best, more, base="screened"),
        fault("decoder_step.fp16.ort-cuda", "best.ids + 1", "what a GPU would decode with", best, more),
        fault("shortlist_beam_step.int8.ort", "best.ids + 1", "the place after the best one", best, more),
        fault("decoder_step_attention.ort", "best.ids + 1", "the token after the best one", best, more),
        fault("decoder_step.fp16", "worst first", "TopK of the smallest", best, with_attribute("", "TopK", "largest", 0)),
        fault("decoder_step.bf16", "worst first", "TopK of the smallest", best, with_attribute("", "TopK", "largest", 0)),
        fault("beam_step.ort", "worst first", "TopK of the smallest, in the function's definition", best,
              plant=in_function("beam_step.ort.onnx", "BestTokens", with_attribute("", "TopK", "largest", 0))),
        fault("decoder_step.int4.ort", "worst first", "TopK of the smallest, in the function's definition", best,
              plant=in_function("decoder_step.int4.ort.onnx", "BestTokens", with_attribute("", "TopK", "largest", 0))),
        *(
            fault(file, "log_probs + 0.01", "scores off by a constant", ("best.log_probs", "planted", "BestTokens"),
                  then("best.log_probs", "Add", np.float32(0.01)))
            for file in ("beam_step.ort", "decoder_step.fp16", "beam_step.int4.ort")
        ),
        fault("beam_step.ort", "log_probs of the second", "the scores of a hypothesis too good",
              ("best.log_probs", "planted", "BestTokens"), then("best.log_probs", "Mul", np.float32(0.99))),
        fault("greedy_step.ort", "banned ignored", "a word that may not come", ("best.", "BestToken", "greedy_step"),
              plant=in_function("greedy_step.ort.onnx", "BestToken", bypassed("", "ScatterElements"))),
        fault("greedy_step.ort", "screened banned ignored", "a word that may not come", screening, base="screened",
              plant=in_function("greedy_step.ort.onnx", "ScreenBest", bypassed("screening", "ScatterElements"))),
        fault("greedy_step.ort", "never recomputed", "rows that are not proven keep their candidate", screening,
              base="screened", plant=in_function("greedy_step.ort.onnx", "ScreenBest",
                                                 then("screening/Not_1.0", "And", np.array(False)))),
        fault("greedy_step.ort", "bounds halved", "a wrong word may be proven best", screening, base="screened",
              plant=in_function("greedy_step.ort.onnx", "ScreenStates",
                                then("screening/Add_1.0", "Mul", np.float32(0.5)))),
        fault("greedy_step.ort", "one candidate", "of 16", screening, base="screened",
              plant=in_function("greedy_step.ort.onnx", "ScreenBest", other_constant("constant.int64.(1,).[16]",
                                                                                     lambda a: a * 0 + 1)),
              harmless="no row is proven then, so that all are recomputed: slower, and right"),
        fault("greedy_step.ort", "last candidates", "the least of the bounds are chosen", screening, base="screened",
              plant=in_function("greedy_step.ort.onnx", "ScreenBest", with_attribute("screening", "TopK", "largest", 0))),
        fault("select_rows", "rows kept", "beams are not reordered", ("select_rows", "selected"), _kept_rows),
        fault("select_rows.fp16", "rows kept", "beams are not reordered", ("select_rows", "selected"), _kept_rows),
        fault("select_rows.bf16", "first row", "every hypothesis continues the first", ("select_rows", "selected"),
              then("index", "Mul", zero)),
        fault("greedy_search", "bias ignored", "a token that may not come", ("greedy_search", "next."),
              then("bias", "Max", np.float32(0))),
        fault("beam_search", "scores ignored", "hypotheses count for nothing", ("beam_search", "candidates."),
              then("scores", "Mul", np.float64(0))),
        fault("beam_search", "ends go on", "a hypothesis goes on after its end", ("beam_search", "next."),
              then("leaving", "Mul", np.float32(0))),
        fault("beam_search.fp16", "mask not moved", "a hypothesis sees the past of the first one", ("beam_search", "next."),
              then("first_row", "Mul", zero)),
        fault("best_tokens.bf16", "best.ids + 1", "the token after the best one", best, more),
        fault("shortlist.ort", "off by one", "weights of the words before", ("shortlist", "listed."),
              then("candidates", "Sub", ONE)),
        fault("shortlist.int8.ort", "off by one", "weights of the words before", ("shortlist", "listed."),
              then("candidates", "Sub", ONE)),
        fault("shortlist_decoder_step.ort", "left_out ignored", "words of other sentences may come",
              ("shortlist_decoder_step", "logits"), then("left_out", "Max", np.float32(0))),
        fault("shortlist_decoder_step.int8.ort", "bias lost", "of the output",
              ("shortlist_decoder_step", "output/", "logits"), then("listed.output_bias", "Mul", np.float32(0))),
        fault("decoder_step_attention.fp16", "logits 1.0005", "too large by 0.05 %", ("logits", "output/", "planted"),
              then("logits", "Mul", np.float32(1.0005))),
    ]  # fmt: skip


def _arithmetic() -> list[Fault]:
    """Of linear layers, norms, activations, embeddings, and of the constants and weights that graphs point to."""
    tokens = "encoder.tokens"
    scale = "number.6.928"

    def scaled(file: str, factor: float, side: str) -> Fault:
        places = f"{side}.tokens"
        return fault(file, "embedding scale", f"too large by {factor - 1:.1%}", places,
                     other_number(scale, lambda a: np.float32(a) * np.float32(factor)))  # fmt: skip

    def definition(file: str, name: str, *changes: Callable[[Any], None]) -> Plant:
        return in_function(f"{file}.onnx", name, *changes)

    hidden1 = f"{E1}.feed_forward.hidden"
    # The value that departs first is the activation of the sum without its bias.
    activated0, activated1 = f"{D0}.feed_forward/Relu", f"{E1}.feed_forward/Relu"
    query = f"{D0}.self_attention.query_key_value"
    return [
        fault("beam_step.ort", "eps", "1e-3 in a norm", f"{D0}.norms.2",
              with_attribute(f"{D0}.norms.2", "ResidualNorm", "epsilon", 1e-3)),
        fault("encoder.ort", "eps 1e-5", "for 1e-6 in a norm", f"{E1}.norms.0", base="screened",
              plant=in_graph("encoder.ort.onnx", with_attribute(f"{E1}.norms.0", "ResidualNorm", "epsilon", 1e-5))),
        fault("encoder", "eps 1e-5", "for 1e-6 in a norm, by TensorRT", f"{E1}.norms.0", base="screened",
              plant=in_graph("encoder.onnx", with_attribute(f"{E1}.norms.0", "LayerNormalization", "epsilon", 1e-5))),
        fault("decoder_step.fp16", "eps", "1e-3 in a norm", f"{D0}.norms.2",
              with_attribute(f"{D0}.norms.2", "LayerNormalization", "epsilon", 1e-3)),
        fault("encoder.ort", "rms eps", "1e-5 for 1e-6 in a norm", f"{E0}.norms.0", base="relative",
              plant=in_graph("encoder.ort.onnx", with_attribute(f"{E0}.norms.0", "RMSNormalization", "epsilon", 1e-5))),
        fault("encoder.ort", "no ReLU", "of a feed-forward", f"{E1}.feed_forward.output",
              with_operator(f"{E1}.feed_forward.output", "LinearRectified", "Linear")),
        fault("decoder_step.int4.ort", "no ReLU", "of a feed-forward", f"{D0}.feed_forward",
              bypassed(f"{D0}.feed_forward", "Relu")),
        fault("decoder_step.ort", "GELU by tanh", "another GELU", f"{D0}.feed_forward",
              with_attribute(f"{D0}.feed_forward", "Gelu", "approximate", "tanh"), base="screened"),
        fault("encoder.bf16", "GELU by tanh", "another GELU", f"{E0}.feed_forward",
              with_attribute(f"{E0}.feed_forward", "Gelu", "approximate", "tanh"), base="screened"),
        fault("beam_step.ort", "hard sigmoid", "another Swish", f"{D1}.feed_forward",
              with_operator(f"{D1}.feed_forward", "Sigmoid", "HardSigmoid"), base="sharp"),
        fault("encoder.ort", "no gate", "of a feed-forward", f"{E0}.feed_forward",
              bypassed(f"{E0}.feed_forward", "Mul"), base="relative"),
        fault("encoder", "bias", "lost, by TensorRT", activated1, bypassed(hidden1, "Add")),
        fault("encoder.fp16", "bias", "lost", activated1, bypassed(hidden1, "Add")),
        fault("beam_step.int4.ort", "bias", "lost", activated0,
              bypassed(f"{D0}.feed_forward.hidden", "Add")),
        fault("decoder_step.fp16", "residual", "lost", f"{D0}/Add", _without_residual(D0, "Add")),
        fault("decoder_step", "residual", "lost, by TensorRT", f"{D0}/Add", _without_residual(D0, "Add")),
        fault("greedy_step.ort", "residual", "lost", f"{D1}.norms.1", _without_residual(f"{D1}.norms.1")),
        fault("encoder.ort", "definition: residual", "every sum of the graph lost", "norms.0",
              plant=definition("encoder.ort", "ResidualNorm", bypassed(f"{E0}.norms.0", "Add"))),
        fault("decoder_step.ort-cuda", "epsilon", "of a norm, on GPUs", f"{D0}.norms.1",
              with_attribute(f"{D0}.norms.1", "SkipLayerNormalization", "epsilon", 1e-3)),
        fault("encoder.ort-cuda", "bias", "lost, on GPUs", f"{E0}.norms.1",
              with_input(f"{E0}.norms.1", "SkipLayerNormalization", 4, "")),
        fault("beam_step.ort-cuda", "norms swapped", "a weight points to another layer's, on GPUs", f"{D0}.norms.1",
              places_swapped(f"{D0}.norms.1.weight", f"{D1}.norms.1.weight")),
        fault("beam_step.fp16.ort-cuda", "scale for bias", "of a norm, on GPUs", f"{D1}.norms.1",
              inputs_swapped(f"{D1}.norms.1", "SkipLayerNormalization", 2, 3)),
        fault("encoder.int8.ort", "definition: mean", "too small by 1 %", "norms.0",
              plant=definition("encoder.int8.ort", "ResidualNorm",
                               then(f"{E0}.norms.0/Div_1.0", "Mul", np.float32(0.99)))),
        fault("greedy_step.int8.ort", "definition: variance", "too large by 1 %", "norms",
              plant=definition("greedy_step.int8.ort", "ResidualNorm",
                               then(f"{D0}.norms.0/Div_2.0", "Mul", np.float32(1.01)))),
        fault("decoder_step.ort", "definition: Gemm 1.001", "every product too large by 0.1 %", query,
              plant=definition("decoder_step.ort", "Linear", with_attribute(query, "Gemm", "alpha", 1.001))),
        fault("encoder.int8.ort", "definition: 1 / 126", "states are cut off", (E0, "Int8Linear"),
              plant=definition("encoder.int8.ort", "Int8Linear",
                               other_constant("constant.float32.().0.00787", lambda a: np.float32(1 / 126)))),
        fault("greedy_step.int8.ort", "definition: zero point", "120 for 128: large states are cut off", (D0, "Int8Linear"),
              plant=definition("greedy_step.int8.ort", "Int8Linear",
                               other_constant("constant.uint8.().128", lambda a: a - 8))),
        fault("greedy_step.int8.ort", "definition: zero point 127", "127 for 128", (D0, "Int8Linear"),
              plant=definition("greedy_step.int8.ort", "Int8Linear",
                               other_constant("constant.uint8.().128", lambda a: a - 1)),
              harmless="states of -127 to 127 are 0 to 254 then, and the product takes the same away"),
        fault("beam_step.int8.ort", "definition: zero point of ReLU", "1 for 0, in the product alone",
              (f"{D0}.feed_forward", "Int8LinearRectified"),
              plant=definition("beam_step.int8.ort", "Int8LinearRectified", _other_zero)),
        scaled("encoder.ort", 1.001, "encoder"),
        scaled("decoder_step.ort", 1.001, "decoder"),
        scaled("decoder_step.fp16", 1.002, "decoder"),
        scaled("beam_step.int4.ort", 1.001, "decoder"),
        fault("encoder.ort", "sinusoids", "rates of 1000 in the place of 10000", "encoder.positions", base="screened",
              plant=in_model("encoder.ort.onnx", own_copy("encoder.positions.table", slower_sinusoids))),
        fault("encoder.ort", "own row", "a copy of the embeddings, one word changed", tokens,
              plant=in_model("encoder.ort.onnx", own_copy("encoder.tokens.weight", _row_zero(70)))),
        fault("decoder_step.fp16", "own row", "a copy of the embeddings, one word changed", "decoder.tokens",
              plant=in_model("decoder_step.fp16.onnx", own_copy("decoder.tokens.weight", _row_zero(70)))),
        fault("greedy_step.ort", "own positions", "a copy of the positions, one row changed", "decoder.positions",
              plant=in_model("greedy_step.ort.onnx", own_copy("decoder.positions.table", _row_zero(35)))),
        fault("beam_step.ort", "own output row", "a copy of the output, a word that never comes", "output",
              plant=in_model("beam_step.ort.onnx", own_copy("output_weight", _row_zero(70)))),
        fault("encoder.int4.ort", "own row", "a copy of the embeddings, one word changed", tokens,
              plant=in_model("encoder.int4.ort.onnx", own_copy("encoder.tokens.weight", _row_zero(70)))),
        fault("greedy_step.ort", "places swapped", "a weight points to another layer's", f"{D0}.cross_attention.query",
              places_swapped(f"{D0}.cross_attention.query.weight", f"{D1}.cross_attention.query.weight")),
        fault("beam_step.ort", "norms swapped", "a weight points to another layer's", f"{D0}.norms.0",
              places_swapped(f"{D0}.norms.0.weight", f"{D1}.norms.0.weight")),
        fault("beam_step.int8.ort", "places swapped", "a weight points to another layer's", f"{D0}.self_attention.output",
              places_swapped(f"{D0}.self_attention.output.int8", f"{D1}.self_attention.output.int8")),
        fault("decoder_step.int4.ort", "places swapped", "a weight points to another layer's",
              f"{D0}.cross_attention.output",
              places_swapped(f"{D0}.cross_attention.output.int4", f"{D1}.cross_attention.output.int4")),
        fault("encoder.bf16", "places swapped", "a weight points to another layer's", f"{E0}.self_attention.key",
              places_swapped(f"{E0}.self_attention.key.weight", f"{E1}.self_attention.key.weight")),
        fault("shortlist_beam_step.ort", "norm", "read instead of another", f"{D0}.norms.0",
              read_instead(f"{D0}.norms.0.weight", f"{D1}.norms.0.weight")),
        fault("decoder_step.ort", "every step", "all steps of float32 too sure", ("logits", "output/", "planted"),
              plant=every([f"{step}_step.ort.onnx" for step in ("decoder", "beam")],
                          lambda file: in_graph(file, then("logits", "Mul", np.float32(1.0003))))),
        fault("decoder_step.ort", "real eps", "1e-3 in a norm of the tutorial's model", f"{D0}.norms.2", base="real",
              plant=in_graph("decoder_step.ort.onnx", with_attribute(f"{D0}.norms.2", "ResidualNorm", "epsilon", 1e-3))),
        fault("greedy_step.ort", "real best.ids + 1", "the token after the best one", ("best.ids", "planted", "screening"),
              then("best.ids", "Add", ONE), base="real"),
        fault("encoder.int8.ort", "real own row", "a copy of the embeddings, one word changed", tokens, base="real",
              plant=in_model("encoder.int8.ort.onnx", own_copy("encoder.tokens.weight", _row_zero(7000)))),
    ]  # fmt: skip


def _other_zero(function: Nodes) -> None:
    product = find(function, f"{D0}.feed_forward.output", "MatMulIntegerToFloat")
    product.input[4] = constant(function, 0, np.asarray(np.uint8(1)))


def graph_faults() -> list[Fault]:
    return [*_best(), *attention_faults(), *_arithmetic()]


def planted_into(folder: Path, fault: Fault) -> None:
    """Plant a fault into the bundle `folder`, and let its manifest tell the new sums.

    Raises:
        AssertionError: nothing changed.
    """
    from fuzz.faults.edits import signed

    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".partial"}
    fault.plant(folder)
    changed = [name for name, content in before.items() if (folder / name).read_bytes() != content]
    assert fault.file in changed or changed, f"{fault.name}: nothing changed"
    signed(folder)
