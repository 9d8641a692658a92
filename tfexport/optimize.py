"""Small passes over an exported graph. Each says what it needs to see, and leaves alone what it does not recognise."""

from __future__ import annotations

import onnx_ir as ir
import onnxscript.optimizer
import onnxscript.rewriter

from tfexport.errors import TfexportError

WEIGHT_SIZE = 64
"""An initializer of more numbers is a weight: it stays as it lies in the weights file."""


def simplify(model: ir.Model) -> None:
    """Fold the arithmetic on shapes and merge what is computed twice.

    Weights stay as they are, also their transposes: so the graph can point into the weights file, and a runtime that
    packs matrices transposes them for nothing.
    """
    ir.passes.common.InlinePass()(model)
    onnxscript.optimizer.fold_constants(
        model,
        input_size_limit=16,
        output_size_limit=WEIGHT_SIZE,
        should_fold=lambda node: False if any(map(_is_weight, node.inputs)) else None,
    )
    onnxscript.rewriter.rewrite(model)
    for pass_ in (
        ir.passes.common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        ir.passes.common.IdentityEliminationPass(),
        ir.passes.common.CommonSubexpressionEliminationPass(),
        ir.passes.common.RemoveUnusedNodesPass(),
        ir.passes.common.DeduplicateInitializersPass(),
    ):
        pass_(model)


def _is_weight(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None and value.const_value.size > WEIGHT_SIZE


def shape_nodes(model: ir.Model) -> set[ir.Node]:
    """The nodes that compute shapes from shapes and constants."""
    arithmetic = {"Shape", "Gather", "Concat", "Reshape", "Squeeze", "Unsqueeze", "Add", "Sub", "Mul", "Div", "Cast"}
    found: set[ir.Node] = set()
    for node in model.graph:  # in topological order
        sources = [value.producer() for value in node.inputs if value is not None and value.const_value is None]
        is_arithmetic = node.op_type in arithmetic and not any(map(_is_weight, node.inputs))
        if node.op_type == "Shape" or (sources and is_arithmetic and all(source in found for source in sources)):
            found.add(node)
    return found


def use_lengths(model: ir.Model) -> int:
    """Tell every `Attention` how many keys are valid instead of masking the others; returns how many it changed.

        Range < length ── Unsqueeze ── Expand ──> Attention(q, k, v, mask)
                  length ───────────────────────> Attention(q, k, v, nonpad_kv_seqlen)

    Exact where the mask is True for the first `length` keys of a row and for nothing else, which is what the pattern
    says. A mask made in any other way (a causal one, one that is an input) stays, and so does one beside `is_causal`,
    which counts queries from the end of the keys where it is told lengths.
    """
    changed = 0
    for node in model.graph:
        if node.op_type != "Attention" or len(node.inputs) != 4 or node.attributes.get_int("is_causal", 0):
            continue
        if (length := _length_of(node.inputs[3])) is not None:
            node.resize_inputs(7)
            node.replace_input_with(3, None)
            node.replace_input_with(6, length)
            changed += 1
    ir.passes.common.RemoveUnusedNodesPass()(model)
    return changed


def _length_of(mask: ir.Value | None) -> ir.Value | None:
    """The lengths [batch] that a mask was made from, if it is the mask of the first `length` keys."""
    expand = _producer(mask, "Expand")
    spread = _producer(expand.inputs[0] if expand is not None else mask, "Unsqueeze")
    # [batch, keys] to [batch, 1, 1, keys]. A mask [queries, keys], such as a causal one, gets its axes before these.
    less = (
        _producer(spread.inputs[0], "Less") if spread is not None and _constants(spread.inputs[1]) == [1, 2] else None
    )
    counted = _producer(less.inputs[0], "Range") if less is not None else None
    column = _producer(less.inputs[1], "Unsqueeze") if less is not None else None
    if counted is None or column is None or _constants(column.inputs[1]) not in ([1], [-1]):
        return None
    start, step = counted.inputs[0], counted.inputs[2]
    return column.inputs[0] if _constants(start) == [0] and _constants(step) == [1] else None


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that `value` comes from, if it is of this type."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type else None


def _constants(value: ir.Value | None) -> list[int]:
    """The numbers of a small constant; none of anything else."""
    if value is None or value.const_value is None or _is_weight(value):
        return []
    return [int(number) for number in value.const_value.numpy().ravel()]


def require_no_masks(model: ir.Model) -> None:
    """What `use_lengths` promises of our own graphs.

    Raises:
        TfexportError: an attention still has a mask.
    """
    masked = [node.name for node in model.graph if node.op_type == "Attention" and len(node.inputs) == 4]
    if masked:
        raise TfexportError(f"{', '.join(map(str, masked))} kept a mask that tells no lengths. Report this.")
