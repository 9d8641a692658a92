"""One step of a search as a graph of standard operators. Its input is the best tokens of a decoder step; its output is the
tokens and hypotheses of the next step. A runtime runs it after each step, on the same device.

The ranking is that of `search/beam.py`: log-probabilities are summed in float64. Of equal sums the lower beam comes first,
then the token that the step ranks first, because TopK orders equal values by their index. ONNX Runtime's CUDA provider keeps
this order for up to 256 numbers. With a beam of 12 or more it ranks more numbers, and equal ones may change places.
"""

from __future__ import annotations

import onnx_ir as ir

from tfexport.graphs.emitter import Emitter, Value


def tell_best_tokens(emitter: Emitter, logits: Value, count: Value) -> None:
    """The `count` [1] best tokens of each row and their log-probabilities, as `models.layers.best_tokens`."""
    last = emitter.sizes(-1)
    values, _ = emitter.nodes("TopK", logits, count, outputs=("", "best.ids"))
    peak = emitter.node("Slice", values, emitter.sizes(0), emitter.sizes(1), last)  # subtracted in the sum: no overflow
    powers = emitter.node("Exp", emitter.node("Sub", logits, peak))
    total = emitter.node("Log", emitter.node("ReduceSum", powers, last))
    emitter.node("Sub", emitter.node("Sub", values, peak), total, output="best.log_probs")


def best_tokens(emitter: Emitter) -> None:
    """`tell_best_tokens` for the logits of a step; the length of `places` is the number of tokens."""
    tell_best_tokens(emitter, emitter.inputs["logits"], emitter.shape_of(emitter.inputs["places"]))


def greedy_search(emitter: Emitter) -> None:
    """The best token of each row, except banned tokens."""
    inputs = emitter.inputs
    scores = emitter.node("Add", inputs["best.log_probs"], _bias(emitter))
    _, place = emitter.nodes("TopK", scores, emitter.sizes(1), outputs=("next.log_probs", ""))
    emitter.node("GatherElements", inputs["best.ids"], place, attributes={"axis": 1}, output="next.tokens")


def beam_search(emitter: Emitter) -> None:
    """The best continuations of each sentence, and the continuations among them that the next step continues.

    best.log_probs [rows, found] ── Add bias ── to float64 ── Add scores ── TopK of [batch, beam * found] ──> candidates
    candidates ── TopK of those that do not end ──> next.tokens, next.scores, and the rows of the mask that they continue
    """
    inputs, batch = emitter.inputs, emitter.shape_of(emitter.inputs["first_row"], 0, 1)
    by_sentence = emitter.shape_node("Concat", batch, emitter.sizes(-1), attributes={"axis": 0})
    allowed = emitter.node("Add", inputs["best.log_probs"], _bias(emitter))
    exact = emitter.node("Cast", allowed, attributes={"to": int(ir.DataType.DOUBLE)})
    totals = emitter.node("Add", exact, emitter.reshape(inputs["scores"], -1, 1))
    _, places = log_probs, _ = emitter.nodes(
        "TopK",
        *(emitter.node("Reshape", totals, by_sentence), emitter.shape_of(inputs["order"])),
        outputs=("candidates.log_probs", ""),
    )
    parents = emitter.node("Div", places, inputs["found"], output="candidates.parents")
    ids = emitter.node("Reshape", inputs["best.ids"], by_sentence)
    tokens = _at(emitter, ids, places, output="candidates.tokens")

    # The best ones that do not end, in their order: candidates that end come after all others.
    last = emitter.node("Add", emitter.node("Gather", inputs["leaving"], tokens), inputs["order"])
    beam = emitter.shape_of(inputs["own"], 0, 1)
    _, chosen = emitter.nodes("TopK", last, beam, outputs=2)
    _at(emitter, tokens, chosen, output="next.tokens")
    _at(emitter, log_probs, chosen, output="next.scores")

    rows = emitter.node("Add", _at(emitter, parents, chosen), inputs["first_row"])
    rows = emitter.node("Unsqueeze", rows, emitter.sizes(1))  # the mask has an axis for heads
    cache = emitter.shape_of(inputs["mask"], 3, 4)
    of_rows = emitter.shape_node("Concat", emitter.sizes(-1), cache, attributes={"axis": 0})
    past = emitter.node("Gather", emitter.node("Reshape", inputs["mask"], of_rows), rows, attributes={"axis": 0})
    emitter.node("Or", past, emitter.node("Equal", inputs["slots"], inputs["own"]), output="next.mask")


def _bias(emitter: Emitter) -> Value:
    """The bias that is added to the log-probabilities of the best tokens."""
    return emitter.node("Gather", emitter.inputs["bias"], emitter.inputs["best.ids"])


def _at(emitter: Emitter, values: Value, places: Value, *, output: str = "") -> Value:
    """`values` [batch, n] at `places` [batch, m]."""
    return emitter.node("GatherElements", values, places, attributes={"axis": 1}, output=output)
