"""The contract's tensors as docs/contract.md shows them."""

from __future__ import annotations

from dataclasses import replace

from tfexport import contract


def markdown_table() -> str:
    steps = (contract.DECODER_STEP, contract.ORT_DECODER_STEP, contract.ORT_BEAM_STEP)
    telling = [
        replace(step, role=contract.ATTENTION_ROLES[step.role], inputs=(), outputs=(contract.ATTENTION,))
        for step in steps
    ]
    ranking = contract.ORT_GREEDY_STEP  # of which the rest is as in `decoder_step`
    ranking = replace(
        ranking, inputs=tuple(t for t in ranking.inputs if t.name == "banned"), outputs=ranking.outputs[:2]
    )
    standard = (contract.ENCODER, contract.DECODER_STEP, contract.SELECT_ROWS, contract.ENCODER_CLASSIFIER)
    lines = ["| graph | | tensor | type | axes | what |", "|---|---|---|---|---|---|"]
    for graph in (*standard, contract.ORT_ENCODER, *steps[1:], ranking, *telling):
        for side, tensors in (("in", graph.inputs), ("out", graph.outputs)):
            for t in tensors:
                lines.append(f"| `{graph.file}` | {side} | `{t.name}` | {t.dtype} | {', '.join(t.axes)} | {t.about} |")
    return "\n".join(lines)
